"""bridge.start.oldest: looks at the first records of logs, with a scripted reader of batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest

from bridge.errors import EnvironmentFailure
from bridge.ingest.batches.reader import CorruptBatch, End, Found, Stretch, TooLargeRecord
from bridge.kafka.admin import Watermarks
from bridge.start.oldest import LOOK_S, NO_BODIES, RECORDS, Oldest, OldestRecords
from bridge.stores.names import SourceName
from tests.manual_clock import ManualClock

A, B = ("delay", 0), ("delay", 1)
TORN = CorruptBatch(offset=0, next=1, reason="crc")


def record(offset: int, size: int = 100) -> TooLargeRecord:
    return TooLargeRecord(offset=offset, ts=1_000 + offset, by_broker=True, size=size)


class Batches:
    """A reader whose findings a test writes."""

    def __init__(self) -> None:
        self.finds: dict[SourceName, list[Found]] = {}
        self.asked: list[SourceName] = []
        self.fails = False
        self.clock = ManualClock()
        self.takes_ms = 0

    def read(
        self, stretches: Sequence[Stretch], is_over: Callable[[], bool], record_bytes_max: int
    ) -> Iterator[tuple[SourceName, Found]]:
        assert record_bytes_max == NO_BODIES
        for stretch in stretches:
            self.asked.append(stretch.name)
            if self.fails:
                raise EnvironmentFailure("failed", hint="", code="DB-3060")
            for each in self.finds.get(stretch.name, [record(stretch.begin), End(offset=stretch.end)]):
                self.clock.advance(self.takes_ms)
                if is_over():
                    return
                yield stretch.name, each


@pytest.fixture
def batches() -> Batches:
    return Batches()


@pytest.fixture
def oldest(batches: Batches) -> OldestRecords:
    return OldestRecords(batches.read, batches.clock)


def logs(**ends: int) -> dict[SourceName, Watermarks]:
    return {{"a": A, "b": B}[name]: Watermarks(start=0, end=end) for name, end in ends.items()}


@pytest.mark.fault("a batch that holds a thousand times its size, as the oldest of a topic with `retention.bytes`")
def test_the_oldest_records_are_read_without_their_bodies(batches: Batches, oldest: OldestRecords) -> None:
    """The bridge estimates the time of a retention by size without memory for the records: a process of its own passes
    over their bodies."""
    batches.finds[A] = [record(0, 1 << 30), record(1, 0), End(offset=2)]
    assert oldest.of_logs(logs(a=2, b=0)) == {A: Oldest(timestamp_ms=1_000, mean_bytes=float(1 << 29))}
    assert batches.asked == [A], "an empty log has none"


def test_a_log_with_the_same_start_is_not_looked_at_again(batches: Batches, oldest: OldestRecords) -> None:
    """The oldest records stay the same; a short log is looked at while it grows."""
    for end, looks in ((5, 1), (5, 1), (7, 1), (8, 2), (RECORDS, 3), (10 * RECORDS, 3)):
        assert A in oldest.of_logs(logs(a=end)) and len(batches.asked) == looks
    oldest.of_logs({A: Watermarks(start=1, end=10 * RECORDS)})
    assert len(batches.asked) == 4


@pytest.mark.parametrize("found", [[TORN], [End(offset=5)], [record(0), TORN]])
def test_what_cannot_be_read_is_not_asked_for_again(
    batches: Batches, oldest: OldestRecords, found: list[Found]
) -> None:
    """A corrupt batch, and a log that begins with aborted records."""
    batches.finds[A] = found
    for _ in range(2):
        assert (A in oldest.of_logs(logs(a=5))) is isinstance(found[0], TooLargeRecord)
    assert batches.asked == [A]


def test_open_transactions_are_looked_at_later(batches: Batches, oldest: OldestRecords) -> None:
    batches.finds[A] = [End(offset=0)]
    assert oldest.of_logs(logs(a=5)) == {}
    batches.finds.clear()
    assert A in oldest.of_logs(logs(a=5))


def test_brokers_without_an_answer_leave_the_known_records(batches: Batches, oldest: OldestRecords) -> None:
    assert oldest.of_logs(logs(a=5)).keys() == {A}
    batches.fails = True
    assert oldest.of_logs(logs(a=5, b=5)).keys() == {A}
    batches.fails = False
    assert oldest.of_logs(logs(a=5, b=5)).keys() == {A, B}


def test_a_long_look_ends(batches: Batches, oldest: OldestRecords) -> None:
    """A batch of countless records takes no look forever, and only one."""
    batches.takes_ms = int(LOOK_S * 1000) // (2 * RECORDS)
    batches.finds[A] = [record(offset) for offset in range(10 * RECORDS)]
    assert oldest.of_logs(logs(a=RECORDS, b=5)).keys() == {A}
    batches.takes_ms = 0
    assert oldest.of_logs(logs(a=RECORDS, b=5)).keys() == {A, B} and batches.asked == [A, B]
