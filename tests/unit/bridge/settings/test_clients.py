"""bridge.kafka and bridge.java_client: properties that the clients accept, the same security for both."""

from __future__ import annotations

import base64
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient

from bridge.commands import tail
from bridge.errors import ConfigurationError
from bridge.kafka.admin import Cluster
from bridge.settings.clients import java, librdkafka
from bridge.settings.java import translate
from bridge.settings.model import Settings


def settings(common: dict[str, str] | None = None, **parts: Any) -> Settings:
    base = {"bootstrap.servers": "127.0.0.1:1", "log_level": "0"}
    tree = {
        "bridge": {"id": "b", "instance": "i"},
        "kafka": {"common": {**base, **(common or {})}, **parts.pop("kafka", {})},
    }
    return Settings.of({**tree, **parts})


@pytest.mark.parametrize("mode", ["exactly-once", "at-least-once"])
def test_the_clients_accept_their_properties(mode: str) -> None:
    """A refused combination would only show when the bridge starts."""
    s = settings(delivery={"mode": mode})
    Producer(librdkafka(s, "producer"))
    Consumer(librdkafka(s, "consumer")).close()
    AdminClient(librdkafka(s, "admin"))


@pytest.mark.fault("a group protocol under which a restart waits for a dead member")
@pytest.mark.parametrize("protocol", ["consumer", "classic"])
def test_the_group_protocol_is_the_bridges(protocol: str) -> None:
    """Under `consumer` the brokers refuse a restarted instance until the session of the killed one has ended."""
    with pytest.raises(ConfigurationError, match=r"kafka\.consumer\.group\.protocol cannot be set"):
        settings(kafka={"consumer": {"group.protocol": protocol}})


def test_the_producer_is_transactional_and_never_reorders_or_drops_on_its_own() -> None:
    """Exactly once: one stable id, all replicas, a record's time-out below the transaction's."""
    p = librdkafka(settings(), "producer")
    assert (p["transactional.id"], p["enable.idempotence"], p["acks"]) == ("b-i", "true", "all")
    assert int(p["message.timeout.ms"]) < int(p["transaction.timeout.ms"]) == 10_000
    assert p["partitioner"] == "murmur2_random"
    assert p["retry.backoff.ms"] == "1"


def test_at_least_once_has_no_transactions_but_still_no_doubles_from_retries() -> None:
    """The mode gives up transactions, nothing else."""
    p = librdkafka(settings(delivery={"mode": "at-least-once"}), "producer")
    assert "transactional.id" not in p
    assert p["enable.idempotence"] == "true"


def test_the_users_properties_override_defaults_for_their_role_only() -> None:
    """common < role; a longer transaction moves the record's time-out along."""
    s = settings(
        kafka={"producer": {"linger.ms": "7", "transaction.timeout.ms": "60000"}, "consumer": {"client.rack": "r"}}
    )
    assert librdkafka(s, "producer")["linger.ms"] == "7"
    assert librdkafka(s, "producer")["message.timeout.ms"] == "59000"
    assert "client.rack" not in librdkafka(s, "producer")
    assert librdkafka(s, "consumer")["client.rack"] == "r"


def test_records_of_a_usual_transaction_wait_for_its_end() -> None:
    """The client's thread spins while one has lingered long enough, and earlier ones are not acknowledged."""
    s = settings()
    assert int(librdkafka(s, "producer")["linger.ms"]) >= 2 * s.delivery.commit_interval
    assert s.budgets.linger_s * 1000 == int(librdkafka(s, "producer")["linger.ms"])
    assert "linger.ms" not in librdkafka(settings(kafka={"producer": {"queue.buffering.max.ms": "7"}}), "producer")


def test_without_transactions_records_leave_at_once() -> None:
    """Consumers see them as soon as they are written."""
    p = librdkafka(settings(delivery={"mode": "at-least-once"}), "producer")
    assert int(p["linger.ms"]) <= 5


def test_records_without_a_key_do_not_stay_with_a_partition_for_long() -> None:
    """By default for twice linger.ms: all records of several transactions."""
    assert int(librdkafka(settings(), "producer")["sticky.partitioning.linger.ms"]) <= 10


def test_the_queue_holds_more_than_one_transaction() -> None:
    """A full queue in the middle of a transaction would be a failure that nobody caused."""
    s = settings(delivery={"transaction_rows": 300_000})
    assert int(librdkafka(s, "producer")["queue.buffering.max.messages"]) >= 600_000


@pytest.mark.fault("a queue smaller than a record")
def test_no_record_is_larger_than_the_queue() -> None:
    """A record that the producer's queue never has room for counts as too large at once, instead of an abort for each
    attempt."""
    p = librdkafka(settings(kafka={"producer": {"queue.buffering.max.kbytes": "1024"}}), "producer")
    assert p["message.max.bytes"] == str(1 << 20)
    p = librdkafka(settings(kafka={"producer": {"queue.buffering.max.kbytes": "2097151"}}), "producer")
    assert p["message.max.bytes"] == librdkafka(settings(), "producer")["message.max.bytes"]


def test_the_consumer_is_a_static_member_that_only_reads_what_is_committed() -> None:
    """Ownership, require-stable look-ups, and no offset that moves by itself."""
    c = librdkafka(settings(), "consumer")
    assert c["group.id"] == "b"
    assert c["group.instance.id"] == "b-i"
    assert c["isolation.level"] == "read_committed"
    assert c["auto.offset.reset"] == "error"
    assert c["enable.auto.commit"] == "false"


def test_spark_reads_committed_records_whatever_the_user_says() -> None:
    """Rolls of an aborted transaction must not be seen."""
    options = java(settings(kafka={"consumer": {"fetch.min.bytes": "1", "client.rack": "r"}}))
    assert options["kafka.isolation.level"] == "read_committed"
    assert options["kafka.bootstrap.servers"] == "127.0.0.1:1"
    assert options["kafka.client.rack"] == "r"
    assert all(name.startswith("kafka.") for name in options)


def test_every_consumer_compares_checksums() -> None:
    """librdkafka does not unless it is told to; a changed record would be delivered as if somebody had written it."""
    made = settings()
    assert librdkafka(made, "consumer")["check.crcs"] == librdkafka(made, "reader")["check.crcs"] == "true"
    assert java(made)["kafka.check.crcs"] == "true"
    # Those that are made of an administrator's properties, or of the user's alone.
    assert Cluster(made)._consumer["check.crcs"] == "true"
    with mock.patch.object(tail, "made") as told, suppress(Exception):
        tail.Tail({}, [], mock.Mock())
    with mock.patch.object(tail, "Consumer") as consumer:
        told.call_args.args[1]()
    assert consumer.call_args.args[0]["check.crcs"] is True


def test_what_only_librdkafka_has_is_left_out_and_what_java_calls_otherwise_is_renamed() -> None:
    """Neither refused nor passed on: the Java client warns about every name that it does not know."""
    same = {"client.dns.lookup": "use_all_dns_ips", "retry.backoff.ms": "5"}
    dropped = {"log_level": "3", "debug": "all", "client.id": "x", "socket.keepalive.enable": "true", "linger.ms": "3"}
    renamed = {"socket.timeout.ms": "1000", "fetch.wait.max.ms": "9", "sasl.mechanisms": "GSSAPI"}
    assert translate(same | dropped | renamed) == same | {
        "request.timeout.ms": "1000",
        "fetch.max.wait.ms": "9",
        "sasl.mechanism": "GSSAPI",
    }


@pytest.mark.parametrize(
    ("mechanism", "module"),
    [("PLAIN", "plain.PlainLoginModule"), ("SCRAM-SHA-512", "scram.ScramLoginModule")],
)
def test_a_user_and_password_become_a_login_that_any_password_survives(mechanism: str, module: str) -> None:
    """Quotes and backslashes stay inside the string: a password must not end it."""
    common = {
        "security.protocol": "sasl_ssl",
        "sasl.mechanism": mechanism,
        "sasl.username": "u",
        "sasl.password": 'a"b\\c;',
    }
    translated = translate(common)
    assert translated["security.protocol"] == "SASL_SSL"
    login = f'org.apache.kafka.common.security.{module} required username="u" password="a\\"b\\\\c;";'
    assert translated["sasl.jaas.config"] == login


def test_kerberos_and_oauth_logins() -> None:
    """The other two mechanisms that both clients have."""
    sasl = {"security.protocol": "SASL_PLAINTEXT"}
    kerberos = sasl | {"sasl.kerberos.keytab": "/k", "sasl.kerberos.principal": "p@R"}
    assert 'keyTab="/k" principal="p@R"' in translate(kerberos)["sasl.jaas.config"]
    oauth = sasl | {
        "sasl.mechanism": "OAUTHBEARER",
        "sasl.oauthbearer.method": "oidc",
        "sasl.oauthbearer.client.id": "c",
        "sasl.oauthbearer.client.secret": "s",
        "sasl.oauthbearer.scope": "kafka",
        "sasl.oauthbearer.token.endpoint.url": "https://idp/token",
    }
    translated = translate(oauth)
    assert 'clientId="c" clientSecret="s" scope="kafka"' in translated["sasl.jaas.config"]
    assert translated["sasl.oauthbearer.token.endpoint.url"] == "https://idp/token"


def test_pem_files_serve_both_clients(tmp_path: Path) -> None:
    """Authorities by location; key and chain as text, since the Java client has no place for two files."""
    (tmp_path / "k").write_text("-----BEGIN PRIVATE KEY-----\nk\n")
    (tmp_path / "c").write_text("-----BEGIN CERTIFICATE-----\nc\n")
    tls = {
        "security.protocol": "ssl",
        "ssl.ca.location": "/ca.pem",
        "ssl.key.location": str(tmp_path / "k"),
        "ssl.certificate.location": str(tmp_path / "c"),
        "ssl.endpoint.identification.algorithm": "none",
    }
    assert translate(tls) == {
        "security.protocol": "SSL",
        "ssl.endpoint.identification.algorithm": "",
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": "/ca.pem",
        "ssl.keystore.type": "PEM",
        "ssl.keystore.key": "-----BEGIN PRIVATE KEY-----\nk\n",
        "ssl.keystore.certificate.chain": "-----BEGIN CERTIFICATE-----\nc\n",
    }


def encrypted(scheme: str) -> str:
    """A private key as PEM, of which all that counts here is the object identifier of its encryption, in hex."""
    body = base64.b64encode(bytes.fromhex("3082" + scheme + "0500")).decode()
    return f"-----BEGIN ENCRYPTED PRIVATE KEY-----\n{body}\n-----END ENCRYPTED PRIVATE KEY-----\n"


def test_an_encrypted_key_goes_to_java_with_its_password() -> None:
    """PBES1 is what both clients can decrypt."""
    tls = {"ssl.key.pem": encrypted("060a2a864886f70d010c0103"), "ssl.certificate.pem": "c", "ssl.key.password": "p"}
    assert translate(tls)["ssl.key.password"] == "p"


@pytest.mark.parametrize(
    ("properties", "needle"),
    [
        ({"enable.ssl.certificate.verification": "false"}, "always verifies"),
        ({"ssl.cipher.suites": "x"}, "ssl.cipher.suites has no equivalent"),
        ({"ssl.ca.location": "/tmp"}, "directory"),
        ({"ssl.key.pem": "-----BEGIN RSA PRIVATE KEY-----", "ssl.certificate.pem": "c"}, "PKCS#8"),
        ({"ssl.key.pem": encrypted("06092a864886f70d01050d"), "ssl.certificate.pem": "c"}, "PBES2"),
        ({"ssl.key.pem": "-----BEGIN ENCRYPTED PRIVATE KEY-----\n!", "ssl.certificate.pem": "c"}, "not a PEM file"),
        ({"ssl.key.pem": "k"}, "ssl.certificate.* is not"),
        ({"ssl.key.location": "/nowhere", "ssl.certificate.pem": "c"}, "cannot read /nowhere"),
        (
            {"security.protocol": "sasl_ssl", "sasl.mechanism": "PLAIN", "sasl.username": "u"},
            "sasl.password is missing",
        ),
        ({"security.protocol": "sasl_ssl", "sasl.mechanism": "AWS"}, "not supported"),
        ({"security.protocol": "sasl_ssl", "sasl.mechanism": "OAUTHBEARER"}, "oidc"),
    ],
)
def test_what_java_cannot_do_is_refused(properties: dict[str, str], needle: str) -> None:
    """A restriction that only one of two clients honours is none."""
    with pytest.raises(ConfigurationError) as caught:
        translate(properties)
    assert needle in str(caught.value)


@pytest.mark.fault("a value that one of the two Kafka clients refuses, or reads as another")
@pytest.mark.parametrize(
    ("properties", "needle"),
    [
        ({"bootstrap.servers": "plaintext://h:1"}, "bootstrap.servers is not a list of brokers"),
        ({"bootstrap.servers": "h:0"}, "bootstrap.servers is not a list of brokers"),
        ({"bootstrap.servers": "::1:9092"}, "bootstrap.servers is not a list of brokers"),
        ({"bootstrap.servers": " , "}, "bootstrap.servers is not a list of brokers"),
        ({"check.crcs": "yes"}, "check.crcs is neither true nor false"),
        ({"fetch.min.bytes": "010"}, "fetch.min.bytes is not a whole number"),
        ({"client.dns.lookup": "default"}, "client.dns.lookup is not one of use_all_dns_ips"),
        ({"client.rack": "a "}, "client.rack begins or ends with a blank"),
        ({"sasl.kerberos.min.time.before.relogin": "0"}, "sasl.kerberos.min.time.before.relogin is 0"),
        ({"sasl.oauthbearer.grant.type": "x"}, "sasl.oauthbearer.grant.type has no equivalent"),
        ({"ssl.keystore.location": "/k.p12"}, "ssl.keystore.password is missing"),
        ({"ssl.keystore.location": "/k.p12", "ssl.keystore.password": " x"}, "ssl.keystore.password begins or ends"),
        ({"security.protocol": "sasl_ssl", "sasl.mechanism": "SCRAM-SHA-1"}, "SCRAM-SHA-1 is not supported"),
    ],
)
def test_a_value_that_only_one_client_takes_is_refused_by_its_name(properties: dict[str, str], needle: str) -> None:
    """The start refuses the value before it delivers, since Spark's client would fail a minute later."""
    with pytest.raises(ConfigurationError) as caught:
        translate(properties)
    assert needle in str(caught.value)


def test_values_that_mean_the_same_are_written_as_the_java_client_reads_them() -> None:
    """Ports, truth values, cases, and what stands for no limit or the system's own."""
    librdkafkas = {
        "bootstrap.servers": "a, [::1]:7,10.0.0.1:9,[fe80::1]",
        "check.crcs": "t",
        "client.dns.lookup": "USE_ALL_DNS_IPS",
        "connections.max.idle.ms": "0",
        "socket.receive.buffer.bytes": "0",
        "socket.connection.setup.timeout.ms": "60000",
        "ssl.endpoint.identification.algorithm": "HTTPS",
        "enable.ssl.certificate.verification": "1",
    }
    assert translate(librdkafkas) == {
        "bootstrap.servers": "a:9092,[::1]:7,10.0.0.1:9,[fe80::1]:9092",
        "check.crcs": "true",
        "client.dns.lookup": "use_all_dns_ips",
        "connections.max.idle.ms": "-1",
        "receive.buffer.bytes": "-1",
        "socket.connection.setup.timeout.ms": "60000",
        "socket.connection.setup.timeout.max.ms": "60000",
        "ssl.endpoint.identification.algorithm": "https",
    }
    kerberos = translate({"security.protocol": "SASL_PLAINTEXT"})
    assert kerberos["sasl.kerberos.service.name"] == "kafka"
    assert java(settings({"socket.timeout.ms": "3000"}))["kafka.fetch.max.wait.ms"] == "1500"


def test_both_clients_trust_the_same_authorities(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The system's file, where none is named; Java has a key store of its own. Without one the key is asked for."""
    tls = {"security.protocol": "ssl"}
    file = tmp_path / "ca.pem"
    file.write_text("-----BEGIN CERTIFICATE-----\n")
    monkeypatch.setattr("bridge.settings.clients.AUTHORITIES", (str(tmp_path / "none"), str(file)))
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    for common in (tls, tls | {"ssl.ca.location": "probe"}):
        s = settings(common)
        assert {librdkafka(s, role)["ssl.ca.location"] for role in ("consumer", "producer", "reader", "admin")} == {
            str(file)
        }
        assert java(s)["kafka.ssl.truststore.location"] == str(file)
    assert "ssl.ca.location" not in librdkafka(settings(), "admin")
    file.unlink()
    with pytest.raises(ConfigurationError, match=r"ssl\.ca\.location is missing"):
        java(settings(tls))


@pytest.mark.parametrize("value", ["0x100", "0100", "100e3", "50.0", "+50", " 50"])
def test_a_number_is_written_in_decimal_digits(value: str) -> None:
    """C reads some of these as another number; a text stays what it is."""
    with pytest.raises(ConfigurationError, match="ms is not a whole number"):
        settings({"socket.timeout.ms": value})
    assert settings({"client.rack": value}).kafka.properties("common")["client.rack"] == value
    assert settings(kafka={"producer": {"linger.ms": "0.5"}}).budgets.linger_s == 0


def test_every_suggested_name_is_known_to_librdkafka_and_to_the_translation() -> None:
    """The list for suggestions cannot name what would then be refused as unknown."""
    from bridge.settings.librdkafka import COMMON_NAMES, problems

    assert [p for p in problems(dict.fromkeys(COMMON_NAMES, "1"), "kafka.common") if "not a known key" in p] == []
