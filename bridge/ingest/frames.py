"""Frames: decoded rows that Spark's tasks send through a socket (java/FrameWriter.java), taken in as Arrow batches.

The socket is a Unix domain socket if Spark runs beside the bridge, TCP if its executors run elsewhere. A connection
must begin with the token, which only the tasks of this run know.

The socket is the flow control. A frame is taken in before the next one is read. So memory holds one frame for each
connection, of 1 MiB and one record, and the kernel's buffers.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Final, Self

import pyarrow as pa
import structlog

from bridge.errors import EnvironmentFailure
from bridge.http.listening import listening
from bridge.ingest.watch.waits import Wait
from bridge.settings.model import SparkSettings
from bridge.settings.secrets import unmasked
from bridge.spark.scratch import for_a_socket
from bridge.stores.names import NAMED_ENTRY
from timerstore.clock import SystemClock

TOKEN_S: Final = Wait.TOKEN.s
"""The deadline for the token of a connection, which is closed after that."""
STRANGERS_MAX: Final = 64
"""The limit of accepted connections without a token. Others wait in the kernel's queue."""
AGAIN_S: Final = 0.2
"""Pause after a failure to accept a connection."""
TASK: Final = -1
"""In place of a frame's length: the start of a task."""
STORED: Final = b"\1"
_LENGTH: Final = struct.Struct(">i")

log = structlog.get_logger("bridge.ingest.frames")


@dataclass(frozen=True, slots=True, kw_only=True)
class FromElsewhere:
    """The way of executors on other machines to the bridge: its `host` as they know it, the address that it listens on,
    and the port (0: any free one)."""

    host: str
    bind: str
    port: int = 0

    @classmethod
    def of(cls, spark: SparkSettings) -> FromElsewhere | None:
        """As Spark's driver listens; None without a cluster."""
        if spark.executor_host is None or spark.master.startswith("local"):
            return None
        given = spark.conf.get("spark.driver.bindAddress")
        bind = spark.executor_host if given is None else unmasked(given)
        return cls(host=spark.executor_host, bind=bind, port=spark.frames_port)


class FrameReceiver:
    """Listens inside its context; each connection has a thread. `take` gets one frame after the other, from several
    connections at once; its exceptions go to `on_failure`, and end that connection and with it Spark's task. `on_task`
    is called for each new task, `on_end` before the confirmation of a connection, both like `take`."""

    def __init__(
        self,
        take: Callable[[pa.Table], None],
        on_task: Callable[[], None],
        on_failure: Callable[[Exception], None],
        way: FromElsewhere | None = None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """`way` is for executors elsewhere; None: they run on this machine."""
        self._take = take
        self._on_task = on_task
        self._on_failure = on_failure
        self._way = way
        self._on_end = on_end
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._strangers = threading.Semaphore(STRANGERS_MAX)
        self._over = threading.Event()
        self._files = ExitStack()
        self.token = secrets.token_hex(16)

    def __enter__(self) -> Self:
        """Raises EnvironmentFailure without a free descriptor, address, port or thread."""
        try:
            self._listen()
        except (OSError, RuntimeError) as error:
            self._files.close()
            raise _not_accepted(error) from error
        return self

    def _listen(self) -> None:
        if self._way is None:
            self.address = str(self._files.enter_context(for_a_socket("frames")))
            self._listener = self._files.enter_context(socket.socket(socket.AF_UNIX))
            self._listener.bind(self.address)
        else:
            listener = listening(self._way.bind, self._way.port, "spark.frames_port", "spark.driver.bindAddress")
            self._listener = self._files.enter_context(listener)
            self.address = f"{self._way.host}:{self._listener.getsockname()[1]}"
        self._listener.listen()
        threading.Thread(target=self._accept, name="frames", daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self.close()
        self._files.close()

    def close(self) -> None:
        """Close all connections: a task that still writes fails. For any thread, repeatable."""
        with self._lock:
            self._over.set()
            for each in (self._listener, *self._connections):
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        """Accept connections until the close. Without a descriptor, thread or memory for a connection, Spark's task
        waits for the next attempt."""
        failed = 0
        while not self._over.is_set():
            try:
                self._accept_one()
                failed = 0
            except (OSError, RuntimeError) as error:
                if self._over.is_set():
                    return
                failed += 1
                if failed == 1:
                    log.warning("frames-not-accepted", reason=str(error))
                if failed * AGAIN_S >= Wait.DESCRIPTORS.s:
                    self._on_failure(_not_accepted(error))
                    return
                self._over.wait(AGAIN_S)

    def _accept_one(self) -> None:
        """Accept one connection, when the number of strangers permits it. Raises OSError, and RuntimeError if no thread
        can start."""
        self._strangers.acquire()
        with ExitStack() as leaving:
            leaving.callback(self._strangers.release)
            connection, _ = self._listener.accept()
            with self._lock:
                if self._over.is_set():
                    connection.close()
                    return
                self._connections.add(connection)
            try:
                threading.Thread(target=self._serve, args=(connection,), name="frames", daemon=True).start()
            except RuntimeError:
                with self._lock, connection:
                    self._connections.discard(connection)
                raise
            leaving.pop_all()  # the thread releases it

    def _has_token(self, connection: socket.socket) -> bool:
        """Whether the connection begins with the token. After that it is no stranger, or ends."""
        try:
            line = _in_time(connection, len(self.token) + 1, TOKEN_S)
        finally:
            self._strangers.release()
        return hmac.compare_digest(line, f"{self.token}\n".encode())

    def _serve(self, connection: socket.socket) -> None:
        """Take in all frames of a connection, then confirm them. The task waits for the confirmation; a connection that
        ends without one has failed."""
        with connection:
            try:
                if not self._has_token(connection):
                    return
                connection.settimeout(None)
                while (frame := self._next(connection)) is not None:
                    if len(frame):
                        self._take(frame)
                        continue
                    self._on_end()
                    with suppress(OSError):  # then the task fails
                        connection.sendall(STORED)
                    return
            except Exception as error:  # noqa: BLE001 - handed on, before the task can see it
                self._on_failure(error)
            finally:
                with self._lock:
                    self._connections.discard(connection)

    def _next(self, connection: socket.socket) -> pa.Table | None:
        """The next frame; an empty one after the last. None if the task has ended before that: Spark has the reason."""
        while (length := _length(connection)) == TASK:
            self._on_task()
        body = None if length is None else _exactly(connection, length)
        if body is None:
            return None
        if not body:
            return NAMED_ENTRY.empty_table()
        return pa.Table.from_batches([pa.ipc.read_record_batch(pa.py_buffer(body), NAMED_ENTRY)])


def _not_accepted(error: Exception) -> EnvironmentFailure:
    return EnvironmentFailure(
        "connections of Spark's tasks cannot be accepted",
        hint="Raise the limit of open files (ulimit -n) or of threads, or lower the number of clients of the API.",
        reason=str(error),
        code="DB-3059",
    )


def _length(connection: socket.socket) -> int | None:
    head = _exactly(connection, _LENGTH.size)
    return None if head is None else int(_LENGTH.unpack(head)[0])


def _in_time(connection: socket.socket, count: int, within_s: float) -> bytes:
    """`count` bytes; fewer if the connection ends before, or more of them come later."""
    clock, data = SystemClock(), b""
    until_s = clock.monotonic_s() + within_s
    with suppress(OSError):
        while len(data) < count and (left_s := until_s - clock.monotonic_s()) > 0:
            connection.settimeout(left_s)
            if not (received := connection.recv(count - len(data))):
                break
            data += received
    return data


def _exactly(connection: socket.socket, count: int) -> bytearray | None:
    """`count` bytes; None if the connection ends before."""
    data = bytearray(count)
    view, got = memoryview(data), 0
    with suppress(OSError):
        while got < count and (received := connection.recv_into(view[got:])):
            got += received
    return data if got == count else None
