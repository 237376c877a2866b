"""A log that Kafka has lost the end of: the index holds what the log holds, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.timerstore.entries import Record
from tests.unit.timerstore.rig import BILLS, NOW_MS, ORDERS, Rig
from timerstore.limits import Limits
from timerstore.operations.find import Query

FAR = NOW_MS + 10_000_000


@pytest.mark.fault("acknowledged records that the brokers lose, in the index")
@pytest.mark.parametrize("flushed", [0, 3, 6])
def test_rows_above_a_cut_leave_and_what_is_written_there_is_new(tmp_path: Path, flushed: int) -> None:
    """Each record of the present log is delivered once, for any number of lost records in segments."""
    rig = Rig(tmp_path, sources=(ORDERS, BILLS), limits=Limits(horizon_ms=1_000))
    rig.produce(NOW_MS, *(FAR + i for i in range(flushed)))
    rig.produce(FAR, source=BILLS)
    rig.ingest()
    rig.finish(NOW_MS)
    rig.store.maintenance.flush(NOW_MS)
    rig.produce(*(FAR + i for i in range(flushed, 6)))
    rig.ingest()
    rig.deliver()
    assert rig.store.pending_from(ORDERS, 4, NOW_MS) == 3
    rig.cut(4)
    rig.reopen()
    rig.produce(NOW_MS - 5, FAR + 50)
    rig.ingest()
    assert rig.store.stats().pending == 6
    rig.finish(FAR + 100)
    rig.assert_each_delivered_once()


@pytest.mark.fault("cancels that the brokers lose")
@pytest.mark.parametrize("is_committed", [True, False])
def test_a_cancel_above_a_cut_covers_nothing_any_more(tmp_path: Path, is_committed: bool) -> None:
    """A lost cancel covers neither its former messages nor newer ones of its id; cancels below the cut keep their
    effect. So it is where they were read and stored ahead of the committed offset, which lies below the cut."""
    rig = Rig(tmp_path, sources=(ORDERS, BILLS), limits=Limits(horizon_ms=1_000))
    log = rig.log[ORDERS]
    for id in ("kept", "gone", "both"):
        log.append(Record(*ORDERS, len(log), FAR, id=id))
    for id in ("gone", "both", "kept", "both", "new"):
        log.append(Record(*ORDERS, len(log), None, cancels=True, id=id))
    log.append(Record(*ORDERS, len(log), NOW_MS - 1))
    rig.log[BILLS].append(Record(*BILLS, 0, FAR, id="kept"))
    rig.log[BILLS].append(Record(*BILLS, 1, None, cancels=True, id="kept"))
    rig.ingest()
    if is_committed:
        rig.finish(NOW_MS)
    rig.store.maintenance.flush(NOW_MS)
    assert rig.store.stats().pending == (not is_committed)
    rig.cut(5)
    rig.reopen()
    rig.log[ORDERS].append(Record(*ORDERS, 5, FAR, id="new"))
    rig.ingest()
    assert rig.store.stats().pending == 2
    found = rig.store.find(Query(), NOW_MS).rows
    assert {(row.topic, row.partition, row.offset) for row in found} == {(*ORDERS, 0), (*ORDERS, 5)}


def elsewhere(rig: Rig, cut: int, *new: int) -> None:
    """ORDERS goes to another instance; its log is cut there, and what is written then is read."""
    rig.store.assignment.give_up([ORDERS], NOW_MS)
    rig.cut(cut)
    rig.produce(*new)
    rig.committed[ORDERS] = len(rig.log[ORDERS]), rig.committed[ORDERS][1]


@pytest.mark.fault("a log that was cut while another instance had the partition")
@pytest.mark.parametrize("restarts", [1, 2])
def test_an_index_that_does_not_know_a_cut_is_not_trusted(tmp_path: Path, restarts: int) -> None:
    """Rows from above the cut leave the index, when the partition comes back and after a start, and the new records
    there are read, even below the committed offset."""
    rig = Rig(tmp_path, sources=(ORDERS, BILLS), limits=Limits(horizon_ms=1_000))
    rig.produce(NOW_MS, *(FAR + i for i in range(5)))
    rig.produce(FAR, source=BILLS)
    rig.ingest()
    rig.finish(NOW_MS)
    rig.store.maintenance.flush(NOW_MS)
    state, starts = {ORDERS: rig.committed[ORDERS]}, {ORDERS: 0}
    assert rig.store.assignment.resume_offsets(state, {}, starts, rig.cuts) == {ORDERS: 6}
    elsewhere(rig, 3, FAR + 50, FAR + 51, FAR + 52, FAR + 53)
    state = {ORDERS: rig.committed[ORDERS]}
    assert rig.store.assignment.resume_offsets(state, {}, starts, rig.cuts) is None
    for _ in range(restarts):
        rig.reopen()
        assert rig.store.resume_offsets() == {ORDERS: None, BILLS: 1}
    rig.ingest()
    rig.deliver()
    rig.store.maintenance.flush(NOW_MS)
    assert rig.store.assignment.resume_offsets(state, {}, starts, rig.cuts) == {ORDERS: 7}, "it knows by now"
    rig.reopen()
    assert rig.store.resume_offsets() == {ORDERS: 7, BILLS: 1}
    rig.ingest()
    rig.finish(FAR + 100)
    rig.assert_each_delivered_once()


def test_a_start_without_a_partition_learns_nothing_of_its_cuts(tmp_path: Path) -> None:
    """Its rows stay as they were before the cut, and a start with it leaves them out."""
    rig = Rig(tmp_path, sources=(ORDERS, BILLS), limits=Limits(horizon_ms=1_000))
    rig.produce(*[FAR] * 3)
    rig.ingest()
    rig.finish(NOW_MS)
    rig.store.maintenance.flush(NOW_MS)
    rig.cut(1)
    rig.produce(FAR + 1, FAR + 2)
    del rig.committed[ORDERS]
    rig.reopen()
    rig.produce(FAR, source=BILLS)
    rig.ingest()
    rig.finish(NOW_MS)
    rig.store.maintenance.flush(NOW_MS)
    rig.committed[ORDERS] = 3, None
    rig.reopen()
    rig.ingest()
    rows = rig.store.find(Query(), NOW_MS).rows
    assert {(row.offset, row.at_ms) for row in rows if row.partition == ORDERS[1]} == {
        (0, FAR),
        (1, FAR + 1),
        (2, FAR + 2),
    }


def test_an_index_without_anything_of_a_partition_takes_it_on_after_a_cut(tmp_path: Path) -> None:
    """It needs not be opened anew for that; and it knows the cut from then on."""
    rig = Rig(tmp_path, sources=(ORDERS, BILLS))
    del rig.committed[ORDERS]
    rig.reopen()
    rig.cuts[ORDERS] = ((7, 0),)
    state, starts = {ORDERS: (0, None)}, {ORDERS: 0}
    assignment = rig.store.assignment
    assert assignment.resume_offsets(state, {}, starts, rig.cuts) == {ORDERS: None}
    assignment.join(assignment.arrival(state, {}, rig.cuts), starts, {ORDERS: 0}, {ORDERS: 0}, NOW_MS)
    rig.store.maintenance.flush(NOW_MS)
    assert rig.store.state.checkpoint.cuts == {ORDERS: 7}


@pytest.mark.parametrize(
    ("cut", "start", "held"), [(4, 2, 2), (1, 2, 1), (1, 5, 1)], ids=["above what is gone", "below it", "and regrown"]
)
def test_what_is_gone_of_a_log_that_was_cut_is_kept(tmp_path: Path, cut: int, start: int, held: int) -> None:
    """Below both the cut and the log's start the index is the only place: it stays so until the partition is read
    again, also over starts in between. What it has from above the cut does not."""
    rig = Rig(tmp_path, limits=Limits(horizon_ms=1_000))
    rig.produce(*(FAR + i for i in range(6)))
    rig.ingest()
    rig.deliver()
    rig.store.maintenance.flush(NOW_MS)
    old = list(rig.log[ORDERS])
    rig.cut(cut)
    rig.produce(*(FAR + 50 + i for i in range(6)))
    rig.log_starts[ORDERS] = start
    for _ in range(2):
        rig.reopen()
        assert rig.store.resume_offsets() == {ORDERS: None} and rig.store.held_below([ORDERS]) == {ORDERS: held}
    rig.ingest()
    found = {row.offset: row.due_ms for row in rig.store.find(Query(), NOW_MS).rows}
    expected = {record.offset: record.due_ms for record in (*old[:held], *rig.log[ORDERS][start:])}
    assert found == expected
    rig.deliver()
    rig.store.maintenance.flush(NOW_MS)
    assert rig.store.state.checkpoint.kept == {} and rig.store.held_below([ORDERS]) == {ORDERS: len(rig.log[ORDERS])}


@pytest.mark.fault("a partition that leaves while it is read again, after Kafka has lost records of it")
def test_what_is_kept_of_a_partition_stays_while_another_instance_has_it(tmp_path: Path) -> None:
    """Its rows stay with it through flushes and compactions of other partitions; both leave after ten minutes."""
    rig = Rig(tmp_path, sources=(ORDERS, BILLS), limits=Limits(horizon_ms=1_000))
    rig.produce(*(FAR + i for i in range(6)))
    rig.produce(FAR, source=BILLS)
    rig.ingest()
    rig.deliver()
    rig.store.maintenance.flush(NOW_MS)
    rig.cut(4)
    rig.log_starts[ORDERS] = 2
    rig.reopen()
    rig.store.assignment.give_up([ORDERS], NOW_MS)
    theirs = rig.committed.pop(ORDERS)
    rig.store.maintenance.flush(NOW_MS)
    rig.store.maintenance.reclaim(NOW_MS)
    rig.committed[ORDERS] = theirs
    rig.reopen()
    assert rig.store.held_below([ORDERS]) == {ORDERS: 2}
    rig.ingest()
    assert {row.offset for row in rig.store.find(Query(), NOW_MS).rows if row.topic == ORDERS[0]} == {0, 1, 2, 3}
    rig.reopen()
    rig.store.assignment.give_up([ORDERS], NOW_MS)
    long_ms = NOW_MS + rig.limits.elsewhere_ms
    assert rig.store.maintenance.flush_due(long_ms)
    rig.store.maintenance.flush(long_ms)
    assert rig.store.state.checkpoint.kept == {} and not rig.store.maintenance.flush_due(long_ms)
