"""bridge.http.management: probes that tell starting from dead, and metrics, on one port."""

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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from select import select
from typing import Any, Final, Self

import pytest
from prometheus_client.parser import text_string_to_metric_families

from bridge.errors import ConfigurationError, EnvironmentFailure
from bridge.http.management import LIMITS, SCRAPES_MAX, ManagementServer
from bridge.http.protection import Protection
from bridge.settings.model import Settings
from bridge.telemetry.counts import Counts
from bridge.telemetry.health import Health, Phase
from bridge.telemetry.metrics import Metrics, StoreSnapshot
from dev.harness.waiting import wait_until
from tests.system.secure import Authority
from timerstore.clock import SystemClock

SYSTEM: Final = SystemClock()
SHORT_S: Final = 0.2
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
        self.server = ManagementServer("127.0.0.1", 0, health=self.health, registry=self.metrics.registry)

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


def test_readyz_says_phase_progress_and_reasons(bench: Bench) -> None:
    """An operator who asks why nothing is delivered yet gets the answer from the probe itself."""
    assert bench.json("/readyz") == (503, {"ready": False, "phase": "starting", "reasons": ["starting"]})
    bench.health.enter(Phase("recovering", reasons=("reading delay[0]",), progress=0.25))
    status, body = bench.json("/readyz")
    assert (status, body["phase"], body["progress"], body["reasons"]) == (503, "recovering", 0.25, ["reading delay[0]"])
    bench.health.enter(Phase("delivering", ready=True))
    assert bench.json("/readyz") == (200, {"ready": True, "phase": "delivering", "reasons": []})
    bench.health.enter(Phase("running", ready=True, reader="plain"))
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


def test_a_connection_has_one_deadline_however_often_it_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that keep coming do not keep a connection open: its age counts. The next one is served."""
    monkeypatch.setattr("bridge.http.server.HEAD_S", SHORT_S)
    with Bench().server as server, socket.create_connection(("127.0.0.1", server.port), timeout=5) as slow:
        slow.sendall(b"GET /livez HTTP/1.0\r\n")

        def is_cut_off() -> bool:
            try:
                slow.sendall(b"X")
            except OSError:
                return True
            return False

        wait_until(is_cut_off, 10, "it is cut off")
        monkeypatch.undo()
        assert ask(server.port, "/livez")[0] == 200


def is_closed(connection: socket.socket) -> bool:
    """Whether the server has closed it."""
    return bool(select([connection], [], [], 0)[0])


@pytest.mark.fault("idle connections on the port of the probes")
def test_a_connection_without_a_request_goes_after_five_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection without a request ends after five seconds, one with a request later; one address never has more than
    half of the connections."""
    bench, gate, asked = Bench(), threading.Event(), threading.Event()

    def snapshot() -> StoreSnapshot:
        asked.set()
        gate.wait(60)
        return StoreSnapshot()

    bench.snapshot = snapshot
    with contextlib.ExitStack() as stack:
        address = ("127.0.0.1", stack.enter_context(bench.server).port)
        stack.callback(gate.set)
        asking = stack.enter_context(socket.create_connection(address, timeout=10))
        asking.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert asked.wait(10)
        monkeypatch.setattr("bridge.http.server.HEAD_S", SHORT_S)
        count = LIMITS.connections_max
        silent = [stack.enter_context(socket.create_connection(address, timeout=10)) for _ in range(count)]
        wait_until(lambda: all(map(is_closed, silent)), 10, "they are closed")
        assert not is_closed(asking)
        gate.set()
        assert asking.recv(100).startswith(b"HTTP/1.1 200")


def test_one_address_has_half_of_the_connections(bench: Bench) -> None:
    """Its connections displace each other."""
    with contextlib.ExitStack() as stack:
        address, count = ("127.0.0.1", bench.server.port), LIMITS.connections_max
        silent = [stack.enter_context(socket.create_connection(address, timeout=10)) for _ in range(count)]
        wait_until(lambda: sum(map(is_closed, silent)) >= count - LIMITS.place_max, 10, "the oldest are closed")
        assert LIMITS.place_max == count // 2


def test_a_scrape_that_hangs_ends_with_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of a connection's life holds for requests under way, too."""
    monkeypatch.setattr("bridge.http.management.LIMITS", replace(LIMITS, connection_s=SHORT_S))
    bench, gate = Bench(), threading.Event()

    def snapshot() -> StoreSnapshot:
        gate.wait(60)
        return StoreSnapshot()

    bench.snapshot = snapshot
    with bench.server as server, socket.create_connection(("127.0.0.1", server.port), timeout=10) as asking:
        asking.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        wait_until(lambda: is_closed(asking), 10, "it is closed")
        gate.set()


@pytest.mark.fault("a metric that is never read to its end")
def test_scrapes_that_hang_do_not_delay_the_probes(bench: Bench) -> None:
    """A few scrapes may hang; the next ones are refused at once, and the probes answer."""
    gate, begun = threading.Event(), threading.Semaphore(0)

    def snapshot() -> StoreSnapshot:
        begun.release()
        gate.wait(60)
        return StoreSnapshot()

    bench.snapshot = snapshot
    with ThreadPoolExecutor(SCRAPES_MAX) as pool:
        hanging = [pool.submit(bench.get, "/metrics") for _ in range(SCRAPES_MAX)]
        assert all(begun.acquire(timeout=10) for _ in hanging)
        assert bench.get("/metrics")[::2] == (503, f"{SCRAPES_MAX} scrapes are under way. Try again.\n")
        assert bench.json("/livez")[0] == 200
        gate.set()
        assert [scrape.result(30)[0] for scrape in hanging] == [200] * SCRAPES_MAX
    assert bench.get("/metrics")[0] == 200


def test_threads_that_cannot_be_started_are_not_counted_for_ever(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the machine has no threads, probes are answered and scrapes are refused; then both are answered."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "http-request":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert [bench.get("/metrics")[0] for _ in range(SCRAPES_MAX + 1)] == [503] * (SCRAPES_MAX + 1)
        assert bench.json("/livez")[0] == 200
    assert bench.get("/metrics")[0] == 200


def test_stop_frees_the_port() -> None:
    """A bridge that is started again finds its port."""
    bench = Bench()
    with bench.server as server:
        port = server.port
    with ManagementServer("127.0.0.1", port, health=bench.health, registry=bench.metrics.registry) as again:
        assert again.port == port


@pytest.mark.parametrize(
    ("protection", "name"),
    [(Protection(user="ü", password=":p:"), "ü"), (Protection(token="0123456789abcdef"), "token")],
    ids=["password", "token"],
)
def test_a_client_with_the_same_credentials_is_known(protection: Protection, name: str) -> None:
    """The header of a client is the one that a server expects."""
    assert protection.who(protection.authorization()["Authorization"]) == name
    assert Protection().authorization() == {}


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

    chain.write_text("being written")
    with ManagementServer(
        "127.0.0.1", 0, health=Health(), registry=Metrics().registry, protection=protection
    ) as server:
        assert get("/livez")[0] == 200, "the certificate of the check is in force"
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


def test_a_client_without_a_password_sends_no_credentials() -> None:
    """A user alone is no reason for a failed login; with a token, the token is sent."""
    assert Protection(user="ops").authorization() == {}
    assert Protection(user="ops", token="t" * 16).authorization() == {"Authorization": f"Bearer {'t' * 16}"}


def test_a_certificate_that_cannot_be_used_is_an_error_with_its_key(tmp_path: Path) -> None:
    """At the start, not at the first probe."""
    (tmp_path / "chain").write_text("nonsense")
    settings = Settings.of({"http": {"certificate_file": str(tmp_path / "chain"), "key_file": str(tmp_path / "none")}})
    with pytest.raises(ConfigurationError, match=r"http\.certificate_file"):
        Protection.of(settings.http)
    with pytest.raises(ConfigurationError, match="belong together"):
        Settings.of({"http": {"user": "scraper"}})
