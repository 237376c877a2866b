"""bridge.ingest.watch.reading: the table of readers is walked."""

from __future__ import annotations

import pytest

from bridge.ingest.watch.reading import TRANSITIONS, Reader, ReaderEvent, Reading


@pytest.mark.parametrize("before", Reader)
@pytest.mark.parametrize("event", ReaderEvent)
def test_one_reader_follows_another_by_the_table(before: Reader, event: ReaderEvent) -> None:
    """An event changes the reader as the table says; without a row it changes nothing."""
    reading = Reading()
    reading.reader = before
    expected = TRANSITIONS[before].get(event, before)
    assert reading.advance(event) is (expected is not before)
    assert reading.reader is expected


def test_every_reader_ends_with_the_plain_one() -> None:
    """It needs nothing but the brokers: whatever Spark does, the partitions are read."""
    for reader in Reader:
        assert reader is Reader.PLAIN or TRANSITIONS[reader][ReaderEvent.STANDS_STILL] is Reader.PLAIN
