"""timerstore.store: flow control, wake-ups, transactions and budgets, with a stand-in for Kafka."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import timerstore.log.segment
from tests.unit.timerstore.entries import Record, entries, gather
from tests.unit.timerstore.rig import NOW_MS, ORDERS, Rig, take
from timerstore.errors import Closed, Misuse
from timerstore.limits import Limits
from timerstore.rows.entry import ENTRY
from timerstore.rows.position import Position, Progress, end_of

FAR_MS = NOW_MS + 900_000
SMALL = Limits(
    flush_bytes=4_000, flush_interval_ms=1_000, ready_rows_bytes=8_000, horizon_ms=60_000, window_bytes=2_000
)


class Background:
    """A call in another thread, and whether it has come back."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.result: object = None
        self.done = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(call,), daemon=True)
        self._thread.start()

    def _run(self, call: Callable[[], object]) -> None:
        try:
            self.result = call()
        except Closed as error:
            self.result = error
        self.done.set()

    def is_blocked(self) -> bool:
        return not self.done.wait(0.05)

    def comes_back(self) -> object:
        assert self.done.wait(20), "still blocked"
        return self.result


# ---- enqueue


def test_a_batch_seen_before_changes_nothing(tmp_path: Path) -> None:
    """Batches are replayed, whole or in part."""
    rig = Rig(tmp_path)
    rig.produce(FAR_MS, NOW_MS, None)
    assert rig.ingest() == 3
    batch = entries(rig.log)
    assert rig.store.append(batch, 3, NOW_MS) == 0
    rig.produce(NOW_MS + 1)
    assert rig.store.append(entries(rig.log[1:]), 4, NOW_MS) == 1
    assert rig.store.stats().pending == 3
    rig.finish(FAR_MS)
    rig.assert_each_delivered_once()


def test_an_empty_batch_moves_the_end(tmp_path: Path) -> None:
    """Markers and aborted records count: O is the end of the batch, not the last record + 1."""
    rig = Rig(tmp_path)
    assert rig.store.append(ENTRY.empty_table(), 7, NOW_MS) == 0
    assert rig.store.append(pa.Table.from_batches([], schema=ENTRY), 9, NOW_MS) == 0
    assert rig.store.next_offset == 9
    assert rig.store.offset_behind()
    assert rig.deliver() == [] and rig.committed == Progress(9)
    assert not rig.store.offset_behind()


def test_types_of_columns_may_be_narrower(tmp_path: Path) -> None:
    """32-bit offsets and times, several chunks."""
    rig = Rig(tmp_path)
    rig.produce(1_000, 2_000)
    table = pa.concat_tables([entries(rig.log[:1]), entries(rig.log[1:])])
    for name in ("offset", "at"):
        table = table.set_column(table.schema.get_field_index(name), name, table.column(name).cast(pa.int32()))
    assert rig.store.append(table, 2, NOW_MS) == 2
    rig.finish(NOW_MS)
    rig.assert_each_delivered_once()


def test_rows_beyond_the_end_they_are_said_to_reach_are_refused(tmp_path: Path) -> None:
    """They would come in a second time; nothing has changed after the refusal."""
    rig = Rig(tmp_path)
    rig.produce(NOW_MS, NOW_MS)
    with pytest.raises(Misuse):
        rig.store.append(entries(rig.log), 1, NOW_MS)
    assert rig.store.next_offset == 0 and rig.store.stats().pending == 0


def full(rig: Rig) -> None:
    """Fill the memtable with what is far off."""
    while rig.store.has_room():
        rig.produce(*[FAR_MS] * 5)
        rig.ingest()


def test_append_blocks_when_the_memtable_is_full_and_goes_on_after_a_flush(tmp_path: Path) -> None:
    """Kafka keeps the backlog; a commit of O lets the flush write, and the flush makes room."""
    rig = Rig(tmp_path, limits=SMALL)
    full(rig)
    rig.produce(FAR_MS)
    blocked = Background(rig.ingest)
    assert blocked.is_blocked()
    assert rig.store.needs_offset_commit(), "the dispatcher is asked for a commit of O"
    rig.deliver()
    assert blocked.is_blocked()
    assert rig.store.maintenance.flush_due(NOW_MS)
    rig.store.maintenance.flush(NOW_MS)
    assert blocked.comes_back() == 1
    rig.finish(FAR_MS)
    rig.assert_each_delivered_once()


def test_a_thread_that_waits_for_room_beats(tmp_path: Path) -> None:
    """It may wait for minutes, while brokers are away: it is not one that hangs."""
    rig = Rig(tmp_path, limits=SMALL)
    full(rig)
    batch, beats = [Record(*ORDERS, len(rig.log), FAR_MS)], queue.SimpleQueue[None]()
    blocked = Background(lambda: rig.store.append(entries(batch), batch[0].offset + 1, NOW_MS, lambda: beats.put(None)))
    for _ in range(2):
        beats.get(timeout=10)
    assert blocked.is_blocked()
    rig.store.close()
    assert isinstance(blocked.comes_back(), Closed)


@pytest.mark.parametrize("how", ["close", "close_intake"])
def test_closing_ends_who_waits_for_room(tmp_path: Path, how: str) -> None:
    """With an error: the batch was not taken in. Closing the intake alone leaves delivery going."""
    rig = Rig(tmp_path, limits=SMALL)
    full(rig)
    rig.produce(FAR_MS)
    blocked = Background(rig.ingest)
    assert blocked.is_blocked()
    getattr(rig.store, how)()
    assert isinstance(blocked.comes_back(), Closed)
    with pytest.raises(Closed):
        rig.store.append(ENTRY.empty_table(), len(rig.log) + 1, NOW_MS)
    rig.store.state.must_be_consistent()
    with pytest.raises(Closed):
        rig.ingest()
    if how == "close_intake":
        rig.deliver()
        assert rig.store.maintenance.flush(NOW_MS).rows > 0


def test_a_flood_of_late_rows_blocks_ingest_until_they_are_delivered(tmp_path: Path) -> None:
    """Late rows cannot be put aside: their memory is bounded by waiting."""
    rig = Rig(tmp_path, limits=Limits(overtaken_bytes=1_000))
    rig.load()
    rig.produce(NOW_MS)
    rig.ingest()
    rig.deliver()
    rig.produce(*[NOW_MS - 1] * 20)
    rig.ingest()
    rig.produce(NOW_MS - 1)
    blocked = Background(rig.ingest)
    assert blocked.is_blocked()
    rig.deliver()
    assert blocked.comes_back() == 1


# ---- waiting


def test_what_is_nearer_is_news(tmp_path: Path) -> None:
    """The dispatcher sleeps until the next row is due; a later one need not wake it."""
    rig = Rig(tmp_path)
    rig.store.wheel.next_window(NOW_MS)
    assert rig.store.next_due_ms() is None
    for ms, is_nearer in ((500, True), (900, False), (100, True)):
        rig.news.clear()
        rig.produce(NOW_MS + ms)
        rig.ingest()
        assert rig.news.is_set() == is_nearer
    assert rig.store.next_due_ms() == NOW_MS + 100


# ---- transactions


def test_nothing_is_handed_out_before_ingest_has_caught_up(tmp_path: Path) -> None:
    """A cancel below the committed O may cover an entry that is due already (invariant I6)."""
    rig = Rig(tmp_path / "1")
    rig.produce(NOW_MS, FAR_MS)
    rig.ingest()
    rig.deliver()
    rig.store.close()
    rig.directory = tmp_path / "2"
    store = rig.open()
    assert not store.is_caught_up()
    with pytest.raises(Misuse, match="before ingest has reached"):
        store.begin()
    rig.ingest()
    store.begin()


def test_one_transaction_at_a_time_and_each_ends_once(tmp_path: Path) -> None:
    """A call out of order is our bug, and says so."""
    rig = Rig(tmp_path)
    transaction = rig.store.begin()
    with pytest.raises(Misuse, match="open"):
        rig.store.begin()
    transaction.acknowledge()
    for call in (transaction.acknowledge, lambda: take(transaction, NOW_MS, 1)):
        with pytest.raises(Misuse, match="ended"):
            call()


def test_rows_come_in_the_order_of_position(tmp_path: Path) -> None:
    """By time, then offset, over as many takes as it needs."""
    rig = Rig(tmp_path)
    rig.store.wheel.next_window(NOW_MS)
    rig.produce(NOW_MS + 7, NOW_MS + 3, NOW_MS + 5, NOW_MS + 3)
    rig.ingest()
    transaction = rig.store.begin()
    assert len(take(transaction, NOW_MS + 2, 9)) == 0
    parts = [take(transaction, NOW_MS + 6, 2), take(transaction, NOW_MS + 6, 2), take(transaction, NOW_MS + 6, 9)]
    rows = [
        (at - NOW_MS, offset)
        for part in parts
        for at, offset in zip(part.at.tolist(), part.offset.tolist(), strict=True)
    ]
    assert rows == [(3, 1), (3, 3), (5, 2)]
    assert parts[0].payload.num_rows == 2


def test_a_rolled_back_transaction_has_not_happened(tmp_path: Path) -> None:
    """Its rows are handed out again, late ones too, also where the frontier has moved back meanwhile."""
    rig = Rig(tmp_path, limits=SMALL)
    rig.store.wheel.next_window(NOW_MS)
    rig.produce(*range(NOW_MS + 1, NOW_MS + 11))
    rig.ingest()
    transaction = rig.store.begin()
    assert len(take(transaction, NOW_MS + 5, 99)) == 5
    rig.produce(*range(NOW_MS, NOW_MS + 80))
    rig.ingest()
    assert len(take(transaction, NOW_MS + 5, 99)) == 6
    transaction.rollback()
    assert rig.store.stats().pending == 90
    rig.finish(NOW_MS + 80)
    rig.assert_each_delivered_once()


def test_what_comes_between_two_takes_may_lie_before_what_was_taken(tmp_path: Path) -> None:
    """It is late from then on, and P does not go back for it."""
    rig = Rig(tmp_path)
    rig.load()
    rig.produce(NOW_MS, NOW_MS + 5)
    rig.ingest()
    transaction = rig.store.begin()
    parts = [take(transaction, NOW_MS + 5, 99)]
    rig.produce(NOW_MS + 3)
    rig.ingest()
    parts.append(take(transaction, NOW_MS + 5, 99))
    rig.commit(transaction, parts)
    assert rig.committed == Progress(3, Position(NOW_MS + 5, 1))
    rig.reopen()
    rig.ingest()
    rig.load()
    assert rig.deliver(NOW_MS + 5) == []
    rig.assert_each_delivered_once()


def test_what_comes_after_the_last_take_is_late(tmp_path: Path) -> None:
    """The ready rows holds nothing that P has passed."""
    rig = Rig(tmp_path)
    rig.load()
    rig.produce(NOW_MS + 5)
    rig.ingest()
    transaction = rig.store.begin()
    taken = take(transaction, NOW_MS + 5, 99)
    rig.produce(NOW_MS + 3)
    rig.ingest()
    rig.commit(transaction, [taken])
    assert (rig.store.stats().ready_rows, len(rig.store.state.resident.overtaken)) == (0, 1)
    assert [record.offset for record in rig.deliver(NOW_MS + 5)] == [1]


def test_what_comes_late_waits_behind_no_flood(tmp_path: Path) -> None:
    """While thousands of overdue rows come in, a take leaves room for what is due on time."""
    rig = Rig(tmp_path)
    rig.store.wheel.next_window(NOW_MS)
    rig.produce(NOW_MS, *[NOW_MS + 50] * 10)
    rig.ingest()
    rig.deliver()
    rig.produce(*[NOW_MS - 1] * 100)
    rig.ingest()
    assert sum(record.due_ms == NOW_MS + 50 for record in rig.deliver(NOW_MS + 50, limit=40)) == 10
    rig.finish(NOW_MS + 50)
    rig.assert_each_delivered_once()


def test_a_flood_of_late_rows_is_committed_in_pieces(tmp_path: Path) -> None:
    """O stops in front of the first late row that is left, in the middle of a batch, and a crash there loses
    nothing."""
    rig = Rig(tmp_path)
    rig.load()
    rig.produce(NOW_MS)
    rig.ingest()
    rig.deliver()
    rig.produce(*[NOW_MS - 1, None] * 5, FAR_MS)
    rig.ingest()
    assert len(rig.deliver(limit=3)) == 3
    assert rig.committed.offset == 4
    rig.store.maintenance.flush(NOW_MS)
    assert rig.reopen().resume_offset() == 4
    rig.ingest()
    rig.finish(FAR_MS)
    rig.assert_each_delivered_once()


def test_late_rows_in_front_are_not_an_offset_that_could_move(tmp_path: Path) -> None:
    """An empty transaction would not move O over them; the dispatcher must not spin."""
    rig = Rig(tmp_path)
    rig.produce(NOW_MS + 10)
    rig.ingest()
    rig.store.wheel.next_window(NOW_MS)
    rig.deliver(NOW_MS + 10)
    rig.produce(NOW_MS + 5)
    rig.ingest()
    assert not rig.store.offset_behind()
    assert rig.store.next_due_ms() == NOW_MS + 5
    assert rig.deliver(NOW_MS) == [], "not early, though P has passed it: the clock has stepped back"
    assert len(rig.deliver(NOW_MS + 5)) == 1


# ---- windows


def test_a_window_that_a_flush_reaches_into_is_asked_for_again(tmp_path: Path) -> None:
    """The gather has not read what the flush took out of the memtable."""
    rig = Rig(tmp_path)
    rig.produce(FAR_MS, FAR_MS + 1)
    rig.ingest()
    rig.deliver()
    rig.store.maintenance.flush(NOW_MS)
    rig.produce(FAR_MS, FAR_MS + 2)
    rig.ingest()
    rig.deliver()
    window = rig.store.wheel.next_window(FAR_MS)
    assert window is not None
    gathered = gather(window)
    rig.store.maintenance.flush(NOW_MS)
    assert not rig.store.wheel.admit(window, gathered)
    rig.finish(FAR_MS + 2)
    rig.assert_each_delivered_once()


def test_a_window_is_asked_for_again_when_the_frontier_has_moved_back(tmp_path: Path) -> None:
    """What was dropped from the ready rows lies before the window: the frontier must not jump over it."""
    rig = Rig(tmp_path, limits=SMALL)
    rig.load()
    rig.produce(*[NOW_MS + 60_001] * 10)
    rig.ingest()
    rig.deliver()
    rig.store.maintenance.flush(NOW_MS)
    rig.produce(*[NOW_MS + 40_000] * 10)
    rig.ingest()
    window = rig.store.wheel.next_window(NOW_MS + 40_000 - 1)
    assert window is not None
    gathered = gather(window)
    while rig.store.state.resident.frontier == window.lower:
        rig.produce(*[NOW_MS + 39_999] * 5)
        rig.ingest()
    assert not rig.store.wheel.admit(window, gathered)
    rig.finish(NOW_MS + 60_001)
    rig.assert_each_delivered_once()


def test_the_memtable_moves_into_the_hot_wheel_in_windows_too(tmp_path: Path) -> None:
    """What falls due before a flush never touches the disk, and keeps to the budget all the same."""
    rig = Rig(tmp_path, limits=Limits(flush_bytes=1 << 20, ready_rows_bytes=10_000, window_bytes=4_000))
    rig.produce(*[FAR_MS] * 500)
    rig.ingest()
    assert not rig.load(FAR_MS)
    assert 0 < rig.store.stats().ready_rows_bytes <= 4_000
    rig.finish(FAR_MS)
    rig.assert_each_delivered_once()
    assert rig.store.stats().segments == 0


def test_a_window_is_cut_where_the_room_ends(tmp_path: Path) -> None:
    """Row groups that begin before the window are counted by half; what they turn out to hold must fit all the same."""
    rig = Rig(tmp_path, limits=Limits(flush_bytes=1 << 20, ready_rows_bytes=10_000, window_bytes=4_000))
    rig.produce(*[FAR_MS] * 500)
    rig.ingest()
    rig.deliver()
    rig.store.maintenance.flush(NOW_MS)
    assert rig.load(FAR_MS)
    assert 0 < rig.store.stats().ready_rows_bytes <= 4_000
    rig.finish(FAR_MS)
    rig.assert_each_delivered_once()


def test_no_window_is_loaded_far_ahead_or_without_room(tmp_path: Path) -> None:
    """Half of the horizon is enough, and a full ready rows has to be delivered first."""
    rig = Rig(tmp_path, limits=SMALL)
    assert rig.store.wheel.next_window(NOW_MS) is None
    frontier = rig.store.state.resident.frontier
    assert frontier.at_ms == NOW_MS + SMALL.horizon_ms
    assert rig.store.wheel.next_window(NOW_MS + SMALL.horizon_ms // 2) is None
    assert rig.store.state.resident.frontier == frontier
    while rig.store.stats().ready_rows_bytes < 6_000:
        rig.produce(NOW_MS + 10)
        rig.ingest()
    assert rig.store.wheel.next_window(NOW_MS + SMALL.horizon_ms) is None
    assert rig.store.state.resident.frontier == frontier


def test_many_in_one_millisecond_are_delivered_within_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """200,000 rows of one millisecond, budgets of a few thousand: once each, in order, through many windows."""
    monkeypatch.setattr(timerstore.log.segment, "ROW_GROUP_ROWS", 1_024)
    rows, batch_rows = 200_000, 10_000
    limits = Limits(flush_bytes=1_500_000, ready_rows_bytes=1_500_000, window_bytes=400_000)
    rig = Rig(tmp_path, limits=limits)
    template = entries([Record("delay", 0, 0, FAR_MS)]).take(pa.array(np.zeros(batch_rows, dtype=np.int64)))
    ceiling = 0
    for start in range(0, rows, batch_rows):
        offsets = pa.array(np.arange(start, start + batch_rows))
        rig.store.append(template.set_column(0, "offset", offsets), start + batch_rows, NOW_MS)
        rig.store.wheel.next_window(FAR_MS - 1_000)
        if not rig.store.has_room() or rig.store.needs_offset_commit():
            commit(rig)
            rig.store.maintenance.flush(NOW_MS)
        ceiling = max(ceiling, rig.store.stats().physical_bytes)
    commit(rig)
    rig.store.maintenance.flush(NOW_MS)
    assert rig.store.stats().ready_rows < rows // 4
    delivered: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = []
    windows = 0
    while sum(len(part) for part in delivered) < rows:
        windows += rig.load(FAR_MS)
        transaction = rig.store.begin()
        delivered.append(take(transaction, FAR_MS, 5_000).offset)
        transaction.acknowledge()
        ceiling = max(ceiling, rig.store.stats().physical_bytes)
    assert (np.concatenate(delivered) == np.arange(rows)).all()
    assert windows > 20
    assert ceiling < 3 * (limits.ready_rows_bytes + limits.memtable_bytes_max)
    assert rig.store.stats().pending == 0
    rig.store.maintenance.reclaim(FAR_MS)
    assert rig.store.stats().segments == 0


def commit(rig: Rig) -> None:
    """An empty transaction, to move O."""
    transaction = rig.store.begin()
    assert len(take(transaction, NOW_MS, 1)) == 0
    rig.committed = transaction.progress()
    transaction.acknowledge()


# ---- looking


def test_a_consistent_look_at_everything(tmp_path: Path) -> None:
    """Counts, by target and by time to go, before and after a flush and a restart."""
    rig = Rig(tmp_path)
    rig.load()
    rig.produce(NOW_MS, NOW_MS + 10, FAR_MS, None)
    rig.ingest()
    rig.deliver()
    rig.store.maintenance.flush(NOW_MS)
    for store in (rig.store, rig.reopen()):
        stats = store.stats([NOW_MS, FAR_MS, FAR_MS + 10_000])
        assert stats.pending == 2 and stats.pending_by_target == {"orders": 2}
        assert stats.pending_until[-1] == 2 and stats.pending_until[0] <= 1 <= stats.pending_until[1]
        assert store.next_offset == 4 == store.committed.offset
        assert stats.segments == 1 and stats.segment_bytes == store.state.timerlog.bytes > 0
    assert len(rig.store.state.resident.memtable) == 0


def test_a_flush_is_due_by_size_or_by_age_and_only_when_something_moves(tmp_path: Path) -> None:
    """An idle store writes nothing; a clock that steps back does not put a flush off."""
    rig = Rig(tmp_path, limits=SMALL)
    maintenance = rig.store.maintenance
    assert not maintenance.flush_due(NOW_MS)
    assert maintenance.flush_due(NOW_MS + 1_000), "the first checkpoint says from where on the index knows"
    maintenance.flush(NOW_MS + 1_000)
    assert not maintenance.flush_due(NOW_MS + 9_000)
    rig.produce(FAR_MS)
    rig.ingest()
    assert not maintenance.flush_due(NOW_MS + 9_000), "O has not been committed"
    rig.deliver()
    assert maintenance.flush_due(NOW_MS + 9_000)
    assert maintenance.flush_due(NOW_MS - 9_000)
    assert not maintenance.flush_due(NOW_MS + 1_001)
    rig.produce(*[FAR_MS] * 40)
    rig.ingest()
    rig.deliver()
    assert maintenance.flush_due(NOW_MS + 1_001)


def test_a_flush_is_due_sooner_when_a_restart_would_read_much_again(tmp_path: Path) -> None:
    """Also of records that are delivered by now: not memory counts, but what lies between O_c and O."""
    rig = Rig(tmp_path, limits=Limits(flush_records=30, flush_pause_ms=5_000))
    maintenance = rig.store.maintenance
    maintenance.flush(NOW_MS)
    for count, since_ms, is_due in ((29, 50_000, False), (1, 4_999, False), (0, 5_000, True)):
        rig.produce(*[FAR_MS] * count)
        rig.ingest()
        rig.deliver()
        assert maintenance.flush_due(NOW_MS + since_ms) is is_due
    maintenance.flush(NOW_MS + 5_000)
    rig.produce(FAR_MS)
    rig.ingest()
    rig.deliver()
    assert not maintenance.flush_due(NOW_MS + 15_000)


def test_what_a_start_has_read_again_is_flushed_as_soon_as_all_of_it_is_read(tmp_path: Path) -> None:
    """However soon each start ends: else every one would read more than the one before."""
    rig = Rig(tmp_path, limits=Limits(flush_records=30, flush_pause_ms=5_000))
    rig.produce(*[FAR_MS] * 40)
    rig.ingest()
    rig.deliver()
    store = rig.reopen()
    log, rig.log = rig.log, rig.log[:35]
    rig.ingest()
    assert not store.is_caught_up()
    assert not store.maintenance.flush_due(NOW_MS)
    rig.log = log
    rig.ingest()
    assert store.maintenance.flush_due(NOW_MS)
    store.maintenance.flush(NOW_MS)
    assert rig.reopen().resume_offset() == 40


def test_what_came_near_before_the_flush_does_not_keep_its_batch_in_memory(tmp_path: Path) -> None:
    """Of each batch one message is in the ready rows when the others go to disk: only that one stays."""
    rig = Rig(tmp_path, limits=Limits(flush_bytes=1 << 20, horizon_ms=60_000, repacked_bytes=1))
    rig.load()
    for _ in range(5):
        rig.produce(NOW_MS + 60_500, *[FAR_MS] * 200)
        rig.ingest()
    rig.deliver()
    rig.load(NOW_MS + 31_000)
    before = rig.store.stats()
    assert rig.store.state.resident.ready.count_until(end_of(NOW_MS + 60_500)) == 5
    rig.store.maintenance.flush(NOW_MS + 1_000)
    after = rig.store.stats()
    assert after.memtable_bytes == 0
    assert after.physical_bytes * 50 < before.physical_bytes
    assert after.ready_rows_bytes == rig.store.state.resident.chunks.bytes_of(
        rig.store.state.resident.ready.all().chunk
    )
    assert len(rig.store.state.resident.chunks) == 1
    rig.finish(FAR_MS)
    rig.assert_each_delivered_once()


def test_what_came_in_many_batches_and_is_due_next_is_put_together(tmp_path: Path) -> None:
    """Once, in the order of position, with the bytes of the copies; a transaction that is undone undoes nothing of
    it."""
    rig = Rig(tmp_path / "store")
    rig.load()
    for batch in range(8):
        rig.produce(*range(NOW_MS + batch, NOW_MS + 200, 8))
        rig.ingest()
    resident = rig.store.state.resident
    before = resident.ready.bytes
    transaction = rig.store.begin()
    taken = take(transaction, NOW_MS + 7, 1_000)
    assert taken.at.tolist() == list(range(NOW_MS, NOW_MS + 8))
    assert len(np.unique(resident.ready.all().chunk)) == 1
    assert 0 < resident.ready.bytes <= before
    assert resident.ready.bytes == resident.chunks.bytes_of(resident.ready.all().chunk)
    transaction.rollback()
    rig.finish(NOW_MS + 300)
    assert [record.due_ms for record in rig.delivered] == list(range(NOW_MS, NOW_MS + 200))
    rig.assert_each_delivered_once()
    assert (resident.ready.bytes, len(resident.chunks)) == (0, 0)
