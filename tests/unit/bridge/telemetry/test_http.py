"""bridge.telemetry.http: probes that tell starting from dead, and metrics, on one port."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import shutil
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, Self
from unittest import mock

import pytest
from prometheus_client.parser import text_string_to_metric_families

import bridge.telemetry.http
from bridge.errors import ConfigurationError, EnvironmentFailure
from bridge.settings.model import Settings
from bridge.telemetry.admission import HEAD_S
from bridge.telemetry.counts import Counts
from bridge.telemetry.health import Health
from bridge.telemetry.http import (
    CONNECTION_S,
    CONNECTIONS_MAX,
    PLACE_MAX,
    THREADS_MAX,
    ManagementServer,
    Protection,
)
from bridge.telemetry.metrics import Metrics, StoreSnapshot
from dev.harness.waiting import wait_until
from tests.manual_clock import ManualClock
from tests.system.secure import Authority
from timerstore.clock import SystemClock

SYSTEM: Final = SystemClock()
FEW_THREADS: Final = 40
PROBE_S_MAX: Final = 1.0
"""Kubernetes waits so long for a probe by default."""
ROUNDS_MIN: Final = 4


def ask(port: int, path: str, method: str = "GET", **headers: str) -> tuple[int, str, str]:
    """Status, content type and body."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        return response.status, response.getheader("Content-Type") or "", response.read().decode()
    finally:
        connection.close()


class Bench:
    """A server, what it reads, and a client."""

    def __init__(self) -> None:
        self.dead: list[str] = []
        self.health = Health(lambda: self.dead)
        self.snapshot: Callable[[], StoreSnapshot] = StoreSnapshot
        self.metrics = Metrics(lambda: self.snapshot())
        self.clock = ManualClock()
        self.server = ManagementServer(
            "127.0.0.1", 0, health=self.health, registry=self.metrics.registry, clock=self.clock
        )

    def get(self, path: str, method: str = "GET", **headers: str) -> tuple[int, str, str]:
        return ask(self.server.port, path, method, **headers)

    def json(self, path: str) -> tuple[int, Any]:
        status, content_type, body = self.get(path)
        assert content_type == "application/json"
        return status, json.loads(body)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    with bench.server:
        yield bench


@pytest.fixture
def few_threads(monkeypatch: pytest.MonkeyPatch) -> int:
    """The limit of threads, lower than it is: the tests reach it sooner."""
    assert CONNECTIONS_MAX < FEW_THREADS < THREADS_MAX
    monkeypatch.setattr(bridge.telemetry.http, "THREADS_MAX", FEW_THREADS)
    return FEW_THREADS


def requests_under_way() -> int:
    """Threads that serve a connection."""
    return sum(thread.name == "http-request" for thread in threading.enumerate())


def test_readyz_says_phase_progress_and_reasons(bench: Bench) -> None:
    """An operator who asks why nothing is delivered yet gets the answer from the probe itself."""
    assert bench.json("/readyz") == (503, {"ready": False, "phase": "starting", "reasons": ["starting"]})
    bench.health.enter("recovering", reasons=("reading delay[0]",), progress=0.25)
    status, body = bench.json("/readyz")
    assert (status, body["phase"], body["progress"], body["reasons"]) == (503, "recovering", 0.25, ["reading delay[0]"])
    bench.health.enter("delivering", ready=True)
    assert bench.json("/readyz") == (200, {"ready": True, "phase": "delivering", "reasons": []})
    bench.health.enter("running", ready=True, reader="plain")
    assert bench.json("/readyz") == (200, {"ready": True, "phase": "running", "reasons": [], "reader": "plain"})


def test_livez_fails_only_when_a_restart_helps(bench: Bench) -> None:
    """Not ready is not dead: a long rebuild must not be killed."""
    assert bench.json("/livez") == (200, {"alive": True, "reasons": []})
    bench.dead = ["dispatcher has died"]
    assert bench.json("/livez") == (503, {"alive": False, "reasons": ["dispatcher has died"]})


def test_metrics_are_those_of_our_registry(bench: Bench) -> None:
    """Text format, parsable, and OpenMetrics for those who ask."""
    bench.metrics.committed(Counts(delivered=Counter(t=3)), 0.1)
    status, content_type, body = bench.get("/metrics?x=1")
    assert status == 200
    assert content_type.startswith("text/plain")
    assert "delay_bridge_records_delivered" in {f.name for f in text_string_to_metric_families(body)}
    assert "openmetrics" in bench.get("/metrics", Accept="application/openmetrics-text; version=1.0.0")[1]


def test_other_paths_and_methods(bench: Bench) -> None:
    """A wrong path names the right ones; HEAD has no body; nothing can be written."""
    assert bench.get("/")[0] == 404
    assert bench.get("/livez", "HEAD")[::2] == (200, "")
    assert bench.get("/livez", "POST")[0] == 501


def test_a_port_that_is_taken_is_an_error_with_a_remedy(bench: Bench) -> None:
    """One clear line, not a traceback."""
    with pytest.raises(EnvironmentFailure, match=r"cannot listen on .*http\.port"):
        ManagementServer("127.0.0.1", bench.server.port, health=bench.health, registry=bench.metrics.registry)


SLOW: Final = 200
DRIP_S: Final = 0.2
"""Each of them sends a byte that often: never silent for long, never done."""


class Dripping:
    """Clients that send a request byte by byte, and connect again when they are cut off."""

    def __init__(self, port: int, count: int) -> None:
        self._address = ("127.0.0.1", port)
        self._stopped = threading.Event()
        self._open = [self._connect() for _ in range(count)]
        self.cut_off = 0
        self._thread = threading.Thread(target=self._drip, daemon=True)
        self._thread.start()

    def _connect(self) -> socket.socket:
        connection = socket.create_connection(self._address, timeout=10)
        connection.sendall(b"GET /livez HTTP/1.0\r\nX: ")
        return connection

    def _drip(self) -> None:
        while not self._stopped.wait(DRIP_S):
            for i, connection in enumerate(self._open):
                try:
                    connection.sendall(b"x")
                except OSError:
                    connection.close()
                    self.cut_off += 1
                    self._open[i] = self._connect()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join(30)
        for connection in self._open:
            connection.close()


def test_two_hundred_slow_connections_do_not_keep_the_probes_from_an_answer(bench: Bench) -> None:
    """Each probe is answered within a second while they drip, and come back when they are cut off."""
    with Dripping(bench.server.port, SLOW) as dripping:
        rounds = 0
        while rounds < ROUNDS_MIN or not dripping.cut_off:
            asked_s = SYSTEM.monotonic_s()
            assert bench.json("/livez") == (200, {"alive": True, "reasons": []})
            assert SYSTEM.monotonic_s() - asked_s < PROBE_S_MAX
            rounds += 1
        assert sum(thread.name == "http-request" for thread in threading.enumerate()) <= 2 * CONNECTIONS_MAX


def test_a_connection_has_one_deadline_however_often_it_sends(bench: Bench) -> None:
    """Bytes that keep coming do not keep it open: what counts is its age. The next one is served."""
    slow = socket.create_connection(("127.0.0.1", bench.server.port), timeout=5)
    slow.sendall(b"GET /livez HTTP/1.0\r\n")

    def is_cut_off() -> bool:
        try:
            slow.sendall(b"X")
        except OSError:
            return True
        return False

    assert bench.json("/livez")[0] == 200
    assert not is_cut_off()
    bench.clock.advance(int(1_000 * CONNECTION_S))
    wait_until(is_cut_off, 10, "it is cut off")
    slow.close()
    assert bench.json("/livez")[0] == 200


def places(server: ManagementServer) -> set[tuple[str, int]]:
    """The addresses of the clients whose connections are open."""
    with server._lock:
        return {connection.getpeername() for connection in server._open}


@pytest.mark.fault("idle connections on the port of the probes")
def test_a_connection_without_a_request_goes_after_five_seconds(bench: Bench) -> None:
    """A connection without a request ends after five seconds, one with a request later; one address never has more than
    half of the connections."""
    gate, asked = threading.Event(), threading.Event()

    def snapshot() -> StoreSnapshot:
        asked.set()
        gate.wait(60)
        return StoreSnapshot()

    bench.snapshot = snapshot
    address = ("127.0.0.1", bench.server.port)
    with contextlib.ExitStack() as stack:
        stack.callback(gate.set)
        asking = stack.enter_context(socket.create_connection(address, timeout=10))
        asking.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert asked.wait(10)
        silent = [stack.enter_context(socket.create_connection(address, timeout=10)) for _ in range(CONNECTIONS_MAX)]
        last = silent[-1].getsockname()
        wait_until(lambda: last in places(bench.server), 10, "the last one is taken up")
        assert len(bench.server._open) == PLACE_MAX  # they displace each other
        bench.clock.advance(int(1_000 * HEAD_S))
        assert silent[-1].recv(1) == b""
        gate.set()
        assert asking.recv(100).startswith(b"HTTP/1.0 200")


def test_requests_that_hang_are_no_more_than_a_limit(bench: Bench, few_threads: int) -> None:
    """A scrape that waits for what does not come, again and again, takes a thread each; then no more are taken up, and
    the probe fails, as it should. When they come back, all is well."""
    gate = threading.Event()

    def snapshot() -> StoreSnapshot:
        gate.wait(60)
        return StoreSnapshot()

    bench.snapshot = snapshot
    address = ("127.0.0.1", bench.server.port)
    asking: list[socket.socket] = []

    def is_refused() -> bool:
        for _ in range(CONNECTIONS_MAX // 4):
            asking.append(socket.create_connection(address, timeout=10))
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                asking[-1].sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        asking[-1].settimeout(0.05)
        with contextlib.suppress(TimeoutError, ConnectionResetError):
            return asking[-1].recv(1) == b""
        return False

    wait_until(is_refused, 60, "no more are taken up")
    assert len(asking) > CONNECTIONS_MAX
    wait_until(lambda: requests_under_way() <= few_threads, 10, "threads whose connections were cut off have ended")
    gate.set()
    wait_until(lambda: is_answered(bench), 10, "it serves again")
    for each in asking:
        each.close()


def test_threads_that_cannot_be_started_are_not_counted_for_ever(
    bench: Bench, few_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine has none left for a while; when it has, probes are answered, and no connection is kept."""
    start = threading.Thread.start
    refused: list[str] = []

    def refuse(thread: threading.Thread) -> None:
        if thread.name != "http-request":
            start(thread)
            return
        refused.append(thread.name)
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        patch.setattr(bridge.telemetry.http, "log", mock.Mock())  # else most of the test's time goes into tracebacks
        for _ in range(few_threads):
            assert not is_answered(bench)
    assert len(refused) == few_threads and not bench.server._open
    assert is_answered(bench)


def is_answered(bench: Bench) -> bool:
    with contextlib.suppress(OSError, http.client.HTTPException):
        return bench.json("/livez")[0] == 200
    return False


def test_stop_frees_the_port() -> None:
    """A bridge that is started again finds its port."""
    bench = Bench()
    port = bench.server.start().port
    bench.server.stop()
    again = ManagementServer("127.0.0.1", port, health=bench.health, registry=bench.metrics.registry)
    again.stop()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl on this machine")
def test_metrics_can_be_guarded_and_certificates_replaced(tmp_path: Path) -> None:
    """TLS with a private authority; /metrics with a password, the probes without; a new certificate at once."""
    authority = Authority(tmp_path / "ca")
    key, chain = authority.issue("bridge")
    (tmp_path / "password").write_text("secret\n")
    names = {"certificate_file": chain, "key_file": key, "user": "scraper", "password_file": tmp_path / "password"}
    protection = Protection.of(Settings.of({"http": {name: str(value) for name, value in names.items()}}).http)
    assert "secret" not in repr(protection)
    context = ssl.create_default_context(cafile=str(authority.certificate))

    def get(path: str, **headers: str) -> tuple[int, int]:
        """Status, and the certificate's serial number."""
        connection = http.client.HTTPSConnection("127.0.0.1", server.port, timeout=5, context=context)
        try:
            connection.connect()
            certificate: Any = connection.sock.getpeercert()
            connection.request("GET", path, headers=headers)
            return connection.getresponse().status, int(str(certificate["serialNumber"]), 16)
        finally:
            connection.close()

    def basic(text: str) -> str:
        return "Basic " + base64.b64encode(text.encode()).decode()

    with ManagementServer(
        "127.0.0.1", 0, health=Health(), registry=Metrics().registry, protection=protection
    ) as server:
        assert get("/livez")[0] == 200
        assert get("/metrics")[0] == 401
        for wrong in (basic("scraper:Secret"), basic("scraper"), "Basic ???", "Bearer secret", ""):
            assert get("/metrics", Authorization=wrong)[0] == 401
        status, serial = get("/metrics", Authorization=basic("scraper:secret"))
        assert status == 200
        authority.issue("bridge")
        assert get("/livez")[1] != serial
        chain.write_text("being written")
        assert get("/livez")[0] == 200, "what is in force stays in force"
        with socket.create_connection(("127.0.0.1", server.port)) as plain:
            plain.sendall(b"GET /livez HTTP/1.0\r\n\r\n")
            plain.settimeout(5)
            with contextlib.suppress(ConnectionResetError):
                assert not plain.recv(100).startswith(b"HTTP"), "no plain text beside TLS"


def test_a_certificate_that_cannot_be_used_is_an_error_with_its_key(tmp_path: Path) -> None:
    """At the start, not at the first probe."""
    (tmp_path / "chain").write_text("nonsense")
    settings = Settings.of({"http": {"certificate_file": str(tmp_path / "chain"), "key_file": str(tmp_path / "none")}})
    with pytest.raises(ConfigurationError, match=r"http\.certificate_file"):
        Protection.of(settings.http)
    with pytest.raises(ConfigurationError, match="belong together"):
        Settings.of({"http": {"user": "scraper"}})
