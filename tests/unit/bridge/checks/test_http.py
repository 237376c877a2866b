"""bridge.checks.host: whether everybody may ask the HTTP API."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from bridge.checks.finding import Context
from bridge.checks.host import check_http
from bridge.checks.run import LOCAL_CHECKS
from bridge.kafka.admin import Cluster
from bridge.settings.model import Settings


@pytest.mark.fault("an HTTP API that is open to everybody")
@pytest.mark.parametrize(
    ("http", "status"),
    [
        ({}, "warning"),
        ({"host": "::"}, "warning"),
        ({"host": "192.0.2.7"}, "warning"),
        ({"host": "bridge.example.com"}, "warning"),
        ({"host": "127.0.0.1"}, "ok"),
        ({"host": "127.0.0.2"}, "ok"),
        ({"host": "::1"}, "ok"),
        ({"host": "localhost"}, "ok"),
        ({"api": "off"}, "ok"),
        ({"user": "u", "password_file": "secret"}, "ok"),
        ({"token_file": "secret"}, "ok"),
    ],
)
def test_an_open_api_is_warned_about(http: dict[str, Any], status: str, tmp_path: Path) -> None:
    """`check` and `run` warn of an API that neither a password nor its address protects, with the remedy."""
    (tmp_path / "secret").write_text("0123456789abcdef")
    tree = {name: str(tmp_path / value) if value == "secret" else value for name, value in http.items()}
    context = Context(
        settings=Settings.of({"http": tree}),
        cluster=cast("Cluster", None),
        connector_jars=list,
        create=False,
        timeout_s=1,
    )
    (found,) = check_http(context)
    assert check_http in LOCAL_CHECKS and found.status == status
    assert ("http.token_file" in found.remedy) == (status == "warning")
