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
from tests.unit.timerstore.rig import BILLS, NOW_MS, ORDERS, Rig
from timerstore.disk import files
from timerstore.errors import Misuse
from timerstore.limits import Limits
from timerstore.log.segment import Reader
from timerstore.operations.find import ORIGINALS_MAX, Count, PendingState, Query

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


@pytest.mark.parametrize("limit", [1, 7, 100])
def test_originals_are_those_of_the_messages_that_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    """On disk and in memory, by partition, a page at a time, in the order of position; copies name their originals."""
    monkeypatch.setattr(timerstore.log.segment, "ROW_GROUP_ROWS", 8)
    rig = Rig(tmp_path / "store", sources=[ORDERS, BILLS], limits=Limits(horizon_ms=1_000))
    for turn in range(2):
        for source in (BILLS, ORDERS):
            rig.produce(*(LATER_MS + 7 * n % 16 for n in range(16)), source=source)
            rig.log[source].append(Record(*source, len(rig.log[source]), LATER_MS + 3, origin=5, rolls=1))
        rig.log[ORDERS].append(Record(*ORDERS, len(rig.log[ORDERS]), None, cancels=True, origin=2))
        rig.ingest()
        rig.deliver()
        if not turn:
            rig.store.maintenance.flush(NOW_MS)
    everything = rig.store.find(Query(), NOW_MS).rows
    assert len(everything) == 67 and len(rig.store.state.timerlog) == 1
    after, found = None, []
    while True:
        page = rig.store.find_originals(Query(), NOW_MS, after=after, limit=limit)
        found.append({name: (origin.tolist(), due.tolist()) for name, (origin, due) in page.found.items()})
        after = page.next
        if after is None:
            break
    for source in (ORDERS, BILLS):
        rows = [(row.origin, row.due_ms) for row in everything if (row.topic, row.partition) == source]
        told = [pair for page in found if source in page for pair in zip(*page[source], strict=True)]
        assert told == rows
    assert [sum(len(origin) for origin, _ in page.values()) for page in found[:-1]] == [limit] * (len(found) - 1)
    for wrong in (0, ORIGINALS_MAX + 1):
        with pytest.raises(Misuse, match="a page has 1 to"):
            rig.store.find_originals(Query(), NOW_MS, limit=wrong)


def test_messages_with_a_schedule_are_found(tmp_path: Path) -> None:
    """In memory and on disk, with what they say; a restart changes nothing."""
    rig = Rig(tmp_path / "store", sources=[ORDERS], limits=Limits(horizon_ms=1_000))
    rig.produce(*(LATER_MS + n for n in range(8)))
    rig.log[ORDERS].append(Record(*ORDERS, 8, LATER_MS + 5, origin=2, schedule='{"every":"1h"}', tick=3))
    rig.ingest()
    rig.deliver()

    def found() -> list[tuple[int, str | None, int]]:
        page = rig.store.find(Query(recurring=True), NOW_MS)
        return [(row.offset, row.schedule, row.tick) for row in page.rows]

    assert found() == [(8, '{"every":"1h"}', 3)]
    rig.store.maintenance.flush(NOW_MS)
    assert len(rig.store.state.timerlog) == 1 and found() == [(8, '{"every":"1h"}', 3)]
    rig.store.close()
    rig.store = rig.open()
    assert found() == [(8, '{"every":"1h"}', 3)]
    assert rig.store.count_where(Query(recurring=True), NOW_MS).rows == 1


@pytest.mark.fault("more targets than are counted by name, when one of them is asked for")
def test_the_messages_of_a_target_are_counted_beside_any_number_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A count by target is exact, although some of its messages are counted together with those of other targets."""
    monkeypatch.setattr("timerstore.memory.pending.TARGETS_MAX", 2)
    rig = Rig(tmp_path / "store", sources=[ORDERS])
    for names in ("ab", "cda"):
        first = len(rig.log[ORDERS])
        rig.log[ORDERS] += [Record(*ORDERS, first + n, LATER_MS, target=name) for n, name in enumerate(names)]
        rig.ingest()
    for name, count in (("a", 2), ("b", 1), ("d", 1), ("e", 0)):
        assert rig.store.count_where(Query(target=name), NOW_MS) == Count(rows=count, is_exact=True)


def test_waiting_messages_of_paused_targets_are_told_apart(tmp_path: Path) -> None:
    """In memory and in a segment, by name and as the default of their delay topic; others keep their states."""
    other = ("other", 0)
    rig = Rig(tmp_path / "store", sources=[ORDERS, other], limits=Limits(horizon_ms=1_000))
    for source in (ORDERS, other):
        due = {None: LATER_MS, "a": LATER_MS, "b": LATER_MS}
        rig.log[source] += [Record(*source, n, due[target], target=target) for n, target in enumerate(due)]
    rig.ingest()
    paused = Query(paused=frozenset("a"), paused_topics=frozenset(["delay"]))
    only = replace(paused, states=frozenset([PendingState.PAUSED]))

    def states(query: Query, now_ms: int = NOW_MS) -> list[tuple[str, int, str]]:
        rows = rig.store.find(query, now_ms, after=None).rows
        return sorted((row.topic, row.offset, row.state.value) for row in rows)

    for _ in ("memory", "segment"):
        assert states(only) == [("delay", 0, "paused"), ("delay", 1, "paused"), ("other", 1, "paused")]
        assert rig.store.count_where(only, NOW_MS).rows == 3
        others = [(topic, 2, "waiting") for topic in ("delay", "other")] + [("other", 0, "waiting")]
        assert states(paused) == sorted(states(only) + others)
        assert rig.store.count_where(paused, NOW_MS).rows == 6
        assert {state for *_, state in states(Query())} == {"waiting"}
        assert {state for *_, state in states(paused, LATER_MS)} == {"overdue"}
        rig.deliver()
        rig.store.maintenance.flush(NOW_MS)
    assert len(rig.store.state.timerlog) == 1


def test_what_was_put_off_is_found_by_its_due_time_and_by_when_it_was_written(tmp_path: Path) -> None:
    """In memory and in a segment, although it comes up long after that."""
    rig = Rig(tmp_path / "store", sources=[ORDERS], limits=Limits(horizon_ms=1_000))
    rig.log[ORDERS] += [
        Record(*ORDERS, 0, NOW_MS - 5, ts_ms=NOW_MS - 9, put_off_ms=LATER_MS),
        Record(*ORDERS, 1, NOW_MS - 5, ts_ms=NOW_MS - 2, put_off_ms=LATER_MS),
        Record(*ORDERS, 2, LATER_MS, ts_ms=NOW_MS - 9),
    ]
    rig.ingest()
    put_off = Query(target="orders", due_until_ms=NOW_MS, at_from_ms=NOW_MS + 1)
    for _ in ("memory", "segment"):
        assert [row.offset for row in rig.store.find(put_off, NOW_MS).rows] == [0, 1]
        assert [row.offset for row in rig.store.find(replace(put_off, ts_until_ms=NOW_MS - 2), NOW_MS).rows] == [0]
        rig.deliver()
        rig.store.maintenance.flush(NOW_MS)
    assert len(rig.store.state.timerlog) == 1


def test_only_what_was_written_again_is_rolled(tmp_path: Path) -> None:
    """A message that is due beyond the roll window waits, until the bridge has written it again for the first time."""
    rig = Rig(tmp_path / "store", sources=[ORDERS], limits=Limits(horizon_ms=1_000))
    for offset, rolls in enumerate((0, 2)):
        row = Record(*ORDERS, offset, LATER_MS, put_off_ms=NOW_MS + 60_000, origin=offset, rolls=rolls)
        rig.log[ORDERS].append(row)
    rig.ingest()
    assert [row.state.value for row in rig.store.find(Query(), NOW_MS).rows] == ["waiting", "rolled"]
