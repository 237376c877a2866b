"""bridge.api.listener: nothing is loaded before a client comes, and it ends with the bridge."""

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
from pathlib import Path

import pytest

from bridge.api.listener import Listener
from bridge.api.server import CONNECTIONS_MAX
from bridge.errors import EnvironmentFailure
from bridge.settings.model import Settings
from bridge.telemetry.http import Protection
from dev.harness.waiting import wait_until
from tests.paths import ROOT
from tests.system.secure import Authority
from tests.unit.bridge.api.fakes import Bridge, Store, message


def listener(bridge: Bridge | None = None, protection: Protection | None = None) -> Listener:
    return Listener(
        "127.0.0.1", 0, source=bridge or Bridge(), protection=protection or Protection(), show_payloads=False
    )


def ask(port: int, path: str, context: ssl.SSLContext | None = None) -> tuple[int, str]:
    """Status and body."""
    if context is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    else:
        connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=10, context=context)
    try:
        connection.request("GET", path)
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
    assert not served.is_loaded
    for _ in range(3):
        status, body = ask(served.port, "/api/v1/count")
        assert (status, json.loads(body)) == (200, {"count": 1, "exact": True})
    assert served.is_loaded


def test_nothing_is_loaded_before_the_first_connection() -> None:
    """A bridge that is never asked does not pay for FastAPI; nor does any command."""
    code = (
        "import sys, bridge.runtime.app, bridge.api.listener\n"
        "print([name for name in ('fastapi', 'uvicorn', 'starlette') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


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


def test_a_port_that_is_taken_is_told() -> None:
    """With the key to change."""
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(EnvironmentFailure, match="cannot listen on"):
        Listener("127.0.0.1", taken.getsockname()[1], source=Bridge(), protection=Protection(), show_payloads=False)


def test_connections_that_say_nothing_are_bounded(served: Listener) -> None:
    """One too many is cut off; when others have gone there is an answer again."""
    assert ask(served.port, "/api/v1/count")[0] == 200
    silent = [socket.create_connection(("127.0.0.1", served.port), timeout=10) for _ in range(CONNECTIONS_MAX + 1)]
    assert silent[-1].recv(1) == b""
    for each in silent:
        each.close()

    def is_answered() -> bool:
        try:
            return ask(served.port, "/api/v1/count")[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    wait_until(is_answered, 10, lambda: "an answer")


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
