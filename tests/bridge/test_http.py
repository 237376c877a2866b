"""bridge.http: probes that tell starting from dead, and metrics, on one port."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import shutil
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from bridge.errors import ConfigurationError, EnvironmentFailure
from bridge.http import CONNECTIONS_MAX, Health, ManagementServer
from bridge.metrics import Metrics
from bridge.protection import Protection
from bridge.settings import Settings
from tests.system.secure import Authority


class Bench:
    """A server, what it reads, and a client."""

    def __init__(self) -> None:
        self.dead: list[str] = []
        self.health = Health(lambda: self.dead)
        self.metrics = Metrics()
        self.server = ManagementServer("127.0.0.1", 0, health=self.health, registry=self.metrics.registry)

    def get(self, path: str, method: str = "GET", **headers: str) -> tuple[int, str, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=5)
        try:
            connection.request(method, path, headers=headers)
            response = connection.getresponse()
            return response.status, response.getheader("Content-Type") or "", response.read().decode()
        finally:
            connection.close()

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
    bench.health.enter("recovering", reasons=("reading delay[0]",), progress=0.25)
    status, body = bench.json("/readyz")
    assert (status, body["phase"], body["progress"], body["reasons"]) == (503, "recovering", 0.25, ["reading delay[0]"])
    bench.health.enter("delivering", ready=True)
    assert bench.json("/readyz") == (200, {"ready": True, "phase": "delivering", "reasons": []})


def test_livez_fails_only_when_a_restart_helps(bench: Bench) -> None:
    """Not ready is not dead: a long rebuild must not be killed."""
    assert bench.json("/livez") == (200, {"alive": True, "reasons": []})
    bench.dead = ["dispatcher has died"]
    assert bench.json("/livez") == (503, {"alive": False, "reasons": ["dispatcher has died"]})


def test_metrics_are_those_of_our_registry(bench: Bench) -> None:
    """Text format, parsable, and OpenMetrics for those who ask."""
    bench.metrics.delivered("t", 3)
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


def test_idle_connections_do_not_shut_out_the_probes_for_good(bench: Bench) -> None:
    """More connections than there are slots are closed at once; a slot that is freed serves again."""
    idle = [socket.create_connection(("127.0.0.1", bench.server.port)) for _ in range(CONNECTIONS_MAX)]
    surplus = socket.create_connection(("127.0.0.1", bench.server.port))
    surplus.settimeout(5)
    assert surplus.recv(1) == b""
    idle[0].sendall(b"GET /livez HTTP/1.0\r\n\r\n")
    idle[0].settimeout(5)
    assert idle[0].recv(12) == b"HTTP/1.0 200"
    for connection in [*idle, surplus]:
        connection.close()


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
    with pytest.raises(ConfigurationError, match="go together"):
        Settings.of({"http": {"user": "scraper"}})
