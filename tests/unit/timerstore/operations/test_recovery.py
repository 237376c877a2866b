"""timerstore.operations.recovery: a damaged directory loses, doubles and invents nothing."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import timerstore.log.segment
from tests.unit.timerstore.entries import Record
from tests.unit.timerstore.rig import NOW_MS, ORDERS, Rig
from timerstore.disk import checkpoint, files
from timerstore.disk.checkpoint import Identity
from timerstore.errors import Corrupt, DiskFailure, WrongIdentity
from timerstore.log.segment import read_rows
from timerstore.log.timerlog import TimerLog
from timerstore.operations import recovery
from timerstore.rows.position import ORIGIN, end_of

SOON_MS, FAR_MS = NOW_MS + 30_000, NOW_MS + 900_000


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    """Two segments with pending rows, and more that is not stored yet."""
    rig = Rig(tmp_path / "store")
    rig.load()
    rig.produce(NOW_MS - 5, SOON_MS, FAR_MS, FAR_MS + 1)
    for _ in range(2):
        rig.produce(FAR_MS + 7)
        rig.ingest()
        rig.deliver()
        rig.store.maintenance.flush(NOW_MS)
    rig.produce(FAR_MS + 9, SOON_MS)
    rig.ingest()
    assert len(rig.store.state.timerlog) == 2
    return rig


@pytest.fixture
def three(tmp_path: Path) -> Rig:
    """Three segments, each with two far messages."""
    rig = Rig(tmp_path / "store")
    rig.load()
    for i in range(3):
        rig.produce(FAR_MS + i, FAR_MS + i)
        rig.ingest()
        rig.deliver()
        rig.store.maintenance.flush(NOW_MS)
    return rig


class Death(BaseException):
    """Nothing catches it, as nothing catches a SIGKILL."""


def set_aside(rig: Rig) -> list[Path]:
    return sorted(rig.directory.glob("*.aside"))


def flip_a_page(rig: Rig, path: Path) -> None:
    """Damage a page such that only reading it tells."""
    content = path.read_bytes()
    for place in range(10, len(content) // 2, 9):
        path.write_bytes(content[:place] + bytes([content[place] ^ 0xFF]) + content[place + 1 :])
        named = next(s for s in rig.store.state.checkpoint.segments if s.name == path.name)
        opened = timerstore.log.segment.read(path, rig.identity, named)
        try:
            read_rows(opened, columns=["offset", "at", "target"])
        except Corrupt:
            return
    raise AssertionError("no page is read")


def finish(rig: Rig) -> None:
    """What remains is delivered, each record once, and the gauge says so."""
    rig.ingest()
    assert rig.store.stats().pending == len(rig.log) - len(rig.delivered)
    rig.finish(FAR_MS + 10)
    rig.assert_each_delivered_once()
    assert rig.store.stats().pending == 0


def segments(rig: Rig) -> list[Path]:
    return sorted(rig.directory.glob("*.parquet"))


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 0xFF
    path.write_bytes(content)


def test_a_sound_directory_is_opened_and_only_the_rest_is_read_again(rig: Rig) -> None:
    """O_c is where ingest goes on."""
    store = rig.reopen()
    assert store.reports == ()
    assert store.resume_offset() == 6
    assert rig.ingest() == 2
    finish(rig)


def test_a_lost_directory_is_rebuilt(rig: Rig) -> None:
    """The index is disposable (invariant I5): what is finished is dropped, what is pending is not."""
    rig.store.close()
    shutil.rmtree(rig.directory)
    assert rig.open().resume_offset() is None
    finish(rig)


@pytest.mark.parametrize(
    "damage",
    [
        lambda rig: flip(rig.directory / files.CHECKPOINT, 40),
        lambda rig: (rig.directory / files.CHECKPOINT).write_bytes(b""),
        lambda rig: flip(segments(rig)[0], -100),
        lambda rig: segments(rig)[1].write_bytes(segments(rig)[0].read_bytes()),
    ],
    ids=["checkpoint", "checkpoint empty", "footer", "another segment's content"],
)
def test_damage_found_at_the_start_means_a_rebuild(rig: Rig, damage: Callable[[Rig], object]) -> None:
    """It is reported; the damaged file is set aside to be looked at, and the next opening has nothing to
    report."""
    rig.store.close()
    damage(rig)
    store = rig.open()
    assert any("rebuilt from Kafka" in report for report in store.reports)
    assert store.resume_offset() is None
    assert list(rig.directory.glob("*.corrupt"))
    assert segments(rig) == []
    assert set_aside(rig), "until the rebuild has caught up, Kafka may lose what they hold"
    finish(rig)
    rig.store.maintenance.flush(NOW_MS)
    assert not set_aside(rig)
    assert rig.reopen().reports == ()


def test_a_segment_that_is_missing_is_rebuilt(rig: Rig) -> None:
    """It cannot come back."""
    rig.store.close()
    segments(rig)[0].unlink()
    store = rig.open()
    assert "missing" in store.reports[0] and "rebuilt from Kafka" in store.reports[0]
    finish(rig)


def test_a_missing_checkpoint_is_an_empty_index(rig: Rig) -> None:
    """Segments that no checkpoint names are put aside: their rows are read from Kafka."""
    rig.store.close()
    (rig.directory / files.CHECKPOINT).unlink()
    rig.open()
    assert segments(rig) == [] and len(set_aside(rig)) == 2
    finish(rig)


def test_a_damaged_page_that_counting_comes_across_means_a_rebuild(tmp_path: Path) -> None:
    """A segment that is partly finished is looked at on opening; a bad page there must not fail every start."""
    rig = Rig(tmp_path / "store")
    rig.produce(SOON_MS, SOON_MS + 1, FAR_MS)
    rig.ingest()
    rig.deliver()
    rig.store.maintenance.flush(NOW_MS)
    rig.load(SOON_MS)
    assert len(rig.deliver(SOON_MS)) == 1
    rig.store.close()
    path = segments(rig)[0]
    content = path.read_bytes()
    for place in range(10, len(content) // 2, 9):
        path.write_bytes(content[:place] + bytes([content[place] ^ 0xFF]) + content[place + 1 :])
        store = rig.open()
        reports = store.reports
        store.close()
        if reports:
            break
        path.write_bytes(content)
    assert "rebuilt from Kafka" in reports[0]
    rig.open()
    finish(rig)


def test_opening_reads_what_delivery_has_passed_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The counts are those of the pending rows, whose number does not make an opening longer."""
    monkeypatch.setattr(timerstore.log.segment, "ROW_GROUP_ROWS", 4)
    rig = Rig(tmp_path / "store")
    rig.produce(*range(SOON_MS, SOON_MS + 40))
    rig.ingest()
    rig.deliver()
    rig.store.maintenance.flush(NOW_MS)
    rig.load(SOON_MS)
    assert len(rig.deliver(SOON_MS + 5)) == 6
    read: list[int] = []
    real = timerstore.log.segment.SegmentReader.read

    def noted(reader: Any, group: int, columns: Sequence[str]) -> pa.Table:
        read.append(group)
        return real(reader, group, columns)

    monkeypatch.setattr(timerstore.log.segment.SegmentReader, "read", noted)
    pending = rig.reopen().state.pending
    assert read == [0, 1]
    assert (len(pending), sum(pending.by_target().values())) == (34, 34)
    assert pending.histogram.until(SOON_MS, FAR_MS) == (0, 34)
    finish(rig)


def test_a_damaged_page_that_a_window_comes_across_is_corrupt(rig: Rig) -> None:
    """The reader says which file; the maintenance thread has it set aside."""
    log: TimerLog = rig.store.state.timerlog
    window = log.window(end_of(NOW_MS), end_of(FAR_MS), 1 << 30)
    path = window.segments[0].path
    content = path.read_bytes()
    for place in range(10, len(content) // 2, 9):
        flip(path, place)
        try:
            read_rows(window.segments[0])
        except Corrupt as error:
            found = Path(error.path)
            break
        path.write_bytes(content)
    assert found == path


@pytest.mark.parametrize(
    "identity",
    [Identity(cluster_id="other", log_id="a/0"), Identity(cluster_id="cluster", log_id="b/0")],
    ids=["cluster", "topic made anew"],
)
def test_a_directory_of_another_cluster_or_log_is_refused(rig: Rig, identity: Identity) -> None:
    """Its rows are not ours; the remedy is named, and nothing is changed."""
    rig.store.close()
    before = sorted(path.name for path in rig.directory.iterdir())
    ours, rig.identity = rig.identity, identity
    with pytest.raises(WrongIdentity) as caught:
        rig.open()
    assert "store.directory" in caught.value.hint
    assert sorted(path.name for path in rig.directory.iterdir()) == before
    rig.identity = ours
    rig.open()
    finish(rig)


def test_a_committed_offset_that_was_moved_back_rebuilds_the_index(rig: Rig) -> None:
    """Rows below O_c that the index left out as finished are pending again."""
    rig.committed = replace(rig.committed, offset=5)
    assert rig.reopen().reports == (recovery.MOVED_BACK,)
    assert rig.store.resume_offset() is None
    assert rig.reopen().resume_offset() is None, "it is not forgotten"


@pytest.mark.parametrize("cleared", [True, False], ids=["cleared", "moved back"])
def test_a_committed_position_that_was_moved_back_rebuilds_the_index(rig: Rig, cleared: bool) -> None:
    """Resetting a group's offsets clears its metadata: what lay below P is not in the segments, and pending again."""
    position = ORIGIN if cleared else rig.committed.position.before()
    rig.committed = replace(rig.committed, position=position)
    assert rig.reopen().reports == (recovery.MOVED_BACK,)
    rig.ingest()
    rig.load()
    assert rig.deliver()[0].offset == 0, "what was finished is delivered again, as the operator asked"


def test_an_offset_below_the_start_of_the_log_covers_nothing(rig: Rig) -> None:
    """The log was with another instance until after its records here were deleted: what that one has delivered is
    finished, what only this index has is delivered, and the log is read from where it begins."""
    rig.store.close()
    rig.log_start = 7
    rig.produce(FAR_MS + 3, FAR_MS + 4)
    rig.committed = replace(rig.committed, offset=10)
    for told in (True, False):
        assert rig.open().resume_offset() is None
        assert (recovery.OUTDATED in rig.store.reports) == told
    rig.ingest()
    rig.store.maintenance.flush(NOW_MS)
    assert rig.reopen().resume_offset() == 10
    rig.finish(FAR_MS + 10)
    assert sorted(r.offset for r in rig.delivered) == [0, 1, 2, 3, 4, 5, 7, 8, 9], "6 is gone"
    assert rig.store.stats().pending == 0


READS = {
    "checkpoint": (Path, "read_text"),
    "segment": (Path, "open"),
    "segment's footer": (pq, "read_metadata"),
    "pages": (pq, "ParquetFile"),
    "columns": (mmap, "mmap"),
}


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.EMFILE])
@pytest.mark.parametrize("read", list(READS))
def test_an_errno_is_not_damage(rig: Rig, monkeypatch: pytest.MonkeyPatch, read: str, number: int) -> None:
    """A volume that cannot be read now may be read later: the start fails, every file stays, and nothing is lost."""
    error = OSError(number, os.strerror(number))
    caught = opening_fails_and_leaves_all(rig, monkeypatch, read, error, DiskFailure)
    assert "volume" in str(getattr(caught, "hint", ""))


@pytest.mark.parametrize("error", [MemoryError(), pa.ArrowMemoryError("malloc of size 64 failed")], ids=repr)
@pytest.mark.parametrize("read", list(READS))
def test_too_little_memory_is_not_damage(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, read: str, error: Exception
) -> None:
    """It says nothing of the file either, though pyarrow counts its own among the errors of what it reads."""
    opening_fails_and_leaves_all(rig, monkeypatch, read, error, MemoryError)


def opening_fails_and_leaves_all(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, read: str, error: Exception, expected: type[Exception]
) -> Exception:
    rig.log.append(Record(*ORDERS, len(rig.log), FAR_MS + 10, id="a"))
    rig.log.append(Record(*ORDERS, len(rig.log), None, id="b", cancels=True))
    rig.ingest()
    rig.load(SOON_MS)
    rig.deliver(SOON_MS)
    rig.store.maintenance.flush(NOW_MS)
    rig.store.close()
    before = {path.name: path.read_bytes() for path in rig.directory.iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(*READS[read], mock.Mock(side_effect=error))
        with pytest.raises(expected) as caught:
            rig.open()
    assert {path.name: path.read_bytes() for path in rig.directory.iterdir()} == before
    assert rig.open().reports == ()
    finish(rig)
    return caught.value


def test_one_damaged_segment_costs_no_other(three: Rig) -> None:
    """All records are gone from Kafka, so that the index is all there is: what the two sound segments hold is used, now
    and after a restart, and what the third held is not made up."""
    rig = three
    rig.log_start = 6
    rig.store.close()
    sound = [segments(rig)[0], segments(rig)[2]]
    flip(segments(rig)[1], -100)
    for _ in range(2):
        assert rig.open().resume_offset() is None, "whether to go on is for others to decide"
        assert segments(rig) == sound
        assert rig.store.stats().pending == 4
        rig.store.close()
    rig.open()
    rig.ingest()
    rig.store.maintenance.flush(NOW_MS)
    assert rig.reopen().resume_offset() == 6
    rig.finish(FAR_MS + 10)
    assert sorted(r.offset for r in rig.delivered) == [0, 1, 4, 5]


@pytest.mark.parametrize("page", [False, True], ids=["footer", "page"])
def test_what_kafka_has_is_read_again_and_what_it_has_not_is_kept(three: Rig, page: bool) -> None:
    """Some of the records are gone: each message comes once, from Kafka or from what is left."""
    rig = three
    rig.load(FAR_MS)
    assert len(rig.deliver(FAR_MS)) == 2, "so that opening has to count"
    rig.log_start = 3
    rig.store.close()
    if page:
        flip_a_page(rig, segments(rig)[0])
    else:
        flip(segments(rig)[0], -100)
    store = rig.open()
    assert store.resume_offset() is None
    assert store.stats().pending == 1, "of the second segment, the first; of the third, nothing"
    assert [each.rows for each in store.state.timerlog] == [1]
    assert len(set_aside(rig)) == 2, "the old ones, until ingest has caught up"
    rig.store.maintenance.flush(NOW_MS)
    assert len(set_aside(rig)) == 2
    rig.ingest()
    rig.store.maintenance.flush(NOW_MS)
    assert set_aside(rig) == []
    rig.finish(FAR_MS + 10)
    rig.assert_each_delivered_once()
    assert rig.store.stats().pending == 0


STEPS = {
    "1: the damaged file is renamed": (checkpoint, "write", 0),
    "2: the checkpoint does without it": (files, "writing", 1),
    "3: half a segment anew": (timerstore.log.segment.SegmentWriter, "_footer", 0),
    "3: a segment anew": (checkpoint, "write", 1),
    "4: the checkpoint names it": (recovery, "_clear", 0),
    "5: one of the old ones is aside": (files, "set_aside", 2),
}


@pytest.mark.parametrize("step", list(STEPS))
def test_death_after_any_step_of_a_recovery(three: Rig, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """The next opening ends where this one would have; no sound file is removed on the way."""
    rig = three
    rig.log_start = 3
    rig.store.close()
    flip(segments(rig)[0], -100)
    owner, name, after = STEPS[step]
    function, calls = getattr(owner, name), []

    def die(*arguments: Any, **named: Any) -> Any:
        calls.append(name)
        if len(calls) > after:
            raise Death
        return function(*arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, die)
        with pytest.raises(Death):
            rig.open()
    store = rig.open()
    assert store.resume_offset() is None
    assert [each.rows for each in store.state.timerlog] == [1] and store.stats().pending == 1
    assert len(set_aside(rig)) >= 2
    rig.ingest()
    rig.store.maintenance.flush(NOW_MS)
    assert set_aside(rig) == []
    rig.finish(FAR_MS + 10)
    assert sorted(r.offset for r in rig.delivered) == [2, 3, 4, 5]


def test_a_disk_that_fills_up_takes_what_is_aside(three: Rig) -> None:
    """Kafka has all of it: a rebuild that waited for room held by its own precaution would never end."""
    three.store.close()
    (three.directory / files.CHECKPOINT).unlink()
    three.open()
    assert len(set_aside(three)) == three.store.maintenance.drop_aside() == 3
    assert set_aside(three) == [] and three.store.maintenance.drop_aside() == 0
    finish(three)


def test_progress_is_told_segment_by_segment(rig: Rig) -> None:
    """Opening many takes a while."""
    rig.store.close()
    told: list[tuple[int, int]] = []
    store = type(rig.store).open(
        recovery.find(rig.directory, rig.identity, NOW_MS), rig.committed, now_ms=NOW_MS,
        progress=lambda done, total: told.append((done, total)),
    )  # fmt: skip
    store.close()
    assert told == [(1, 2), (2, 2), (2, 2), (2, 2)], "once more for each when its rows are counted"


def test_progress_goes_on_while_segments_are_written_anew(three: Rig) -> None:
    """That takes longer than to open them: where nothing is told meanwhile, a start of many gigabytes is taken for a
    thread that hangs."""
    rig = three
    rig.log_start = 3
    rig.store.close()
    (rig.directory / segments(rig)[2]).unlink()
    told: list[tuple[int, int]] = []
    with mock.patch.object(timerstore.log.segment.SegmentWriter, "close", side_effect=lambda: told.append((0, 0))):
        store = type(rig.store).open(
            recovery.find(rig.directory, rig.identity, NOW_MS), rig.committed, now_ms=NOW_MS,
            log_start=rig.log_start, progress=lambda done, total: told.append((done, total)),
        )  # fmt: skip
    store.close()
    missing, opened = told[:2], told[2:]
    assert missing == [(1, 3), (2, 3)]
    assert opened == [(1, 2), (2, 2), (0, 0), (2, 2), (1, 1)], "one is sound as it is, and is counted"
