"""What a search reads, and that it comes to an end. (What it finds: tests/model/test_store_machine.py.)"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pytest

import timerstore.log.segment
import timerstore.operations.find
from tests.unit.timerstore.entries import Record
from tests.unit.timerstore.rig import BILLS, NOW_MS, ORDERS, Rig
from timerstore.disk import files
from timerstore.limits import Limits
from timerstore.log.segment import Reader
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


@pytest.mark.parametrize("damage", ["none", "bit", "gone"])
def test_an_origin_is_found_in_the_row_groups_that_hold_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    """The original and its copies, and nothing else is read; a damaged index is made again from its segment."""
    monkeypatch.setattr(timerstore.log.segment, "ROW_GROUP_ROWS", 8)
    rig = Rig(tmp_path / "store", sources=[ORDERS, BILLS], limits=Limits(horizon_ms=1_000))
    rig.produce(*(LATER_MS + 7 * n % 64 for n in range(64)), source=BILLS)
    rig.produce(*(LATER_MS + 5 * n % 64 for n in range(63)))
    rig.log[ORDERS].append(Record(*ORDERS, 63, LATER_MS + 5, origin=20, rolls=1))
    rig.ingest()
    rig.deliver()
    rig.store.maintenance.flush(NOW_MS)
    rig.store.close()
    (path,) = rig.directory.glob(f"*{files.ORIGINS_SUFFIX}")
    content = bytearray(path.read_bytes())
    content[65] ^= damage == "bit"
    path.write_bytes(content)
    if damage == "gone":
        path.unlink()
    store = rig.open()
    assert store.reports == ()
    read: list[int] = []
    real = Reader.read

    def counted(reader: Reader, group: int, columns: Sequence[str]) -> pa.Table:
        read.append(group)
        return real(reader, group, columns)

    monkeypatch.setattr(Reader, "read", counted)
    found = store.find(Query(origin=(*ORDERS, 20)), NOW_MS).rows
    assert [(row.offset, row.rolls) for row in found] == [(63, 1), (20, 0)]
    assert len(set(read)) == 2
    assert [row.offset for row in store.find(Query(origin=(*BILLS, 20)), NOW_MS).rows] == [20]
    assert store.find(Query(origin=(*BILLS, 64)), NOW_MS).rows == ()
    assert store.find(Query(origin=("other", 0, 20)), NOW_MS).rows == ()
