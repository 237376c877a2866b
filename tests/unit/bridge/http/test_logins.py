"""bridge.http.logins: failed logins leave a trace, and no more of it than a line a minute."""

from __future__ import annotations

import base64
import http.client

import pytest
from fastapi.testclient import TestClient
from structlog.testing import capture_logs

from bridge.api.application import application
from bridge.http.logins import TOLD_S, Logins
from bridge.http.management import ManagementServer
from bridge.http.protection import Protection
from bridge.telemetry.health import Health
from bridge.telemetry.metrics import Metrics
from tests.manual_clock import ManualClock
from tests.unit.bridge.api.fakes import Bridge

PROTECTION = Protection(user="u", password="right", token="0123456789abcdef")
WRONG = f"Basic {base64.b64encode(b'u:wrong').decode()}"


@pytest.mark.fault("somebody who tries passwords")
def test_failed_logins_are_counted_and_told_once_a_minute() -> None:
    """Failed logins at both ports are counted and logged with the client's address, never with the password; a request
    without a password is no login."""
    clock, metrics = ManualClock(), Metrics()
    logins = Logins(clock, metrics.login_failed)
    api = TestClient(application(Bridge(), PROTECTION, show_payloads=False, logins=logins), base_url="http://localhost")
    with (
        capture_logs() as logs,
        ManagementServer(
            "127.0.0.1", 0, health=Health(), registry=metrics.registry, protection=PROTECTION, logins=logins
        ) as server,
    ):

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
        clock.advance(int(TOLD_S * 1_000))
        assert scrape(Authorization="Bearer 0123456789abcdee") == 401
    lines = [line for line in logs if line["event"] == "login-failed"]
    assert [(line["client"], line["path"], line["failed"]) for line in lines] == [
        ("testclient", "/api/v1/count", 1),
        ("127.0.0.1", "/metrics", 20),
    ]
    assert "wrong" not in str(lines) and "d3Jvbmc" not in str(lines)
    assert metrics.registry.get_sample_value("delay_bridge_logins_failed_total") == 21
