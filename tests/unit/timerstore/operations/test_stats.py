"""timerstore.operations.stats: pending rows that Kafka does not have any more, in memory and in segments."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.unit.timerstore.rig import NOW_MS, Rig
from timerstore.limits import Limits
from timerstore.memory.sorted_runs import EMPTY
from timerstore.operations import stats
from timerstore.operations.stats import Trimmed

FAR = NOW_MS + 10_000_000


def test_rows_in_memory_are_looked_at_one_by_one(tmp_path: Path) -> None:
    """Ready, beyond the frontier, or overtaken: what is pending below the log's start is found, and only that."""
    rig = Rig(tmp_path)
    rig.produce(FAR, FAR + 1)
    rig.ingest()
    assert not rig.store.trimmed(0).is_any
    assert rig.store.trimmed(1) == Trimmed(is_any=True, is_unstored=True)
    rig.deliver()
    assert rig.store.trimmed(1).can_flush
    rig.store.maintenance.flush(NOW_MS)
    assert rig.store.trimmed(2) == Trimmed(is_any=True)


def test_rows_are_examined_without_the_lock(tmp_path: Path) -> None:
    """Delivery goes on during a pass over a million rows. The answer concerns the moment before it."""
    rig = Rig(tmp_path)
    rig.produce(FAR, FAR + 1)
    rig.ingest()
    state = rig.store.state
    looks = stats.trimmed(state, 1), stats.may_hold_below(state, 1)
    merged = state.memory.merged.below({state.log: 1})
    with ThreadPoolExecutor(1) as pool, state.lock:
        rows = pool.submit(merged).result(60).get(state.log, EMPTY)
        found = [pool.submit(look, rows).result(60) for look in looks]
    assert found == [Trimmed(is_any=True, is_unstored=True), True]


def test_what_is_finished_may_be_gone(tmp_path: Path) -> None:
    """Deleting finished records is what retention is for."""
    rig = Rig(tmp_path)
    rig.produce(NOW_MS - 1, FAR)
    rig.ingest()
    rig.finish(NOW_MS)
    assert not rig.store.trimmed(1).is_any
    assert rig.store.trimmed(2).is_any


def test_of_a_segment_the_last_row_tells(tmp_path: Path) -> None:
    """As long as that is not finished, it is pending; its record may be gone while others are still there."""
    rig = Rig(tmp_path, limits=Limits(horizon_ms=1_000))
    rig.produce(FAR + 5, FAR)
    rig.ingest()
    rig.deliver()
    assert rig.store.maintenance.flush(NOW_MS).rows == 2
    rig.reopen()
    assert len(rig.store.state.resident.memtable) == 0
    assert not rig.store.trimmed(0).is_any
    assert rig.store.trimmed(1).is_any
    rig.finish(FAR + 5)
    assert not rig.store.trimmed(2).is_any
