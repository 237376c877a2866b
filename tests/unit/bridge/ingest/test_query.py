"""bridge.enqueue: how large a micro-batch may be."""

from __future__ import annotations

from typing import cast

import pytest
from confluent_kafka import Message

from bridge.ingest.query import FIRST_RECORDS, GROWTH_MAX, LEAST_RECORDS, BatchLimits, BatchSize
from bridge.wire.received import record_bytes

LIMITS = BatchLimits(records=64_000, bytes=32 << 20, trigger_ms=100)
HEAP_BYTES = 512 << 20


class Record:
    """What is asked of a message."""

    def __init__(self, value: bytes | None, key: bytes | None, headers: list[tuple[str, bytes | None]] | None) -> None:
        self.value = lambda: value
        self.key = lambda: key
        self.headers = lambda: headers


@pytest.mark.parametrize("headers", [None, [], [("x", None)], [("x" * 10, b"1" * 8_000), ("y", b"")]])
def test_headers_count_in_the_size_of_a_record(headers: list[tuple[str, bytes | None]] | None) -> None:
    """They may be all of it."""
    written = sum(len(name) + len(value or b"") for name, value in headers or [])
    assert record_bytes(cast(Message, Record(b"v" * 5, b"k" * 3, headers))) == 8 + written + 100
    assert record_bytes(cast(Message, Record(None, None, headers))) == written + 100


@pytest.mark.parametrize("sampled_bytes", [100.0, 400.0])
def test_a_first_batch_fits_the_heap_although_the_sample_was_of_small_records(sampled_bytes: float) -> None:
    """All that follow have as many bytes of headers as `limits.header_bytes` allows; and then batches become small."""
    size = BatchSize(LIMITS, sampled_bytes)
    assert size.records * (64 << 10) <= HEAP_BYTES / 4
    assert size.observe(size.records, size.records * (64 << 10))
    assert size.records * (64 << 10) <= LIMITS.bytes


def test_batches_of_small_records_grow_step_by_step_to_their_bytes() -> None:
    """Each step is worth the new start of the query: there are few."""
    size = BatchSize(LIMITS, 400.0)
    assert size.records == FIRST_RECORDS
    steps = [size.records]
    while size.observe(size.records, size.records * 400):
        assert steps[-1] < size.records <= GROWTH_MAX * steps[-1]
        steps.append(size.records)
    assert steps[-1] == LIMITS.records
    assert len(steps) <= 3


def test_a_batch_that_is_not_full_changes_nothing() -> None:
    """Little is read because little came."""
    size = BatchSize(LIMITS, 400.0)
    assert not size.observe(10, 4_000)
    assert not size.observe(0, 0)
    assert size.records == FIRST_RECORDS


def test_large_records_never_make_a_batch_of_none() -> None:
    """Whatever one of them is."""
    size = BatchSize(LIMITS, 50.0 * (1 << 20))
    assert size.records == LEAST_RECORDS
