"""bridge.cluster and bridge.checks on a real broker: refusals, warnings and repairs."""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from itertools import chain, repeat
from pathlib import Path
from typing import Any, Protocol
from unittest import mock

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer, TopicPartition

from bridge.checks.finding import Finding
from bridge.checks.run import require, run_checks
from bridge.errors import ConfigurationError, EnvironmentFailure, StateError
from bridge.install import connector
from bridge.kafka.admin import Cluster
from bridge.kafka.releases import Release, api_versions, release_of
from bridge.settings.model import Settings
from bridge.start.oldest import OldestRecords
from dev.broker.embedded import kafka_version
from dev.harness.pace import scaled
from timerstore.clock import SystemClock
from timerstore.disk.checkpoint import Checkpoint, Identity, read, write
from timerstore.errors import DiskFailure

pytestmark = pytest.mark.system

JAVA_S = 60
JAR = Path(__file__)
STAMPED = {"message.timestamp.type": "LogAppendTime"}


class Broker(Protocol):
    """What these tests need of the fixture."""

    @property
    def bootstrap(self) -> str: ...


class Bench:
    """Settings for one delay topic of a name of its own, and the checks on them."""

    def __init__(self, bootstrap: str, directory: Path) -> None:
        self.bootstrap = bootstrap
        self.directory = directory
        self.name = f"delay-{uuid.uuid4().hex[:8]}"
        self.cluster = Cluster(self.settings())

    def settings(self, **tree: Any) -> Settings:
        base = {
            "bridge": {"id": self.name, **tree.pop("bridge", {})},
            "kafka": {"common": {"bootstrap.servers": self.bootstrap}},
            "delay_topics": {self.name: tree.pop("topic", {})},
            "store": {"directory": str(self.directory), "flush_bytes": "64KiB"},
            "http": {"host": "127.0.0.1"},
        }
        return Settings.of(base | tree)

    def create(self, config: Mapping[str, str], name: str | None = None) -> None:
        self.cluster.create_topic(name or self.name, partitions=1, replication=1, config=config)
        self.cluster.await_topics([name or self.name])

    def check(self, create: bool = False, **tree: Any) -> list[Finding]:
        return run_checks(self.settings(**tree), create=create, connector_jars=lambda: [JAR])

    def failures(self, create: bool = False, **tree: Any) -> list[Finding]:
        return [finding for finding in self.check(create, **tree) if finding.status == "failed"]


@pytest.fixture
def bench(broker: Broker, tmp_path: Path) -> Bench:
    return Bench(broker.bootstrap, tmp_path / "data")


def about(findings: list[Finding], text: str) -> Finding:
    """The only finding with `text` in its detail."""
    (found,) = [finding for finding in findings if text in finding.detail]
    return found


def test_the_cluster_tells_its_id_and_brokers(bench: Bench) -> None:
    """A data directory is bound to the id; it does not change from call to call."""
    first = bench.cluster.describe()
    assert first.cluster_id
    assert first.brokers
    assert first == bench.cluster.describe()


def test_topics_have_an_id_that_is_theirs_alone(bench: Bench) -> None:
    """A topic that was deleted and made anew must be told from the old one."""
    other = f"{bench.name}-other"
    bench.create(STAMPED)
    bench.create({}, other)
    found = bench.cluster.topics([bench.name, other, "absent-topic"])
    assert set(found) == {bench.name, other}
    assert found[bench.name].partitions == 1
    assert found[bench.name].leaderless == ()
    ids = bench.cluster.topic_ids([bench.name, other])
    assert len(set(ids.values())) == 2
    assert (
        bench.cluster.topic_configs([bench.name, "absent-topic"])[bench.name]["message.timestamp.type"]
        == "LogAppendTime"
    )


def test_watermarks_count_what_is_in_the_log(bench: Bench) -> None:
    """Log start and end, as the loss and lag checks need them."""
    bench.create(STAMPED)
    producer = Producer({"bootstrap.servers": bench.bootstrap})
    for _ in range(3):
        producer.produce(bench.name, b"x")
    assert producer.flush(30) == 0
    marks = bench.cluster.watermarks([(bench.name, 0)])[bench.name, 0]
    assert (marks.start, marks.end) == (0, 3)


@pytest.mark.parametrize("renewals", [["stuck"], ["none"], ["well"], ["stuck", "well"], ["none", "well"]])
@pytest.mark.parametrize("times", [1, 1_000_000])
def test_a_moment_without_a_leader_is_waited_out_and_no_more(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, times: int, renewals: list[str]
) -> None:
    """A new topic's broker, or the one that led until now, may answer that it does not lead. Another client, which has
    no leader of before, is asked then, and one more if that one was made too early. Where none can be made, the client
    that there is goes on."""
    bench.create(STAMPED)
    admin, left = bench.cluster._admin, [times]

    class Electing:
        """Answers so for a number of times; a real broker cannot be asked to."""

        def list_offsets(self, asked: Mapping[TopicPartition, Any], **more: Any) -> Mapping[TopicPartition, Any]:
            if not left[0]:
                return dict(admin.list_offsets(dict(asked), **more))
            left[0] -= 1
            refused: Future[Any] = Future()
            refused.set_exception(KafkaException(KafkaError(KafkaError.NOT_LEADER_FOR_PARTITION)))
            return dict.fromkeys(asked, refused)

        def poll(self, timeout_s: float) -> int:
            return admin.poll(timeout_s)

    made = chain(renewals, repeat(renewals[-1]))

    def make() -> object:
        renewal = next(made)
        if renewal == "none":
            raise EnvironmentFailure("a Kafka client cannot be created", hint="")
        return admin if renewal == "well" else Electing()

    monkeypatch.setattr(bench.cluster, "_admin", Electing())
    monkeypatch.setattr(bench.cluster, "_make_admin", make)
    if times == 1 or "well" in renewals:
        assert bench.cluster.watermarks([(bench.name, 0)])[bench.name, 0].end == 0
    else:
        with pytest.raises(EnvironmentFailure, match="cannot look up offsets"):
            bench.cluster.watermarks([(bench.name, 0)])


def test_the_log_tells_its_age(bench: Bench) -> None:
    """Offsets by time, and the oldest record's time and size, where there is one."""
    bench.create(STAMPED)
    records = OldestRecords.of(bench.settings(), connector.jars, SystemClock(), run=lambda look: look())
    marks = bench.cluster.watermarks([(bench.name, 0)])
    assert records.of_logs(marks) == {}
    producer = Producer({"bootstrap.servers": bench.bootstrap})
    for value in (b"x" * 100, b"x" * 300):
        producer.produce(bench.name, value)
    assert producer.flush(30) == 0
    place = (bench.name, 0)
    oldest = records.of_logs(bench.cluster.watermarks([place]))[place]
    assert 100 < oldest.mean_bytes < 400
    assert bench.cluster.first_after([place], oldest.timestamp_ms) == {place: 0}
    assert bench.cluster.first_after([place], oldest.timestamp_ms + 3_600_000) == {place: None}


def test_a_failure_names_the_brokers_and_the_reason() -> None:
    """`Timed out` alone would send the operator looking in the wrong place."""
    settings = Settings.of({"kafka": {"common": {"bootstrap.servers": "127.0.0.1:1"}}})
    with pytest.raises(EnvironmentFailure) as caught:
        Cluster(settings, timeout_s=0.5).describe()
    assert "127.0.0.1:1" in str(caught.value)
    assert "Connection refused" in str(caught.value)


def test_the_brokers_release_is_told_by_what_they_speak(bench: Bench) -> None:
    """Each release that is supported, by what only it and later ones speak."""
    assert release_of(api_versions(bench.settings())) == Release.of(kafka_version())


@pytest.mark.fault("an unclean leader election")
def test_topics_that_allow_unclean_elections_are_told(bench: Bench) -> None:
    """A start warns of topics whose replicas may become leader without acknowledged records."""
    bench.create({**STAMPED, "unclean.leader.election.enable": "true"})
    findings = [f for f in bench.check() if f.name == "unclean elections"]
    assert [(f.status, f"true of {bench.name}:" in f.detail) for f in findings] == [("warning", True)]
    assert f"--entity-name {bench.name} --add-config unclean.leader.election.enable=false" in findings[0].remedy


def test_missing_topics_are_told_by_check_and_made_by_run(bench: Bench) -> None:
    """`check` changes nothing; what `run` makes passes all checks."""
    findings = bench.check()
    told = [f for f in findings if "does not exist" in f.detail]
    assert {f.status for f in told} == {"warning"}
    assert len(told) == 2
    assert all("kafka-topics --bootstrap-server" in f.remedy for f in told)
    assert bench.cluster.topics([bench.name]) == {}

    findings = bench.check(create=True)
    assert {f.status for f in findings if f.name != "transaction markers"} == {"ok"}
    made = bench.cluster.topics([bench.name, f"{bench.name}.dlt"])
    assert made[bench.name].partitions == 2
    configs = bench.cluster.topic_configs(made)
    assert configs[bench.name]["message.timestamp.type"] == "LogAppendTime"
    assert configs[bench.name]["cleanup.policy"] == "delete"
    assert (configs[bench.name]["retention.ms"], configs[bench.name]["retention.bytes"]) == ("1209600000", "-1")
    assert (
        int(configs[f"{bench.name}.dlt"]["max.message.bytes"]) == int(configs[bench.name]["max.message.bytes"]) + 65_536
    )


def test_missing_topics_are_refused_where_nothing_may_be_created(bench: Bench) -> None:
    """With the command that makes them."""
    failed = bench.failures(create=True, bridge={"create_topics": False})
    assert [f.detail for f in failed] == ["does not exist"] * 2
    assert "message.timestamp.type=LogAppendTime" in failed[0].remedy
    assert "max.message.bytes" in failed[1].remedy
    assert bench.cluster.topics([bench.name]) == {}


@pytest.mark.parametrize(
    ("config", "needle", "remedy"),
    [
        ({}, "CreateTime", "message.timestamp.type=LogAppendTime"),
        (STAMPED | {"cleanup.policy": "compact"}, "cleanup.policy=compact", "cleanup.policy=delete"),
        (STAMPED | {"cleanup.policy": "compact,delete"}, "compact", "cleanup.policy=delete"),
    ],
)
def test_a_delay_topic_that_would_lose_or_misplace_messages_is_refused(
    bench: Bench, config: dict[str, str], needle: str, remedy: str
) -> None:
    """The producer's clock would decide retention and due times; compaction would drop pending messages."""
    bench.create(config)
    (failed,) = bench.failures(create=True)
    assert needle in failed.detail
    assert remedy in failed.remedy
    assert bench.name in failed.remedy


def test_retention_is_compared_with_the_roll_window(bench: Bench) -> None:
    """Not longer: refused, whose error it is. Too short for a downtime, or a limit in bytes: a warning with numbers.
    Each finding has the number of records of the longest delay."""
    bench.create(STAMPED | {"retention.ms": "3600000", "retention.bytes": "1048576"})
    findings = bench.check()
    assert about(findings, "kept 1h, and roll after 30m: a message of the longest delay, 3650d,").status == "ok"
    assert about(findings, "3650d, is written about 200229 times").status == "ok"
    assert about(findings, "outgrows 1MiB within 30m").status == "warning"
    warned = about(bench.check(roll={"window": "50m"}), "more than 10m may lose messages")
    assert (warned.status, "retention.ms=6000000" in warned.remedy) == ("warning", True)
    (failed,) = bench.failures(roll={"window": "1h"})
    assert (failed.error, "retention.ms=3600000" in failed.detail) == (ConfigurationError, True)


def test_a_topic_that_rolls_nothing_is_named_as_such(bench: Bench) -> None:
    """Its retention needs no second half."""
    bench.create(STAMPED | {"retention.ms": "7200000"})
    found = about(bench.check(delay={"max": "90m"}, retention={"headroom": "30m"}), "kept 2h")
    assert (found.status, "roll after 90m: a message of the longest delay, 90m, is written once" in found.detail) == (
        "ok",
        True,
    )


def test_a_dead_letter_topic_must_take_a_reject_with_its_headers(bench: Bench) -> None:
    """One that is too small is said with the number; one that compacts is refused."""
    bench.create(STAMPED)
    bench.create({"cleanup.policy": "compact"}, f"{bench.name}.dlt")
    findings = bench.check()
    assert about(findings, "a large reject with its headers needs 1114124").status == "warning"
    assert about(findings, "records without a key are refused").status == "failed"


def test_default_targets_are_looked_up(bench: Bench) -> None:
    """Absent: a warning, it may come before the first message is due. Not allowed: nothing would ever be delivered."""
    findings = bench.check(topic={"target": "absent-target"})
    assert about([f for f in findings if f.name == "target absent-target"], "does not exist").status == "warning"
    findings = bench.check(topic={"target": "absent-target"}, targets={"deny": ["absent-.*"]})
    assert about([f for f in findings if f.name == "target absent-target"], "not allowed").status == "failed"


def test_limits_of_the_brokers_are_compared(bench: Bench) -> None:
    """A session time-out that the group coordinator would refuse is told before the start."""
    findings = bench.check(delivery={"session_timeout": "1s"})
    assert about(findings, "delivery.session_timeout 1s is outside").status == "failed"


def test_at_least_once_needs_no_transactions(bench: Bench) -> None:
    """The check says so instead of asking for a right that is not needed."""
    assert about(bench.check(delivery={"mode": "at-least-once"}), "not used").status == "ok"


@pytest.mark.parametrize(
    ("identity", "status", "needle"),
    [
        (lambda cluster, topic: (cluster, topic), "ok", "belongs to cluster"),
        (lambda cluster, topic: ("another", topic), "failed", "belongs to cluster another"),
        (lambda cluster, topic: (cluster, "another"), "failed", "deleted and created again"),
    ],
)
def test_a_directory_of_another_cluster_or_topic_is_refused(
    bench: Bench, identity: Callable[[str, str], tuple[str, str]], status: str, needle: str
) -> None:
    """Its segments would be delivered to the wrong place."""
    bench.create(STAMPED)
    directory = bench.directory / bench.name / "0"
    directory.mkdir(parents=True)
    cluster_id, topic_id = identity(
        bench.cluster.describe().cluster_id, bench.cluster.topic_ids([bench.name])[bench.name]
    )
    write(directory, Checkpoint(identity=Identity(cluster_id=cluster_id, log_id=f"{topic_id}/0"), offset=0))
    findings = [f for f in bench.check() if f.name == "directory identity"]
    assert (findings[0].status, needle in findings[0].detail) == (status, True)


def test_without_brokers_the_rest_is_still_checked(tmp_path: Path) -> None:
    """One start tells as much as can be told."""
    tree = {"kafka": {"common": {"bootstrap.servers": "127.0.0.1:1"}}, "store": {"directory": str(tmp_path)}}
    findings = run_checks(Settings.of(tree), timeout_s=0.5, connector_jars=lambda: [JAR])
    assert (findings[0].name, findings[0].status) == ("brokers", "failed")
    assert {"directory", "java", "connector", "java client"} <= {f.name for f in findings}
    with pytest.raises(EnvironmentFailure, match="brokers: cannot reach"):
        require(findings)


def local(tmp_path: Path, jars: list[Path] | None = None, **tree: Any) -> dict[str, Finding]:
    """The findings about this machine, by name; no broker is asked for long."""
    base = {"kafka": {"common": {"bootstrap.servers": "127.0.0.1:1"}}, "store": {"directory": str(tmp_path)}}
    findings = run_checks(
        Settings.of(base | tree), timeout_s=0.1, connector_jars=lambda: [JAR] if jars is None else jars
    )
    return {finding.name: finding for finding in findings}


def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    """Here a file is in its place: the same for root as for anybody."""
    (tmp_path / "file").touch()
    found = local(tmp_path, store={"directory": str(tmp_path / "file" / "data")})["directory"]
    assert (found.status, "cannot be written" in found.detail) == ("failed", True)


def test_a_directory_without_room_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A segment must fit beside its predecessor."""
    monkeypatch.setattr("bridge.checks.host.shutil.disk_usage", lambda _: type("U", (), {"free": 1 << 20})())
    assert local(tmp_path)["directory"].status == "failed"


@pytest.mark.parametrize("full", [False, True], ids=["little room", "no room"])
def test_a_full_disk_with_an_index_is_no_reason_not_to_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: bool
) -> None:
    """The start is what makes room: it delivers, and reclaims the delivered rows."""
    directory = tmp_path / "delay" / "0"
    directory.mkdir(parents=True)
    write(directory, Checkpoint(identity=Identity(cluster_id="cluster", log_id="id/0"), offset=0))
    monkeypatch.setattr("bridge.checks.host.shutil.disk_usage", lambda _: type("U", (), {"free": 1 << 20})())
    if full:
        no_room = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        monkeypatch.setattr("bridge.checks.host.os.fsync", mock.Mock(side_effect=no_room))
    found = local(tmp_path)["directory"]
    assert (found.status, found.remedy[:4]) == ("warning", "free")


def test_a_full_disk_with_a_rebuild_under_way_is_no_reason_not_to_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A damaged checkpoint was renamed by the start before, and the old segments put aside: the bridge itself removes
    the files that fill the disk."""
    directory = tmp_path / "delay" / "0"
    directory.mkdir(parents=True)
    (directory / "segment-0000000001.parquet.1.aside").touch()
    monkeypatch.setattr("bridge.checks.host.shutil.disk_usage", lambda _: type("U", (), {"free": 1 << 20})())
    assert local(tmp_path)["directory"].status == "warning"


def test_an_index_that_cannot_be_read_is_no_damaged_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A volume that answers with an error is an environment failure: the file may be whole."""
    monkeypatch.setattr(Path, "read_text", mock.Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO))))
    with pytest.raises(DiskFailure) as caught:
        read(tmp_path)
    assert caught.value.hint


def test_java_must_be_there_and_recent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Absent, too old, and right."""
    assert local(tmp_path)["java"].status == "ok"
    java = tmp_path / "bin" / "java"
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert "does not run" in local(tmp_path)["java"].detail
    java.parent.mkdir()
    java.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\"' >&2\n")
    java.chmod(0o755)
    assert (local(tmp_path)["java"].status, "version 11" in local(tmp_path)["java"].detail) == ("failed", True)


def test_the_connector_must_be_there(tmp_path: Path) -> None:
    """Without it Spark fails at the first query, in a hundred lines."""
    assert local(tmp_path)["connector"].status == "ok"
    assert local(tmp_path, [])["connector"].status == "failed"
    assert "gone.jar" in local(tmp_path, [tmp_path / "gone.jar"])["connector"].detail


def test_properties_that_java_does_not_have_are_a_failed_check(tmp_path: Path) -> None:
    """The start is refused before Spark is."""
    common = {"bootstrap.servers": "127.0.0.1:1", "ssl.cipher.suites": "x"}
    found = local(tmp_path, kafka={"common": common})["java properties"]
    assert (found.status, "ssl.cipher.suites" in found.detail) == ("failed", True)


def test_a_start_ends_with_the_kind_of_what_failed() -> None:
    """State and surroundings have a status each; where both failed it is that of the surroundings."""
    state = Finding(name="directory", status="failed", detail="another cluster's", error=StateError)
    surroundings = Finding(name="brokers", status="failed", detail="no answer")
    with pytest.raises(StateError):
        require([state])
    with pytest.raises(EnvironmentFailure):
        require([state, surroundings])
    require([Finding(name="brokers", status="warning", detail="old", error=StateError)])


@pytest.mark.fault("a value that one of the two Kafka clients refuses, or reads as another")
def test_the_check_has_the_java_client_ask_the_brokers(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """`check` finds a value that only librdkafka accepts; a start has no time for a JVM."""
    monkeypatch.setattr("bridge.checks.host._JAVA_TIMEOUT_S", scaled(JAVA_S))
    found = [each for each in run_checks(bench.settings()) if each.name == "java client"]
    assert [(each.status, each.detail) for each in found][1:] == [("ok", "the brokers answer it")]
    monkeypatch.setattr("bridge.checks.host.java", lambda _: {"kafka.bootstrap.servers": "no-such-host:1"})
    refused = [each for each in run_checks(bench.settings()) if each.name == "java client"][1]
    assert refused.status == "failed" and "bootstrap.servers" in refused.detail
    assert len([each for each in run_checks(bench.settings(), create=True) if each.name == "java client"]) == 1
