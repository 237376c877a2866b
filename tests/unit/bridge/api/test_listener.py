"""bridge.api.listener: FastAPI is loaded for the first request, and the listener ends with the bridge."""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from select import select
from typing import Any

import pytest
from starlette.types import ASGIApp

from bridge.api.application import application
from bridge.api.listener import LIMITS, Listener
from bridge.http.management import ManagementServer
from bridge.http.protection import Protection
from bridge.settings.model import Settings
from bridge.telemetry.health import Health, Phase
from bridge.telemetry.metrics import Metrics
from dev.harness.pace import scaled
from dev.harness.waiting import wait_until
from tests.paths import ROOT
from tests.system.secure import Authority
from tests.unit.bridge.api.fakes import Bridge, Store, message

TOKEN = "0123456789abcdef"


def listener(
    bridge: Bridge | None = None, protection: Protection | None = None, *, is_writable: bool = False
) -> Listener:
    return Listener(
        "127.0.0.1", 0, source=bridge or Bridge(), protection=protection or Protection(), show_payloads=False,
        is_writable=is_writable,
    )  # fmt: skip


def ask(port: int, path: str, context: ssl.SSLContext | None = None, token: str | None = None) -> tuple[int, str]:
    """Status and body."""
    if context is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=scaled(10))
    else:
        connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=scaled(10), context=context)
    try:
        connection.request("GET", path, headers={} if token is None else {"Authorization": f"Bearer {token}"})
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


@pytest.fixture
def served() -> Iterator[Listener]:
    with listener(Bridge(Store(message(1)))) as serving:
        yield serving


def test_it_answers(served: Listener) -> None:
    """The first connection is answered, and those after it."""
    for _ in range(3):
        status, body = ask(served.port, "/api/v1/count")
        assert (status, json.loads(body)) == (200, {"count": 1, "exact": True})


def test_nothing_is_loaded_before_the_first_connection() -> None:
    """A bridge without a request to its API does not load FastAPI, and no command loads it or uvicorn."""
    code = (
        "import sys\n"
        "loaded = lambda *names: [name for name in names if name in sys.modules]\n"
        "import bridge.commands.cli\n"
        "commands = loaded('fastapi', 'starlette', 'uvicorn', 'httpx', 'pyarrow')\n"
        "import bridge.runtime.app\n"
        "print(commands + loaded('fastapi', 'starlette', 'httpx'))"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.fault("a failure to load the API")
def test_a_failure_to_load_is_not_the_end(monkeypatch: pytest.MonkeyPatch, served: Listener) -> None:
    """The API answers though its first load fails: only the first client has no answer."""
    failures = [RuntimeError("an import fails")]

    def fails_once(*arguments: Any, **named: Any) -> ASGIApp:
        if failures:
            raise failures.pop()
        return application(*arguments, **named)

    monkeypatch.setattr("bridge.api.application.application", fails_once)
    assert [ask(served.port, "/api/v1/count")[0] for _ in range(2)] == [503, 200]


def test_it_ends_before_and_after_a_first_client(served: Listener) -> None:
    """Its thread is gone, also where a connection is open."""
    idle = listener()
    with idle:
        assert "api" in {each.name for each in threading.enumerate()}
    assert not idle._thread.is_alive()
    assert ask(served.port, "/api/v1/count")[0] == 200
    with socket.create_connection(("127.0.0.1", served.port)):
        served.__exit__()
        assert not served._thread.is_alive()


SILENT = 3 * LIMITS.connections_max


@contextmanager
def crowd(port: int, count: int = SILENT) -> Iterator[list[socket.socket]]:
    """Connections that say nothing."""
    with ExitStack() as stack:
        yield [stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10)) for _ in range(count)]


@pytest.mark.fault("idle connections without credentials on the API's port")
def test_connections_that_say_nothing_keep_nobody_from_an_answer() -> None:
    """Each request is answered, before, during and after any number of idle connections."""
    with listener(protection=Protection(token=TOKEN)) as served:
        for _ in range(3):
            with crowd(served.port):
                assert ask(served.port, "/api/v1/count")[0] == 401
                assert ask(served.port, "/api/v1/count", token=TOKEN)[0] == 200


def test_an_address_has_a_limit_of_its_own(served: Listener) -> None:
    """Connections of one address displace each other, and leave room for others."""
    assert ask(served.port, "/api/v1/count")[0] == 200
    with crowd(served.port) as silent:

        def are_open() -> int:
            return len(silent) - sum(each in select(silent, [], [], 0)[0] for each in silent)

        wait_until(lambda: are_open() <= LIMITS.place_max, 10, lambda: f"{are_open()} are open")


@pytest.mark.fault("a reverse proxy, behind which all users have one address")
def test_who_has_shown_credentials_is_not_counted_by_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections with credentials do not count towards the limit of one address."""
    monkeypatch.setattr("bridge.api.listener.LIMITS", replace(LIMITS, place_max=2))
    monkeypatch.setattr("bridge.http.server.IDLE_S", 600)
    with listener(protection=Protection(token=TOKEN)) as served, ExitStack() as stack:
        kept = []
        for _ in range(5):
            kept.append(http.client.HTTPConnection("127.0.0.1", served.port, timeout=10))
            stack.callback(kept[-1].close)
        for each in (*kept, *kept):
            each.request("GET", "/api/v1/count", headers={"Authorization": f"Bearer {TOKEN}"})
            each.auto_open = 0  # the second request needs the same connection
            answer = each.getresponse()
            assert (answer.status, answer.read()[:1]) == (200, b"{")


GET = b"GET /api/v1/count HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = (
    b"POST /api/v1/messages/cancel HTTP/1.1\r\nHost: localhost\r\nX-Delay-Bridge-Action: 1\r\n"
    b"Content-Type: application/json\r\nContent-Length: 60000\r\n\r\n{"
)


@pytest.mark.fault("a request that comes byte by byte")
@pytest.mark.parametrize(("first", "slowly"), [(b"", GET[:-20]), (GET, GET[:-20]), (b"", POST), (GET, POST)])
def test_a_request_has_a_time_limit(first: bytes, slowly: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit holds for the head and the body of every request of a connection, at any rate of bytes."""
    monkeypatch.setattr("bridge.http.server.HEAD_S", 0.5)
    with (
        listener(is_writable=True) as served,
        socket.create_connection(("127.0.0.1", served.port), timeout=10) as slow,
    ):
        if first:
            slow.sendall(first)
            assert slow.recv(65_536).startswith(b"HTTP/1.1 200")
        slow.sendall(slowly)

        def is_cut_off() -> bool:
            try:
                slow.sendall(b"x")
            except OSError:
                return True
            return False

        wait_until(is_cut_off, 10, "it is cut off")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl on this machine")
def test_connections_without_a_handshake_keep_nobody_from_an_answer(tmp_path: Path) -> None:
    """They count from their first byte on, not from the end of the handshake."""
    authority = Authority(tmp_path / "ca")
    key, chain = authority.issue("bridge")
    settings = Settings.of({"http": {"certificate_file": str(chain), "key_file": str(key)}}).http
    trust = ssl.create_default_context(cafile=str(authority.certificate))
    with listener(protection=Protection.of(settings)) as served, crowd(served.port) as silent:
        assert ask(served.port, "/api/v1/count", trust)[0] == 200
        wait_until(lambda: silent[0] in select(silent[:1], [], [], 0)[0], 10, "the oldest is cut off")


def test_a_request_that_is_under_way_is_not_displaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """By any number of connections that say nothing."""
    bridge, gate, asked = Bridge(), threading.Event(), threading.Event()

    def overview() -> None:
        asked.set()
        gate.wait(30)

    monkeypatch.setattr(bridge, "overview", overview)
    with listener(bridge) as served, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, served.port, "/api/v1/summary")
        assert asked.wait(30)
        with crowd(served.port) as silent:
            wait_until(lambda: silent[0] in select(silent[:1], [], [], 0)[0], 10, "the oldest is cut off")
            gate.set()
            assert answer.result(30)[0] == 503


def test_the_certificate_is_the_one_of_the_metrics(tmp_path: Path) -> None:
    """TLS by the same files; one that is replaced serves the next connection."""
    chain, key = tmp_path / "chain.pem", tmp_path / "key.pem"

    def install(name: str) -> ssl.SSLContext:
        authority = Authority(tmp_path / name)
        for source, target in zip(authority.issue("bridge"), (key, chain), strict=True):
            shutil.copy(source, target)
        return ssl.create_default_context(cafile=str(authority.certificate))

    trust = install("first")
    settings = Settings.of({"http": {"certificate_file": str(chain), "key_file": str(key)}}).http
    with listener(protection=Protection.of(settings)) as served:
        assert ask(served.port, "/api/v1/count", trust)[0] == 200
        trust = install("second")
        assert ask(served.port, "/api/v1/count", trust)[0] == 200


@pytest.mark.fault("a blocked event loop of the API")
def test_a_blocked_loop_of_the_api_does_not_delay_the_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probes and the metrics are answered while the API's event loop is blocked."""
    bridge, gate, blocked = Bridge(None), threading.Event(), threading.Event()
    phase = bridge.phase

    def block() -> Phase:
        blocked.set()
        assert gate.wait(60)
        return phase()

    monkeypatch.setattr(bridge, "phase", block)
    with (
        listener(bridge) as api,
        ManagementServer("127.0.0.1", 0, health=Health(), registry=Metrics().registry) as management,
        ThreadPoolExecutor(1) as pool,
    ):
        answer = pool.submit(ask, api.port, "/api/v1/count")
        try:
            assert blocked.wait(30)
            asked = [ask(management.port, path)[0] for path in ("/livez", "/readyz", "/metrics")]
            assert asked == [200, 503, 200] and not answer.done()
        finally:
            gate.set()
        assert answer.result(30)[0] == 503
