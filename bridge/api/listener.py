"""The API's listener: a thread that waits for the first connection, and only then loads FastAPI and uvicorn.

The API of most bridges has no client, and the two libraries cost memory and time. uvicorn runs on this thread, and so
installs no signal handlers.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from selectors import EVENT_READ, DefaultSelector
from typing import TYPE_CHECKING, Final, Self

import structlog

from bridge.api.source import Source
from bridge.errors import EnvironmentFailure
from bridge.telemetry.heartbeats import Beat, unwatched
from bridge.telemetry.http import Protection
from bridge.telemetry.listening import failure_reason, hint_for, host_and_port, listening
from bridge.telemetry.logins import Logins

if TYPE_CHECKING:
    from bridge.api.server import ApiServer

BEAT_S: Final = 5.0
"""The interval of the thread's beats before the first client."""
STOP_S: Final = 2.0
LOADS_MAX: Final = 3
"""The attempts to load the libraries and to serve, one for each client that comes."""

log = structlog.get_logger("bridge.api.listener")


class Listener:
    """Serves the API inside `with`. For port 0 the system chooses; `port` is the one in use."""

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
        logins: Logins | None = None,
        base_path: str = "",
        beat: Beat = unwatched,
    ) -> None:
        """Raises EnvironmentFailure if it cannot listen on the port. If the thread ends, its beats stop and /livez
        names it; delivery goes on."""
        self._source, self._protection = source, protection
        self._show_payloads, self._is_writable = show_payloads, is_writable
        self._peers, self._instance, self._logins = peers, instance, logins
        self._base_path = base_path
        self._host, self._beat = host, beat
        self._stopping = False
        self._server: ApiServer | None = None
        try:
            self._socket = listening(host, port)
        except OSError as error:
            raise EnvironmentFailure(
                f"cannot listen on {host_and_port(host, port)}: {failure_reason(error)}",
                hint=hint_for(error, "http.api_port"),
                code="DB-3035",
            ) from None
        self._socket.setblocking(False)
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="api", daemon=True)

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    @property
    def is_loaded(self) -> bool:
        """Whether a client has come."""
        return self._server is not None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop, within `STOP_S`: requests under way are cut off."""
        self._stopping = True
        if self._server is not None:
            self._server.should_exit = True
        with suppress(OSError):
            self._wake.send(b".")
        self._thread.join(STOP_S)
        for opened in (self._socket, self._wake, self._woken):
            opened.close()

    def _run(self) -> None:
        """Load and serve; a failure, for instance of an import, costs one client its answer."""
        for left in reversed(range(LOADS_MAX)):
            try:
                self._wait_for_a_client()
                if not self._stopping:
                    self._serve()
            except Exception:
                if left:
                    log.exception("api-failed")
                else:
                    log.exception("api-ended")
            else:
                return

    def _wait_for_a_client(self) -> None:
        with DefaultSelector() as selector:
            selector.register(self._socket, EVENT_READ)
            selector.register(self._woken, EVENT_READ)
            self._beat()
            while not selector.select(BEAT_S):
                self._beat()

    def _serve(self) -> None:
        from bridge.api.application import application
        from bridge.api.server import ApiServer

        names = (self._host, socket.gethostname())
        app = application(
            self._source, self._protection, names=names,
            show_payloads=self._show_payloads, is_writable=self._is_writable,
            peers=self._peers, instance=self._instance, logins=self._logins, base_path=self._base_path,
        )  # fmt: skip
        self._server = ApiServer(app, self._protection.certificate, self._beat)
        self._server.should_exit = self._stopping  # `__exit__` may have run just before
        self._server.run([self._socket])
