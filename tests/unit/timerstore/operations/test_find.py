"""Searches that are cut short come to an end. (tests/model/test_store_machine.py has what else `find` promises.)"""

from __future__ import annotations

from pathlib import Path

import pytest

import timerstore.operations.find
from tests.unit.timerstore.rig import BILLS, NOW_MS, ORDERS, Rig
from timerstore.limits import Limits
from timerstore.operations.find import Query

LATER_MS = NOW_MS + 3_600_000


def test_a_search_that_is_cut_short_in_front_of_a_first_offset_goes_on_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timerstore.operations.find, "SCANNED_ROWS_MAX", 6)
    rig = Rig(tmp_path / "store", sources=[ORDERS, BILLS], limits=Limits(horizon_ms=1_000))
    # The row group of the second partition lies around the only row of the first one, and is looked at each time.
    for source, due_ms in ((BILLS, [LATER_MS + 10 * n for n in range(10)]), (ORDERS, [LATER_MS + 50])):
        rig.produce(*due_ms, source=source)
        rig.ingest()
        rig.deliver()
        rig.store.maintenance.flush(NOW_MS)
    assert len(rig.store.state.timerlog) == 2
    found, after = [], None
    for _ in range(10):
        page = rig.store.find(Query(), NOW_MS, after=after)
        found += [(row.due_ms - LATER_MS, row.partition) for row in page.rows]
        after = page.next
        if after is None:
            break
    assert after is None
    assert found == [(10 * n, 1) for n in range(5)] + [(50, 0)] + [(10 * n, 1) for n in range(5, 10)]
