"""The export over HTTP: a real store, a real listener, and clients that read, wait, or go."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import bridge.api.export
import timerstore.operations.export
from bridge.api.export import EXPORTS_MAX
from bridge.api.listener import LIMITS, Listener
from bridge.api.peers.batches import MEDIA_TYPE
from bridge.api.source import PendingMessages
from bridge.commands.api_client import ApiClient
from bridge.commands.cli import app
from bridge.commands.export import export_batches
from bridge.errors import EnvironmentFailure
from bridge.http.protection import Protection
from bridge.settings.model import HttpSettings
from bridge.stores.stores import Stores
from dev.harness.waiting import wait_until
from tests.model.stores import batch
from tests.unit.bridge.api import fakes
from tests.unit.bridge.stores.rig import ORDERS, Rig
from tests.unit.timerstore.entries import Record
from timerstore.errors import Corrupt
from timerstore.limits import Limits
from timerstore.log import segment

LATER_MS = fakes.NOW_MS + 3_600_000
ROWS = 40
VALUE = bytes(range(256)) * 1_024


@dataclass
class Bridge(fakes.Bridge):
    """With a store of its own."""

    index: Stores | None = None

    def pending(self) -> PendingMessages | None:
        """The real store."""
        return self.index


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    """Messages with values of 256 KiB: half in memory, half in a segment of five row groups."""
    monkeypatch.setattr(segment, "ROW_GROUP_ROWS", 4)
    monkeypatch.setattr(timerstore.operations.export, "BATCH_BYTES_MAX", 1 << 20)
    rig = Rig(tmp_path / "store", limits=Limits(horizon_ms=1_000))
    for first in (0, ROWS // 2):
        records = [
            Record(*ORDERS, n, LATER_MS + n, value=VALUE, target="orders" if n % 2 else None, id=f"i{n}")
            for n in range(first, first + ROWS // 2)
        ]
        rig.logs[ORDERS] += records
        rig.stores.append(batch(records), {ORDERS: first + ROWS // 2}, fakes.NOW_MS)
        if first == 0:
            rig.deliver(fakes.NOW_MS)
            rig.stores.flush(fakes.NOW_MS)
    assert rig.stores.stats().segments == 1
    return rig


def listener(rig: Rig, *, show_payloads: bool = True) -> Listener:
    source = Bridge(index=rig.stores)
    return Listener("127.0.0.1", 0, source=source, protection=Protection(), show_payloads=show_payloads)


@pytest.fixture
def served(rig: Rig) -> Iterator[Listener]:
    with listener(rig) as serving:
        yield serving


def api(served: Listener) -> ApiClient:
    return ApiClient(HttpSettings(), f"http://127.0.0.1:{served.port}", 10.0)


def read(served: Listener, parameters: Sequence[tuple[str, str]] = ()) -> pa.Table:
    return pa.Table.from_batches(export_batches(api(served), dict(parameters))).sort_by("offset")


def delay_bridge(served: Listener, *words: str) -> Any:
    return CliRunner().invoke(app, ["pending", *words, "--url", f"http://127.0.0.1:{served.port}"])


def open_files(rig: Rig) -> list[Path]:
    """Of the store, in this process, by way of its segments."""
    found = [each.resolve() for each in Path("/proc/self/fd").iterdir()]
    directory = (rig.directory / "delay" / "0").resolve()
    return [each for each in found if each.parent == directory and ".parquet" in each.name]


FILTERS: list[list[tuple[str, str]]] = [
    [],
    [("target", "orders")],
    [("target", "")],
    [("id", "i7")],
    [("origin", "delay/0/7")],
    [("key", "0-33")],
    [("due_until", str(LATER_MS + 25)), ("due_from", str(LATER_MS + 3))],
    [("state", "overdue")],
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_an_export_has_what_a_count_says_and_what_pages_have(
    served: Listener, tmp_path: Path, filters: list[tuple[str, str]]
) -> None:
    """Over HTTP and in a file, with each filter."""
    table = read(served, filters)
    options = [word for name, text in filters for word in (f"--{name.replace('_', '-')}", text)]
    found = delay_bridge(served, "export", "--to", str(tmp_path / "a.parquet"), *options)
    assert found.exit_code == 0, found.output
    assert found.output == f"{len(table)} messages written to {tmp_path / 'a.parquet'}\n"
    assert pq.read_table(tmp_path / "a.parquet").sort_by("offset") == table
    assert [each.name for each in tmp_path.iterdir() if each.is_file()] == ["a.parquet"]
    assert delay_bridge(served, "count", *options).output == f"{len(table)}\n"
    pages = api(served).get("messages", dict(filters))["messages"]
    for row, message in zip(table.to_pylist(), pages, strict=True):
        for name in ("due", "at", "ts"):
            assert row[name].timestamp() * 1000 == message[name]
        same = message.keys() - {"due", "at", "ts", "key"}
        assert {name: row[name] for name in same} == {name: message[name] for name in same}
        assert (row["key"].decode(), row["value"]) == (message["key"]["text"], VALUE)
        assert row["headers"] == [{"key": "h", "value": b"v"}]


def test_payloads_only_where_they_are_allowed(rig: Rig) -> None:
    """Neither values nor headers leave a bridge that does not show them."""
    with listener(rig, show_payloads=False) as served:
        table = read(served)
        assert len(table) == table["value"].null_count == table["headers"].null_count == ROWS


def begun(served: Listener) -> socket.socket:
    """A client that has asked, and takes little."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    client.settimeout(10)
    client.connect(("127.0.0.1", served.port))
    client.sendall(b"GET /api/v1/export HTTP/1.1\r\nHost: x\r\n\r\n")
    assert client.recv(12, socket.MSG_PEEK) == b"HTTP/1.1 200"
    return client


def test_a_client_that_goes_frees_the_files(served: Listener, rig: Rig) -> None:
    """And its turn: one too many is refused before, and has an answer then; other questions are answered meanwhile."""
    clients = [begun(served) for _ in range(EXPORTS_MAX)]
    with pytest.raises(EnvironmentFailure, match="exports are under way"):
        read(served)
    assert len(open_files(rig)) == EXPORTS_MAX and api(served).get("count")["count"] == ROWS
    for client in clients:
        client.close()
    wait_until(lambda: not open_files(rig), 10, lambda: "closed files")
    assert len(read(served)) == ROWS


def test_a_slow_client_waits_for_nobody_and_loses_nothing(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has not taken is not made, what is delivered meanwhile is in it, and its connection lasts."""
    made: list[object] = []
    batch = timerstore.operations.export.Export._batch

    def counted(*given: Any) -> pa.RecordBatch:
        made.append(given)
        return batch(*given)

    monkeypatch.setattr(timerstore.operations.export.Export, "_batch", counted)
    monkeypatch.setattr("bridge.api.listener.LIMITS", replace(LIMITS, connection_s=0.05))
    with listener(rig) as served, begun(served) as client:
        rig.finish(LATER_MS + 100)
        rig.stores.flush(LATER_MS + 100)
        rig.stores.reclaim(LATER_MS + 100)
        assert not list(rig.directory.glob("*/*/*.parquet")) and len(made) < 10
        response = http.client.HTTPResponse(client)
        response.begin()
        assert response.headers.get_content_type() == MEDIA_TYPE
        assert pa.ipc.open_stream(response).read_all().num_rows == ROWS


def test_a_client_that_takes_nothing_is_cut_off(served: Listener, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files and turn are free again."""
    monkeypatch.setattr(bridge.api.export, "STALL_S", 0.01)
    with begun(served):
        wait_until(lambda: not open_files(rig), 10, lambda: "closed files")


def test_a_stream_that_breaks_off_is_an_error_and_no_file(
    served: Listener, rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that was there stays as it was."""

    def damaged(*_: object) -> Iterator[pa.Table]:
        raise Corrupt("checksum", path="x")

    monkeypatch.setattr(segment.SegmentReader, "parts", damaged)
    (tmp_path / "a.parquet").write_text("before")
    found = delay_bridge(served, "export", "--to", str(tmp_path / "a.parquet"))
    assert found.exit_code == 3 and "DB-1020 the export has broken off after 20 messages" in found.output
    assert [each.name for each in tmp_path.iterdir() if each.is_file()] == ["a.parquet"]
    assert (tmp_path / "a.parquet").read_text() == "before"
    wait_until(lambda: not open_files(rig), 10, lambda: "closed files")


def test_a_file_that_cannot_be_written(served: Listener, rig: Rig, tmp_path: Path) -> None:
    """Is told, and the export ends."""
    found = delay_bridge(served, "export", "--to", str(tmp_path / "nowhere" / "a.parquet"))
    assert found.exit_code == 3 and "DB-1021" in found.output
    wait_until(lambda: not open_files(rig), 10, lambda: "closed files")


def test_wrong_filters_and_an_index_that_is_not_complete(served: Listener) -> None:
    """As for a list."""
    found = delay_bridge(served, "export", "--to", "a.parquet", "--due-from", "yesterday")
    assert found.exit_code == 2
    with (
        Listener("127.0.0.1", 0, source=Bridge(), protection=Protection(), show_payloads=False) as empty,
        pytest.raises(EnvironmentFailure, match="cannot answer"),
    ):
        read(empty)
