"""bridge.remote with a real S3 server."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import obstore
import pytest
from obstore.exceptions import PermissionDeniedError

from bridge.remote import objects as objects_module
from bridge.remote.objects import PART_BYTES, Missing, Objects, RemoteTrouble, RemoteUnavailable
from bridge.settings.model import Settings
from bridge.settings.reserved import REMOTE_URI
from dev.broker.embedded import free_ports
from dev.harness.waiting import wait_until
from tests.unit.bridge.remote.rig import FaultyObjects, Instance
from tests.unit.bridge.stores.rig import NOW_MS

SERVES_S = 60.0
URI = "s3://bucket/some/prefix"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of an S3 server with one bucket."""
    [port] = free_ports(1)
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"

    def serves() -> bool:
        assert process.poll() is None
        try:
            with urllib.request.urlopen(urllib.request.Request(f"{address}/bucket", method="PUT"), timeout=5):
                return True
        except OSError:
            return False

    try:
        wait_until(serves, SERVES_S, "the S3 server")
        yield address
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def environment(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials and address, as a pod has them."""
    values = {
        "AWS_ENDPOINT_URL": server, "AWS_ALLOW_HTTP": "true", "AWS_REGION": "eu-central-1",
        "AWS_ACCESS_KEY_ID": "id-of-a-key", "AWS_SECRET_ACCESS_KEY": "a-secret-key",
    }  # fmt: skip
    for name, value in values.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("environment")
def test_an_instance_goes_on_from_a_copy_on_s3(tmp_path: Path) -> None:
    """Upload, look, and adoption, with the same promises as in a mounted directory."""
    objects = FaultyObjects(URI)
    one = Instance(tmp_path / "one", objects, {})
    one.work(NOW_MS + 5_000, NOW_MS - 1)
    one.upload()
    one.look()
    one.work(NOW_MS + 6_000)
    one.upload()
    one.look()
    one.look()
    assert len([key for key in objects.all() if key.endswith("manifest")]) == 1
    other = Instance(tmp_path / "other", objects, one.kafka).takes_over(one)
    assert other.adopt() and other.covered() == 3 and len(other.pending()) == 2


@pytest.mark.usefixtures("environment")
def test_large_files_go_in_parts(tmp_path: Path) -> None:
    """Each part is shown before it is sent, and they come in order, however many are under way."""
    objects, path, pieces = Objects(URI), tmp_path / "large", list[int]()
    for size in (0, 1, PART_BYTES, 2 * PART_BYTES + 7):
        content = bytes(range(256)) * (size // 256) + bytes(size % 256)
        path.write_bytes(content)
        with path.open("rb") as file:
            objects.put_file("large", file, lambda piece: pieces.append(len(piece)))
        for at_once in (1, 4):
            assert b"".join(objects.parts("large", size, at_once)) == content
        assert objects.exists("large")
    assert max(pieces) == PART_BYTES
    objects.delete("large")
    objects.delete("large")
    assert not objects.exists("large")
    with pytest.raises(Missing):
        objects.get("large")


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize("at_once", [1, 4])
def test_parts_are_under_way_together(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as asked for, and no more. After an error none is."""
    monkeypatch.setattr(objects_module, "PART_BYTES", 10)
    objects, content = Objects(URI), bytes(range(157))
    objects.put("parts", content)
    real, under_way, most = obstore.get_range_async, 0, 0

    def read(fails_at: int) -> bytes:
        together = asyncio.Barrier(at_once)

        async def part(*args: Any, start: int, length: int) -> Any:
            nonlocal under_way, most
            under_way += 1
            most = max(most, under_way)
            try:
                await asyncio.wait_for(together.wait(), SERVES_S)
                if start >= fails_at:
                    raise OSError("a lost connection")
                return await real(*args, start=start, length=length)
            finally:
                under_way -= 1

        with mock.patch.object(obstore, "get_range_async", part):
            return b"".join(objects.parts("parts", len(content), at_once))

    assert read(fails_at=len(content)) == content and most == at_once
    with pytest.raises(RemoteUnavailable, match="a lost connection"):
        read(fails_at=30)
    assert not under_way


@pytest.mark.usefixtures("environment")
def test_a_bucket_that_is_not_there_is_trouble_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """As refused or expired credentials are."""
    with pytest.raises(RemoteTrouble) as found:
        Objects("s3://another/prefix").put("a", b"x")
    assert "a-secret-key" not in str(found.value) and "id-of-a-key" not in str(found.value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(RemoteTrouble) as found:
        list(Objects(URI).keys("a", lambda: None))
    assert "a-secret-key" not in str(found.value)


@pytest.mark.usefixtures("environment")
def test_refused_credentials_are_asked_for_anew() -> None:
    """A client keeps them until their end, and they may be withdrawn before."""
    objects = Objects(URI)
    objects.put("a", b"x")
    first = objects._store
    with (
        mock.patch.object(obstore, "get", side_effect=PermissionDeniedError("no more")),
        pytest.raises(RemoteUnavailable),
    ):
        objects.get("a")
    assert objects.get("a") == b"x" and objects._store is not first


def test_a_password_in_the_address_of_the_endpoint_is_in_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors of the client have the whole address."""
    for name, value in {"AWS_ENDPOINT_URL": "http://user:HUNTER2@127.0.0.1:1", "AWS_ALLOW_HTTP": "true"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RemoteTrouble) as found:
        Objects(URI).put("a", b"x")
    assert "HUNTER2" not in str(found.value) and "user" not in str(found.value)


@pytest.mark.parametrize(
    "uri", ["s3://b", "gs://b/x/y/", "az://container/a", "abfss://c@account.dfs.core.windows.net/x"]
)
def test_addresses_of_object_stores_are_taken(uri: str) -> None:
    """A container before its account is no user."""
    assert re.match(REMOTE_URI, uri)


@pytest.mark.parametrize(
    "uri",
    [
        "s3://key:secret@bucket/a", "ftp://a/b", "memory:///", "/mnt/a", "s3://", "s3://b?x=1",
        "az://account:secret@container/a", "gs://user:secret@bucket/x", "gs://user:secret", "az://secret@container",
        "abfss://user:secret@account.dfs.core.windows.net/x",
    ],
)  # fmt: skip
def test_other_addresses_are_refused(uri: str) -> None:
    """With the name of the key, and before anything starts."""
    with pytest.raises(Exception, match=r"store\.remote") as found:
        Settings.of({"store": {"remote": uri}})
    assert "secret" not in str(found.value)
