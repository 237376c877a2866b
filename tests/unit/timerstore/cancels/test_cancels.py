"""Cancel and replace: what a tombstone covers, and how the counts follow."""

from __future__ import annotations

import errno
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import timerstore.cancels.cancels
import timerstore.disk.column_file
from tests.unit.timerstore.entries import Record, entries
from tests.unit.timerstore.rig import NOW_MS, ORDERS, Rig, take
from timerstore.cancels import tombstones
from timerstore.cancels.cancels import NO_ORIGIN
from timerstore.disk import files
from timerstore.errors import DiskFull
from timerstore.limits import Limits
from timerstore.operations.transaction import Transaction
from timerstore.rows.position import Position, Progress

SOON_MS, FAR_MS = NOW_MS + 20_000, NOW_MS + 900_000
DAY_MS = 86_400_000


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    rig = Rig(tmp_path / "store")
    rig.load()
    return rig


def send(rig: Rig, due_ms: int | None, id: str | None, **more: object) -> Record:
    rig.log.append(replace(Record(*ORDERS, len(rig.log), due_ms, id=id), **more))  # type: ignore[arg-type]
    return rig.log[-1]


def cancel(rig: Rig, id: str) -> Record:
    return send(rig, None, id, cancels=True)


def cancel_origin(rig: Rig, origin: int) -> Record:
    return send(rig, None, None, cancels=True, origin=origin)


def delivered(rig: Rig, until_ms: int) -> list[Record]:
    """The timers that are delivered when everything due is."""
    before = len(rig.delivered)
    rig.finish(until_ms)
    return [record for record in rig.delivered[before:] if record.due_ms is not None]


def test_a_cancelled_timer_is_not_delivered_and_others_are(rig: Rig) -> None:
    """A cancel finishes the timers of its id that were sent before it, and nothing else."""
    send(rig, SOON_MS, "a")
    others = [
        send(rig, SOON_MS, "b"),
        send(rig, SOON_MS, None),
        send(rig, SOON_MS, "A"),
    ]
    cancel(rig, "a")
    others.append(send(rig, SOON_MS, "a"))
    rig.ingest()
    assert rig.store.stats().pending == 4
    assert rig.store.stats().cancelled == 1
    assert sorted(map(repr, delivered(rig, SOON_MS))) == sorted(map(repr, others))
    assert rig.store.stats().pending == 0


@pytest.mark.parametrize("due_ms", [NOW_MS - 5, NOW_MS, SOON_MS, FAR_MS], ids=["overtaken", "now", "ready", "memtable"])
@pytest.mark.parametrize("flushed", [False, True], ids=["in memory", "in a segment"])
def test_a_cancel_reaches_a_timer_wherever_it_is(rig: Rig, due_ms: int, flushed: bool) -> None:
    """The counts fall by one when the cancel is read, by target and by time, and never again."""
    send(rig, FAR_MS + 60_000, None)
    send(rig, due_ms, "a", target="bills")
    rig.ingest()
    if flushed:
        rig.store.begin().rollback()
        transaction = rig.store.begin()
        rig.commit(transaction, [take(transaction, NOW_MS - 10_000, 10)])
        rig.store.maintenance.flush(NOW_MS)
    before = rig.store.stats([due_ms + 30_000])
    cancel(rig, "a")
    cancel(rig, "a")
    rig.ingest()
    after = rig.store.stats([due_ms + 30_000])
    assert (before.pending, before.pending_by_target, before.pending_until) == (2, {"orders": 1, "bills": 1}, (1,))
    assert (after.pending, after.pending_by_target, after.pending_until) == (1, {"orders": 1}, (0,))
    assert after.cancelled == 1
    assert delivered(rig, FAR_MS) == []
    assert rig.store.stats().pending == 1


def test_a_replace_takes_the_place_of_what_came_before(rig: Rig) -> None:
    """A timer that replaces cancels its predecessors, not itself; also where its cancel is a row of its own."""
    send(rig, SOON_MS, "a")
    second = send(rig, SOON_MS + 1, "a", replace=True)
    rig.ingest()
    assert rig.store.stats().pending == 1
    third = send(rig, SOON_MS + 2, "a", replace=True)
    twin = replace(third, due_ms=None, cancels=True)
    assert rig.store.append(entries([twin, third]), 3, NOW_MS) == 2
    assert rig.store.stats().pending == 1
    assert third in delivered(rig, SOON_MS + 2)
    assert second not in rig.delivered


def test_both_rows_of_an_offset_are_finished_or_none(rig: Rig) -> None:
    """Where a cancel shares its offset with a late timer that is not due, O does not pass the cancel alone."""
    send(rig, NOW_MS + 5_000, None)
    rig.ingest()
    rig.deliver(NOW_MS + 5_000)
    timer = send(rig, NOW_MS + 1_000, "a", replace=True)
    twin = replace(timer, due_ms=None, cancels=True)
    rig.store.append(entries([twin, timer]), 2, NOW_MS)
    assert rig.deliver(NOW_MS) == []
    assert rig.committed.offset == 1
    assert len(rig.deliver(NOW_MS + 1_000)) == 2
    assert rig.committed.offset == 2


@pytest.mark.parametrize("committed", [True, False], ids=["commit", "abort"])
def test_a_timer_that_is_on_loan_is_delivered_or_cancelled(rig: Rig, committed: bool) -> None:
    """A cancel that is read while the timer is in a transaction loses if that commits, and wins if it does not."""
    send(rig, NOW_MS, "a")
    rig.ingest()
    transaction = rig.store.begin()
    rows = take(transaction, NOW_MS, 10)
    assert len(rows) == 1
    cancel(rig, "a")
    rig.ingest()
    assert rig.store.stats().pending == 0
    if committed:
        rig.commit(transaction, [rows])
    else:
        transaction.rollback()
    assert rig.store.stats().pending == 0
    assert rig.store.stats().cancelled == (0 if committed else 1)
    assert delivered(rig, NOW_MS) == []
    assert len([record for record in rig.delivered if not record.cancels]) == (1 if committed else 0)
    assert rig.committed.offset == 2


def test_a_copy_is_cancelled_with_its_original(rig: Rig) -> None:
    """A copy that was written before its cancel was read comes later, and is covered by its origin (RocketMQ #7991)."""
    original = send(rig, NOW_MS, "a")
    rig.ingest()
    rig.deliver()
    cancel(rig, "a")
    send(rig, SOON_MS, "a", origin=original.offset, rolls=1)
    again = send(rig, SOON_MS, "a")
    rig.ingest()
    send(rig, SOON_MS, "a", origin=original.offset, rolls=2)
    rig.ingest()
    assert rig.store.stats().pending == 1
    assert delivered(rig, SOON_MS) == [again]


@pytest.mark.parametrize("how", ["flushed", "not flushed", "directory"])
def test_a_cancel_survives_a_restart(rig: Rig, how: str) -> None:
    """From its file or from Kafka, also when the cancel itself is finished; counts are as before."""
    send(rig, FAR_MS, "a")
    send(rig, FAR_MS, "b")
    rig.ingest()
    rig.deliver()
    if how != "not flushed":
        rig.store.maintenance.flush(NOW_MS)
    cancel(rig, "a")
    rig.ingest()
    rig.deliver()
    if how == "flushed":
        rig.store.maintenance.flush(NOW_MS)
        assert rig.store.state.checkpoint.tombstones
    if how == "directory":
        rig.directory = rig.directory.with_name("another")
    rig.reopen()
    assert rig.store.stats().pending == (1 if how == "flushed" else 0)
    rig.ingest()
    rig.load()
    assert rig.store.stats().pending == 1
    assert [record.id for record in delivered(rig, FAR_MS)] == ["b"]
    assert rig.store.stats().pending == 0


@pytest.mark.parametrize("most", [0, 3, 100])
def test_counts_after_a_restart_with_cancels_by_id_and_by_origin(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Each cancelled timer leaves the counts once, though its id and its origin may both be cancelled. More origins
    than memory may have are not collected."""
    monkeypatch.setattr(timerstore.cancels.cancels, "ORIGINS_HELD_MAX", most)
    for i in range(12):
        send(rig, FAR_MS + i, f"{i % 6}" if i % 2 else None)
    rig.ingest()
    rig.deliver()
    rig.store.maintenance.flush(NOW_MS)
    cancel(rig, "1")
    for origin in (0, 1, 2, 3, 4, 7):
        cancel_origin(rig, origin)
    rig.ingest()
    rig.deliver()
    rig.store.maintenance.flush(NOW_MS)
    named = rig.store.state.cancels.named_origins()
    assert (None if named is None else named.tolist()) == (None if most < 6 else [0, 1, 2, 3, 4, 7])
    counted = rig.store.stats().pending
    assert counted == rig.reopen().stats().pending == 6
    assert sorted(record.offset for record in delivered(rig, FAR_MS + 12)) == [5, 6, 8, 9, 10, 11]


def test_many_cancelled_timers_are_passed_without_output(rig: Rig) -> None:
    """A take looks on until it finds something to deliver; P and O move over what is cancelled."""
    for i in range(30):
        send(rig, NOW_MS, str(i))
        cancel(rig, str(i))
    last = send(rig, NOW_MS, None)
    rig.ingest()
    assert [r for r in rig.deliver(limit=1_000) if not r.cancels] == [last]
    assert rig.committed == Progress(61, Position(NOW_MS, 60))
    for i in range(100):
        send(rig, SOON_MS, str(i))
    rig.ingest()
    for i in range(100):
        cancel(rig, str(i))
    last = send(rig, SOON_MS + 1, None)
    rig.ingest()
    rig.deliver(NOW_MS)
    transaction = rig.store.begin()
    assert rig.commit(transaction, [take(transaction, SOON_MS + 1, 10)]) == [last]


def test_a_cancel_that_is_read_during_a_flush_is_kept(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the flush writes is one thing, what comes meanwhile another: the next flush writes that."""
    write = tombstones.write

    def slow(*arguments: Any) -> Any:
        cancel(rig, "b")
        rig.ingest()
        return write(*arguments)

    send(rig, None, None)
    cancel(rig, "a")
    rig.ingest()
    with monkeypatch.context() as patch:
        patch.setattr(tombstones, "write", slow)
        rig.store.maintenance.flush(NOW_MS)
    assert rig.store.state.cancels.tombstones.memory_rows == 1
    send(rig, SOON_MS, "a", origin=0, rolls=1)
    send(rig, SOON_MS, "b", origin=0, rolls=1)
    rig.ingest()
    assert rig.store.stats().pending == 0
    rig.store.maintenance.flush(NOW_MS)
    rig.reopen()
    assert rig.store.stats().tombstones >= 2


@pytest.mark.parametrize("what", ["flush", "deliver", "take", "load"])
def test_what_happens_while_a_cancel_is_looked_up(rig: Rig, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """The look-up needs no lock: timers that move meanwhile are counted out once, finished ones by their delivery."""
    send(rig, NOW_MS, "a")
    send(rig, NOW_MS + 1, "a")
    send(rig, FAR_MS, "a")
    rig.ingest()
    transactions: list[Transaction] = []

    def meanwhile(*arguments: Any) -> Any:
        judged = judge(*arguments)
        if what == "flush":
            rig.deliver(NOW_MS - 1)
            rig.store.maintenance.flush(NOW_MS)
        elif what == "deliver":
            rig.deliver(NOW_MS)
        elif what == "take":
            transactions.append(rig.store.begin())
            assert len(take(transactions[0], NOW_MS, 1)) == 1
        else:
            rig.finish(NOW_MS - 1)
        return judged

    judge = rig.store.state.cancels.judge
    cancel(rig, "a")
    with monkeypatch.context() as patch:
        patch.setattr(rig.store.state.cancels, "judge", meanwhile)
        rig.ingest()
    assert rig.store.stats().pending == 0
    for transaction in transactions:
        transaction.rollback()
    assert rig.store.stats().cancelled == (2 if what == "deliver" else 3)
    assert delivered(rig, FAR_MS) == []
    assert rig.store.stats().pending == 0


class TestExpiry:
    """A tombstone is kept until nothing that it covers can be pending, and no longer."""

    LIMITS = Limits(window_ms=DAY_MS)
    KEEP_MS = DAY_MS + timerstore.cancels.cancels.MARGIN_MS

    @pytest.fixture
    def rig(self, tmp_path: Path) -> Rig:
        return Rig(tmp_path / "store", limits=self.LIMITS)

    def age(self, rig: Rig, now_ms: int) -> int:
        """Flush at a later time, with a tombstone more so that there is something to merge; returns how many are
        left."""
        rig.finish(now_ms)
        while rig.store.wheel.next_window(now_ms) is not None:
            rig.load(now_ms)
        rig.store.maintenance.flush(now_ms)
        return rig.store.stats().tombstones

    def test_it_goes_after_the_window_and_the_margin(self, rig: Rig) -> None:
        """Not a millisecond sooner; a file of which nothing is left goes too."""
        cancel(rig, "a")
        rig.ingest()
        assert self.age(rig, NOW_MS) == 1
        assert self.age(rig, NOW_MS + self.KEEP_MS) == 1
        assert self.age(rig, NOW_MS + self.KEEP_MS + 1) == 0
        assert list(rig.directory.glob(f"*{files.TOMBSTONES_SUFFIX}")) == []
        assert rig.reopen().stats().tombstones == 0

    def test_downtime_does_not_count(self, rig: Rig) -> None:
        """Copies that another process left may not be read yet, and are covered: it is kept until they are finished."""
        due_ms = NOW_MS + DAY_MS
        original = send(rig, NOW_MS, "a")
        rig.ingest()
        rig.deliver(NOW_MS)
        cancel(rig, "a")
        rig.ingest()
        self.age(rig, NOW_MS)
        rig.store.close()
        send(rig, due_ms, "a", origin=original.offset, rolls=1)
        later_ms = NOW_MS + 10 * self.KEEP_MS
        rig.open(later_ms)
        assert self.age(rig, later_ms) == 1
        count = len(rig.delivered)
        rig.ingest()
        assert rig.store.stats().pending == 0
        rig.finish(later_ms)
        assert rig.delivered[count:] == []
        assert self.age(rig, later_ms) == 0

    def test_restarts_do_not_keep_it(self, rig: Rig) -> None:
        """A process that has read what others left drops what has expired, however short it has run."""
        cancel(rig, "a")
        rig.ingest()
        self.age(rig, NOW_MS)
        later_ms = NOW_MS + self.KEEP_MS + 1
        rig.store.close()
        rig.open(later_ms)
        assert self.age(rig, later_ms) == 0

    def test_one_that_lasts_keeps_no_others(self, rig: Rig) -> None:
        """It stays alone. Its file is written again once half of it has expired, and not before."""
        far_ms = NOW_MS + 300 * DAY_MS
        send(rig, far_ms, "far")
        for number in range(100):
            cancel(rig, f"{number}")
        cancel(rig, "far")
        rig.ingest()
        assert self.age(rig, NOW_MS) == 101
        [before] = rig.directory.glob(f"*{files.TOMBSTONES_SUFFIX}")
        assert self.age(rig, NOW_MS + self.KEEP_MS) == 101
        assert [before] == [*rig.directory.glob(f"*{files.TOMBSTONES_SUFFIX}")]
        assert self.age(rig, NOW_MS + self.KEEP_MS + 3_600_000) == 1
        rig.reopen()
        assert rig.store.stats().pending == 0
        assert self.age(rig, far_ms - 1) == 1
        assert delivered(rig, far_ms) == [] and self.age(rig, far_ms + 1) == 0

    @pytest.mark.parametrize("where", ["memory", "segment", "copy", "late"])
    def test_it_outlives_what_it_covers(self, rig: Rig, where: str) -> None:
        """However long a covered timer waits, and wherever."""
        due_ms = NOW_MS + 3 * self.KEEP_MS
        if where == "late":
            send(rig, due_ms + 1, None)
            rig.ingest()
            rig.load(due_ms)
            rig.finish(due_ms + 1)
        original = send(rig, NOW_MS if where == "copy" else due_ms, "a")
        rig.ingest()
        if where == "copy":
            rig.deliver(NOW_MS)
        if where == "segment":
            rig.deliver(NOW_MS - 1)
            rig.store.maintenance.flush(NOW_MS)
        cancel(rig, "a")
        rig.ingest()
        if where == "copy":
            send(rig, due_ms, "a", origin=original.offset, rolls=1)
            rig.ingest()
        assert self.age(rig, NOW_MS + 2 * self.KEEP_MS) == 1
        count = len(rig.delivered)
        rig.finish(due_ms)
        assert [record for record in rig.delivered[count:] if not record.cancels] == []
        assert self.age(rig, due_ms + self.KEEP_MS) == 0


class TestFiles:
    """Tombstones on disk."""

    def test_memory_is_bounded(self, tmp_path: Path) -> None:
        """Above the limit a flush is due whatever O does; at twice the limit ingest waits."""
        rig = Rig(tmp_path / "store", limits=Limits(tombstone_rows=10))
        rig.store.maintenance.flush(NOW_MS)
        for _ in range(5):
            assert not rig.store.maintenance.flush_due(NOW_MS)
            for _ in range(10):
                cancel(rig, f"{len(rig.log)}")
            rig.ingest()
            assert rig.store.maintenance.flush_due(NOW_MS)
            rig.store.maintenance.flush(NOW_MS)
            assert rig.store.state.cancels.tombstones.memory_rows == 0
        assert rig.store.stats().tombstones == 50
        for _ in range(20):
            cancel(rig, f"{len(rig.log)}")
        rig.ingest()
        assert not rig.store.has_room()
        rig.store.maintenance.flush(NOW_MS)
        assert rig.store.has_room()

    def test_files_are_merged(self, rig: Rig) -> None:
        """A logarithmic number of files, each cancel in one of them, whatever the order; the merged ones are gone."""
        for i in range(64):
            cancel(rig, f"{i}")
            cancel(rig, f"{i % 7}")
            rig.ingest()
            rig.store.maintenance.flush(NOW_MS)
        assert len(rig.store.state.checkpoint.tombstones) <= 7
        names = {path.name for path in rig.directory.glob(f"*{files.TOMBSTONES_SUFFIX}")}
        assert names == {file.name for file in rig.store.state.checkpoint.tombstones}
        store = rig.reopen()
        for i in range(64):
            send(rig, SOON_MS, f"{i}", origin=0, rolls=1)
        survivor = send(rig, SOON_MS, "6")
        rig.ingest()
        # Offset 0 itself is the cancel of "0": all are covered.
        assert store.stats().pending == 1
        assert delivered(rig, SOON_MS) == [survivor]

    @pytest.mark.parametrize("damage", ["bit", "short", "gone"])
    def test_a_damaged_file_is_set_aside_and_rebuilt(self, rig: Rig, damage: str) -> None:
        """As a damaged segment is: cancels come from Kafka again."""
        send(rig, FAR_MS, "a")
        cancel(rig, "a")
        rig.ingest()
        rig.deliver()
        rig.store.maintenance.flush(NOW_MS)
        rig.store.close()
        (path,) = rig.directory.glob(f"*{files.TOMBSTONES_SUFFIX}")
        content = bytearray(path.read_bytes())
        content[65] ^= 1
        path.write_bytes(content if damage == "bit" else content[:50])
        if damage == "gone":
            path.unlink()
        store = rig.open()
        assert "rebuilt from Kafka" in store.reports[0]
        assert store.resume_offset() is None
        rig.ingest()
        assert store.stats().pending == 0
        assert delivered(rig, FAR_MS) == []

    @pytest.mark.parametrize("damage", ["bit", "gone"])
    def test_a_damaged_id_index_is_made_again(self, rig: Rig, damage: str) -> None:
        """It is derived from its segment: nothing is read from Kafka again."""
        send(rig, FAR_MS, "a")
        rig.ingest()
        rig.deliver()
        rig.store.maintenance.flush(NOW_MS)
        rig.store.close()
        (path,) = rig.directory.glob(f"*{files.IDS_SUFFIX}")
        content = bytearray(path.read_bytes())
        content[65] ^= 1
        path.write_bytes(content)
        if damage == "gone":
            path.unlink()
        store = rig.open()
        assert store.reports == ()
        cancel(rig, "a")
        rig.ingest()
        assert store.stats().pending == 0

    @pytest.mark.parametrize("step", ["_put", "read"])
    def test_a_full_disk_keeps_the_cancels_in_memory(
        self, rig: Rig, monkeypatch: pytest.MonkeyPatch, step: str
    ) -> None:
        """Nothing has changed after it, and the next flush writes them."""
        send(rig, FAR_MS, "a")
        cancel(rig, "a")
        rig.ingest()
        rig.deliver()
        names = sorted(path.name for path in rig.directory.iterdir())

        def full(*_: object, **__: object) -> None:
            raise DiskFull("full") if step == "read" else OSError(errno.ENOSPC, "full")

        with monkeypatch.context() as patch:
            patch.setattr(
                tombstones if step == "read" else timerstore.disk.column_file, "write" if step == "read" else step, full
            )
            with pytest.raises(DiskFull):
                rig.store.maintenance.flush(NOW_MS)
        assert sorted(path.name for path in rig.directory.iterdir()) == names
        send(rig, FAR_MS, "a", origin=0, rolls=1)
        rig.ingest()
        assert rig.store.stats().pending == 0
        rig.store.maintenance.flush(NOW_MS)
        rig.reopen()
        rig.ingest()
        assert rig.store.stats().pending == 0

    def test_segments_without_ids_have_no_index(self, rig: Rig) -> None:
        """Timers without ids cost nothing; reclaim removes an index with its segment."""
        send(rig, SOON_MS, None)
        rig.ingest()
        rig.deliver()
        rig.store.maintenance.flush(NOW_MS)
        assert list(rig.directory.glob(f"*{files.IDS_SUFFIX}")) == []
        send(rig, SOON_MS, "a")
        rig.ingest()
        rig.deliver()
        rig.store.maintenance.flush(NOW_MS)
        assert len(list(rig.directory.glob(f"*{files.IDS_SUFFIX}"))) == 1
        rig.finish(SOON_MS)
        assert rig.store.maintenance.reclaim(SOON_MS) == 2
        assert list(rig.directory.glob(f"*{files.IDS_SUFFIX}")) == []


class TestByOrigin:
    """A cancel that names the record: for messages without an id too."""

    @pytest.mark.parametrize("due_ms", [NOW_MS - 5, NOW_MS, SOON_MS, FAR_MS])
    @pytest.mark.parametrize("flushed", [False, True], ids=["in memory", "in a segment"])
    @pytest.mark.parametrize("id", [None, "a"])
    def test_it_reaches_a_timer_wherever_it_is(self, rig: Rig, due_ms: int, flushed: bool, id: str | None) -> None:
        """The timer and its copies, those before and those after it; the counts follow at once, and only once."""
        send(rig, FAR_MS + 60_000, None)
        send(rig, due_ms, id, target="bills")
        send(rig, FAR_MS, id, origin=1, rolls=1)
        rig.ingest()
        if flushed:
            rig.deliver(NOW_MS - 100_000)
            rig.store.maintenance.flush(NOW_MS)
        for _ in range(2):
            cancel_origin(rig, 1)
            rig.ingest()
            stats = rig.store.stats()
            assert (stats.pending, stats.cancelled) == (1, 2)
        send(rig, FAR_MS, id, origin=1, rolls=2)
        rig.ingest()
        if id is not None:
            cancel(rig, id)
            rig.ingest()
        assert (rig.store.stats().pending, rig.store.stats().cancelled) == (1, 3)
        assert rig.store.stats().pending_by_target == {"orders": 1}
        assert [record.offset for record in delivered(rig, FAR_MS + 60_000)] == [0]

    @pytest.mark.parametrize("lost", [False, True], ids=["flushed", "directory lost"])
    def test_it_is_remembered(self, rig: Rig, lost: bool) -> None:
        """In the files, with the counts; and by the log, when the directory is lost."""
        send(rig, FAR_MS, None)
        send(rig, FAR_MS, "b")
        send(rig, FAR_MS, None)
        rig.ingest()
        cancel_origin(rig, 0)
        cancel_origin(rig, 1)
        rig.ingest()
        rig.deliver()
        rig.store.maintenance.flush(NOW_MS)
        rig.store.close()
        if lost:
            shutil.rmtree(rig.directory)
        store = rig.open()
        rig.ingest()
        assert store.stats().pending == 1
        send(rig, FAR_MS, None, origin=0, rolls=1)
        rig.ingest()
        assert store.stats().pending == 1
        assert [record.offset for record in delivered(rig, FAR_MS)] == [2]

    def test_it_names_nothing_that_comes_later_or_elsewhere(self, rig: Rig) -> None:
        """What is sent after it is not cancelled; a cancel that was for another partition cancels nothing here."""
        cancel_origin(rig, 2)
        cancel_origin(rig, NO_ORIGIN)
        sent = [send(rig, SOON_MS, None), send(rig, SOON_MS, "a")]
        cancel_origin(rig, 10**15 - 1)
        rig.ingest()
        assert rig.store.stats().pending == 2
        assert delivered(rig, SOON_MS) == sent

    def test_an_offset_that_no_record_can_have_is_in_no_index(self, rig: Rig) -> None:
        """15 digits are more than 48 bits."""
        far = [send(rig, FAR_MS, None), send(rig, FAR_MS, None)]
        cancel_origin(rig, 10**15 - 1)
        rig.ingest()
        rig.deliver()
        rig.store.maintenance.flush(NOW_MS)
        rig.reopen()
        rig.ingest()
        assert not len(rig.store.state.cancels.tombstones)
        assert rig.store.stats().pending == 2
        assert delivered(rig, FAR_MS) == far
