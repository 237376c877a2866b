"""The index of ids: bounded in memory, derived from segments on disk, exact in what it finds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import timerstore.cancels.id_index
import timerstore.disk.column_file
import timerstore.log.segment
from tests.unit.timerstore.entries import Record
from tests.unit.timerstore.rig import NOW_MS, ORDERS, Rig
from timerstore.operations.find import LogQuery

FAR_MS = NOW_MS + 900_000


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    rig = Rig(tmp_path / "store")
    rig.load()
    return rig


def send(rig: Rig, due_ms: int | None, id: str | None, target: str | None = "x") -> None:
    rig.log.append(replace(Record(*ORDERS, len(rig.log), due_ms, target), id=id, cancels=due_ms is None))


def test_what_is_delivered_leaves_memory_without_a_flush(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flood of short delays is finished before anything is flushed: finished timers are dropped as more come."""
    monkeypatch.setattr(timerstore.cancels.id_index, "UNSTORED_SLACK", 8)
    send(rig, FAR_MS, "stays")
    most = 0
    for i in range(50):
        for j in range(3):
            send(rig, NOW_MS, f"{i}-{j}", target=f"target {i}")
        rig.ingest()
        rig.deliver()
        most = max(most, len(rig.store.state.cancels.unstored))
    assert most <= 2 * 4 + 8 + 3
    send(rig, None, "stays")
    rig.ingest()
    assert rig.store.stats().pending == 0


def test_a_flush_moves_timers_to_the_index_of_a_segment(rig: Rig) -> None:
    """What a segment holds is not in memory any more; what is not flushed stays there."""
    for i in range(10):
        send(rig, FAR_MS + i, f"{i}")
    rig.ingest()
    rig.deliver()
    send(rig, FAR_MS, "unflushed")
    rig.ingest()
    rig.store.maintenance.flush(NOW_MS)
    (segment,) = rig.store.state.timerlog
    assert segment.ids is not None
    assert (len(segment.ids), len(rig.store.state.cancels.unstored)) == (10, 1)


def test_an_id_of_many_timers_is_counted_out_whole(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """In several segments and in memory, by each of their targets and their times, a few rows at a time."""
    monkeypatch.setattr(timerstore.cancels.id_index, "FOUND_ROWS_MAX", 2)
    targets = ["a", "b", None]
    for round in range(3):
        for i in range(7):
            send(rig, FAR_MS + 10_000 * i, "one", target=targets[(round + i) % 3])
            send(rig, FAR_MS, "two", target="c")
            send(rig, FAR_MS, None, target="c")
        rig.ingest()
        if round < 2:
            rig.deliver()
            rig.store.maintenance.flush(NOW_MS)
    assert rig.store.stats().pending_by_target == {"a": 7, "b": 7, "": 7, "c": 42}
    send(rig, None, "one")
    rig.ingest()
    edges = [FAR_MS + 10_000 * i for i in range(1, 9)]
    stats = rig.store.stats(edges)
    assert stats.pending_by_target == {"c": 42}
    assert stats.pending_until == (42,) * 8
    assert stats.cancelled == 21


@pytest.mark.fault("memory for the indexes of a large segment")
def test_the_indexes_of_a_segment_are_made_in_the_memory_of_a_run(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The indexes of ids and origins are sorted run by run, so that a merge of any size takes the memory of one run.
    Each message is found by its id and by its origin, once, and its cancel counts it out."""
    monkeypatch.setattr(timerstore.log.segment, "ROW_GROUP_ROWS", 4)
    monkeypatch.setattr(timerstore.disk.column_file, "RUN_ROWS", 10)
    for i in range(30):
        send(rig, FAR_MS + i % 7, f"{i % 15}")
        send(rig, FAR_MS + i % 7, None)
    rig.ingest()
    rig.deliver()
    rig.store.maintenance.flush(NOW_MS)
    (segment,) = rig.store.state.timerlog
    assert segment.ids is not None
    for index, rows in ((segment.ids, 30), (segment.origins, 60)):
        runs = index._runs
        assert all(0 < run.stop - run.start <= 10 for run in runs)
        assert [run.start for run in runs] == [0, *(run.stop for run in runs[:-1])] and runs[-1].stop == rows
    by_position = sorted(rig.log, key=lambda record: (record.at_ms, record.offset))
    for wanted in ([0, 59], [7, 8, 7, 60, -1], list(range(50)), list(range(-100, 100))):
        found_rows = [row for row, record in enumerate(by_position) if record.offset in wanted]
        assert segment.origins.rows_of(np.array(wanted)).tolist() == found_rows
    for record in rig.log:
        (found,) = rig.store.find(LogQuery(origin_offset=record.offset), NOW_MS).rows
        assert found.offset == record.offset
    for i in range(15):
        assert {row.offset for row in rig.store.find(LogQuery(id=f"{i}"), NOW_MS).rows} == {2 * i, 2 * i + 30}
    for i in range(14):
        send(rig, None, f"{i}")
    rig.ingest()
    assert rig.store.stats().pending == 32
    rig.reopen()
    rig.ingest()
    assert rig.store.stats().pending == 32


@pytest.mark.parametrize("many", ["cancels", "timers"])
def test_a_start_counts_segments_without_what_is_cancelled(rig: Rig, many: str) -> None:
    """Whichever of the two there are more of; cancels in several files; and not what is finished already."""
    send(rig, NOW_MS + 1, "done")
    for i in range(4 if many == "cancels" else 40):
        send(rig, FAR_MS, f"{i}", target="a" if i % 2 else "b")
    rig.ingest()
    rig.deliver()
    rig.store.maintenance.flush(NOW_MS)
    for i in range(20 if many == "cancels" else 2):
        send(rig, None, f"{i}")
        send(rig, None, f"{i}")
    send(rig, None, "done")
    rig.ingest()
    rig.deliver()
    rig.store.maintenance.flush(NOW_MS)
    send(rig, None, "1")
    rig.ingest()
    rig.deliver(NOW_MS + 1)
    rig.store.maintenance.flush(NOW_MS + 1)
    before = rig.store.stats()
    rig.reopen()
    after = rig.store.stats()
    left = {} if many == "cancels" else {"a": 19, "b": 19}
    assert (before.pending_by_target, after.pending_by_target) == (left, left)
    assert (before.pending, after.pending) == (sum(left.values()),) * 2


def test_a_start_counts_a_timer_out_once_however_often_it_is_cancelled(rig: Rig) -> None:
    """By its id, several times, and by its origin: a timer without an id by its origin only."""
    for i in range(6):
        send(rig, FAR_MS, f"{i}" if i % 2 else None)
    rig.ingest()
    rig.deliver()
    rig.store.maintenance.flush(NOW_MS)
    for i in range(4):
        rig.log.append(Record(*ORDERS, len(rig.log), None, cancels=True, origin=i))
        send(rig, None, f"{i}")
        rig.ingest()
        rig.deliver()
        rig.store.maintenance.flush(NOW_MS)
    send(rig, None, "1")
    rig.ingest()
    assert rig.store.stats().pending == 2
    rig.reopen()
    rig.ingest()
    assert rig.store.stats().pending == 2


def test_an_index_in_runs_is_none_of_an_earlier_version(rig: Rig) -> None:
    """An earlier version takes its file for one sorted run, by `segment_crc` in the note, and would miss timers."""
    send(rig, FAR_MS, "one")
    rig.ingest()
    rig.deliver()
    rig.store.maintenance.flush(NOW_MS)
    indexes = [path for path in rig.directory.iterdir() if path.suffix in (".ids", ".origins")]
    assert len(indexes) == 2
    for path in indexes:
        assert "segment_crc" not in timerstore.disk.column_file.read(path).note
