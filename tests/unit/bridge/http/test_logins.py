"""Failed logins at the HTTP ports: counted, and logged at most once a minute."""

from __future__ import annotations

import base64
import http.client
import io
import json

import pytest
from fastapi.testclient import TestClient

from bridge.api.application import application
from bridge.http.management import ManagementServer
from bridge.http.protection import Protection
from bridge.telemetry import logs
from bridge.telemetry.health import Health
from bridge.telemetry.metrics import Metrics
from tests.unit.bridge.api.fakes import Bridge

WRONG = f"Basic {base64.b64encode(b'u:wrong').decode()}"


@pytest.mark.fault("somebody who tries passwords")
def test_failed_logins_are_counted_and_told_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failed logins at both ports are counted and logged with the client's address, never with the password; a request
    without a password is no login."""
    now_s, metrics, out = [1_800_000_000.0], Metrics(), io.StringIO()
    monkeypatch.setattr("logging.time.time", lambda: now_s[0])
    monkeypatch.setattr("logging.time.time_ns", lambda: int(now_s[0] * 1e9), raising=False)
    logs.configure(format="json", stream=out)
    protection = Protection(user="u", password="right", token="0123456789abcdef", on_failure=metrics.logins_failed.inc)
    api = TestClient(application(Bridge(), protection, show_payloads=False), base_url="http://localhost")
    with ManagementServer("127.0.0.1", 0, health=Health(), registry=metrics.registry, protection=protection) as server:

        def scrape(**headers: str) -> int:
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
            connection.request("GET", "/metrics", headers=headers)
            status = connection.getresponse().status
            connection.close()
            return status

        assert api.get("/api/v1/count").status_code == scrape() == 401
        assert api.get("/api/v1/count", auth=("u", "right")).status_code == 200
        for _ in range(10):
            assert api.get("/api/v1/count", headers={"Authorization": WRONG}).status_code == 401
            assert scrape(Authorization=WRONG) == 401
        now_s[0] += logs.RATION_S
        assert scrape(Authorization="Bearer 0123456789abcdee") == 401
    lines = [line for line in map(json.loads, out.getvalue().splitlines()) if line["event"] == "login-failed"]
    assert [(line["client"], line["path"], line.get("left_out")) for line in lines] == [
        ("testclient", "/api/v1/count", None),
        ("127.0.0.1", "/metrics", 19),
    ]
    assert "wrong" not in out.getvalue() and "d3Jvbmc" not in out.getvalue()
    assert metrics.registry.get_sample_value("delay_bridge_logins_failed_total") == 21
