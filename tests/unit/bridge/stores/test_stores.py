"""bridge.stores.stores: batches that concern several partitions, and partitions that leave meanwhile."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from bridge.stores.damage import Damage
from bridge.stores.search import Query
from bridge.stores.stores import TRANSITIONS, Life
from dev.harness.waiting import wait_until
from tests.model.stores import State, batch
from tests.unit.bridge.stores.rig import BILLS, NOW_MS, ORDERS, RETRY, Rig
from tests.unit.timerstore.entries import Record, gather
from timerstore.errors import Closed, Corrupt, DiskFailure, DiskFull, Misuse
from timerstore.limits import Limits
from timerstore.memory import memory
from timerstore.operations import recovery
from timerstore.operations.find import FoundPage
from timerstore.operations.transaction import Transaction
from timerstore.rows.position import AT_MIN, Progress
from timerstore.store import TimerStore

FAR_MS = NOW_MS + 36_000_000


def flooded(directory: Path) -> Rig:
    """One partition has no room."""
    rig = Rig(directory, limits=Limits(flush_bytes=1 << 16, horizon_ms=1_000))
    rig.load()
    rig.produce(ORDERS, *[FAR_MS] * 2_000)
    rig.ingest()
    assert not rig.stores.has_room()
    return rig


def test_a_partition_that_leaves_holds_up_no_batch(tmp_path: Path) -> None:
    """A batch that waits for its room goes on; rows of other partitions are taken in."""
    rig = flooded(tmp_path)
    records = [Record(*ORDERS, 2_000, FAR_MS), Record(*BILLS, 0, FAR_MS), Record(*BILLS, 1, FAR_MS)]
    beats, taken = threading.Event(), list[int]()

    def append() -> None:
        taken.append(rig.stores.append(batch(records), {ORDERS: 2_001, BILLS: 2, RETRY: 0}, NOW_MS, beats.set))

    reader = threading.Thread(target=append)
    reader.start()
    assert beats.wait(20)
    rig.stores.close_partitions([ORDERS])
    reader.join(20)
    assert taken == [2] and rig.stores.next_offsets() == {BILLS: 2, RETRY: 0}
    assert rig.stores.stats().pending == 2


def test_an_intake_that_is_closed_ends_a_batch(tmp_path: Path) -> None:
    """Delivery and flushes go on."""
    rig = flooded(tmp_path)
    raised: list[BaseException] = []

    def append() -> None:
        try:
            rig.stores.append(batch([]), {ORDERS: 2_001, BILLS: 1}, NOW_MS)
        except Closed as error:
            raised.append(error)

    reader = threading.Thread(target=append)
    reader.start()
    rig.stores.close_intake()
    reader.join(20)
    wait_until(lambda: raised, 20, "it ends")
    rig.deliver()
    rig.stores.flush(NOW_MS)
    assert rig.stores.has_room()


@pytest.mark.fault("a partition that takes no writes, and leaves no room")
def test_a_held_partition_without_room_stalls_no_other(tmp_path: Path) -> None:
    """Batches pass over a held partition without room. Once it is released and has room, it is read again from its next
    offset: nothing in between is missing."""
    rig = flooded(tmp_path)
    run = rig.stores.run
    rig.stores.hold_named([ORDERS])
    assert rig.stores.has_room()
    for _ in range(2):
        rig.produce(ORDERS, FAR_MS)
        rig.produce(BILLS, FAR_MS)
        assert rig.ingest() == 1
    assert rig.stores.next_offsets() == {ORDERS: 2_000, BILLS: 2, RETRY: 0}
    rig.deliver()
    rig.stores.flush(NOW_MS)
    rig.stores.read_again()
    assert rig.stores.next_offsets(run).keys() == {BILLS, RETRY} and rig.ingest() == 0, "it is still held"
    rig.stores.hold_named([])
    rig.stores.read_again()
    assert rig.stores.run > run and rig.ingest() == 2
    assert rig.stores.next_offsets() == {ORDERS: 2_002, BILLS: 2, RETRY: 0}


def test_a_partition_lives_by_the_table(tmp_path: Path) -> None:
    """Nothing is delivered before it is caught up, and then commands first; held ones are released; no other change is
    possible."""
    rig = Rig(tmp_path)
    rig.produce(BILLS, NOW_MS)
    rig.ingest()
    rig.deliver()
    rig.reopen()
    assert rig.stores.in_life(Life.CATCHING_UP) == [BILLS] and rig.stores.arrive() == []
    assert len(rig.stores.begin(NOW_MS).take(NOW_MS, 10)) == 0
    rig.stores._end_loan()
    rig.ingest()
    assert rig.stores.arrive() == [BILLS] and rig.stores.next_wakeup_ms() is None
    for before in Life:
        for after in Life:
            entry = rig.stores._entries[BILLS]
            entry.life = before
            if before is after or (before, after) in TRANSITIONS:
                entry.become(after)
                assert entry.life is after
            else:
                with pytest.raises(Misuse):
                    entry.become(after)


@pytest.mark.fault("rows behind a gap, of a partition that has come back")
@pytest.mark.fault("a cancel by origin that reads a damaged segment")
def test_a_cancel_that_meets_damage_concerns_its_partition_alone(tmp_path: Path) -> None:
    """The others take in their rows, of the same batch and of the next ones. The damaged partition is opened anew, and
    reads the cancel again; until then no run is begun for it."""
    rig, told = Rig(tmp_path, limits=Limits(horizon_ms=1_000)), list[bool]()
    rig.stores.damage = Damage(lambda: told.append(True))
    rig.produce(BILLS, FAR_MS)
    rig.ingest()
    rig.deliver()
    rig.stores.flush(NOW_MS)
    [segment] = tmp_path.glob("delay/1/*.parquet")
    segment.write_bytes(b"damaged")
    run = rig.stores.run
    for at in range(2):
        records = [Record(*ORDERS, at, FAR_MS), Record(*BILLS, 1, None, cancels=True, origin=0)]
        assert rig.stores.append(batch(records), {ORDERS: at + 1, BILLS: 2}, NOW_MS, run=run) == 1
        rig.stores.read_again()
    assert rig.stores.next_offsets() == {ORDERS: 2, BILLS: 1, RETRY: 0} and rig.stores.run == run
    assert told == [True] and rig.stores.damage.names == {BILLS}
    assert [path.read_bytes() for path in tmp_path.glob("delay/1/*.corrupt")] == [b"damaged"]
    rig.stores.damage.forget([BILLS])
    assert not rig.stores.damage.names


def test_late_rows_of_an_earlier_run_are_left_out(tmp_path: Path) -> None:
    """A partition that goes and comes back further back takes in nothing that a reader sent before: the records in
    between would be lost. Partitions that stay lose nothing."""
    rig = Rig(tmp_path)
    rig.produce(ORDERS, FAR_MS, FAR_MS)
    rig.produce(BILLS, FAR_MS, FAR_MS)
    run, records = rig.stores.run, [Record(*ORDERS, 0, FAR_MS), Record(*BILLS, 1, FAR_MS)]
    rig.stores.close_partitions([BILLS])
    rig.stores.coming({BILLS: State()}, {}, {})
    rig.stores.start_at({BILLS: 0}, {BILLS: 2})
    assert rig.stores.next_offsets(run).keys() == {ORDERS, RETRY}
    assert rig.stores.append(batch(records), {ORDERS: 1, BILLS: 2}, NOW_MS, run=run) == 1
    assert rig.stores.next_offsets() == {ORDERS: 1, BILLS: 0, RETRY: 0}
    rig.ingest()
    assert rig.stores.next_offsets() == {ORDERS: 2, BILLS: 2, RETRY: 0} and rig.stores.stats().pending == 4


def test_of_a_partition_whose_commands_come_first_nothing_else_is_taken(tmp_path: Path) -> None:
    """Rows of all others are, in the same transaction; a held partition that is released is looked at again."""
    rig = Rig(tmp_path)
    rig.load()
    for name in (ORDERS, BILLS):
        rig.produce(name, NOW_MS, None)
    rig.ingest()
    entry = rig.stores._entries[BILLS]
    for life in (Life.HELD, Life.COMMANDS_FIRST):
        entry.become(life)
    assert rig.stores.has_commands() and rig.stores.next_wakeup_ms() == AT_MIN
    assert rig.deliver() == [(AT_MIN, ORDERS, 1), (AT_MIN, BILLS, 1), (NOW_MS, ORDERS, 0)]
    assert not rig.stores.has_commands() and rig.stores.next_wakeup_ms() is None
    rig.stores.go_live([BILLS])
    assert rig.deliver() == [(NOW_MS, BILLS, 0)]


def test_a_partition_that_comes_to_a_closed_intake_takes_nothing_in(tmp_path: Path) -> None:
    """The pipeline was cancelled while its store was opened."""
    rig = Rig(tmp_path)
    rig.stores.close_partitions([BILLS])
    rig.stores.close_intake()
    assert rig.stores.coming({BILLS: State()}, {}, {}) == {BILLS: None}
    rig.stores.start_at({BILLS: 0}, {BILLS: 1})
    with pytest.raises(Closed):
        rig.stores.append(batch([Record(*BILLS, 0, FAR_MS)]), {BILLS: 1}, NOW_MS)


def test_a_page_reads_of_each_partition_what_it_may_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no more: rows behind the last one of the page so far are left alone. Pages show each message once."""
    names = [("delay", partition) for partition in range(8)]
    rig, read = Rig(tmp_path, names), list[int]()
    for n, name in enumerate(names):
        rig.produce(name, *range(FAR_MS + n, FAR_MS + 400, 8))
    rig.ingest()
    find = TimerStore.find

    def counted(*args: Any, **kwargs: Any) -> FoundPage:
        page = find(*args, **kwargs)
        read.append(len(page.rows))
        return page

    monkeypatch.setattr(TimerStore, "find", counted)
    shown, after = list[int](), None
    while True:
        page = rig.stores.find(Query(), NOW_MS, after=after, limit=20)
        shown += [row.at_ms for row in page.rows]
        after = page.next
        if after is None:
            break
    assert shown == list(range(FAR_MS, FAR_MS + 400))
    assert sum(read[:8]) < 4 * 20


def test_partitions_that_could_not_be_opened_take_no_room(tmp_path: Path) -> None:
    """Each attempt opens all again; the stores that it has opened before a full disk are closed."""
    rig = Rig(tmp_path)
    rig.stores.close_partitions([BILLS, RETRY])
    ready = rig.stores.memory.budgets.ready
    guaranteed = ready.guaranteed
    opened: list[Any] = [TimerStore.open, mock.Mock(side_effect=DiskFull("full", hint="", code="DB-3028"))]
    with (
        mock.patch.object(TimerStore, "open", lambda *args, **kwargs: opened.pop(0)(*args, **kwargs)),
        pytest.raises(DiskFull),
    ):
        rig.stores.coming({BILLS: State(), RETRY: State()}, {}, {})
    assert not opened and ready.guaranteed == guaranteed


@pytest.mark.parametrize("is_damaged", [True, False])
def test_an_index_that_could_not_be_read_takes_no_room(tmp_path: Path, is_damaged: bool) -> None:
    """The next attempt, or the rebuild after damage, makes a new store; the other stores keep their part."""
    rig = Rig(tmp_path)
    rig.load()
    rig.produce(BILLS, NOW_MS + 900_000)
    rig.ingest()
    rig.deliver()
    rig.stores.flush(NOW_MS)
    guaranteed = rig.stores.memory.budgets.ready.guaranteed
    rig.stores.close_partitions([BILLS])
    [segment] = (tmp_path / "delay" / "1").glob("*.parquet")
    failure = Corrupt("", path=str(segment)) if is_damaged else DiskFailure("", hint="", code="DB-3025")
    coming = {BILLS: rig.states[BILLS]}
    with mock.patch.object(recovery, "covered_in", mock.Mock(side_effect=[failure, []])):
        if not is_damaged:
            with pytest.raises(DiskFailure):
                rig.stores.coming(coming, {}, {})
        rig.stores.coming(coming, {}, {})
    assert rig.stores.memory.budgets.ready.guaranteed == guaranteed


@pytest.mark.fault("a flush or a search at the end of a transaction")
def test_a_transaction_ends_in_all_stores_at_once(tmp_path: Path) -> None:
    """No other thread meets its rows without their payloads, which may be those of other rows by then."""
    rig = Rig(tmp_path)
    rig.load()
    for name in (ORDERS, BILLS):
        rig.produce(name, *[NOW_MS] * 4)
    rig.ingest()
    loan = rig.stores.begin(NOW_MS)
    assert len(rig.take(loan, NOW_MS, 100)) == 8
    finish, came_in, lock = Transaction.finish, list[bool](), rig.stores.memory.lock

    def come_in() -> None:
        came_in.append(lock.acquire(blocking=False))
        if came_in[-1]:
            lock.release()

    def finished(transaction: Transaction, progress: Progress) -> None:
        other = threading.Thread(target=come_in)
        other.start()
        other.join()
        finish(transaction, progress)

    with mock.patch.object(Transaction, "finish", finished):
        rig.commit(loan)
    assert came_in == [False, False]


def test_a_cancel_that_comes_too_late_leaves_the_counts_of_targets_right(tmp_path: Path) -> None:
    """Its message is counted out when the cancel is read, and delivered all the same."""
    rig = Rig(tmp_path)
    rig.load()
    rig.logs[ORDERS] += [Record(*ORDERS, 0, NOW_MS, id="a", target="A"), Record(*ORDERS, 1, FAR_MS, target="B")]
    rig.ingest()
    loan = rig.stores.begin(NOW_MS)
    assert rig.take(loan, NOW_MS, 10)
    rig.logs[ORDERS].append(Record(*ORDERS, 2, None, id="a", cancels=True))
    rig.ingest()
    rig.commit(loan)
    assert rig.stores.stats().pending_by_target == {"B": 1}


@pytest.mark.fault("a partition with few rows beside large ones of others, held for hours")
def test_rows_keep_no_memory_of_other_partitions(tmp_path: Path) -> None:
    """A few rows of a large batch are copied when they are placed. So the memory of the other rows is free."""
    rig = Rig(tmp_path)
    rig.load()
    record = Record(*ORDERS, 0, NOW_MS + 10_000, value=bytes(1 << 16))
    [bills] = [view for view in rig.stores.views() if view.name == BILLS]
    for i in range(4):
        rows = [*(replace(record, offset=16 * i + j) for j in range(16)), Record(*BILLS, i, NOW_MS + 10_000)]
        rig.stores.append(batch(rows), {ORDERS: 16 * i + 16, BILLS: i + 1}, NOW_MS)
        assert rig.stores.stats().ready_rows == 17 * (i + 1)
    assert sum(view.resident.ready.bytes for view in rig.stores.views()) > 4 << 20
    rig.stores.close_partitions([ORDERS])
    assert len(bills.resident.ready) == 4
    assert sum(each.get_total_buffer_size() for each in rig.stores.memory.chunks.all().values()) < 1 << 16


@pytest.mark.fault("a partition that leaves while it shares batches with others, or while its window is read")
def test_a_closed_partition_keeps_no_memory(tmp_path: Path) -> None:
    """A batch is one chunk of all its partitions. The chunk goes with the rows of the last one."""
    rig = Rig(tmp_path)
    rig.load()
    rig.produce(BILLS, NOW_MS + 900_000)
    rig.ingest()
    rig.deliver()
    rig.stores.flush(NOW_MS)
    loading = rig.stores.next_loading(NOW_MS + 890_000)
    assert loading is not None
    for name in (ORDERS, BILLS, RETRY):
        rig.produce(name, NOW_MS + 10, NOW_MS + 910_000)
    rig.ingest()
    assert len(rig.stores.memory.chunks) == 1
    rig.stores.close_partitions([ORDERS, BILLS])
    rig.stores.admit(loading, gather(loading.window))
    chunks = rig.stores.memory.chunks
    assert chunks._live[list(chunks._payload)].sum() == 2
    assert rig.deliver(NOW_MS + 10) == [(NOW_MS + 10, RETRY, 0)]
    rig.stores.flush(NOW_MS + 10)
    assert not len(rig.stores.memory.chunks) and rig.stores.stats().physical_bytes == 0


def test_the_rest_of_many_batches_is_copied_step_by_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One step is bounded. Until none is left, the flush of each partition copies more, without a pause."""
    rig = Rig(tmp_path, limits=Limits(repacked_bytes=1))
    monkeypatch.setattr(memory, "REPACKED_ROWS_MAX", 2)
    rig.load()
    for _ in range(5):
        rig.produce(ORDERS, *[NOW_MS] * 9, NOW_MS + 10_000)
        rig.ingest()
    rig.deliver()
    rig.stores.flush(NOW_MS)
    copies = rig.stores.memory.chunks.all().values()
    assert sorted(map(len, copies)) == [1, 2, 2]


@pytest.mark.parametrize("due_ms", [10, 900_000], ids=["soon", "later"])
def test_the_parts_of_a_batch_come_to_each_store(tmp_path: Path, due_ms: int) -> None:
    """Also if one is held, has read some rows before, or has passed their time. Each row is delivered once."""
    rig = Rig(tmp_path)
    rig.load()
    rig.produce(ORDERS, NOW_MS + 5)
    rig.ingest()
    rig.deliver(NOW_MS + 5)
    rig.stores.hold_named([RETRY])
    for name in (ORDERS, BILLS, RETRY):
        rig.produce(name, NOW_MS + due_ms, NOW_MS + 3, NOW_MS + 1_000_000)
    whole = batch([*rig.logs[ORDERS], *rig.logs[BILLS], *rig.logs[RETRY]])
    ends = {name: len(log) for name, log in rig.logs.items()}
    assert rig.stores.append(whole, ends, NOW_MS) == 9
    assert rig.stores.append(whole, ends, NOW_MS) == 0
    assert [view.resident.ready.bytes > 0 for view in rig.stores.views()] == [due_ms == 10, True, True]
    rig.stores.hold_named([])
    expected = sorted((r.at_ms, name, r.offset) for name, log in rig.logs.items() for r in log)
    seen: list[tuple[int, tuple[str, int], int]] = [(NOW_MS + 5, ORDERS, 0)]
    for until_ms in (NOW_MS + 5, NOW_MS + 900_000, NOW_MS + 1_000_000):
        rig.load(until_ms)
        while taken := rig.deliver(until_ms):
            seen += taken
    assert sorted(seen) == expected
    assert rig.stores.stats().pending == 0 and not len(rig.stores.memory.chunks)


def test_later_cancels_find_the_messages_of_a_batch_by_their_ids(tmp_path: Path) -> None:
    """In each partition its own: the counts fall when the cancel is read, and the message is not delivered."""
    rig = Rig(tmp_path)
    rig.load()
    for name in (ORDERS, BILLS, RETRY):
        rig.logs[name] += [
            Record(*name, offset, due_ms, id=id)
            for offset, (due_ms, id) in enumerate([(NOW_MS + 10, "b"), (NOW_MS + 900_000, "a"), (NOW_MS + 10, None)])
        ]
    rig.ingest()
    assert len(rig.stores.memory.chunks) == 1 and rig.stores.stats().pending == 9
    rig.logs[ORDERS].append(Record(*ORDERS, 3, None, id="a", cancels=True))
    rig.logs[BILLS].append(Record(*BILLS, 3, None, id="b", cancels=True))
    rig.ingest()
    assert rig.stores.stats().pending == 7
    rig.logs[BILLS].append(Record(*BILLS, 4, NOW_MS + 10, id="b"))
    rig.ingest()
    delivered = {(name, offset) for at_ms, name, offset in rig.deliver(NOW_MS + 10) if at_ms > 0}
    assert delivered == {(ORDERS, 0), (ORDERS, 2), (BILLS, 2), (BILLS, 4), (RETRY, 0), (RETRY, 2)}
    assert rig.stores.stats().pending == 2
