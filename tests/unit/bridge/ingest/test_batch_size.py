"""bridge.ingest.batch_size: how large a micro-batch may be."""

from __future__ import annotations

import pytest

from bridge.ingest.batch_size import GROWTH_MAX, RECORDS_MIN, BatchLimits, BatchSize

LIMITS = BatchLimits(records=64_000, bytes=32 << 20, trigger_ms=100)
HEAP_BYTES = 512 << 20
MESSAGE_BYTES = 1 << 20
"""What a topic takes by default."""
HEADER_BYTES = 64 << 10
"""What `limits.header_bytes` allows by default."""


def test_the_first_batches_fit_the_heap_whatever_the_records_are() -> None:
    """The first one although each record is as large as a topic takes by default; the second one although all records
    of the first were small and these have as many bytes of headers as are allowed. And then batches become small."""
    assert BatchSize(LIMITS).records * MESSAGE_BYTES <= HEAP_BYTES / 4
    size = BatchSize(LIMITS)
    assert size.observe(size.records, size.records * 100)
    assert size.records * HEADER_BYTES <= HEAP_BYTES / 4
    size.observe(size.records, size.records * HEADER_BYTES)
    assert size.records * HEADER_BYTES <= LIMITS.bytes


def test_a_batch_that_is_too_large_is_followed_by_one_that_fits() -> None:
    """In one step, however many steps led up to it."""
    size = BatchSize(LIMITS)
    while size.observe(size.records, size.records * 100):
        pass
    assert size.observe(size.records, size.records * HEADER_BYTES)
    assert size.records * HEADER_BYTES <= LIMITS.bytes


def test_batches_of_small_records_grow_step_by_step_to_their_bytes() -> None:
    """Each step costs a restart of the query: there are few."""
    size = BatchSize(LIMITS)
    steps = [size.records]
    while size.observe(size.records, size.records * 400):
        assert steps[-1] < size.records <= GROWTH_MAX * steps[-1]
        steps.append(size.records)
    assert steps[0] == RECORDS_MIN
    assert steps[-1] > LIMITS.records / 2
    assert len(steps) <= 4


def test_a_batch_that_is_not_full_changes_nothing() -> None:
    """Little is read because little came."""
    size = BatchSize(LIMITS)
    assert not size.observe(RECORDS_MIN // 4, 4_000)
    assert not size.observe(0, 0)
    assert size.records == RECORDS_MIN


@pytest.mark.parametrize("limits", [LIMITS, BatchLimits(records=1, bytes=1, trigger_ms=1)])
def test_large_records_never_make_a_batch_of_none(limits: BatchLimits) -> None:
    """However large one of them is."""
    size = BatchSize(limits)
    assert not size.observe(1, 50 << 20)
    assert not size.observe(RECORDS_MIN, RECORDS_MIN * 50 << 20)
    assert size.records == RECORDS_MIN
