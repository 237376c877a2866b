"""Floods: far more than memory may hold comes in, soon due, far off, or both, and the bounds hold (invariant I8)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.timerstore.entries import gather
from tests.unit.timerstore.rig import NOW_MS, Rig
from timerstore.limits import Limits

ROWS = 12_000
BATCH = 500
LIMITS = Limits(
    flush_bytes=200_000,
    ready_rows_bytes=300_000,
    window_bytes=60_000,
    horizon_ms=60_000,
    compaction_segments=4,
    repacked_bytes=20_000,
)
SOON_MS, FAR_MS = 20_000, 86_400_000
FLOODS = {
    "soon": lambda i: SOON_MS + i % 9_000,
    "far": lambda i: FAR_MS + i * 7_919 % 9_000_000,
    "both": lambda i: SOON_MS + i % 9_000 if i % 2 else FAR_MS + i * 7_919 % 9_000_000,
}


@pytest.mark.parametrize("flood", list(FLOODS))
def test_memory_stays_within_its_bounds_in_a_flood(tmp_path: Path, flood: str) -> None:
    """Twelve thousand messages into room for a thousand or two: L moves back, flushes and windows follow, ingest never
    stops for good, each message arrives once; and what is in memory physically is no more than the budgets."""
    rig = Rig(tmp_path, limits=LIMITS)
    maintenance = rig.store.maintenance
    physical = retreats = 0
    for first in range(0, ROWS, BATCH):
        frontier = rig.store.state.resident.frontier
        rig.produce(*(NOW_MS + FLOODS[flood](i) for i in range(first, first + BATCH)))
        assert rig.store.has_room()
        rig.ingest()
        retreats += rig.store.state.resident.frontier < frontier
        rig.deliver()
        while rig.load():
            pass
        if maintenance.flush_due(NOW_MS):
            maintenance.flush(NOW_MS)
        window = maintenance.compaction_window(NOW_MS)
        if window is not None:
            maintenance.compact(window, gather(window))
        stats = rig.store.stats()
        rows = stats.ready_rows + len(rig.store.state.resident.memtable)
        batch_bytes = (stats.ready_rows_bytes + stats.memtable_bytes) * BATCH // max(1, rows)
        assert stats.ready_rows_bytes <= LIMITS.ready_rows_bytes + batch_bytes
        assert stats.memtable_bytes <= LIMITS.memtable_bytes_max + batch_bytes
        physical = max(physical, stats.physical_bytes)
    assert physical <= LIMITS.ready_rows_bytes + LIMITS.memtable_bytes_max
    assert (retreats > 0) == (flood != "far"), "L moves back where too much is due soon"
    assert rig.store.stats().pending == ROWS
    assert len(rig.store.state.timerlog) < 12
    rig.finish(NOW_MS + FAR_MS + 10_000_000)
    rig.assert_each_delivered_once()
    assert len(rig.delivered) == len(rig.log) == ROWS
