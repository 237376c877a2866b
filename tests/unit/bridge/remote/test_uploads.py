"""bridge.remote.uploads: which failures concern which partitions."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import zlib
from pathlib import Path
from typing import IO, Any
from unittest import mock

import pytest
from structlog.testing import capture_logs

from bridge.remote.objects import Objects, RemoteUnavailable
from bridge.stores.names import SourceName
from bridge.wire.committed_state import Manifest
from tests.unit.bridge.remote.rig import FaultyObjects, Instance
from tests.unit.bridge.stores.rig import BILLS, NOW_MS, ORDERS, Rig


def test_a_first_upload_goes_on_after_errors(
    tmp_path: Path, objects: FaultyObjects, kafka: dict[SourceName, Manifest]
) -> None:
    """Each file is uploaded once, without a manifest before, too."""
    made = Instance(tmp_path / "made", objects, kafka)
    for number in range(4):
        made.work(NOW_MS + 9_000 + number)
    failures = 0

    def fault(what: str, key: str) -> None:
        nonlocal failures
        if what == "before put_file" and "segment-0000000004" in key and failures < 3:
            failures += 1
            raise RemoteUnavailable("one request fails")

    objects.fault = fault
    for _ in range(6):
        made.clock.advance(300_000)
        made.upload()
    assert failures == 3 and ORDERS in kafka and objects.count("put_file") == 4


class Unreadable:
    """An open file on a bad sector."""

    name = "segment"

    def read(self, _: int) -> bytes:
        raise OSError(5, "Input/output error")


@pytest.mark.parametrize("is_disk", [True, False], ids=["its file cannot be read", "its objects are refused"])
def test_a_partition_that_fails_stops_no_other(
    tmp_path: Path, objects: FaultyObjects, kafka: dict[SourceName, Manifest], is_disk: bool
) -> None:
    """Neither the ones before it nor those behind it."""
    made = Instance(tmp_path / "made", objects, kafka)
    made.rig.stores.close()
    made.rig = rig = Rig(tmp_path / "both", [ORDERS, BILLS])
    for name in (ORDERS, BILLS):
        rig.produce(name, NOW_MS + 9_000)
    rig.ingest()
    rig.stores.arrive()
    rig.stores.go_live([ORDERS, BILLS])
    rig.finish(NOW_MS)
    rig.stores.flush(NOW_MS)
    bad, good = sorted(rig.stores.by_name)
    directory, real = str(rig.stores.by_name[bad].state.directory), Objects.put_file

    def put_file(self: Objects, key: str, file: IO[bytes], step: Any) -> None:
        if directory in str(file.name) and not is_disk:
            raise RemoteUnavailable("this key is refused")
        real(self, key, Unreadable() if directory in str(file.name) else file, step)  # type: ignore[arg-type]

    with mock.patch.object(Objects, "put_file", put_file):
        for _ in range(2):
            made.clock.advance(300_000)
            made.upload()
    assert set(kafka) == {good}


def test_a_manifest_that_nests_deeply_is_a_lost_one(one: Instance) -> None:
    """It ends no process, and all files are uploaded again."""
    [key] = [key for key in one.objects.all() if key.endswith("manifest")]
    body = "[" * 200_000
    Objects.put(one.objects, key, json.dumps({"crc": zlib.crc32(body.encode()), "body": body}).encode())
    one.begin()
    with capture_logs() as events:
        one.upload()
    assert [each["event"] for each in events] == ["manifest-lost"] and one.uploads.age_s() == 0


@pytest.mark.fault("a kill during an upload to a mounted directory")
def test_a_file_that_a_kill_leaves_unfinished_is_removed(one: Instance, tmp_path: Path) -> None:
    """As any other object that nobody names."""
    [key] = [key for key in one.objects.all() if key.endswith("parquet")]
    code = """
import io, os, sys
from bridge.remote.objects import PART_BYTES, Objects
pieces = []
def step(piece):
    pieces.append(piece)
    if len(pieces) == 3:
        os.kill(os.getpid(), 9)
Objects(sys.argv[1]).put_file(sys.argv[2], io.BytesIO(bytes(4 * PART_BYTES)), step)
"""
    killed = key.rsplit("/", 1)[0] + "/0123456789abcdef-segment"
    ended = subprocess.run([sys.executable, "-c", code, f"file://{tmp_path}/remote", killed], timeout=60)
    assert ended.returncode == -9
    left = [path.name for path in (tmp_path / "remote").rglob("*#*")]
    assert left == ["0123456789abcdef-segment#1"]
    for _ in range(2):
        one.look()
    assert not list((tmp_path / "remote").rglob("*#*"))
    assert key in one.objects.all()


def test_a_mount_that_hangs_is_a_failure_of_storage_alone(one: Instance) -> None:
    """No heartbeat is late, and the age of the copy grows."""
    reached, goes_on = threading.Event(), threading.Event()

    def hang(what: str, key: str) -> None:
        assert what and key
        reached.set()
        assert goes_on.wait(60)

    one.work(NOW_MS + 9_000)
    one.objects.fault = hang
    one.clock.advance(900_000)
    one.uploads.start()
    try:
        assert reached.wait(60)
        one.clock.advance(3_600_000)
        assert one.uploads.age_s() >= 3_600 and not one.uploads.stop(0.1)
    finally:
        goes_on.set()
    assert one.uploads.stop(60)
