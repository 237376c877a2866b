"""The bridge on a broker that asks for everything: TLS both ways, a password, and a grant for each thing it does."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from bridge.errors import EnvironmentFailure
from tests.system.bridge import ROOT, RunningBridge
from tests.system.secure import Authority, SecureBroker, client_properties

pytestmark = [
    pytest.mark.system,
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl on this machine"),
]

USER: Final = "bridge-user"
# With what ends strings in JAAS and YAML, and what regular expressions and shells mean something by.
PASSWORD: Final = 'canary-"\\$(7f3a);{'
KEY_PASSWORD: Final = "canary-key-91bd"
REFUSED_S_MAX: Final = 90
SEND_S_MAX: Final = 90

# The names in docs/operations.md, which are this broker's.
ID: Final = "orders"
DELAY: Final = "orders.delay"
TARGET: Final = "orders.real"


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureBroker]:
    """The broker, with topics, the user, and the grants of docs/operations.md."""
    broker = SecureBroker(Authority(tmp_path_factory.mktemp("authority")))
    with broker:
        broker.create(DELAY, {"message.timestamp.type": "LogAppendTime"})
        broker.create(f"{DELAY}.dlt", {"max.message.bytes": str(2 << 20)})
        broker.create(TARGET)
        broker.add_user(USER, PASSWORD)
        for kind, name, operations, prefixed in documented_rights():
            broker.grant(USER, kind, name, operations, prefixed=prefixed)
        yield broker


def documented_rights() -> list[tuple[str, str, list[str], bool]]:
    """The table in docs/operations.md: kind, name, operations, whether the name is a prefix; without the cluster's."""
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    table = text.split("**Rights.**")[1].split("\n\n")[1]
    found = []
    for line in table.splitlines()[2:]:
        resource, operations, _ = (cell.strip() for cell in line.strip("|").split("|"))
        if resource.startswith("cluster"):
            continue
        kind = "TRANSACTIONAL_ID" if resource.startswith("transactional id") else resource.split()[0].upper()
        name = TARGET if resource == "each target" else re.findall("`(.*)`", resource)[0]
        found.append(("TOPIC" if kind == "EACH" else kind, name, operations.split(", "), "prefix" in resource))
    assert len(found) == 5, found
    return found


def configured(secure: SecureBroker, directory: Path, password: str) -> dict[str, Any]:
    """What a user of this broker has to write; secrets in files."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "password").write_text(password + "\n")
    (directory / "key-password").write_text(KEY_PASSWORD)
    return {
        "bridge": {"create_topics": False},
        "kafka": {
            "common": {
                **client_properties(secure.authority, USER, KEY_PASSWORD),
                "ssl.key.password_file": str(directory / "key-password"),
                "sasl.mechanism": "SCRAM-SHA-512",
                "sasl.username": USER,
                "sasl.password_file": str(directory / "password"),
            }
        },
    }


@pytest.fixture(scope="module")
def bridge(secure: SecureBroker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningBridge]:
    """One bridge for this module, with no more rights than the documents ask for."""
    directory = tmp_path_factory.mktemp("bridge")
    config = configured(secure, directory, PASSWORD)
    with RunningBridge(directory, secure.bootstrap, DELAY, id=ID, config=config) as running:
        yield running.start()


def send(secure: SecureBroker, directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`delay-bridge send --wait`, as the administrator, who may read what arrives."""
    common = {**secure.admin_properties, "bootstrap.servers": secure.bootstrap}
    config = directory / "admin.yaml"
    config.write_text(json.dumps({"kafka": {"common": common}, "delay_topics": {DELAY: {}}}))
    command = [sys.executable, "-m", "bridge", "send", "--config", str(config), "--after", "1s", "--wait", "60s"]
    return subprocess.run(
        [*command, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=SEND_S_MAX, check=False
    )


@pytest.mark.timeout(420)
def test_both_clients_get_in_and_need_no_more_rights_than_documented(
    secure: SecureBroker, bridge: RunningBridge, tmp_path: Path
) -> None:
    """SCRAM, a private authority and an encrypted key, from one configuration: read, delivered, dead-lettered."""
    sent = send(secure, tmp_path, "--to", TARGET, "hello")
    assert sent.returncode == 0, sent.stderr + bridge.tail()
    assert f"arrived at {TARGET}/0/0" in sent.stdout
    refused = send(secure, tmp_path, "--to", TARGET, "--partition", "7", "hello")
    assert "is a dead letter" in refused.stderr and "partition-out-of-range" in refused.stderr, refused.stderr
    assert "AUTHORIZATION" not in bridge.logs


def test_no_secret_can_be_seen(secure: SecureBroker, bridge: RunningBridge, tmp_path: Path) -> None:
    """Not in the log, the metrics, the probes, the configuration as printed, or any process's arguments."""
    assert send(secure, tmp_path, "--to", TARGET, "once more").returncode == 0
    arguments = "\n".join(word for process in bridge.processes() for word in process.cmdline())
    assert "java" in arguments, "the JVM is one of them"
    printed = subprocess.run(
        [sys.executable, "-m", "bridge", "config", "--config", str(bridge.config_file)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    seen = [
        bridge.logs,
        arguments,
        printed.stdout,
        *(bridge.http(path)[1] for path in ("/metrics", "/readyz", "/livez")),
    ]
    assert all(seen)
    for text in seen:
        assert "canary" not in text and "BEGIN" not in text


def test_a_wrong_password_is_refused_without_being_told(secure: SecureBroker, tmp_path: Path) -> None:
    """One line for the operator, with the brokers' reason and without the password."""
    config = configured(secure, tmp_path, "canary-wrong")
    with RunningBridge(tmp_path, secure.bootstrap, DELAY, id=ID, instance="wrong", config=config) as bridge:
        bridge.launch()
        assert bridge.wait_end(REFUSED_S_MAX) == EnvironmentFailure.exit_code, bridge.tail()
        assert re.search("(?i)authenti|credential|SASL", bridge.last_words()), bridge.last_words()
        assert "canary" not in bridge.logs
