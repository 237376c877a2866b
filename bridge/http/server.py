"""HTTP listeners: uvicorn on a thread and an event loop of its own, without signal handlers and a log of requests, with
limits on connections and a certificate that may be replaced.

The probes and the API have a listener each, so that a blocked loop of one does not delay the other. This module accepts
the connections, since uvicorn counts them only after their TLS handshake. If there are too many, admission.py chooses
the one to end.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any, Final, Self

import h11
import structlog
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from bridge.http.admission import HEAD_S, Guest, Standing, counted_place, one_to_go
from bridge.http.protection import WHO, Certificate
from bridge.telemetry.heartbeats import Beat, unwatched

IDLE_S: Final = 5
"""The longest rest of a connection between two requests."""
DRAIN_S: Final = 1
"""The time of requests under way at a stop."""
STOP_S: Final = 2.0
"""The longest wait for the end of a listener."""
ACCEPT_S: Final = 1.0
"""The rest after a failed accept: the process has no more file descriptors."""
TICK_S: Final = 1.0
"""The interval of a listener's beats, and of the change of its answers' date."""
NAMES_MAX: Final = 64
"""Look-ups of host names at a time: one for each other instance, so that slow ones do not delay the rest."""
LINE_BYTES_MAX: Final = 16_384
"""Maximum number of bytes of a request's line and headers."""

Application = Callable[[Any, Any, Any], Awaitable[None]]
"""An ASGI application."""

log = structlog.get_logger("bridge.http.server")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """The limits of a listener."""

    connections_max: int
    place_max: int
    """Maximum number of connections of one address without credentials."""
    connection_s: float
    """The longest life of a connection, unless a request for one of `long_paths` is under way: these have limits of
    their own."""
    long_paths: Collection[str] = ()


class _Connection(H11Protocol):
    """A connection: it ends after its time, or after a request for a long path that is under way then. The head and the
    body of each request have HEAD_S."""

    _end: asyncio.TimerHandle | None = None
    _request: asyncio.TimerHandle | None = None

    def __init__(self, limits: ConnectionLimits, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._limits = limits
        self.begun, self.ended = asyncio.Event(), asyncio.Event()
        """`begun`: the head of its first request has arrived. `ended`: it is closed."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn has it
        super().connection_made(transport)
        self._end = self.loop.call_later(self._limits.connection_s, self._expire)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None:
            self.begun.set()
        state = self.conn.their_state
        is_partial = state is h11.SEND_BODY or (state is h11.IDLE and self.conn.trailing_data[0] != b"")
        if not is_partial and self._request is not None:
            self._request.cancel()
            self._request = None
        elif is_partial and self._request is None:
            self._request = self.loop.call_later(HEAD_S, self.transport.abort)

    def eof_received(self) -> bool:  # type: ignore[override] # as asyncio has it
        """Keep the connection for an answer under way, its last one: the client may only have ended its own side. On a
        long path it counts as gone; TLS has no such end."""
        is_awaited = self.scheme == "http" and self._is_under_way() and not self._is_on_long_path()
        if is_awaited:
            self.cycle.keep_alive = False
        return is_awaited

    def standing(self) -> Standing:
        """The standing by its last request. The application names the client."""
        cycle: Any = self.cycle  # None before the first request, despite its type
        if cycle is None or cycle.scope["state"].get(WHO) is None:
            return Standing.STRANGER
        return Standing.IDLE if cycle.response_complete else Standing.BUSY

    def is_known(self) -> bool:
        """Whether the client has shown credentials."""
        cycle: Any = self.cycle
        return cycle is not None and bool(cycle.scope["state"].get(WHO))

    def _expire(self) -> None:
        if self._is_under_way() and self._is_on_long_path() and not self.transport.is_closing():
            self._end = self.loop.call_later(self._limits.connection_s, self._expire)
        else:
            self.transport.abort()

    def _is_under_way(self) -> bool:
        cycle: Any = self.cycle
        return cycle is not None and not cycle.response_complete

    def _is_on_long_path(self) -> bool:
        return self.cycle.scope["path"] in self._limits.long_paths

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self._end, self._request):
            if timer is not None:
                timer.cancel()
        self.begun.set()
        self.ended.set()


@dataclass(slots=True, kw_only=True)
class _Visit(Guest):
    """A connection from its acceptance to the end of `task`."""

    task: asyncio.Task[None] | None = None
    connection: _Connection | None = None

    def look(self) -> None:
        """Update the standing."""
        if self.connection is not None:
            self.standing = self.connection.standing()
            if self.connection.is_known():
                self.place = None

    def end(self) -> None:
        """Cut the connection off."""
        if self.task is not None:
            self.task.cancel()


class _Server(uvicorn.Server):
    """The server of a listener. `run` returns within about a second after `stop`."""

    def __init__(self, app: Application, certificate: Certificate | None, limits: ConnectionLimits, beat: Beat) -> None:
        config = uvicorn.Config(
            app,
            interface="asgi3",
            ws="none",
            lifespan="off",
            loop="asyncio",
            log_config=None,
            log_level="error",  # a warning for each request that is not HTTP would fill the log
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=IDLE_S,
            timeout_graceful_shutdown=DRAIN_S,
            h11_max_incomplete_event_size=LINE_BYTES_MAX,
            ssl_context_factory=None if certificate is None else lambda *_: _following(certificate),
        )
        super().__init__(config)
        self._limits, self._beat = limits, beat
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = asyncio.Event()
        self._visits: dict[int, _Visit] = {}
        self._number = 0
        self._accepting: list[asyncio.Task[None]] = []

    def stop(self) -> None:
        """Make `run` return; any thread."""
        self.should_exit = True
        with suppress(RuntimeError):  # the loop has ended
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._stopping.set)

    async def main_loop(self) -> None:
        """Beat until the stop. uvicorn's own loop wakes up ten times a second."""
        self._loop = asyncio.get_running_loop()  # before the look at `should_exit`
        while not await self.on_tick(0):
            self._beat()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), TICK_S)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept the connections of these sockets."""
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(NAMES_MAX, "names"))
        await super().startup(sockets=[])
        self._accepting = [asyncio.create_task(self._accept(listener)) for listener in sockets or []]

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End all connections; requests under way have DRAIN_S."""
        for task in self._accepting:
            task.cancel()
        await super().shutdown(sockets)
        for visit in list(self._visits.values()):
            visit.end()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, address = await loop.sock_accept(listener)
            except OSError as error:
                log.warning("accept-failed", port=listener.getsockname()[1], reason=str(error))
                await asyncio.sleep(ACCEPT_S)
                continue
            self._take_up(accepted, counted_place(address[0]), loop.time())
            await asyncio.sleep(0)  # `sock_accept` does not yield while connections wait

    def _take_up(self, accepted: socket.socket, place: str, now_s: float) -> None:
        """Serve a new connection, in place of another one if there are too many."""
        self._number += 1
        visit = self._visits[self._number] = _Visit(place=place, since_s=now_s)
        visit.task = asyncio.create_task(self._receive(visit, accepted))
        visit.task.add_done_callback(partial(self._forget, self._number, visit, accepted))
        for other in self._visits.values():
            other.look()
        most = self._limits
        gone = one_to_go(self._visits, self._number, guests_max=most.connections_max, place_max=most.place_max)
        if gone is not None:
            self._visits.pop(gone).end()

    def _forget(self, number: int, visit: _Visit, accepted: socket.socket, _: object) -> None:
        """Remove an ended connection, even one whose task never took a step."""
        self._visits.pop(number, None)
        if visit.connection is None:
            accepted.close()

    async def _receive(self, visit: _Visit, accepted: socket.socket) -> None:
        """Serve a connection to its end. The handshake and the first head have HEAD_S together."""
        make = partial(
            _Connection, self._limits, config=self.config, server_state=self.server_state,
            app_state=self.lifespan.state,
        )  # fmt: skip
        transport: asyncio.Transport | None = None
        try:
            async with asyncio.timeout(HEAD_S):
                transport, connection = await asyncio.get_running_loop().connect_accepted_socket(
                    make, accepted, ssl=self.config.ssl
                )
                visit.connection = connection
                await connection.begun.wait()
            await connection.ended.wait()
        except (OSError, TimeoutError):  # no handshake, or no head in time
            pass
        finally:
            if transport is not None:
                transport.abort()


class HttpListener:
    """Serves an ASGI application inside `with`, on a thread and an event loop of its own."""

    def __init__(
        self,
        app: Application,
        listener: socket.socket,
        thread: str,
        limits: ConnectionLimits,
        certificate: Certificate | None,
        beat: Beat = unwatched,
    ) -> None:
        """`listener` is a listening socket, `thread` the name of the thread."""
        listener.setblocking(False)
        self._socket = listener
        self._server = _Server(app, certificate, limits, beat)
        self._thread = threading.Thread(target=self._server.run, args=([listener],), name=thread, daemon=True)

    @property
    def port(self) -> int:
        """The port in use."""
        return int(self._socket.getsockname()[1])

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop, within STOP_S: requests under way are cut off."""
        self._server.stop()
        self._thread.join(STOP_S)
        self._socket.close()


def _following(certificate: Certificate) -> ssl.SSLContext:
    """A context that gives each new connection the present certificate of the files."""

    def choose(connection: Any, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = certificate.context()

    context = certificate.context()
    context.sni_callback = choose
    return context


async def send_answer(
    send: Any, status: HTTPStatus, content_type: str, body: bytes, headers: Mapping[str, str] | None = None
) -> None:
    """Send a whole answer."""
    fields = {"content-type": content_type, "content-length": str(len(body)), **(headers or {})}
    encoded = [(name.encode(), value.encode()) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": status.value, "headers": encoded})
    await send({"type": "http.response.body", "body": body})
