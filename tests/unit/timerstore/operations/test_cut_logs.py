"""A log that Kafka has lost the end of: the index holds what the log holds, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.timerstore.entries import Record
from tests.unit.timerstore.rig import NOW_MS, ORDERS, Rig
from timerstore.limits import Limits
from timerstore.operations.find import LogQuery

FAR = NOW_MS + 10_000_000


@pytest.mark.fault("acknowledged records that the brokers lose, in the index")
@pytest.mark.parametrize("flushed", [0, 3, 6])
def test_rows_above_a_cut_leave_and_what_is_written_there_is_new(tmp_path: Path, flushed: int) -> None:
    """Each record of the present log is delivered once, for any number of lost records in segments."""
    rig = Rig(tmp_path, limits=Limits(horizon_ms=1_000))
    rig.produce(NOW_MS, *(FAR + i for i in range(flushed)))
    rig.ingest()
    rig.finish(NOW_MS)
    rig.store.maintenance.flush(NOW_MS)
    rig.produce(*(FAR + i for i in range(flushed, 6)))
    rig.ingest()
    rig.deliver()
    assert rig.store.pending_from(4, NOW_MS) == 3
    rig.cut(4)
    rig.reopen()
    rig.produce(NOW_MS - 5, FAR + 50)
    rig.ingest()
    assert rig.store.stats().pending == 5
    rig.finish(FAR + 100)
    rig.assert_each_delivered_once()


@pytest.mark.fault("cancels that the brokers lose")
@pytest.mark.parametrize("is_committed", [True, False])
def test_a_cancel_above_a_cut_covers_nothing_any_more(tmp_path: Path, is_committed: bool) -> None:
    """A lost cancel covers neither its former messages nor newer ones of its id; cancels below the cut keep their
    effect. So it is where they were read and stored ahead of the committed offset, which lies below the cut."""
    rig = Rig(tmp_path, limits=Limits(horizon_ms=1_000))
    log = rig.log
    for id in ("kept", "gone", "both"):
        log.append(Record(*ORDERS, len(log), FAR, id=id))
    for id in ("gone", "both", "kept", "both", "new"):
        log.append(Record(*ORDERS, len(log), None, cancels=True, id=id))
    log.append(Record(*ORDERS, len(log), NOW_MS - 1))
    rig.ingest()
    if is_committed:
        rig.finish(NOW_MS)
    rig.store.maintenance.flush(NOW_MS)
    assert rig.store.stats().pending == (not is_committed)
    rig.cut(5)
    rig.reopen()
    rig.log.append(Record(*ORDERS, 5, FAR, id="new"))
    rig.ingest()
    assert rig.store.stats().pending == 2
    found = rig.store.find(LogQuery(), NOW_MS).rows
    assert {row.offset for row in found} == {0, 5}


@pytest.mark.fault("a log that was cut while another instance had the partition")
@pytest.mark.parametrize("restarts", [1, 2])
def test_an_index_that_does_not_know_a_cut_is_not_trusted(tmp_path: Path, restarts: int) -> None:
    """Rows from above the cut leave the index, when the partition comes back and after a start, and the new records
    there are read, even below the committed offset."""
    rig = Rig(tmp_path, limits=Limits(horizon_ms=1_000))
    rig.produce(NOW_MS, *(FAR + i for i in range(5)))
    rig.ingest()
    rig.finish(NOW_MS)
    rig.store.maintenance.flush(NOW_MS)
    assert rig.reopen().resume_offset() == 6
    rig.cut(3)
    rig.produce(FAR + 50, FAR + 51, FAR + 52, FAR + 53)
    rig.committed = replace(rig.committed, offset=len(rig.log))
    for _ in range(restarts):
        assert rig.reopen().resume_offset() is None
    rig.ingest()
    rig.deliver()
    rig.store.maintenance.flush(NOW_MS)
    assert rig.reopen().resume_offset() == 7, "it knows by now"
    rig.ingest()
    rig.finish(FAR + 100)
    rig.assert_each_delivered_once()


def test_an_index_without_anything_knows_a_cut_from_then_on(tmp_path: Path) -> None:
    """There is nothing to give up."""
    rig = Rig(tmp_path)
    rig.cuts = ((7, 0),)
    rig.reopen()
    rig.store.maintenance.flush(NOW_MS)
    assert rig.store.state.checkpoint.cut == 7


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
    old = list(rig.log)
    rig.cut(cut)
    rig.produce(*(FAR + 50 + i for i in range(6)))
    rig.log_start = start
    for _ in range(2):
        rig.reopen()
        assert rig.store.resume_offset() is None and rig.store.held_below() == held
    rig.ingest()
    found = {row.offset: row.due_ms for row in rig.store.find(LogQuery(), NOW_MS).rows}
    expected = {record.offset: record.due_ms for record in (*old[:held], *rig.log[start:])}
    assert found == expected
    rig.deliver()
    rig.store.maintenance.flush(NOW_MS)
    assert rig.store.state.checkpoint.kept is None and rig.store.held_below() == len(rig.log)
