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
    """However much of them was in segments: each record of the log as it is now is delivered once."""
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
    rig.produce(NOW_MS - 5, FAR + 50)
    rig.ingest()
    assert rig.store.stats().pending == 6
    rig.finish(FAR + 100)
    rig.assert_each_delivered_once()


@pytest.mark.parametrize("crash", [False, True], ids=["", "crash after the commit"])
def test_a_cancel_above_a_cut_covers_nothing_any_more(tmp_path: Path, crash: bool) -> None:
    """Neither what it had cancelled, nor what was written there since under its id; those below still do."""
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
    rig.finish(NOW_MS)
    rig.store.maintenance.flush(NOW_MS)
    assert rig.store.stats().pending == 0
    if crash:  # O went back in Kafka, and the next process knows of no cut
        del log[5:]
        rig.committed[ORDERS] = 5, rig.committed[ORDERS][1]
        rig.reopen()
    else:
        rig.cut(5)
    rig.log[ORDERS].append(Record(*ORDERS, 5, FAR, id="new"))
    rig.ingest()
    assert rig.store.stats().pending == 2
    found = rig.store.find(Query(), NOW_MS).rows
    assert {(row.topic, row.partition, row.offset) for row in found} == {(*ORDERS, 0), (*ORDERS, 5)}
