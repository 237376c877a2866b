"""The API's listener. FastAPI is loaded for the first request: the API of most bridges has no client, and the library
costs memory and time."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

import structlog

from bridge.api.source import BULK, EXPORT, Source
from bridge.http.listening import listening
from bridge.http.protection import Protection
from bridge.http.server import ConnectionLimits, HttpListener, send_answer
from bridge.telemetry.heartbeats import Beat, unwatched

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

LIMITS: Final = ConnectionLimits(
    connections_max=64,
    place_max=24,  # fewer than the requests that run at a time
    connection_s=60.0,
    long_paths=(EXPORT, *BULK),
)

log = structlog.get_logger("bridge.api.listener")


class Listener(HttpListener):
    """Serves the API inside `with`. If its thread ends, its beats stop and /livez names it; delivery goes on."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        source: Source,
        protection: Protection,
        show_payloads: bool,
        is_writable: bool = False,
        peers: Sequence[str] = (),
        instance: str = "",
        base_path: str = "",
        beat: Beat = unwatched,
    ) -> None:
        """For port 0 the system chooses. Raises EnvironmentFailure if it cannot listen on the port."""
        listener = listening(host, port, "http.api_port")
        make = partial(
            _application, source, protection, names=(host, socket.gethostname()), show_payloads=show_payloads,
            is_writable=is_writable, peers=peers, instance=instance, base_path=base_path,
        )  # fmt: skip
        super().__init__(_Late(make), listener, "api", LIMITS, protection.certificate, beat)


class _Late:
    """An application that is made for its first request."""

    def __init__(self, make: Callable[[], ASGIApp]) -> None:
        self._make = make
        self._app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer. A failure, for instance of an import, costs one client its answer."""
        try:
            app = self._app = self._app or self._make()
        except Exception:
            log.exception("api-failed")
            text = b"The API could not be loaded: the log of the bridge says why. Try again.\n"
            await send_answer(send, HTTPStatus.SERVICE_UNAVAILABLE, "text/plain; charset=utf-8", text)
        else:
            await app(scope, receive, send)


def _application(*arguments: Any, **named: Any) -> ASGIApp:
    from bridge.api.application import application

    return application(*arguments, **named)
