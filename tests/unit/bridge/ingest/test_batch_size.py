"""bridge.ingest.batch_size: how large a micro-batch may be."""

from __future__ import annotations

import pytest

from bridge.ingest.batch_size import GROWTH_MAX, RECORDS_FIRST, RECORDS_MIN, BatchLimits, BatchSize

LIMITS = BatchLimits(records=64_000, bytes=32 << 20, trigger_ms=100)
HEAP_BYTES = 512 << 20
HEADER_BYTES = 64 << 10
"""What `limits.header_bytes` allows by default."""


@pytest.mark.parametrize("sampled_bytes", [100.0, 400.0])
def test_a_first_batch_fits_the_heap_although_the_sample_was_of_small_records(sampled_bytes: float) -> None:
    """All that follow have as many bytes of headers as `limits.header_bytes` allows; and then batches become small."""
    size = BatchSize(LIMITS, sampled_bytes)
    assert size.records * HEADER_BYTES <= HEAP_BYTES / 4
    assert size.observe(size.records, size.records * HEADER_BYTES)
    assert size.records * HEADER_BYTES <= LIMITS.bytes


def test_a_batch_that_is_too_large_is_followed_by_one_that_fits() -> None:
    """In one step, however many steps led up to it."""
    size = BatchSize(LIMITS, 400.0)
    while size.observe(size.records, size.records * 100):
        pass
    assert size.observe(size.records, size.records * HEADER_BYTES)
    assert size.records * HEADER_BYTES <= LIMITS.bytes


def test_batches_of_small_records_grow_step_by_step_to_their_bytes() -> None:
    """Each step costs a restart of the query: there are few."""
    size = BatchSize(LIMITS, 400.0)
    steps = [size.records]
    while size.observe(size.records, size.records * 400):
        assert steps[-1] < size.records <= GROWTH_MAX * steps[-1]
        steps.append(size.records)
    assert steps[0] == RECORDS_FIRST
    assert steps[-1] > LIMITS.records / 2
    assert len(steps) <= 3


def test_a_batch_that_is_not_full_changes_nothing() -> None:
    """Little is read because little came."""
    size = BatchSize(LIMITS, 400.0)
    assert not size.observe(10, 4_000)
    assert not size.observe(0, 0)
    assert size.records == RECORDS_FIRST


def test_large_records_never_make_a_batch_of_none() -> None:
    """However large one of them is."""
    size = BatchSize(LIMITS, 50.0 * (1 << 20))
    assert size.records == RECORDS_MIN
    assert not size.observe(1, 50 << 20)
    assert not size.observe(RECORDS_MIN, RECORDS_MIN * 50 << 20)
    assert size.records == RECORDS_MIN
