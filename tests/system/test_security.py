"""The bridge on a broker that asks for everything: TLS both ways, a password, and a grant for each thing it does."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from confluent_kafka import Producer

from bridge.errors import EnvironmentFailure
from dev.harness.kafka import TopicReader
from dev.harness.pace import scaled
from dev.harness.waiting import wait_until
from tests.paths import ROOT
from tests.system.bridge import RunningBridge
from tests.system.issuer import Issuer
from tests.system.secure import Authority, SecureBroker, client_properties

pytestmark = [
    pytest.mark.system,
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl on this machine"),
]

USER: Final = "bridge-user"
# With what ends strings in JAAS and YAML, and what regular expressions and shells mean something by.
PASSWORD: Final = 'canary-"\\$(7f3a);{'
CLIENT_SECRET: Final = "canary-client-e0d3"
NEW_PASSWORD: Final = "canary-second-52c4"
KEY_PASSWORD: Final = "canary-key-91bd"
REFUSED_S_MAX: Final = 90
SEND_S_MAX: Final = 90
RENEWED_S_MAX: Final = 60

# The names in docs/operations.md, which are this broker's.
ID: Final = "orders"
DELAY: Final = "orders.delay"
TARGET: Final = "orders.real"


@pytest.fixture(scope="module")
def issuer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Issuer]:
    """Tokens for the user."""
    with Issuer(tmp_path_factory.mktemp("issuer"), client=USER, secret=CLIENT_SECRET) as running:
        yield running


@pytest.fixture(scope="module")
def secure(issuer: Issuer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureBroker]:
    """The broker, with topics, the user, and the grants of docs/operations.md."""
    broker = SecureBroker(Authority(tmp_path_factory.mktemp("authority")), issuer.url)
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
    """A user's settings for this broker; secrets in files."""
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
        [*command, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=scaled(SEND_S_MAX), check=False
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


@pytest.mark.fault("replaced credentials")
def test_replaced_credentials_are_taken_over_and_nothing_is_lost(
    secure: SecureBroker, bridge: RunningBridge, tmp_path: Path
) -> None:
    """Certificate, key and password are replaced while messages fall due; a key without its certificate is reported,
    and no message is lost. The old password opens no connection any more, and each message arrives once."""
    count, seconds = 180, 18
    common = {**secure.admin_properties, "bootstrap.servers": secure.bootstrap}
    producer = Producer(common)
    mark = uuid.uuid4().hex
    sent = [f"{mark}-{i}" for i in range(count)]
    for i, text in enumerate(sent):
        delay = f"{1_000 + i * seconds * 1_000 // count}ms"
        producer.produce(DELAY, text, headers=[("delay-topic", TARGET.encode()), ("delay-for", delay.encode())])
    assert producer.flush(SEND_S_MAX) == 0
    certificate = secure.authority.certificate.with_name(f"{USER}.pem")
    old = certificate.read_bytes()
    secure.authority.issue(USER, KEY_PASSWORD)
    new = certificate.read_bytes()
    certificate.write_bytes(old)
    wait_until(lambda: bridge.events("credentials-not-usable"), RENEWED_S_MAX, lambda: bridge.tail())
    wait_until(lambda: "a Kafka client cannot be created" in bridge.http("/readyz")[1], RENEWED_S_MAX, "the reason")
    assert bridge.metrics()["credentials_refused"] == 1
    secure.add_user(USER, NEW_PASSWORD)
    (bridge.config_file.parent / "password").write_text(NEW_PASSWORD)
    certificate.write_bytes(new)
    pid = bridge.pid
    wait_until(lambda: len(bridge.events("ready")) == 2, RENEWED_S_MAX, lambda: bridge.tail())
    assert bridge.running and bridge.pid == pid
    assert [event["reason"] for event in bridge.events("restarted-in-place")] == ["credentials-replaced"]
    wait_until(
        lambda: len(bridge.processes()) == 2, RENEWED_S_MAX, lambda: f"a JVM, and one only: {bridge.processes()}"
    )
    with TopicReader(secure.bootstrap, [TARGET], client=secure.admin_properties) as reader:

        def arrived() -> list[str]:
            reader.poll()
            values = [(record.value or b"").decode() for record in reader.records]
            return [value for value in values if value.startswith(mark)]

        wait_until(lambda: len(arrived()) >= count, SEND_S_MAX, lambda: f"{len(arrived())} of {count}; {bridge.tail()}")
        reader.to_end()
        assert sorted(arrived()) == sorted(sent)
    assert send(secure, tmp_path, "--to", TARGET, "afterwards").returncode == 0
    assert len(bridge.events("credentials-not-usable")) == 1, bridge.tail()
    assert bridge.metrics()["credentials_refused"] == 0
    assert "canary" not in bridge.logs


def test_a_wrong_password_is_refused_without_being_told(secure: SecureBroker, tmp_path: Path) -> None:
    """One line for the operator, with the brokers' reason and without the password."""
    config = configured(secure, tmp_path, "canary-wrong")
    with RunningBridge(tmp_path, secure.bootstrap, DELAY, id=ID, instance="wrong", config=config) as bridge:
        bridge.launch()
        assert bridge.wait_end(REFUSED_S_MAX) == EnvironmentFailure.exit_code, bridge.tail()
        assert re.search("(?i)authenti|credential|SASL", bridge.last_words()), bridge.last_words()
        assert "canary" not in bridge.logs


def test_tokens_of_an_issuer_let_both_clients_in(
    secure: SecureBroker, issuer: Issuer, bridge: RunningBridge, tmp_path: Path
) -> None:
    """OAUTHBEARER by OpenID Connect, from one configuration: read by the Java client, delivered by librdkafka."""
    bridge.stop()
    (tmp_path / "client-secret").write_text(CLIENT_SECRET)
    common = {
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "OAUTHBEARER",
        "sasl.oauthbearer.method": "oidc",
        "sasl.oauthbearer.client.id": USER,
        "sasl.oauthbearer.client.secret_file": str(tmp_path / "client-secret"),
        "sasl.oauthbearer.token.endpoint.url": f"{issuer.url}/token",
        "sasl.oauthbearer.scope": "kafka",
    }
    config = {"bridge": {"create_topics": False}, "kafka": {"common": common}}
    with RunningBridge(tmp_path, secure.oauth, DELAY, id=ID, config=config) as by_token:
        by_token.start()
        by_token.wait_spark()
        assert send(secure, tmp_path, "--to", TARGET, "by token").returncode == 0, by_token.tail()
        assert {agent.partition("/")[0] for agent in issuer.issued} >= {"Java"}, issuer.issued
        assert "canary" not in by_token.logs
