"""Death after each numbered step of flush and reclaim, and disks that fill up: reopening loses and doubles nothing."""

from __future__ import annotations

import errno
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import timerstore.log.segment
from tests.unit.timerstore.entries import Record
from tests.unit.timerstore.rig import NOW_MS, ORDERS, Rig, take
from timerstore.disk import checkpoint, column_file, files
from timerstore.errors import DiskFailure, DiskFull
from timerstore.limits import Limits
from timerstore.memory.resident import Resident

SOON_MS, FAR_MS = NOW_MS + 20_000, NOW_MS + 900_000


class Death(BaseException):
    """Nothing catches it, as nothing catches a SIGKILL."""


def die(*_: Any, **__: Any) -> Any:
    raise Death


def filled(directory: Path, limits: Limits | None = None) -> Rig:
    """A segment with pending rows, and unstored rows: ready, in the memtable and overtaken."""
    rig = Rig(directory, limits=limits)
    rig.store.wheel.next_window(NOW_MS)
    rig.produce(NOW_MS, SOON_MS, FAR_MS)
    rig.ingest()
    rig.deliver()
    rig.store.maintenance.flush(NOW_MS)
    rig.produce(SOON_MS + 1, FAR_MS + 1)
    rig.ingest()
    rig.deliver()
    rig.produce(NOW_MS - 1, SOON_MS + 2, FAR_MS + 2)
    rig.ingest()
    return rig


def finish(rig: Rig) -> None:
    rig.ingest()
    rig.finish(FAR_MS + 2)
    rig.assert_each_delivered_once()
    assert rig.store.stats().pending == 0
    rig.store.maintenance.flush(FAR_MS)
    rig.store.maintenance.reclaim(FAR_MS)
    assert rig.store.stats().segments == 0
    assert [path.name for path in rig.directory.glob("*.parquet")] == []


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return filled(tmp_path / "store")


STEPS = {
    "1: nothing is written": (timerstore.log.segment, "write"),
    "2: half a segment": (timerstore.log.segment.SegmentWriter, "_footer"),
    "2: a segment without its name": (os, "replace"),
    "2: a segment, its directory not synced": (timerstore.log.segment, "read"),
    "2: a segment without a checkpoint": (checkpoint, "write"),
    "3: half a checkpoint": (checkpoint, "_write_text"),
    "3: a checkpoint, memory not told": (Resident, "mark_stored"),
}


@pytest.mark.parametrize("transaction_open", [False, True], ids=["", "rows handed out"])
@pytest.mark.parametrize("step", list(STEPS))
def test_death_after_any_step_of_a_flush(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, step: str, transaction_open: bool
) -> None:
    """The rows come from the segment or from Kafka, never from both and never from neither."""
    if transaction_open:
        assert len(take(rig.store.begin(), SOON_MS + 2, 99)) == 4
    with monkeypatch.context() as patch:
        patch.setattr(*STEPS[step], die)
        with pytest.raises(Death):
            rig.store.maintenance.flush(NOW_MS)
    store = rig.reopen()
    assert store.resume_offset() == (5 if step[0] == "3" and "half" not in step else 3)
    assert not list(rig.directory.glob("*" + files.TEMPORARY_SUFFIX))
    assert len(list(rig.directory.glob("*.parquet"))) == len(store.state.timerlog)
    finish(rig)


@pytest.mark.parametrize("step", ["checkpoint", "unlink"])
def test_death_during_a_reclaim(rig: Rig, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """A segment that the checkpoint names is there; one that it does not name is removed by the next opening."""
    rig.store.maintenance.flush(NOW_MS)
    rig.finish(FAR_MS + 2)
    with monkeypatch.context() as patch:
        if step == "checkpoint":
            patch.setattr(checkpoint, "write", die)
        else:
            patch.setattr(Path, "unlink", die)
        with pytest.raises(Death):
            rig.store.maintenance.reclaim(NOW_MS)
    store = rig.reopen()
    assert len(store.state.timerlog) == (2 if step == "checkpoint" else 0)
    finish(rig)


@pytest.mark.fault("a kill while indexes are made again after an upgrade")
def test_death_while_the_indexes_beside_segments_are_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the death at each change of a file another start goes on; cancels by id and origin miss no message."""
    rig = Rig(tmp_path / "store")
    for first in (0, 3):
        rig.log += [Record(*ORDERS, first + at, FAR_MS, id=f"{first + at}") for at in range(3)]
        rig.ingest()
        rig.deliver()
        rig.store.maintenance.flush(NOW_MS)
    indexes = [path for suffix in files.INDEX_SUFFIXES for path in sorted(rig.directory.glob(f"*{suffix}"))]
    for path in indexes:  # those of an earlier version
        path.write_bytes(b"sorted otherwise")
    assert len(indexes) == 4
    deaths = 0
    while True:
        left = deaths

        def until_then(change: Any) -> Any:
            def changed(*args: Any) -> Any:
                nonlocal left
                left -= 1
                return die() if left < 0 else change(*args)

            return changed

        with monkeypatch.context() as patch:
            for module, name in ((files, "remove"), (files, "publish"), (column_file, "_put")):
                patch.setattr(module, name, until_then(getattr(module, name)))
            try:
                rig.reopen()
            except Death:
                deaths += 1
                files.temporary_of(indexes[deaths % 4]).write_bytes(b"half")  # a process that is killed removes nothing
                continue
        break
    assert deaths > 10 and not list(rig.directory.glob(f"*{files.TEMPORARY_SUFFIX}"))
    rig.log += [Record(*ORDERS, 6, None, cancels=True, id="1"), Record(*ORDERS, 7, None, cancels=True, origin=4)]
    rig.ingest()
    assert rig.store.stats().pending == 4
    rig.finish(FAR_MS)
    assert {record.offset for record in rig.delivered if record.due_ms} >= {0, 2, 3, 5}


def test_death_between_the_commit_and_its_acknowledgement(rig: Rig) -> None:
    """Kafka knows; the store learns it at the next opening."""
    transaction = rig.store.begin()
    rows = take(transaction, SOON_MS + 2, 99)
    taken = [rig.log[offset] for offset in rows.offset.tolist()]
    rig.committed = transaction.progress()
    rig.delivered += taken
    rig.reopen()
    finish(rig)


@pytest.mark.parametrize("part", ["segment", "checkpoint"])
def test_a_full_disk_during_a_flush_changes_nothing(rig: Rig, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """Delivery goes on, the flush is tried again, and the failed one leaves no file behind."""
    module: Any = timerstore.log.segment.SegmentWriter if part == "segment" else checkpoint
    writer = "_footer" if part == "segment" else "_write_text"
    names = sorted(path.name for path in rig.directory.iterdir())
    stats = rig.store.stats()

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(module, writer, fail)
        for _ in range(2):
            with pytest.raises(DiskFull):
                rig.store.maintenance.flush(NOW_MS)
            assert sorted(path.name for path in rig.directory.iterdir()) == names
            assert rig.store.stats() == stats
        assert len(rig.deliver(SOON_MS, limit=2)) == 2
    rig.store.maintenance.flush(NOW_MS)
    rig.reopen()
    finish(rig)


def test_a_failed_fsync_ends_the_process_and_loses_nothing(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not tried again, and the next start finds the state before."""

    def fail(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(DiskFailure) as caught:
            rig.store.maintenance.flush(NOW_MS)
    assert not isinstance(caught.value, DiskFull)
    rig.reopen()
    finish(rig)


@pytest.fixture
def tiny_disk() -> Iterator[Path]:
    """A file system of 256 KiB."""
    with tempfile.TemporaryDirectory(prefix="tiny-disk-") as name:
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", name], capture_output=True)
        if mounted.returncode:
            pytest.skip("mounting a tmpfs is not permitted here")
        try:
            yield Path(name)
        finally:
            subprocess.run(["umount", "--lazy", name], check=True, capture_output=True)


def test_a_disk_that_is_really_full_is_waited_out(tiny_disk: Path) -> None:
    """What the Parquet writer says then is understood, and its half file is removed: with room again, all goes on."""
    rig = filled(tiny_disk / "store")
    rig.produce(*[FAR_MS] * 3_000)
    rig.ingest()
    rig.deliver()
    ballast = tiny_disk / "ballast"
    with pytest.raises(OSError, match="No space left"):
        ballast.write_bytes(b"\0" * (1 << 20))
    for _ in range(2):
        with pytest.raises(DiskFull):
            rig.store.maintenance.flush(NOW_MS)
    assert not list(rig.directory.glob("*" + files.TEMPORARY_SUFFIX))
    ballast.unlink()
    assert rig.store.maintenance.flush(NOW_MS).rows > 3_000
    rig.reopen()
    finish(rig)
    rig.store.close()
