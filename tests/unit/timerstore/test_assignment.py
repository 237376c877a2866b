"""timerstore.assignment: sources that go and come while something else is under way. (What happens between two steps,
the store's machine tries: tests/model.)"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.unit.timerstore.entries import Record, entries
from tests.unit.timerstore.rig import BILLS, NOW_MS, ORDERS, Rig
from timerstore.cancels.cancels import Cancels
from timerstore.errors import Misuse
from timerstore.operations.timer_wheel import TimerWheel

SOON_MS, FAR_MS = NOW_MS + 1_000, NOW_MS + 36_000_000


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    rig = Rig(tmp_path / "store", sources=[ORDERS, BILLS])
    rig.load()
    return rig


def give_up(rig: Rig) -> None:
    rig.store.assignment.give_up([BILLS], NOW_MS)
    assert rig.store.assignment.settle()


def take_on(rig: Rig) -> None:
    """It comes back, on what is committed; its records are read, and it is released."""
    committed, starts = {BILLS: rig.committed[BILLS]}, {BILLS: 0}
    resume = rig.store.assignment.resume_offsets(committed, {}, starts)
    assert resume is not None
    arrival = rig.store.assignment.arrival(committed, {})
    offsets, ends = {name: at or 0 for name, at in resume.items()}, {BILLS: len(rig.log[BILLS])}
    rig.store.assignment.join(arrival, starts, offsets, ends, NOW_MS)


def meanwhile(rig: Rig, method: Callable[..., Any], call: int, owner: type) -> Any:
    """A patch of a method that is called during an operation: at its nth call the source is given up first."""
    calls = count(1)

    def patched(self: Any, *arguments: Any, **more: Any) -> Any:
        if next(calls) == call:
            give_up(rig)
        return method(self, *arguments, **more)

    return mock.patch.object(owner, method.__name__, patched)


def test_what_is_taken_in_while_its_source_goes_is_not_kept(rig: Rig) -> None:
    """Its rows would be delivered here, and by the instance that has it; the batch's other rows are."""
    rig.produce(SOON_MS, FAR_MS)
    rig.produce(SOON_MS, FAR_MS, source=BILLS)
    with meanwhile(rig, Cancels.judge, 1, Cancels):
        rig.ingest()
    stats = rig.store.stats()
    assert (stats.pending, stats.ready_rows, len(rig.store.state.resident.memtable)) == (2, 1, 1)
    assert [row.partition for row in rig.deliver(SOON_MS)] == [0]


@pytest.mark.parametrize("is_flushed", [False, True])
def test_a_cancel_that_is_taken_in_while_its_source_goes_is_not_kept(rig: Rig, is_flushed: bool) -> None:
    """What it cancels is counted out with all else that is given up; it is read again when the source comes back."""
    rig.log[BILLS] = [Record(*BILLS, 0, FAR_MS, id="message")]
    rig.ingest()
    rig.deliver()
    if is_flushed:
        rig.store.maintenance.flush(NOW_MS)
    rig.log[BILLS].append(Record(*BILLS, 1, None, id="message", cancels=True))
    judge = Cancels.judge

    def judged(*arguments: Any) -> Any:
        result = judge(*arguments)
        rig.store.assignment.give_up([BILLS], NOW_MS)
        return result

    with mock.patch.object(Cancels, "judge", judged):
        rig.ingest()
    assert rig.store.assignment.settle() and rig.store.stats().pending == 0
    take_on(rig)
    assert rig.store.stats().pending == is_flushed
    rig.ingest()
    assert rig.store.stats().pending == 0


def test_a_window_that_is_loaded_while_its_source_goes_is_read_again(rig: Rig) -> None:
    rig.produce(NOW_MS + 101_000)
    rig.produce(NOW_MS + 101_000, source=BILLS)
    rig.ingest()
    rig.deliver()
    rig.store.maintenance.flush(NOW_MS)
    now_ms = NOW_MS + 100_000
    with meanwhile(rig, TimerWheel._is_current, 2, TimerWheel):
        assert not rig.load(now_ms)
    assert rig.load(now_ms) and rig.store.stats().ready_rows == 1
    take_on(rig)
    rig.ingest()
    assert rig.store.assignment.joined([BILLS]) == [BILLS]
    rig.store.hold([])
    rig.finish(NOW_MS + 101_000)
    rig.assert_each_delivered_once()


def test_rows_that_a_flush_is_writing_are_counted_out_once(rig: Rig) -> None:
    """They are in memory when the source goes, and in a segment when it is counted out."""
    rig.produce(FAR_MS, source=BILLS)
    rig.ingest()
    rig.deliver()
    unstored = rig.store.maintenance._unstored

    def choose(*arguments: Any) -> Any:
        rows = unstored(*arguments)
        rig.store.assignment.give_up([BILLS], NOW_MS)
        return rows

    with mock.patch.object(rig.store.maintenance, "_unstored", choose):
        assert rig.store.maintenance.flush(NOW_MS).rows == 1
    assert rig.store.stats().pending == 1, "not counted yet"
    assert rig.store.assignment.settle() and rig.store.stats().pending == 0
    take_on(rig)
    assert rig.store.next_offsets()[BILLS] == 1 and rig.store.stats().pending == 1


def test_nothing_of_a_newcomer_is_delivered_before_it_is_read_up_to_its_offset(rig: Rig) -> None:
    """A cancel below O may cover what is due already (I6). The others are delivered meanwhile, and O of the newcomer
    stays where it is."""
    give_up(rig)
    rig.produce(NOW_MS, NOW_MS, source=BILLS)
    rig.committed[BILLS] = (2, (NOW_MS - 1, *BILLS, 0))  # another instance has read them, and delivered neither
    take_on(rig)
    rig.produce(NOW_MS)
    rig.store.append(*batch(rig, ORDERS, 0, 1))
    rig.store.append(*batch(rig, BILLS, 0, 1))
    assert rig.store.assignment.joined([BILLS]) == [] and rig.store.assignment.joining() == [BILLS]
    assert [row.partition for row in rig.deliver()] == [0]
    assert rig.committed[BILLS][0] == 2
    rig.store.append(*batch(rig, BILLS, 1, 2))
    assert rig.store.assignment.joined([BILLS]) == [BILLS] and rig.store.assignment.joining() == []
    rig.store.hold([])
    rig.finish(NOW_MS)
    rig.assert_each_delivered_once()


@pytest.mark.fault("a corrupt batch below the committed offset")
def test_a_partition_that_cannot_be_read_up_to_its_offset_holds_up_no_other(rig: Rig) -> None:
    """A start delivers the other partitions; the partition joins when it can be read."""
    rig.produce(NOW_MS, NOW_MS, source=BILLS)
    rig.committed[BILLS] = (2, (NOW_MS - 1, *BILLS, 0))  # read, and not delivered
    rig.reopen()
    rig.produce(NOW_MS)
    rig.store.append(*batch(rig, ORDERS, 0, 1))
    rig.store.append(*batch(rig, BILLS, 0, 1))
    assert not rig.store.is_caught_up()
    rig.store.assignment.postpone([BILLS], NOW_MS)
    assert rig.store.is_caught_up() and rig.store.assignment.joining() == [BILLS]
    rig.store.hold([])
    rig.load()
    assert [row.partition for row in rig.deliver()] == [0]
    assert rig.committed[BILLS][0] == 2
    rig.store.append(*batch(rig, BILLS, 1, 2))
    assert rig.store.assignment.joined([BILLS]) == [BILLS]
    rig.store.hold([])
    rig.finish(NOW_MS)
    rig.assert_each_delivered_once()


def test_partitions_change_between_transactions_only(rig: Rig) -> None:
    transaction = rig.store.begin()
    with pytest.raises(Misuse, match="a transaction is open"):
        rig.store.assignment.give_up([BILLS], NOW_MS)
    transaction.rollback()
    give_up(rig)
    assert rig.store.next_offsets().keys() == {ORDERS}


def batch(rig: Rig, source: tuple[str, int], begin: int, end: int) -> Any:
    return entries(rig.log[source][begin:end]), {source: end}, NOW_MS
