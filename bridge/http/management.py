"""The management port: /livez, /readyz and /metrics, without secrets.

The password guards only /metrics: probes cannot send one, and their answers need no guard. The metrics are read on
threads of their own, since they wait for locks of the store: a hanging scrape does not delay a probe.
"""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any, Final

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from bridge.http.listening import listening
from bridge.http.protection import WHO, Protection
from bridge.http.server import ConnectionLimits, HttpListener, send_answer
from bridge.http.workers import Unavailable, Workers
from bridge.telemetry.health import Health

SCRAPES_MAX: Final = 4
LIMITS: Final = ConnectionLimits(connections_max=32, place_max=16, connection_s=10.0)
"""More connections on a management port are a mistake or an attack."""
TEXT: Final = "text/plain; charset=utf-8"

Answer = tuple[HTTPStatus, str, bytes]


class ManagementServer(HttpListener):
    """The server of the management port."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        health: Health,
        registry: CollectorRegistry,
        protection: Protection | None = None,
    ) -> None:
        """For port 0 the system chooses. Raises EnvironmentFailure if it cannot listen on the port."""
        self._health, self._registry, self._protection = health, registry, protection or Protection()
        self._workers = Workers(SCRAPES_MAX, "scrapes")
        listener = listening(host, port, "http.port")
        super().__init__(self._serve, listener, "http", LIMITS, self._protection.certificate)

    async def _serve(self, scope: Any, _receive: Any, send: Any) -> None:
        """The ASGI application. A connection ends with its answer."""
        if scope["type"] != "http":
            return
        status, content_type, body = await self._answer(scope)
        headers = {"cache-control": "no-store", "connection": "close"}
        if status is HTTPStatus.UNAUTHORIZED:
            headers["www-authenticate"] = 'Basic realm="metrics"'
        await send_answer(send, status, content_type, body, headers)

    async def _answer(self, scope: Any) -> Answer:
        if scope["method"] not in ("GET", "HEAD"):
            return HTTPStatus.NOT_IMPLEMENTED, TEXT, b"use GET\n"
        path, scope["state"][WHO] = scope["path"], ""
        if path == "/metrics" and self._protection.login(scope) is None:
            return HTTPStatus.UNAUTHORIZED, TEXT, b"authentication required\n"
        match path:
            case "/livez":
                problems = self._health.problems()
                return _json({"alive": not problems, "reasons": problems}, ok=not problems)
            case "/readyz":
                phase = self._health.phase
                progress = None if phase.progress is None else round(phase.progress, 3)
                optional = {"progress": progress, "reader": phase.reader}
                body = {"ready": phase.ready, "phase": phase.name, "reasons": phase.reasons}
                return _json(body | {name: v for name, v in optional.items() if v is not None}, ok=phase.ready)
            case "/metrics":
                return await self._metrics(dict(scope["headers"]).get(b"accept", b"").decode("latin-1"))
        return HTTPStatus.NOT_FOUND, TEXT, b"try /livez, /readyz or /metrics\n"

    async def _metrics(self, accept: str) -> Answer:
        encode, content_type = choose_encoder(accept)
        try:
            body = await self._workers.run(lambda: encode(self._registry), LIMITS.connection_s)
        except Unavailable as error:
            return HTTPStatus.SERVICE_UNAVAILABLE, TEXT, f"{error}\n".encode()
        return HTTPStatus.OK, content_type, body


def _json(body: object, *, ok: bool) -> Answer:
    status = HTTPStatus.OK if ok else HTTPStatus.SERVICE_UNAVAILABLE
    return status, "application/json", json.dumps(body).encode() + b"\n"
