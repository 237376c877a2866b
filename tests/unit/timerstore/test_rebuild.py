"""timerstore.rebuild: an index that is extended by sorted rows, and the state of its directory after a crash."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.unit.timerstore.entries import Record, entries
from tests.unit.timerstore.rig import NOW_MS, ORDERS, Rig
from timerstore.disk import checkpoint
from timerstore.errors import DiskFailure, DiskFull, Misuse
from timerstore.limits import Limits
from timerstore.operations import recovery
from timerstore.operations.find import LogQuery
from timerstore.rebuild import Rebuild, remove_unfinished
from timerstore.rows.entry import UNCOPYABLE, Kind
from timerstore.rows.position import Position, Progress
from timerstore.store import TimerStore

LIMITS = Limits(tombstone_rows=8, segment_bytes_max=1)
HERE = [(offset, 2_000_000 + 10 * offset) for offset in range(60)]


def timer(offset: int, due_ms: int, **more: object) -> Record:
    return Record(*ORDERS, offset, due_ms, **more)  # type: ignore[arg-type]


def cancel(offset: int, id: str | None = None, origin: int | None = None) -> Record:
    return Record(*ORDERS, offset, None, id=id, cancels=True, origin=origin)


def a_log() -> list[Record]:
    """Sixty timers with ids, then cancels, replaces and moves of some."""
    log = [timer(offset, due_ms, id=f"id-{offset}") for offset, due_ms in HERE]
    log += [cancel(60 + i, id=f"id-{3 * i}") for i in range(15)]
    log += [timer(75, 5_000_000, id="id-50", replace=True), cancel(76, origin=52)]
    log += [timer(77, 6_000_000, rolls=UNCOPYABLE), timer(78, 6_000_001)]
    moved = {"command": Kind.MOVE, "moved_ms": 9_000_000}
    log += [Record(*ORDERS, 79 + i, None, origin=77 + i, **moved) for i in range(2)]  # type: ignore[arg-type]
    return log


def sent(made: Rebuild, rig: Rig, log: Sequence[Record]) -> list[Callable[[], None]]:
    """The calls with the rows of a log behind the index, as the job sends them."""
    behind = log[rig.store.resume_offset() or 0 : rig.committed.offset]
    is_first = [r for r in behind if r.kind not in (Kind.TIMER, Kind.REJECT) or r.replace or r.rolls == UNCOPYABLE]
    timers = sorted((r for r in behind if r.kind == Kind.TIMER), key=lambda record: (record.at_ms, record.offset))
    return [
        *(partial(made.commands, entries(is_first[i : i + 4])) for i in range(0, len(is_first), 4)),
        *(partial(made.timers, entries(timers[i : i + 7])) for i in range(0, len(timers), 7)),
    ]


def rebuilt(rig: Rig, log: Sequence[Record], failed: Sequence[int] = ()) -> Rebuild:
    """A rebuild that has taken in the rows of a log behind the index, after attempts that failed behind this number of
    calls."""
    made = Rebuild(rig.store, NOW_MS)
    calls = sent(made, rig, log)
    for count in failed:
        for call in calls[:count]:
            call()
        made.begin_again()
    for call in calls:
        call()
    made.write()
    return made


def pending(store: TimerStore) -> list[int]:
    batches = list(store.export(LogQuery(), NOW_MS, bulky=False))
    rows = [row for batch in batches for row in batch.to_pylist() if row["state"] != "cancelled"]
    assert store.stats().pending == len(rows)
    return sorted(int(row["offset"]) for row in rows)


@pytest.mark.parametrize("stored", [0, 40, 70])
def test_an_index_goes_on_where_it_ends(tmp_path: Path, stored: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows and cancels behind its end have the same effect as read one by one, on those in older segments, too;
    tombstones and rows take several files."""
    monkeypatch.setattr("timerstore.rebuild.ROW_GROUP_ROWS", 10)
    log = a_log()
    for name in ("read", "made"):
        (tmp_path / name).mkdir()
    read, made = Rig(tmp_path / "read", limits=LIMITS), Rig(tmp_path / "made", limits=LIMITS)
    for rig in (read, made):
        rig.log = log[:stored]
        if stored:
            rig.committed = Progress(stored)
            rig.reopen()
            rig.ingest()
            rig.store.maintenance.flush(NOW_MS)
        rig.log = log
        rig.committed = Progress(len(log), Position(2_000_025, 0))
        rig.reopen()
    read.ingest()
    read.store.maintenance.flush(NOW_MS)
    rebuilt(made, log).publish()
    for rig in (read, made):
        rig.reopen()
    assert pending(made.store) == pending(read.store)
    assert 77 in pending(made.store) and 78 not in pending(made.store), "too large for a copy; moved"
    assert made.store.resume_offset() == len(log) and made.store.state.checkpoint.progress == made.committed
    if not stored:
        assert made.store.stats().segments > 1 and len(made.store.state.cancels.tombstones.files) >= 1
    made.finish(10_000_000)
    delivered = [record.offset for record in made.delivered if record.kind == Kind.TIMER]
    read.finish(10_000_000)
    assert sorted(delivered) == sorted(record.offset for record in read.delivered if record.kind == Kind.TIMER)


@pytest.mark.fault("a failed task under a rebuild")
@pytest.mark.parametrize("stored", [0, 40, 70])
def test_rows_of_a_failed_attempt_do_not_count(tmp_path: Path, stored: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task that sends its rows once more, behind any part of them, makes the same index, and leaves no other file."""
    monkeypatch.setattr("timerstore.rebuild.ROW_GROUP_ROWS", 10)
    log = a_log()
    made: list[tuple[object, ...]] = []
    attempts: list[list[int]] = [[], [2], [5, 8], [99, 11], [99]]
    for failed in attempts:
        directory = tmp_path / ("-".join(map(str, failed)) or "none")
        directory.mkdir()
        rig = Rig(directory, limits=LIMITS)
        rig.log, rig.committed = log[:stored], Progress(stored)
        rig.reopen()
        if stored:
            rig.ingest()
            rig.store.maintenance.flush(NOW_MS)
        rig.log, rig.committed = log, Progress(len(log), Position(2_000_025, 0))
        rig.reopen()
        rebuild = rebuilt(rig, log, failed)
        rebuild.publish()
        files = {path.name for path in directory.glob("*.parquet")}
        assert files == {each.name for each in checkpoint_of(rig).segments}
        rig.reopen()
        lookup = rig.store.state.cancels.tombstones.lookup().merged()
        cancels = [tuple(each) for run in lookup for each in zip(run.keys.hi, run.keys.lo, run.offset, strict=True)]
        made.append((pending(rig.store), rebuild.rows, cancels))
    assert all(each == made[0] for each in made)


def checkpoint_of(rig: Rig) -> checkpoint.Checkpoint:
    found = recovery.find(rig.directory, rig.identity, NOW_MS).checkpoint
    assert found is not None
    return found


@pytest.mark.fault("a crash of a rebuild")
def test_a_crash_before_the_checkpoint_leaves_the_old_index(tmp_path: Path) -> None:
    """A rebuild that ends before its checkpoint leaves the old index; the next start removes its files, and reads the
    log."""
    rig, log = Rig(tmp_path), a_log()
    rig.log, rig.committed = log[:40], Progress(40)
    rig.reopen()
    rig.ingest()
    rig.store.maintenance.flush(NOW_MS)
    before = {path.name for path in tmp_path.iterdir()}
    rig.log, rig.committed = log, Progress(len(log))
    rig.reopen()
    rebuilt(rig, log)
    assert {path.name for path in tmp_path.iterdir()} > before
    rig.reopen()
    assert {path.name for path in tmp_path.iterdir()} == before and rig.store.resume_offset() == 40
    rig.ingest()
    assert len(pending(rig.store)) == 60 - 15 - 2 + 1 + 1


@pytest.mark.fault("kills of rebuilds without an index")
@pytest.mark.parametrize("stored", [0, 40])
def test_kills_do_not_fill_the_disk(tmp_path: Path, stored: int) -> None:
    """The next rebuild removes the files of a killed one, and no others; so does the next start, once it has caught
    up."""
    rig, log = Rig(tmp_path), a_log()
    rig.log, rig.committed = log[:stored], Progress(stored)
    rig.reopen()
    if stored:
        rig.ingest()
        rig.store.maintenance.flush(NOW_MS)
    rig.log, rig.committed = log, Progress(len(log))
    left = []
    for _ in range(3):
        remove_unfinished(recovery.find(tmp_path, rig.identity, NOW_MS))
        rig.reopen()
        rebuilt(rig, log)
        left.append(sorted(path.name for path in tmp_path.iterdir()))
    assert left[0] == left[2] and rig.store.resume_offset() == (stored or None)
    rig.reopen()
    rebuilt(rig, log).publish()
    rig.reopen()
    assert len(pending(rig.store)) == 60 - 15 - 2 + 1 + 1
    assert not [path for path in tmp_path.iterdir() if path.suffix in (".aside", ".tmp")]


@pytest.mark.fault("a full disk under a rebuild")
def test_a_rebuild_that_fails_removes_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rebuild without room for its checkpoint removes the segments that it has made, and the old index counts."""
    rig, log = Rig(tmp_path), a_log()
    rig.log, rig.committed = log, Progress(len(log))
    rig.reopen()
    made = rebuilt(rig, log)
    monkeypatch.setattr("timerstore.disk.checkpoint.write", _no_room)
    with pytest.raises(DiskFull):
        made.publish()
    made.abandon()
    assert not list(tmp_path.glob("*.parquet"))


@pytest.mark.fault("a disk that fails while a rebuild replaces the checkpoint")
def test_a_checkpoint_that_may_be_there_keeps_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an error of the disk, the checkpoint may be the new one: the files that it names stay."""
    rig, log = Rig(tmp_path), a_log()
    rig.log, rig.committed = log, Progress(len(log))
    rig.reopen()
    made = rebuilt(rig, log)
    write = checkpoint.write

    def fails_late(*args: object, **more: object) -> None:
        write(*args, **more)  # type: ignore[arg-type]
        raise DiskFailure("the directory cannot be synced", hint="", code="DB-3025")

    monkeypatch.setattr("timerstore.disk.checkpoint.write", fails_late)
    with pytest.raises(DiskFailure):
        made.publish()
    made.abandon()
    monkeypatch.undo()
    rig.reopen()
    assert rig.store.resume_offset() == len(log) and len(pending(rig.store)) == 60 - 15 - 2 + 1 + 1


def _no_room(*_: object, **__: object) -> None:
    raise DiskFull("no room", hint="", code="DB-3028")


def test_timers_out_of_order_are_refused(tmp_path: Path) -> None:
    """Rows that come twice in one attempt are not taken in."""
    rig = Rig(tmp_path)
    rig.committed = replace(rig.committed, offset=60)
    rig.reopen()
    made = Rebuild(rig.store, NOW_MS)
    made.timers(entries([timer(3, 500), timer(1, 700)]))
    with pytest.raises(Misuse):
        made.timers(entries([timer(3, 500), timer(1, 700)]))
    made.abandon()
