"""compose.yaml: Kafka, the bridge and the page, as this version has them."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any, Final

import pytest
import yaml

from bridge import __version__
from bridge.settings.load import load
from dev.broker.embedded import pom_version
from tests.paths import ROOT

FILE: Final = ROOT / "compose.yaml"
SERVICES: Final[dict[str, Any]] = yaml.safe_load(FILE.read_text(encoding="utf-8"))["services"]


def test_versions_are_those_of_the_project() -> None:
    """The broker is the one that is tested with, the image the one that `make image` builds."""
    assert SERVICES["kafka"]["image"] == f"apache/kafka:{pom_version()}"
    assert SERVICES["bridge"]["image"] == f"delay-bridge:{__version__}"


def test_the_bridge_finds_the_broker_and_the_page_is_where_it_says() -> None:
    """Its variables are settings; ports are published to this machine alone, where the page answers to their name."""
    bridge, kafka = SERVICES["bridge"], SERVICES["kafka"]
    settings = load(None, bridge["environment"])
    address = settings.kafka.common["bootstrap.servers"]
    assert f"INSIDE://{address}" in kafka["environment"]["KAFKA_ADVERTISED_LISTENERS"]
    ports = [f"127.0.0.1:{port}:{port}" for port in (settings.http.port, settings.http.api_port)]
    assert bridge["ports"] == ports and all(port.startswith("127.0.0.1:") for port in kafka["ports"])
    assert f"http://localhost:{settings.http.api_port}/" in FILE.read_text(encoding="utf-8")


def test_compose_understands_it() -> None:
    """As `docker compose` reads it."""
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "compose", "version"], capture_output=True, check=False).returncode:
        pytest.skip("no docker compose on this machine")
    run = subprocess.run(
        [docker, "compose", "--file", str(FILE), "config", "--quiet"], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
