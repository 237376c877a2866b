"""uvicorn, as the API needs it: no signal handlers, no log of requests, a bound on each connection, a certificate that
may be replaced."""

from __future__ import annotations

import asyncio
import ssl
from typing import Any, Final

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from bridge.api import export
from bridge.api.actions.bulk import PATHS as BULK_PATHS
from bridge.telemetry.heartbeats import Beat
from bridge.telemetry.http import Certificate

CONNECTIONS_MAX: Final = 64
CONNECTION_S: Final = 60.0
"""From its handshake to its end, whatever it is at but an export or a bulk action, which have limits of their own."""
IDLE_S: Final = 5
STOP_S: Final = 1
BEAT_TICKS: Final = 10
LINE_BYTES_MAX: Final = 16_384
"""Of a request's line and headers."""


class _Connection(H11Protocol):
    """One of at most CONNECTIONS_MAX, for at most CONNECTION_S
    and while an export or a bulk action is under way."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn has it
        super().connection_made(transport)
        if len(self.connections) > CONNECTIONS_MAX:
            transport.abort()
            return
        self._end = self.loop.call_later(CONNECTION_S, self._expire)

    def _expire(self) -> None:
        cycle: Any = self.cycle  # None before the first request, whatever its type says
        is_under_way = cycle is not None and not cycle.response_complete and not self.transport.is_closing()
        if is_under_way and cycle.scope["path"] in (export.PATH, *BULK_PATHS):
            self._end = self.loop.call_later(CONNECTION_S, self._expire)
        else:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if hasattr(self, "_end"):
            self._end.cancel()


class ApiServer(uvicorn.Server):
    """Set `should_exit`, and `run` returns within a second or so; any thread."""

    def __init__(self, app: ASGIApp, certificate: Certificate | None, beat: Beat) -> None:
        config = uvicorn.Config(
            app,
            http=_Connection,
            ws="none",
            lifespan="off",
            loop="asyncio",
            log_config=None,
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=IDLE_S,
            timeout_graceful_shutdown=STOP_S,
            h11_max_incomplete_event_size=LINE_BYTES_MAX,
            ssl_context_factory=None if certificate is None else lambda *_: _following(certificate),
        )
        super().__init__(config)
        self._beat = beat

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second."""
        if counter % BEAT_TICKS == 0:
            self._beat()
        return await super().on_tick(counter)


def _following(certificate: Certificate) -> ssl.SSLContext:
    """A context that gives each new connection what the files hold now."""

    def choose(connection: Any, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = certificate.context()

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(*certificate.files)
    context.sni_callback = choose
    return context
