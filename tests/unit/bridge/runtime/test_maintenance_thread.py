"""bridge.maintenance on a real store: what a full disk stops, and what it must not."""

from __future__ import annotations

import errno
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from structlog.testing import capture_logs

import timerstore.log.segment
from bridge.errors import BridgeError, EnvironmentFailure
from bridge.runtime.maintenance_thread import COMPACT_INTERVAL_S, FLUSH_AGAIN_S, RECLAIM_INTERVAL_S, MaintenanceThread
from bridge.stores.damage import Damage
from bridge.stores.directory import KEPT_MS
from bridge.telemetry.heartbeats import DISK_BYTES_PER_S, SPARK_S
from bridge.telemetry.metrics import Metrics
from dev.harness.waiting import wait_until
from tests.manual_clock import ManualClock
from tests.unit.bridge.stores.rig import BILLS, NOW_MS, ORDERS, Rig
from tests.unit.timerstore.entries import gather
from timerstore.disk import checkpoint
from timerstore.errors import Corrupt, DiskFull
from timerstore.limits import Limits
from timerstore.log import segment
from timerstore.operations import compaction
from timerstore.operations.maintenance import Flushed, Maintenance

DISK_BYTES = 1 << 20
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
NEAR_MS, FAR_MS = NOW_MS + 1_000_000, NOW_MS + 36_000_000


class Bench:
    """The steps of maintenance, one by one, on a clock that stands still."""

    def __init__(self, directory: Path, limits: Limits | None = None) -> None:
        self.rig = Rig(directory, limits=limits or Limits(compaction_segments=2))
        self.clock = ManualClock(now_ms=NOW_MS)
        self.corrupt: list[str] = []
        self.fatal: list[BridgeError] = []
        self.beats = 0
        self.budgets: list[float | None] = []
        self.rig.stores.damage = Damage(lambda: self.corrupt.append("corrupt"))
        self.maintenance = MaintenanceThread(
            store=self.rig.stores,
            clock=self.clock,
            metrics=Metrics(),
            on_fatal=self.fatal.append,
            beat=self.beat,
        )

    def beat(self, within_s: float | None = None) -> None:
        self.beats += 1
        self.budgets.append(within_s)

    def steps(self, seconds: float) -> None:
        """What maintenance does within a while, waits skipped."""
        end_s = self.clock.monotonic_s() + seconds
        while self.clock.monotonic_s() < end_s:
            self.clock.advance(int(1_000 * max(self.maintenance._step(), 0.001)))

    def take_in(self, *due_ms: int) -> None:
        """These messages are read, and O moves over them."""
        self.rig.produce(ORDERS, *due_ms)
        self.rig.ingest()
        self.rig.deliver(self.clock.now_ms())

    def flush(self, *due_ms: int) -> None:
        """A segment of these."""
        self.take_in(*due_ms)
        before = self.segments
        self.steps(self.rig.limits.flush_interval_ms / 1_000 + 2)
        assert self.segments == before + 1

    def is_full(self) -> bool:
        return self.maintenance.disk_is_full

    @property
    def segments(self) -> int:
        return len(list(self.rig.directory.glob("*/*/segment-*.parquet")))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "store")


def no_room(*_: Any, **__: Any) -> None:
    raise FULL


def test_stores_whose_flushes_are_due_together_are_flushed_one_by_one(bench: Bench) -> None:
    """Other work, and delivery, have their turn in between; and no store waits for one that is due again at once."""
    bench.steps(1)
    for name in bench.rig.logs:
        bench.rig.produce(name, FAR_MS, NEAR_MS)
    bench.rig.ingest()
    bench.rig.deliver()
    bench.clock.advance(bench.rig.limits.flush_interval_ms)
    for flushed in range(1, len(bench.rig.logs) + 1):
        assert bench.rig.stores.upkeep.flush_due(bench.clock.now_ms())
        bench.maintenance._step()
        assert bench.segments == flushed
    assert not bench.rig.stores.upkeep.flush_due(bench.clock.now_ms())
    with (
        mock.patch.object(Maintenance, "flush_due", return_value=True),
        mock.patch.object(Maintenance, "flush", autospec=True, return_value=Flushed(rows=0, bytes=0)) as flush,
    ):
        for _ in range(2 * len(bench.rig.logs)):
            bench.maintenance._step()
    flushed_in_turn = [call.args[0] for call in flush.call_args_list]
    assert flushed_in_turn == 2 * [each.maintenance for each in bench.rig.stores.by_name.values()]


def test_flushes_without_an_end_leave_merges_their_turns(bench: Bench) -> None:
    """With many partitions, or a short interval, a flush is due at each step: segments would pile up."""
    bench.flush(FAR_MS)
    bench.take_in(FAR_MS + 1)
    with mock.patch.object(Maintenance, "flush_due", return_value=True):
        bench.steps(2 * COMPACT_INTERVAL_S)
    assert bench.segments == 1


def test_what_is_asked_for_is_done_between_two_pieces_of_work(bench: Bench) -> None:
    """A flush that was asked for is awaited, concerns the named partitions alone, and finds a full disk to be no
    failure."""
    bench.take_in(FAR_MS)
    assert not bench.maintenance.pass_step(0)
    bench.maintenance.start()
    assert bench.maintenance.pass_step(10) and bench.maintenance.flush_now(10, [BILLS]) and bench.segments == 0
    with mock.patch.object(timerstore.log.segment.SegmentWriter, "_note", no_room):
        assert bench.maintenance.flush_now(10)
        assert bench.is_full() and bench.segments == 0
    assert bench.maintenance.flush_now(10)
    assert bench.segments == 1
    assert bench.maintenance.stop() and not bench.maintenance.flush_now(0.01)


def test_what_is_delivered_is_reclaimed_while_no_segment_fits(bench: Bench) -> None:
    """A segment needs room that a checkpoint does not: the flush that fails keeps nothing from making room for it, and
    then goes on by itself."""
    bench.flush(*range(NEAR_MS, NEAR_MS + 100))
    bench.take_in(FAR_MS)
    with mock.patch.object(timerstore.log.segment.SegmentWriter, "_note", no_room):
        bench.steps(70)
        assert bench.is_full()
        bench.clock.advance(NEAR_MS + 100 - bench.clock.now_ms())
        bench.steps(RECLAIM_INTERVAL_S)
        assert len(bench.rig.deliver(bench.clock.now_ms())) == 100, "windows are loaded meanwhile"
        bench.steps(2 * RECLAIM_INTERVAL_S)
        assert bench.segments == 0
        assert bench.is_full()
    bench.steps(2 * FLUSH_AGAIN_S)
    assert bench.segments == 1 and not bench.is_full()


def test_a_disk_stays_full_while_another_store_needs_no_room(bench: Bench) -> None:
    """Its flush writes a checkpoint alone, and says nothing about room for the one that waits."""
    full, flush = bench.rig.stores.by_name[ORDERS].maintenance, Maintenance.flush
    bench.steps(1)
    for name in (ORDERS, BILLS):
        bench.rig.produce(name, NEAR_MS)
    bench.rig.ingest()
    bench.rig.deliver()

    def flush_or_fail(maintenance: Maintenance, now_ms: int) -> Flushed:
        if maintenance is full:
            raise DiskFull("no room")
        return flush(maintenance, now_ms)

    bench.clock.advance(bench.rig.limits.flush_interval_ms)
    with mock.patch.object(Maintenance, "flush", flush_or_fail), capture_logs() as entries:
        bench.steps(3 * FLUSH_AGAIN_S)
        assert bench.is_full()
    assert [entry["event"] for entry in entries] == ["disk-full"]
    bench.steps(2 * FLUSH_AGAIN_S)
    assert bench.segments == 2 and not bench.is_full()


def test_a_checkpoint_that_frees_room_has_its_room_kept(bench: Bench) -> None:
    """Where not a byte is left, what was reserved is given up, and kept again with the room that was made."""
    bench.flush(*range(NEAR_MS, NEAR_MS + 100))
    bench.clock.advance(NEAR_MS + 100 - bench.clock.now_ms())
    bench.steps(1)
    bench.rig.deliver(bench.clock.now_ms())
    reserve = bench.rig.stores.directory.of(ORDERS) / "reserve"
    assert reserve.exists()
    write = checkpoint._write_text

    def write_if_room(path: Path, text: str) -> None:
        if reserve.exists():
            raise FULL
        write(path, text)

    with mock.patch.object(checkpoint, "_write_text", write_if_room):
        bench.steps(2 * RECLAIM_INTERVAL_S)
    assert bench.segments == 0
    assert reserve.exists()


def test_a_compaction_gives_its_room_back_to_a_flush(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has written is worth less than what is only in memory."""
    monkeypatch.setattr(timerstore.log.segment, "ROW_GROUP_ROWS", 16)
    monkeypatch.setattr("bridge.runtime.maintenance_thread.MaintenanceThread._compact", lambda _: None)
    for _ in range(2):
        bench.flush(*range(FAR_MS, FAR_MS + 200))
    monkeypatch.undo()
    loading = bench.rig.stores.next_compaction(bench.clock.now_ms())
    assert loading is not None
    bench.rig.stores.compact(loading, gather(loading.window))
    assert list(bench.rig.directory.glob("*/*/*.tmp"))
    bench.take_in(FAR_MS)
    with mock.patch.object(timerstore.log.segment.SegmentWriter, "_note", no_room):
        while not bench.is_full():
            bench.clock.advance(60_000)
            bench.maintenance._flush_due()
    assert not list(bench.rig.directory.glob("*/*/*.tmp"))
    bench.steps(70 + COMPACT_INTERVAL_S)
    assert bench.rig.stores.stats().pending == 401 and bench.segments <= 2


def test_a_beat_comes_with_every_piece_of_work(bench: Bench) -> None:
    """Also when there is nothing to do: a thread that stands still is told from one that is idle."""
    for _ in range(3):
        before = bench.beats
        bench.maintenance._step()
        assert bench.beats > before


def test_an_errno_is_an_environment_failure_and_leaves_every_file(bench: Bench) -> None:
    """A volume that answers with EIO says nothing about what is on it: the process ends, the index stays."""
    bench.flush(NEAR_MS)
    bench.clock.advance(NEAR_MS - bench.clock.now_ms())
    before = sorted(bench.rig.directory.rglob("*"))
    with mock.patch("timerstore.log.segment.pq.ParquetFile", side_effect=OSError(errno.EIO, "Input/output error")):
        bench.maintenance.start()
        wait_until(lambda: not bench.maintenance.is_alive, 30, "maintenance ends")
    assert [type(error) for error in bench.fatal] == [EnvironmentFailure]
    assert bench.corrupt == []
    assert sorted(bench.rig.directory.rglob("*")) == before


def test_damage_is_reported_once_and_maintenance_goes_on(bench: Bench) -> None:
    """Its partition is closed soon; the thread ends only if the file cannot be set aside, on a volume that has become
    read-only."""
    bench.flush(NEAR_MS)
    bench.clock.advance(NEAR_MS - bench.clock.now_ms())
    [damaged] = bench.rig.directory.glob("*/*/segment-*.parquet")
    damage = Corrupt("it fails its checksum", path=str(damaged))
    with mock.patch("bridge.stores.upkeep.read_window", side_effect=damage):
        with mock.patch("os.replace", side_effect=OSError(errno.EROFS, os.strerror(errno.EROFS))):
            bench.maintenance._run()
        assert [error.code for error in bench.fatal] == ["DB-3025"] and bench.corrupt == []
        bench.maintenance.start()
        seen = bench.beats
        wait_until(lambda: bench.beats > seen + 2, 30, "maintenance goes on")
        assert bench.maintenance.stop(30)
    assert len(bench.fatal) == 1 and bench.corrupt == ["corrupt"] and not damaged.exists()
    assert bench.rig.stores.damage.names == {ORDERS}


@pytest.fixture
def small_disk() -> Iterator[tuple[Path, Callable[[], None]]]:
    """A file system of its own where one may be mounted; and what fills it, all but some bytes."""
    with tempfile.TemporaryDirectory(prefix="small-disk-") as name:
        command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", name]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("mounting a tmpfs is not permitted here")
        try:
            yield Path(name), lambda: fill(Path(name) / "ballast")
        finally:
            subprocess.run(["umount", "--lazy", name], check=True, capture_output=True)


def fill(path: Path) -> None:
    with pytest.raises(OSError, match="No space left"):
        path.write_bytes(b"\0" * DISK_BYTES * 2)


def test_a_disk_that_is_really_full_delivers_reclaims_and_goes_on(
    small_disk: tuple[Path, Callable[[], None]],
) -> None:
    """Not a byte is left and nobody frees any: what is delivered makes the room that the next flush needs."""
    directory, fill_up = small_disk
    bench = Bench(directory / "store", Limits(compaction_segments=100))
    for part in range(4):
        bench.flush(*range(NEAR_MS + 1_000_000 * part, NEAR_MS + 1_000_000 * part + 1_500))
    fill_up()
    bench.take_in(*range(FAR_MS, FAR_MS + 1_000))
    bench.steps(70)
    assert bench.is_full()
    for part in range(4):
        bench.clock.advance(max(0, NEAR_MS + 1_000_000 * part + 1_500 - bench.clock.now_ms()))
        bench.steps(1)
        assert len(bench.rig.deliver(bench.clock.now_ms(), [2_000])) == 1_500
    bench.steps(2 * FLUSH_AGAIN_S)
    assert not bench.is_full()
    assert [segment.rows for view in bench.rig.stores.views() for segment in view.segments] == [1_000]
    bench.rig.reopen()
    assert bench.rig.stores.reports == () and bench.rig.stores.resume_offsets()[ORDERS] == 7_000
    bench.rig.stores.close()


def test_the_end_of_a_compaction_has_the_time_that_a_slow_disk_needs(tmp_path: Path) -> None:
    """The file that is made durable then, and read for its index, may be as large as segments get."""
    bench = Bench(tmp_path)
    bench.flush(FAR_MS)
    closed: list[float | None] = []
    close = compaction.Compaction.close

    def seen(under_way: compaction.Compaction) -> segment.Segment | None:
        closed.append(bench.budgets[-1])
        return close(under_way)

    with mock.patch.object(compaction.Compaction, "close", seen):
        bench.take_in(FAR_MS + 1)
        bench.steps(bench.rig.limits.flush_interval_ms / 1_000 + 2 * COMPACT_INTERVAL_S)
    assert bench.segments == 1
    assert closed == [SPARK_S + bench.rig.limits.segment_bytes_max / DISK_BYTES_PER_S]


@pytest.mark.fault("a link in place of the directory of another instance's partition")
def test_an_index_that_cannot_be_removed_ends_nothing(tmp_path: Path) -> None:
    """An index that nobody needs and that cannot be removed, since its directory is a link or of another user, is
    reported once; delivery and flushes go on."""
    bench = Bench(tmp_path / "store")
    (tmp_path / "elsewhere").mkdir()
    bench.rig.stores.close_partitions([BILLS])
    place = bench.rig.stores.directory.of(BILLS)
    place.rmdir()
    place.symlink_to(tmp_path / "elsewhere")
    bench.steps(1)
    with capture_logs() as entries:
        for _ in range(2):
            bench.clock.advance(KEPT_MS)
            bench.steps(1)
    assert [entry["event"] for entry in entries].count("indexes-not-removed") == 1
    assert place.is_symlink()
