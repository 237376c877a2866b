"""Frames: decoded rows that Spark's tasks send through a socket (java/FrameWriter.java), taken in as Arrow batches.

A Unix domain socket where Spark runs beside the bridge; TCP where its executors run elsewhere. A connection has to
begin with the token, which only the tasks of this run know: frames of an earlier run find another socket, or none.

The socket is the flow control. A frame is taken in before the next one is read, so what is in memory is one frame for
each connection, of 1 MiB and one record, and the kernel's buffers.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Final, Self

import pyarrow as pa

from bridge.spark.scratch import for_a_socket
from timerstore.rows.entry import ENTRY

TOKEN_S: Final = 10.0
"""A connection that has not sent its token by then is closed."""
STORED: Final = b"\1"
_LENGTH: Final = struct.Struct(">i")


class FrameReceiver:
    """Listens while it is entered; each connection has a thread. `take` is given one frame after the other, of several
    connections at once; what it raises goes to `on_failure`, and ends that connection and with it Spark's task.
    """

    def __init__(
        self,
        take: Callable[[pa.Table], None],
        on_open: Callable[[], None],
        on_failure: Callable[[Exception], None],
        host: str | None = None,
    ) -> None:
        """`host` is the address of this machine for executors elsewhere; None: they run on it."""
        self._take = take
        self._on_open = on_open
        self._on_failure = on_failure
        self._host = host
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._closed = False
        self._files = ExitStack()
        self.token = secrets.token_hex(16)

    def __enter__(self) -> Self:
        if self._host is None:
            self.address = str(self._files.enter_context(for_a_socket("frames")))
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(self.address)
        else:
            self._listener = socket.create_server((self._host, 0))
            self.address = "{}:{}".format(*self._listener.getsockname())
        self._listener.listen()
        threading.Thread(target=self._accept, name="frames", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self._listener.close()
        self._files.close()

    def close(self) -> None:
        """Close all connections: a task that still writes fails. Any thread, any number of times."""
        with self._lock:
            self._closed = True
            for each in (self._listener, *self._connections):
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            with self._lock:
                if self._closed:
                    connection.close()
                    return
                self._connections.add(connection)
            threading.Thread(target=self._serve, args=(connection,), name="frames", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        """Take in all frames of a connection, and say so: the other side waits for that, and a connection that ends
        without it has failed."""
        with connection:
            try:
                connection.settimeout(TOKEN_S)
                line = _exactly(connection, len(self.token) + 1)
                if line is None or not hmac.compare_digest(bytes(line), f"{self.token}\n".encode()):
                    return
                connection.settimeout(None)
                self._on_open()
                while (frame := self._next(connection)) is not None:
                    if len(frame):
                        self._take(frame)
                        continue
                    with suppress(OSError):  # the task fails then
                        connection.sendall(STORED)
                    return
            except Exception as error:  # noqa: BLE001 - handed on, before the task can see it
                self._on_failure(error)
            finally:
                with self._lock:
                    self._connections.discard(connection)

    def _next(self, connection: socket.socket) -> pa.Table | None:
        """The next frame; an empty one after the last. None where the task has ended before that: Spark says why."""
        head = _exactly(connection, _LENGTH.size)
        body = None if head is None else _exactly(connection, _LENGTH.unpack(head)[0])
        if body is None:
            return None
        if not body:
            return ENTRY.empty_table()
        return pa.Table.from_batches([pa.ipc.read_record_batch(pa.py_buffer(body), ENTRY)])


def _exactly(connection: socket.socket, count: int) -> bytearray | None:
    """So many bytes; None where the connection ends before."""
    data = bytearray(count)
    view, got = memoryview(data), 0
    with suppress(OSError):
        while got < count and (received := connection.recv_into(view[got:])):
            got += received
    return data if got == count else None
