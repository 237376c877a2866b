"""What a search reads, and that it comes to an end. (What it finds: tests/model/test_store_machine.py.)"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

import timerstore.log.segment
import timerstore.operations.find
from tests.unit.timerstore.entries import Record
from tests.unit.timerstore.rig import NOW_MS, ORDERS, Rig
from timerstore.disk import files
from timerstore.errors import Misuse
from timerstore.limits import Limits
from timerstore.log.segment import SegmentReader
from timerstore.operations.find import ORIGINALS_MAX, Count, LogQuery, PendingState
from timerstore.rows.position import ORIGIN

LATER_MS = NOW_MS + 3_600_000


def test_a_search_that_is_cut_short_in_front_of_a_first_offset_goes_on_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timerstore.operations.find, "SCANNED_ROWS_MAX", 6)
    rig = Rig(tmp_path / "store", limits=Limits(horizon_ms=1_000))
    # The row group of the first segment lies around the only row of the second one, and is looked at each time.
    for due_ms in ([LATER_MS + 10 * n for n in range(10)], [LATER_MS + 50]):
        rig.produce(*due_ms)
        rig.ingest()
        rig.deliver()
        rig.store.maintenance.flush(NOW_MS)
    assert len(rig.store.state.timerlog) == 2
    found, after = [], ORIGIN
    for _ in range(10):
        page = rig.store.find(LogQuery(), NOW_MS, after=after)
        found += [(row.due_ms - LATER_MS, row.offset) for row in page.rows]
        if page.next is None:
            break
        after = page.next
    assert page.next is None
    assert found == [(10 * n, n) for n in range(6)] + [(50, 10)] + [(10 * n, n) for n in range(6, 10)]


@pytest.mark.parametrize("damage", ["none", "bit", "gone"])
def test_an_origin_is_found_in_the_row_groups_that_hold_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    """The original and its copies, and nothing else is read; a damaged index is made again from its segment."""
    monkeypatch.setattr(timerstore.log.segment, "ROW_GROUP_ROWS", 8)
    rig = Rig(tmp_path / "store", limits=Limits(horizon_ms=1_000))
    rig.produce(*(LATER_MS + 5 * n % 64 for n in range(63)))
    rig.log.append(Record(*ORDERS, 63, LATER_MS + 5, origin=20, rolls=1))
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
    real = SegmentReader.read

    def counted(reader: SegmentReader, group: int, columns: Sequence[str]) -> pa.Table:
        read.append(group)
        return real(reader, group, columns)

    monkeypatch.setattr(SegmentReader, "read", counted)
    found = store.find(LogQuery(origin_offset=20), NOW_MS).rows
    assert [(row.offset, row.rolls) for row in found] == [(63, 1), (20, 0)]
    assert len(set(read)) == 2
    assert store.find(LogQuery(origin_offset=64), NOW_MS).rows == ()


@pytest.mark.parametrize("limit", [1, 7, 100])
def test_originals_are_those_of_the_messages_that_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    """On disk and in memory, a page at a time, in the order of position; copies name their originals."""
    monkeypatch.setattr(timerstore.log.segment, "ROW_GROUP_ROWS", 8)
    rig = Rig(tmp_path / "store", limits=Limits(horizon_ms=1_000))
    for turn in range(2):
        rig.produce(*(LATER_MS + 7 * n % 16 for n in range(16)))
        rig.log.append(Record(*ORDERS, len(rig.log), LATER_MS + 3, origin=5, rolls=1))
        rig.log.append(Record(*ORDERS, len(rig.log), None, cancels=True, origin=2))
        rig.ingest()
        rig.deliver()
        if not turn:
            rig.store.maintenance.flush(NOW_MS)
    everything = rig.store.find(LogQuery(), NOW_MS).rows
    assert len(everything) == 33 and len(rig.store.state.timerlog) == 1
    after, found = ORIGIN, []
    while True:
        page = rig.store.find_originals(LogQuery(), NOW_MS, after=after, limit=limit)
        found.append(list(zip(page.offset.tolist(), page.origin.tolist(), page.due.tolist(), strict=True)))
        if page.next is None:
            break
        after = page.next
    assert [each for page in found for each in page] == [(row.offset, row.origin, row.due_ms) for row in everything]
    assert [len(page) for page in found[:-1]] == [limit] * (len(found) - 1)
    for wrong in (0, ORIGINALS_MAX + 1):
        with pytest.raises(Misuse, match="a page has 1 to"):
            rig.store.find_originals(LogQuery(), NOW_MS, limit=wrong)


def test_messages_with_a_schedule_are_found(tmp_path: Path) -> None:
    """In memory and on disk, with what they say; a restart changes nothing."""
    rig = Rig(tmp_path / "store", limits=Limits(horizon_ms=1_000))
    rig.produce(*(LATER_MS + n for n in range(8)))
    rig.log.append(Record(*ORDERS, 8, LATER_MS + 5, origin=2, schedule='{"every":"1h"}', tick=3))
    rig.ingest()
    rig.deliver()

    def found() -> list[tuple[int, str | None, int]]:
        page = rig.store.find(LogQuery(recurring=True), NOW_MS)
        return [(row.offset, row.schedule, row.tick) for row in page.rows]

    assert found() == [(8, '{"every":"1h"}', 3)]
    rig.store.maintenance.flush(NOW_MS)
    assert len(rig.store.state.timerlog) == 1 and found() == [(8, '{"every":"1h"}', 3)]
    rig.store.close()
    rig.store = rig.open()
    assert found() == [(8, '{"every":"1h"}', 3)]
    assert rig.store.count_where(LogQuery(recurring=True), NOW_MS).rows == 1


@pytest.mark.fault("more targets than are counted by name, when one of them is asked for")
def test_the_messages_of_a_target_are_counted_beside_any_number_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A count by target is exact, although some of its messages are counted together with those of other targets."""
    monkeypatch.setattr("timerstore.memory.pending.TARGETS_MAX", 2)
    rig = Rig(tmp_path / "store")
    for names in ("ab", "cda"):
        first = len(rig.log)
        rig.log += [Record(*ORDERS, first + n, LATER_MS, target=name) for n, name in enumerate(names)]
        rig.ingest()
    for name, count in (("a", 2), ("b", 1), ("d", 1), ("e", 0)):
        assert rig.store.count_where(LogQuery(target=name), NOW_MS) == Count(rows=count, is_exact=True)


def test_waiting_messages_of_paused_targets_are_told_apart(tmp_path: Path) -> None:
    """In memory and in a segment, by name and as the default target; others keep their states."""
    rig = Rig(tmp_path / "store", limits=Limits(horizon_ms=1_000))
    rig.log += [Record(*ORDERS, n, LATER_MS, target=target) for n, target in enumerate((None, "a", "b"))]
    rig.ingest()
    paused = LogQuery(paused=frozenset("a"), is_default_paused=True)
    only = replace(paused, states=frozenset([PendingState.PAUSED]))

    def states(query: LogQuery, now_ms: int = NOW_MS) -> list[tuple[int, str]]:
        return sorted((row.offset, row.state.value) for row in rig.store.find(query, now_ms).rows)

    for _ in ("memory", "segment"):
        assert states(only) == [(0, "paused"), (1, "paused")]
        assert rig.store.count_where(only, NOW_MS).rows == 2
        assert states(paused) == [*states(only), (2, "waiting")]
        assert states(replace(paused, is_default_paused=False))[0] == (0, "waiting")
        assert rig.store.count_where(paused, NOW_MS).rows == 3
        assert {state for _, state in states(LogQuery())} == {"waiting"}
        assert {state for _, state in states(paused, LATER_MS)} == {"overdue"}
        rig.deliver()
        rig.store.maintenance.flush(NOW_MS)
    assert len(rig.store.state.timerlog) == 1


def test_what_was_put_off_is_found_by_its_due_time_and_by_when_it_was_written(tmp_path: Path) -> None:
    """In memory and in a segment, although it comes up long after that."""
    rig = Rig(tmp_path / "store", limits=Limits(horizon_ms=1_000))
    rig.log += [
        Record(*ORDERS, 0, NOW_MS - 5, ts_ms=NOW_MS - 9, put_off_ms=LATER_MS),
        Record(*ORDERS, 1, NOW_MS - 5, ts_ms=NOW_MS - 2, put_off_ms=LATER_MS),
        Record(*ORDERS, 2, LATER_MS, ts_ms=NOW_MS - 9),
    ]
    rig.ingest()
    put_off = LogQuery(target="orders", due_until_ms=NOW_MS, at_from_ms=NOW_MS + 1)
    for _ in ("memory", "segment"):
        assert [row.offset for row in rig.store.find(put_off, NOW_MS).rows] == [0, 1]
        assert [row.offset for row in rig.store.find(replace(put_off, ts_until_ms=NOW_MS - 2), NOW_MS).rows] == [0]
        rig.deliver()
        rig.store.maintenance.flush(NOW_MS)
    assert len(rig.store.state.timerlog) == 1


def test_only_what_was_written_again_is_rolled(tmp_path: Path) -> None:
    """A message that is due beyond the roll window waits, until the bridge has written it again for the first time."""
    rig = Rig(tmp_path / "store", limits=Limits(horizon_ms=1_000))
    for offset, rolls in enumerate((0, 2)):
        row = Record(*ORDERS, offset, LATER_MS, put_off_ms=NOW_MS + 60_000, origin=offset, rolls=rolls)
        rig.log.append(row)
    rig.ingest()
    assert [row.state.value for row in rig.store.find(LogQuery(), NOW_MS).rows] == ["waiting", "rolled"]
