"""An export is one moment of the store. (tests/model/test_store_machine.py compares it with pages.)"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pytest

import timerstore.log.segment
import timerstore.operations.export
from tests.unit.timerstore.rig import NOW_MS, Rig
from timerstore.errors import Corrupt
from timerstore.limits import Limits
from timerstore.operations.export import SCHEMA
from timerstore.operations.find import PENDING, LogQuery, PendingState

LATER_MS = NOW_MS + 3_600_000


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    """Ten messages in two segments, five in memory, all due in an hour; two rows in a row group."""
    monkeypatch.setattr(timerstore.log.segment, "ROW_GROUP_ROWS", 2)
    rig = Rig(tmp_path / "store", limits=Limits(horizon_ms=1_000))
    for _ in range(2):
        rig.produce(*(LATER_MS + n for n in range(5)))
        rig.ingest()
        rig.deliver()
        rig.store.maintenance.flush(NOW_MS)
    assert len(rig.store.state.timerlog) == 2
    rig.produce(*(LATER_MS + n for n in range(5)))
    rig.ingest()
    return rig


def places(batches: Iterable[pa.RecordBatch]) -> list[int]:
    """Offsets in order."""
    return sorted(pa.Table.from_batches(batches, SCHEMA)["offset"].to_pylist())


EVERYTHING = list(range(15))


def test_what_happens_later_changes_nothing(rig: Rig) -> None:
    """All is delivered, the files are removed, and others have come, before the first batch is read and after."""
    whole, begun = (rig.store.export(LogQuery(), NOW_MS, bulky=True) for _ in range(2))
    first = next(begun)
    rig.finish(LATER_MS + 10)
    rig.store.maintenance.flush(LATER_MS + 10)
    rig.store.maintenance.reclaim(LATER_MS + 10)
    assert not len(rig.store.state.timerlog) and not list(rig.directory.glob("*.parquet"))
    rig.produce(LATER_MS + 3_600_000)
    rig.ingest()
    assert places(whole) == places([first, *begun]) == EVERYTHING
    assert places(rig.store.export(LogQuery(), NOW_MS, bulky=True)) == [15]
    rig.finish(LATER_MS + 3_600_010)
    rig.assert_each_delivered_once()


def test_batches_are_small(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """However large the row groups, and what is in memory."""
    monkeypatch.setattr(timerstore.operations.export, "BATCH_BYTES_MAX", 1)
    batches = list(rig.store.export(LogQuery(), NOW_MS, bulky=True))
    assert places(batches) == EVERYTHING and [batch.num_rows for batch in batches] == [1] * 15


def test_values_and_headers_only_where_they_are_asked_for(rig: Rig) -> None:
    """Without them the columns are there, and null."""
    for bulky in (True, False):
        table = pa.Table.from_batches(rig.store.export(LogQuery(), NOW_MS, bulky=bulky))
        assert table.schema == SCHEMA and table["key"].null_count == 0
        assert table["value"].null_count == table["headers"].null_count == (0 if bulky else 15)


def test_nothing_is_a_batch_too(rig: Rig) -> None:
    """However little fits, there is a batch for each row group that was read."""
    nothing = list(rig.store.export(LogQuery(key=b"?"), NOW_MS, bulky=False))
    assert len(nothing) == 6 and places(nothing) == []
    assert places(rig.store.export(LogQuery(key=b"0-3"), NOW_MS, bulky=False)) == [3]
    cancelled = LogQuery(states=frozenset(PendingState) - PENDING)
    assert places(rig.store.export(cancelled, NOW_MS, bulky=False)) == []


def open_segments(rig: Rig) -> int:
    """Files of the store's segments that this process has open, removed or not."""
    links = [each.resolve() for each in Path("/proc/self/fd").iterdir()]
    return sum(link.parent == rig.directory.resolve() and ".parquet" in link.name for link in links)


def test_files_are_closed_at_the_end_and_when_it_is_given_up(rig: Rig) -> None:
    """At any point."""
    given_up, read = (rig.store.export(LogQuery(), NOW_MS, bulky=True) for _ in range(2))
    assert open_segments(rig) == 4
    next(given_up)
    given_up.close()
    assert open_segments(rig) == 2
    list(read)
    assert open_segments(rig) == 0


def test_a_segment_that_goes_before_it_is_opened(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The export begins anew; one that is damaged, and still there, is an error."""
    real = timerstore.log.segment.open_file

    def gone(segment: timerstore.log.segment.Segment) -> pa.NativeFile:
        monkeypatch.setattr(timerstore.operations.export, "open_file", real)
        rig.finish(LATER_MS + 10)
        rig.store.maintenance.flush(LATER_MS + 10)
        rig.store.maintenance.reclaim(LATER_MS + 10)
        return real(segment)

    monkeypatch.setattr(timerstore.operations.export, "open_file", gone)
    segment = next(iter(rig.store.state.timerlog)).path
    assert places(rig.store.export(LogQuery(), NOW_MS, bulky=True)) == [] and not segment.exists()
    rig.produce(LATER_MS * 2)
    rig.ingest()
    rig.deliver(LATER_MS + 20)
    rig.store.maintenance.flush(LATER_MS + 20)
    next(iter(rig.store.state.timerlog)).path.unlink()
    with pytest.raises(Corrupt):
        rig.store.export(LogQuery(), NOW_MS, bulky=True)
