"""The management port: /livez, /readyz and /metrics, without secrets. TLS and a password are optional, both from files.

New connections get a replaced certificate without a restart. The password guards only /metrics: probes cannot send one,
and their answers need no guard.

Slow clients cannot keep probes from an answer: a connection has a few seconds for the head of its request, and a few
more from its handshake to the last byte. If there are too many, admission.py chooses the one to end.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import json
import re
import socket
import ssl
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final, Self

import structlog
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from bridge.errors import ConfigurationError, EnvironmentFailure
from bridge.settings.model import HttpSettings
from bridge.settings.secrets import read_secret_file
from bridge.telemetry.admission import HEAD_S, Guest, Standing, counted_place, one_to_go
from bridge.telemetry.health import Health
from bridge.telemetry.listening import failure_reason, hint_for, host_and_port, listening
from bridge.telemetry.logins import Logins
from timerstore.clock import Clock, SystemClock

log = structlog.get_logger("bridge.telemetry.http")

TOKEN: Final = "token"
"""The name of a client with the token, which has no name of its own."""
TOKEN_PATTERN: Final = "[A-Za-z0-9._~+/=-]{16,1024}"
CONNECTION_S: Final = 10.0
CONNECTIONS_MAX: Final = 32  # more on a management port are a mistake or an attack
PLACE_MAX: Final = 16
"""Maximum number of connections of one address."""
THREADS_MAX: Final = 4 * CONNECTIONS_MAX
"""Maximum number of threads of requests. A thread ends soon after its connection, unless it hangs with the store."""
STOP_LOOK_S: Final = 0.25
"""The interval of the look for a stop: the end of the process waits for half of it on average."""


class Certificate:
    """Certificate chain and key, PEM files. `context` follows their changes."""

    def __init__(self, chain: Path, key: Path) -> None:
        self._chain = chain
        self._key = key
        self._lock = threading.Lock()
        try:
            self._load()
        except (OSError, ssl.SSLError) as error:
            raise ConfigurationError(
                f"http.certificate_file, http.key_file: unusable: {error.strerror or 'not PEM'}",
                hint="Give a PEM chain, and its key without a password.",
                certificate=chain,
                key=key,
                code="DB-2025",
            ) from None

    @property
    def files(self) -> tuple[Path, Path]:
        """Chain and key."""
        return self._chain, self._key

    def context(self) -> ssl.SSLContext:
        """The context of one new connection. Half-replaced files leave the old certificate in force."""
        with self._lock:
            try:
                if self._loaded != self._changed():
                    self._load()
                    log.info("certificate-replaced", certificate=str(self._chain))
            except (OSError, ssl.SSLError) as error:
                log.warning("certificate-not-replaced", reason=str(error))
            return self._context

    def _load(self) -> None:
        changed = self._changed()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(self._chain, self._key)
        self._loaded, self._context = changed, context

    def _changed(self) -> tuple[int, int]:
        return self._chain.stat().st_mtime_ns, self._key.stat().st_mtime_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Protection:
    """The certificate and the credentials of a port; by default none."""

    certificate: Certificate | None = None
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)

    @classmethod
    def of(cls, settings: HttpSettings) -> Protection:
        """The configured protection. Raises ConfigurationError for unusable files."""
        certificate, password, token = None, None, None
        if settings.certificate_file is not None and settings.key_file is not None:
            certificate = Certificate(settings.certificate_file, settings.key_file)
        if settings.password_file is not None:
            password = read_secret_file(str(settings.password_file), "http.password_file")
        if settings.token_file is not None:
            token = read_secret_file(str(settings.token_file), "http.token_file")
            if not re.fullmatch(TOKEN_PATTERN, token):
                raise ConfigurationError(
                    "http.token_file: no token in it", hint="Write 16 to 1,024 letters and digits.", code="DB-2028"
                )
        return cls(certificate=certificate, user=settings.user, password=password, token=token)

    @property
    def is_open(self) -> bool:
        """Whether the port needs no credentials."""
        return self.user is None and self.token is None

    def who(self, authorization: str | None) -> str | None:
        """The client with this Authorization header: the user, `TOKEN`, or "" on an open port; None: a stranger."""
        if self.is_open:
            return ""
        scheme, _, credentials = (authorization or "").partition(" ")
        # Compared in constant time: the time of an answer must not reveal the correct part of a guess.
        if scheme.lower() == "bearer" and self.token is not None:
            return TOKEN if hmac.compare_digest(credentials.encode("utf-8", "replace"), self.token.encode()) else None
        try:
            given = base64.b64decode(credentials, validate=True)
        except (binascii.Error, ValueError):
            return None
        is_user = scheme.lower() == "basic" and self.user is not None and self.password is not None
        return self.user if is_user and hmac.compare_digest(given, f"{self.user}:{self.password}".encode()) else None


class ManagementServer(ThreadingHTTPServer):
    """Serves the probes and metrics on its own threads. For port 0 the system chooses; `port` is the one in use."""

    daemon_threads = True
    block_on_close = False  # a client that keeps its connection open must not hold up the stop

    def __init__(
        self,
        host: str,
        port: int,
        *,
        health: Health,
        registry: CollectorRegistry,
        protection: Protection | None = None,
        logins: Logins | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.health = health
        self.registry = registry
        self.protection = protection or Protection()
        self.logins = logins or Logins()
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._open: dict[socket.socket, Guest] = {}
        self._running = 0
        self._mine = threading.local()
        try:
            listener = listening(host, port)
        except OSError as error:
            raise EnvironmentFailure(
                f"cannot listen on {host_and_port(host, port)}: {failure_reason(error)}",
                hint=hint_for(error, "http.port"),
                code="DB-3029",
            ) from None
        super().__init__((host, port), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.server_address = listener.getsockname()
        self._thread = threading.Thread(target=self.serve_forever, args=(STOP_LOOK_S,), name="http", daemon=True)

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def start(self) -> Self:
        self._thread.start()
        return self

    def stop(self) -> None:
        """Stop serving and free the port. Requests under way are cut off."""
        if self._thread.is_alive():
            self.shutdown()
            self._thread.join()
        self.server_close()
        for connection in list(self._open):
            self._cut_off(connection)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    # ---- by the base class

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a new connection, in place of another one if there are too many."""
        if self._running >= THREADS_MAX:
            self.shutdown_request(request)
            return
        connection = request.dup()  # the same connection: TLS makes another socket of `request`
        with self._lock:
            self._running += 1
            self._open[connection] = Guest(place=counted_place(client_address[0]), since_s=self._clock.monotonic_s())
            gone = one_to_go(self._open, connection, guests_max=CONNECTIONS_MAX, place_max=PLACE_MAX)
        if gone is not None:
            self._cut_off(gone)
        work = (connection, request, client_address)
        try:
            threading.Thread(target=self._process, args=work, name="http-request", daemon=True).start()
        except RuntimeError:  # the machine has no more threads; the base class ends the connection
            self._forget(connection)
            raise

    def service_actions(self) -> None:
        """End the connections that are older than CONNECTION_S, or older than HEAD_S without a valid request. The
        accepting thread calls it at least twice a second."""
        now_s = self._clock.monotonic_s()
        with self._lock:
            old = [
                connection
                for connection, guest in self._open.items()
                if now_s - guest.since_s >= (HEAD_S if guest.standing is Standing.STRANGER else CONNECTION_S)
            ]
        for connection in old:
            self._cut_off(connection)

    def heard(self) -> None:
        """A request's own thread calls it after a valid head."""
        with self._lock:
            guest = self._open.get(self._mine.connection)
            if guest is not None:
                guest.standing = Standing.IDLE

    def _process(self, connection: socket.socket, request: Any, client_address: Any) -> None:
        self._mine.connection = connection
        try:
            self.process_request_thread(request, client_address)
        finally:
            self._forget(connection)

    def _forget(self, connection: socket.socket) -> None:
        self._cut_off(connection)
        with self._lock:
            self._running -= 1

    def _cut_off(self, connection: socket.socket) -> None:
        """End a connection, and its thread's wait on it."""
        with self._lock:
            if self._open.pop(connection, None) is None:
                return
        with suppress(OSError):  # the client may have left
            connection.shutdown(socket.SHUT_RDWR)
        connection.close()

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Handshake and answer, on the request's own thread: a client without a handshake holds up no other."""
        if self.protection.certificate is None:
            super().finish_request(request, client_address)
            return
        with self.protection.certificate.context().wrap_socket(request, server_side=True) as secured:
            super().finish_request(secured, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 - the base class's signature
        if not isinstance(sys.exception(), OSError):  # an OSError: the client has left, or was cut off
            log.debug("http-request-failed", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: ManagementServer
    server_version = "delay-bridge"
    sys_version = ""

    def do_GET(self) -> None:
        is_guarded = self.path.partition("?")[0] == "/metrics"
        credentials = self.headers.get("Authorization")
        is_known = not is_guarded or self.server.protection.who(credentials) is not None
        if is_known:
            self.server.heard()
        elif credentials is not None:
            self.server.logins.failed(self.client_address[0], self.path)
        match self.path.partition("?")[0]:
            case "/livez":
                problems = self.server.health.problems()
                status = HTTPStatus.SERVICE_UNAVAILABLE if problems else HTTPStatus.OK
                self._json(status, {"alive": not problems, "reasons": problems})
            case "/readyz":
                phase = self.server.health.phase
                status = HTTPStatus.OK if phase.ready else HTTPStatus.SERVICE_UNAVAILABLE
                progress = None if phase.progress is None else round(phase.progress, 3)
                body = {"ready": phase.ready, "phase": phase.name, "reasons": phase.reasons}
                optional = {"progress": progress, "reader": phase.reader}
                self._json(status, body | {name: value for name, value in optional.items() if value is not None})
            case "/metrics" if is_known:
                encode, content_type = choose_encoder(self.headers.get("Accept", ""))
                self._answer(HTTPStatus.OK, content_type, encode(self.server.registry))
            case "/metrics":
                self._answer(HTTPStatus.UNAUTHORIZED, "text/plain; charset=utf-8", b"authentication required\n")
            case _:
                self._answer(HTTPStatus.NOT_FOUND, "text/plain; charset=utf-8", b"try /livez, /readyz or /metrics\n")

    do_HEAD = do_GET

    def _json(self, status: HTTPStatus, body: object) -> None:
        self._answer(status, "application/json", json.dumps(body).encode() + b"\n")

    def _answer(self, status: HTTPStatus, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        if status is HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", 'Basic realm="metrics"')
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not logged: probes come every few seconds."""
