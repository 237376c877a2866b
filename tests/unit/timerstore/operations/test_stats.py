"""timerstore.operations.stats: pending rows that Kafka does not have any more, in memory and in segments."""

from __future__ import annotations

from pathlib import Path

from tests.unit.timerstore.rig import BILLS, NOW_MS, ORDERS, Rig
from timerstore.limits import Limits

FAR = NOW_MS + 10_000_000


def test_rows_in_memory_are_looked_at_one_by_one(tmp_path: Path) -> None:
    """Ready, beyond the frontier, or overtaken: what is pending below the log's start is found, and only that."""
    rig = Rig(tmp_path, sources=(ORDERS, BILLS))
    rig.produce(FAR, FAR + 1)
    rig.produce(NOW_MS + 1, source=BILLS)
    rig.ingest()
    assert rig.store.trimmed({ORDERS: 0, BILLS: 0}) == []
    assert rig.store.trimmed({ORDERS: 1}) == [ORDERS]
    assert rig.store.trimmed({ORDERS: 1, BILLS: 1, ("other", 0): 9}) == [ORDERS, BILLS]


def test_what_is_finished_may_be_gone(tmp_path: Path) -> None:
    """Deleting finished records is what retention is for."""
    rig = Rig(tmp_path)
    rig.produce(NOW_MS - 1, FAR)
    rig.ingest()
    rig.finish(NOW_MS)
    assert rig.store.trimmed({ORDERS: 1}) == []
    assert rig.store.trimmed({ORDERS: 2}) == [ORDERS]


def test_of_a_segment_the_last_row_of_each_partition_tells(tmp_path: Path) -> None:
    """As long as that is not finished, it is pending; its record may be gone while others are still there."""
    rig = Rig(tmp_path, limits=Limits(horizon_ms=1_000))
    rig.produce(FAR + 5, FAR)
    rig.ingest()
    rig.deliver()
    assert rig.store.maintenance.flush(NOW_MS).rows == 2
    rig.reopen()
    assert len(rig.store.state.resident.memtable) == 0
    assert rig.store.trimmed({ORDERS: 0}) == []
    assert rig.store.trimmed({ORDERS: 1}) == [ORDERS]
    rig.finish(FAR + 5)
    assert rig.store.trimmed({ORDERS: 2}) == []
