"""Segments are merged and rewritten: few files, no dead weight, nothing lost."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import timerstore.log.segment
from tests.unit.timerstore.entries import Record, gather
from tests.unit.timerstore.rig import NOW_MS, ORDERS, Rig
from timerstore.disk import checkpoint, files
from timerstore.errors import DiskFull
from timerstore.limits import Limits
from timerstore.log.segment import read_counts, read_rows
from timerstore.operations.compaction import choose, passed_rows
from timerstore.rows.position import Position, end_of

HOUR_MS = 3_600_000
FEW = Limits(compaction_segments=4, window_bytes=20_000, horizon_ms=1_000)


class Death(Exception):
    """The process dies here."""


def die(*_: Any, **__: Any) -> None:
    raise Death


@pytest.fixture(autouse=True)
def small_row_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few thousand rows are many of them."""
    monkeypatch.setattr(timerstore.log.segment, "ROW_GROUP_ROWS", 64)


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path / "store", limits=FEW)


def flush(rig: Rig, *due_ms: int) -> None:
    """A segment with these times, twice."""
    for _ in range(2):
        rig.produce(*due_ms)
    rig.ingest()
    rig.deliver()
    rig.store.maintenance.flush(NOW_MS)


def compact(rig: Rig, now_ms: int = NOW_MS, meanwhile: Callable[[], object] = lambda: None) -> int:
    """Everything that is worth while; returns how many windows were read."""
    windows = 0
    for _ in range(1_000):
        before = len(rig.store.state.timerlog)
        window = rig.store.maintenance.compaction_window(now_ms)
        if window is not None:
            rig.store.maintenance.compact(window, gather(window))
            windows += 1
            meanwhile()
        elif len(rig.store.state.timerlog) >= before:
            return windows
    raise AssertionError("no end of it")


def assert_files_are_those_named(rig: Rig) -> None:
    assert {p.name for p in rig.directory.glob("*.parquet")} == {s.named.name for s in rig.store.state.timerlog}
    assert not list(rig.directory.glob("*" + files.TEMPORARY_SUFFIX))


def test_a_month_of_flushes_leaves_few_segments(tmp_path: Path) -> None:
    """Far timers, a flush a minute: the number of files follows the logarithm of what they hold, and no row is
    rewritten more often than there are tiers."""
    rig = Rig(tmp_path, limits=Limits(compaction_segments=4, horizon_ms=1_000))
    largest, rewritten = 0, 0
    for minute in range(64):
        rig.produce(*range(NOW_MS + HOUR_MS * 24 + minute, NOW_MS + HOUR_MS * 24 + minute + 50))
        rig.ingest()
        rig.deliver()
        rig.store.maintenance.flush(NOW_MS)
        before = {s.named.name: s.rows for s in rig.store.state.timerlog}
        compact(rig)
        rewritten += sum(s.rows for s in rig.store.state.timerlog if s.named.name not in before)
        largest = max(largest, len(rig.store.state.timerlog))
    assert largest <= 4
    assert sum(s.rows for s in rig.store.state.timerlog) == 64 * 50
    rig.finish(NOW_MS + HOUR_MS * 25)
    rig.assert_each_delivered_once()


def test_a_merge_keeps_what_is_pending_and_drops_what_is_finished(rig: Rig) -> None:
    """In the order of position, in as many windows as it takes, and the same gauges before, after and on reopening."""
    for i in range(4):
        flush(rig, NOW_MS + 500 + i, *range(NOW_MS + 10_000 + i, NOW_MS + 30_000, 100))
    rig.finish(NOW_MS + 600)
    pending, rows = rig.store.stats().pending, sum(s.rows for s in rig.store.state.timerlog)
    assert compact(rig, NOW_MS + 600) > 3
    [merged] = rig.store.state.timerlog
    assert merged.rows == pending < rows
    table = read_rows(merged, columns=["at", "offset"])
    positions = list(zip(*(table.column(name).to_pylist() for name in table.column_names), strict=True))
    assert positions == sorted(positions)
    assert_files_are_those_named(rig)
    for _ in range(2):
        assert rig.store.stats().pending == pending == sum(rig.store.stats().pending_by_target.values())
        rig.reopen()
    assert rig.store.reports == ()
    rig.ingest()
    rig.finish(NOW_MS + 40_000)
    rig.assert_each_delivered_once()


def test_the_footer_of_a_merged_segment_is_that_of_one_written_at_once(rig: Rig, tmp_path: Path) -> None:
    """Extents, histogram, targets and fences, however many windows it was written in."""
    other = Rig(tmp_path / "other")
    times = [[*range(NOW_MS + 10_000 + i, NOW_MS + 60_000, 333)] for i in range(4)]
    for each in times:
        flush(rig, *each)
        for _ in range(2):
            other.produce(*each)
    other.ingest()
    other.deliver()
    other.store.maintenance.flush(NOW_MS)
    compact(rig)
    [merged], [written] = rig.store.state.timerlog, other.store.state.timerlog
    assert merged.rows == written.rows and (merged.begin, merged.end) == (written.begin, written.end)
    assert (merged.first, merged.last) == (written.first, written.last)
    (ours,), (theirs,) = read_counts(merged), read_counts(written)
    assert ours.slots.tolist() == theirs.slots.tolist()
    assert ours.counts.tolist() == theirs.counts.tolist()
    assert ours.targets == theirs.targets
    assert int(merged.group_rows.sum()) == merged.rows and len(merged.fences.at) > len(written.fences.at) > 1


def test_flushes_windows_and_deliveries_come_in_between(rig: Rig) -> None:
    """A compaction holds nothing up: what happens between two of its windows is neither lost nor doubled."""
    for i in range(4):
        flush(rig, *range(NOW_MS + 2_000 + i, NOW_MS + 30_000, 100))
    now_ms = NOW_MS

    def meanwhile() -> None:
        nonlocal now_ms
        now_ms += 1_500
        rig.produce(now_ms + 700, now_ms + 20_000)
        rig.ingest()
        rig.finish(now_ms)
        rig.store.maintenance.flush(now_ms)
        rig.store.maintenance.reclaim(now_ms)

    assert compact(rig, meanwhile=meanwhile) > 3
    assert_files_are_those_named(rig)
    rig.reopen()
    rig.ingest()
    rig.finish(NOW_MS + 200_000)
    rig.assert_each_delivered_once()


def test_a_segment_that_is_half_dead_is_rewritten(rig: Rig) -> None:
    """Disk use follows what is pending; where all of it is due within the hour, waiting is cheaper."""
    due = [*range(NOW_MS + 1_000, NOW_MS + 3_000)]
    flush(rig, *due, NOW_MS + 2 * HOUR_MS)
    flush(rig, *due, NOW_MS + HOUR_MS // 2)
    [far, near] = rig.store.state.timerlog
    rig.finish(NOW_MS + 3_000)
    compact(rig, NOW_MS + 3_000)
    live = [s for s in rig.store.state.timerlog if s is not near]
    assert near in list(rig.store.state.timerlog) and [s.rows for s in live] == [2]
    assert live[0].named.bytes < far.named.bytes // 10
    rig.finish(NOW_MS + 3 * HOUR_MS)
    rig.assert_each_delivered_once()


def test_a_segment_that_is_half_cancelled_is_rewritten(tmp_path: Path) -> None:
    """Without what a tombstone on disk covers; the gauges stay, and what is left is delivered, also after a restart."""
    rig = Rig(tmp_path, limits=FEW)
    log, due_ms = rig.log, NOW_MS + 2 * HOUR_MS
    for i in range(200):
        log.append(Record(*ORDERS, i, due_ms + i, id=f"id-{i}"))
    rig.ingest()
    rig.deliver()
    rig.store.maintenance.flush(NOW_MS)
    for i in range(150):
        log.append(Record(*ORDERS, len(log), None, id=f"id-{i}", cancels=True))
    rig.ingest()
    rig.deliver()
    assert rig.store.stats().pending == 50
    rig.store.maintenance.flush(NOW_MS)
    assert compact(rig) > 0
    assert [each.rows for each in rig.store.state.timerlog] == [50]
    rig.reopen()
    assert rig.store.stats().pending == 50
    rig.ingest()
    rig.finish(due_ms + 1_000)
    assert [r.id for r in rig.delivered if not r.cancels] == [f"id-{i}" for i in range(150, 200)]


def test_what_is_left_of_nothing_is_no_segment(rig: Rig) -> None:
    """Where everything is finished by the time it is read, the old files go and no new one comes."""
    for i in range(4):
        flush(rig, NOW_MS + 2_000 + i)
    window = rig.store.maintenance.compaction_window(NOW_MS)
    assert window is not None
    rig.finish(NOW_MS + 3_000)
    assert rig.store.maintenance.reclaim(NOW_MS) == 0, "they are being read"
    rig.store.maintenance.compact(window, gather(window))
    assert rig.store.maintenance.compaction_window(NOW_MS) is None
    assert len(rig.store.state.timerlog) == 0
    assert_files_are_those_named(rig)


STEPS = {
    "half a segment": (timerstore.log.segment.SegmentWriter, "_footer"),
    "a segment without its name": (os, "replace"),
    "a segment without a checkpoint": (checkpoint, "write"),
    "both, and the old ones": (timerstore.log.segment, "remove"),
}


@pytest.mark.parametrize("step", list(STEPS))
def test_death_after_any_step(rig: Rig, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """The next opening finds the old segments or the new one, and removes the others."""
    for i in range(4):
        flush(rig, NOW_MS + 5_000 + i)
    rows = 8
    with monkeypatch.context() as patch:
        patch.setattr(*STEPS[step], die)
        with pytest.raises(Death):
            compact(rig)
    rig.reopen()
    assert len(rig.store.state.timerlog) == (1 if "old ones" in step else 4)
    assert sum(s.rows for s in rig.store.state.timerlog) == rows
    assert_files_are_those_named(rig)
    rig.ingest()
    rig.finish(NOW_MS + 6_000)
    rig.assert_each_delivered_once()


@pytest.mark.parametrize("part", ["rows", "footer", "checkpoint"])
def test_a_full_disk_gives_the_compaction_up(rig: Rig, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """The old segments stay, the half file goes, and it is done when there is room."""
    for i in range(4):
        flush(rig, NOW_MS + 5_000 + i)

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    where = {
        "rows": (timerstore.log.segment.SegmentWriter, "_note"),
        "footer": (timerstore.log.segment.SegmentWriter, "_footer"),
        "checkpoint": (checkpoint, "_write_text"),
    }
    with monkeypatch.context() as patch:
        patch.setattr(*where[part], fail)
        for _ in range(2):
            with pytest.raises(DiskFull):
                compact(rig)
            assert len(rig.store.state.timerlog) == 4
            assert_files_are_those_named(rig)
    compact(rig)
    assert len(rig.store.state.timerlog) == 1
    rig.finish(NOW_MS + 6_000)
    rig.assert_each_delivered_once()


def test_tiers_and_bounds_of_a_merge(rig: Rig) -> None:
    """As many as the limit says and not more bytes than a segment may have; the dead count for nothing."""
    for i in range(6):
        flush(rig, *range(NOW_MS + 5_000 + i, NOW_MS + 6_000, 10))
    segments = list(rig.store.state.timerlog)

    def chosen(dead: int = 0, **more: int) -> int:
        return len(choose(segments, Limits(**{"compaction_segments": 4, **more}), NOW_MS, lambda _: dead))

    assert chosen() == 4
    assert chosen(compaction_segments=7) == 0
    size = max(each.named.bytes for each in segments)
    assert chosen(segment_bytes_max=3 * size) == 3
    assert chosen(segment_bytes_max=size) == 0
    assert chosen(segment_bytes_max=size, dead=segments[0].rows // 2 + 1) >= 2


def test_passed_rows_are_those_of_passed_row_groups(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the fences of the footer: never more than there are, and all of them in the end."""
    monkeypatch.setattr(timerstore.log.segment, "ROW_GROUP_ROWS", 4)
    flush(rig, *range(NOW_MS + 5_000, NOW_MS + 5_009))
    [each] = rig.store.state.timerlog
    counts = [passed_rows(each, end_of(NOW_MS + 4_999 + i)) for i in range(11)]
    assert counts == sorted(counts)
    assert counts[0] == 0 and counts[-1] == each.rows == 18
    assert all(0 <= 2 * i - count < 8 for i, count in enumerate(counts[:-1]))
    assert passed_rows(each, Position(NOW_MS + 5_008, 0)) < each.rows
