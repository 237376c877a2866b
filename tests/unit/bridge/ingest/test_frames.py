"""bridge.ingest.frames: who may send frames, and what becomes of them. The other side is a socket of the test's."""

from __future__ import annotations

import re
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pytest

from bridge.delivery import filling
from bridge.errors import EnvironmentFailure
from bridge.ingest import frames as module
from bridge.ingest.decode_records import decode_records
from bridge.ingest.frames import STORED, FrameReceiver, FromElsewhere
from bridge.ingest.watch.waits import Wait
from bridge.settings.model import SparkSettings
from bridge.wire.decode_epochs import DecodeEpoch, DecodeParameters
from bridge.wire.received import Record
from dev.harness.waiting import wait_until
from tests.manual_clock import ManualClock
from tests.paths import ROOT

SEEN_S = 10
EPOCHS = (
    DecodeEpoch(
        offset=0, parameters=DecodeParameters(max_delay_ms=10**9, roll_window_ms=10**9, has_default_target=True)
    ),
)


def entries(first: int, end: int) -> pa.Table:
    headers: list[tuple[str, bytes | None]] = [("delay-for", b"1s"), ("x", None)]
    records = [Record("delay", 0, offset, 0, True, b"k", None, headers) for offset in range(first, end)]
    return decode_records(records, {("delay", 0): EPOCHS})


def frame(table: pa.Table) -> bytes:
    """As FrameWriter.java sends it."""
    [batch] = table.combine_chunks().to_batches()
    body: bytes = batch.serialize().to_pybytes()
    return struct.pack(">i", len(body)) + body


LAST = struct.pack(">i", 0)
TASK = struct.pack(">i", -1)


class Bench:
    def __init__(self, way: FromElsewhere | None = None) -> None:
        self.taken: list[pa.Table] = []
        self.tasks = 0
        self.ended = 0
        self.failures: list[Exception] = []
        self.refuses: Exception | None = None
        self.receiver = FrameReceiver(self.take, self.begin, self.failures.append, way, self.end)

    def take(self, table: pa.Table) -> None:
        if self.refuses is not None:
            raise self.refuses
        self.taken.append(table)

    def begin(self) -> None:
        self.tasks += 1

    def end(self) -> None:
        if self.refuses is not None:
            raise self.refuses
        self.ended += 1

    def connect(self, token: str | None = None) -> socket.socket:
        address = self.receiver.address
        if address.startswith("/"):
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(address)
        else:
            host, _, port = address.rpartition(":")
            connection = socket.create_connection((host, int(port)))
        connection.settimeout(SEEN_S)
        connection.sendall(f"{self.receiver.token if token is None else token}\n".encode())
        return connection


@pytest.fixture(params=[None, FromElsewhere(host="localhost", bind="127.0.0.1")], ids=["unix", "tcp"])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    made = Bench(request.param)
    with made.receiver:
        yield made


def test_frames_are_taken_in_their_order_and_then_acknowledged(bench: Bench) -> None:
    """What the last task waits for: all of its rows are taken in."""
    with bench.connect() as connection:
        connection.sendall(TASK + frame(entries(0, 3)) + TASK + frame(entries(3, 4))[:50])
        wait_until(lambda: bench.taken, SEEN_S, "a whole frame is taken, whatever follows")
        assert bench.ended < 1
        connection.sendall(frame(entries(3, 4))[50:] + LAST)
        assert connection.recv(1) == STORED and connection.recv(1) == b""
    assert [table.column("offset").to_pylist() for table in bench.taken] == [[0, 1, 2], [3]]
    assert bench.taken[1].equals(entries(3, 4)) and bench.tasks == 2 and not bench.failures
    assert bench.ended == 1


@pytest.mark.parametrize("token", ["", "wrong", "0" * 32])
def test_a_stranger_is_turned_away(bench: Bench, token: str) -> None:
    with bench.connect(token) as connection:
        with suppress(BrokenPipeError):  # it may be turned away already
            connection.sendall(b"\0" * 64)
        assert closed(connection)
    assert not bench.taken and not bench.tasks and not bench.failures


def test_a_frame_that_is_not_taken_ends_the_connection(bench: Bench) -> None:
    """What follows it must not be stored."""
    bench.refuses = RuntimeError("no")
    with bench.connect() as connection:
        connection.sendall(frame(entries(0, 1)) + LAST)
        assert closed(connection), "without an acknowledgement: Spark must not count the batch as done"
    assert bench.failures == [bench.refuses]


def test_an_end_that_is_refused_is_not_acknowledged(bench: Bench) -> None:
    """Another attempt of the task may count in its place."""
    bench.refuses = RuntimeError("no")
    with bench.connect() as connection:
        connection.sendall(TASK + LAST)
        assert closed(connection)
    assert bench.failures == [bench.refuses]


def test_a_task_that_dies_in_a_frame_leaves_what_was_whole(bench: Bench) -> None:
    with bench.connect() as connection:
        connection.sendall(frame(entries(0, 1)) + frame(entries(1, 9))[:-1])
    wait_until(lambda: bench.taken and not bench.receiver._connections, SEEN_S, "the connection is gone")
    assert [len(table) for table in bench.taken] == [1] and not bench.failures and not bench.ended


def test_a_close_ends_what_still_sends(bench: Bench) -> None:
    with bench.connect() as connection:
        connection.sendall(TASK)
        wait_until(lambda: bench.tasks, SEEN_S, "it is open")
        bench.receiver.close()
        assert closed(connection)


def test_one_that_says_nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TOKEN_S", 0.05)
    made = Bench()
    with made.receiver, socket.socket(socket.AF_UNIX) as connection:
        connection.connect(made.receiver.address)
        connection.settimeout(SEEN_S)
        assert closed(connection)
    assert not Path(made.receiver.address).exists()


@pytest.mark.fault("a stranger that sends a byte from time to time")
def test_the_deadline_of_a_token_is_for_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection whose token is not whole after ten seconds is closed, however its bytes come."""
    clock, connection = ManualClock(), mock.Mock()

    def receive(_: int) -> bytes:
        clock.advance(4_000)
        return b"x"

    monkeypatch.setattr(module, "SystemClock", lambda: clock)
    connection.recv.side_effect = receive
    assert module._in_time(connection, 33, module.TOKEN_S) == b"xxx"
    assert [call.args[0] for call in connection.settimeout.call_args_list] == [10, 6, 2]


@pytest.mark.fault("many strangers at the port for rows from executors")
def test_strangers_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of connections without a token, 64 are accepted, and others wait until one of them ends. Those of tasks do not
    count."""
    monkeypatch.setattr(module, "STRANGERS_MAX", 2)
    read, strangers, counts = module._in_time, set[int](), []

    def count(connection: socket.socket, *more: Any) -> bytes:
        strangers.add(connection.fileno())
        counts.append(len(strangers))
        try:
            return read(connection, *more)
        finally:
            strangers.discard(connection.fileno())

    monkeypatch.setattr(module, "_in_time", count)
    made, tasks, silent = Bench(), 3, 4
    with made.receiver, ExitStack() as open_ones:
        for _ in range(tasks):
            open_ones.enter_context(made.connect()).sendall(TASK)
        wait_until(lambda: made.tasks == tasks, SEEN_S, "the tasks")
        others = [open_ones.enter_context(made.connect("")) for _ in range(silent)]
        wait_until(lambda: len(counts) >= tasks + 2, SEEN_S, "two strangers")
        last = open_ones.enter_context(made.connect())
        last.sendall(TASK)
        for each in others:
            each.close()
        wait_until(lambda: made.tasks == tasks + 1, SEEN_S, "it is accepted when others have ended")
    assert max(counts) == 2 and not made.failures


def test_a_reader_that_is_slow_holds_the_sender_up(bench: Bench) -> None:
    """The socket is the flow control: what is not taken stays on the other side."""
    gate, sent = threading.Event(), 0
    take = bench.take

    def wait(table: pa.Table) -> None:
        gate.wait(SEEN_S)
        take(table)

    bench.receiver._take = wait
    piece = frame(entries(0, 2_000))
    with bench.connect() as connection:
        connection.settimeout(0.2)
        with suppress(TimeoutError):
            while sent * len(piece) < 64 << 20:
                connection.sendall(piece)
                sent += 1
        assert sent * len(piece) < 64 << 20
        gate.set()
        wait_until(lambda: len(bench.taken) >= sent, SEEN_S, "all of it is taken")


def closed(connection: socket.socket) -> bool:
    """Whether the other side has closed it."""
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def test_a_disk_that_fails_is_no_end_of_a_task(bench: Bench) -> None:
    """An OSError of taking a frame in is told: only those of the socket are the task's."""
    bench.refuses = OSError(28, "No space left on device")
    with bench.connect() as connection:
        connection.sendall(frame(entries(0, 1)) + LAST)
        assert closed(connection)
    assert bench.failures == [bench.refuses]


@pytest.mark.fault("no descriptor left for a connection")
def test_a_connection_that_cannot_be_accepted_is_accepted_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bridge accepts the connection when a descriptor or a thread is free; after a minute the query fails with the
    reason."""
    monkeypatch.setattr(module, "AGAIN_S", 0.01)
    made, accept, failures = Bench(), FrameReceiver._accept_one, [OSError(24, "Too many open files")] * 3

    def fail_first(receiver: FrameReceiver) -> None:
        if failures:
            raise failures.pop()
        accept(receiver)

    monkeypatch.setattr(FrameReceiver, "_accept_one", fail_first)
    with made.receiver, made.connect() as connection:
        connection.sendall(TASK)
        wait_until(lambda: made.tasks, SEEN_S, "it is accepted")
    assert not made.failures
    monkeypatch.setattr(module, "AGAIN_S", Wait.DESCRIPTORS.s)
    failures.append(OSError(24, "Too many open files"))
    stuck = Bench()
    with stuck.receiver:
        wait_until(lambda: stuck.failures, SEEN_S, "it says why")
    [failure] = stuck.failures
    assert isinstance(failure, EnvironmentFailure) and failure.code == "DB-3059"


def test_a_connection_without_a_thread_is_closed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its task fails, and the query begins anew; the next one is accepted."""
    start, refused = threading.Thread.start, [RuntimeError("can't start new thread")]

    def refuse(thread: threading.Thread) -> None:
        if refused:
            raise refused.pop()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with suppress(BrokenPipeError), bench.connect() as connection:  # closed before the token or after it
        assert closed(connection)
    assert not refused
    with bench.connect() as connection:
        connection.sendall(TASK)
        wait_until(lambda: bench.tasks, SEEN_S, "the next one")


def test_a_cancel_is_read_within_the_time_that_is_promised_to_it() -> None:
    """A cancel acts until so long before its message is due, as README says: a task that rests after a message, the
    frame's own time, and the rows that the dispatcher has taken ahead fit into half of that."""
    promised = re.search(r"cancelled or replaced until ([0-9.]+) s before", (ROOT / "README.md").read_text("utf-8"))
    java = (ROOT / "bridge/ingest/java/FrameWriter.java").read_text("utf-8")
    rest = re.search(r"REST_MS_MAX = (\d+);", java)
    interval = re.search(r"INTERVAL_NANOS = (\d[\d_]*);", java)
    assert promised and rest and interval
    ms = int(rest[1]) + int(interval[1].replace("_", "")) // 1_000_000 + filling.AHEAD_MS
    assert ms <= 1_000 * float(promised[1]) / 2


def test_no_descriptor_to_listen_with_is_a_failure_after_which_the_query_begins_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nothing is left of it."""

    def full(*_: object) -> socket.socket:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    bench = Bench()
    monkeypatch.setattr(socket, "socket", full)
    with pytest.raises(EnvironmentFailure) as raised, bench.receiver:
        pass
    assert raised.value.code == "DB-3059" and not list(tmp_path.iterdir())


def test_without_a_cluster_the_socket_is_a_file() -> None:
    """No port is open then, also with the settings of a cluster that is not used."""
    elsewhere: dict[str, Any] = {"executor_host": "0.0.0.0", "frames_port": 4040}
    assert FromElsewhere.of(SparkSettings(master="local[2]", **elsewhere)) is None
    way = FromElsewhere.of(SparkSettings(master="spark://spark:7077", **elsewhere))
    assert way == FromElsewhere(host="0.0.0.0", bind="0.0.0.0", port=4040)


@pytest.mark.parametrize("bind", ["127.0.0.1", "a-name-that-nobody-has.invalid"])
def test_executors_get_their_own_name_for_the_bridge(bind: str) -> None:
    """It need not be known here, and the port is the configured one; a taken port, or an unknown address to listen on,
    is a failure that names its setting."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        bench = Bench(FromElsewhere(host="bridge.example", bind=bind, port=port))
        with pytest.raises(EnvironmentFailure) as raised, bench.receiver:
            pass
        key = "spark.frames_port" if bind == "127.0.0.1" else "spark.driver.bindAddress"
        assert raised.value.code == "DB-3029" and key in raised.value.hint
    if bind == "127.0.0.1":
        with bench.receiver:
            assert bench.receiver.address == f"bridge.example:{port}"
