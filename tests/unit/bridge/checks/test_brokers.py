"""bridge.checks.brokers: releases with faults, limits, and unclean leader elections."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from confluent_kafka import KafkaError, KafkaException

from bridge.checks import brokers
from bridge.checks.brokers import (
    BROKERS_OWN,
    DEFAULT,
    UNCLEAN,
    VERIFICATION,
    check_broker_limits,
    check_broker_version,
    check_unclean_elections,
)
from bridge.checks.finding import Context, Finding
from bridge.kafka.admin import Cluster, ClusterDescription
from bridge.kafka.releases import _RELEASES, Release, loses_markers, release_of
from bridge.settings.model import Settings

SPEAKS = {name: {key: version} for name, key, version in _RELEASES}
"""Protocol versions that each release brought."""
OFF, ON = {UNCLEAN: "false"}, {UNCLEAN: "true"}
DENIED = KafkaError.TOPIC_AUTHORIZATION_FAILED


def context_of(cluster: object, mode: str = "exactly-once") -> Context:
    """Of a bridge with one delay topic, which has a default target."""
    tree: dict[str, Any] = {"delay_topics": {"delay": {"target": "orders"}}, "delivery": {"mode": mode}}
    return Context(
        settings=Settings.of(tree),
        cluster=cluster,  # type: ignore[arg-type]  # a double
        connector_jars=tuple,
        create=False,
        timeout_s=1,
    )


def version_findings(
    monkeypatch: pytest.MonkeyPatch, speaks: Mapping[int, int], *, mode: str = "exactly-once", cluster_id: str = "id"
) -> list[tuple[str, str]]:
    """Names and statuses of the findings about brokers with this protocol."""
    monkeypatch.setattr(brokers, "api_versions", lambda *_, **__: speaks)
    cluster = mock.Mock(describe=lambda: ClusterDescription(cluster_id=cluster_id, brokers=("one:9092",)))
    return [(found.name, found.status) for found in check_broker_version(context_of(cluster, mode))]


@pytest.mark.fault("brokers that are too old for exactly-once delivery")
def test_brokers_below_the_supported_release_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exactly-once does not start on brokers below the tested releases; at-least-once warns."""
    for old in ({28: 2}, SPEAKS[Release(2, 5)], SPEAKS[Release(3, 7)]):
        assert version_findings(monkeypatch, old) == [("broker version", "failed")]
        assert version_findings(monkeypatch, old, mode="at-least-once") == [("broker version", "warning")]
    assert version_findings(monkeypatch, SPEAKS[Release(3, 9)]) == [("broker version", "ok")]


@pytest.mark.fault("brokers that drop transaction markers")
@pytest.mark.parametrize(("version", "loses"), [("4.2.2", False), ("4.3.1", True), ("4.4.0", True)])
def test_releases_that_lose_markers_are_told(monkeypatch: pytest.MonkeyPatch, version: str, loses: bool) -> None:
    """A start warns of brokers with KAFKA-20734, with the remedy."""
    found = version_findings(monkeypatch, SPEAKS[Release.of(version)])
    assert (("transaction markers", "warning") in found) is loses
    assert loses_markers(Release.of(version)) is loses


def test_unknown_brokers_are_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Brokers without a known protocol are a warning, and so is Redpanda, which speaks that of an old Kafka."""
    assert version_findings(monkeypatch, {}) == [("broker version", "warning")]
    redpanda = version_findings(monkeypatch, SPEAKS[Release(2, 5)], cluster_id="redpanda.8a7d")
    assert redpanda == [("broker version", "warning")]


@pytest.mark.fault("brokers that do not verify whose transaction a record is of")
@pytest.mark.parametrize(
    ("told", "mode", "status"),
    [("false", "exactly-once", "failed"), ("false", "at-least-once", "ok"), ("true", "exactly-once", "ok")],
)
def test_brokers_are_to_verify_transactions(told: str, mode: str, status: str) -> None:
    """Exactly-once does not start on brokers whose check of late records (KIP-890) is switched off."""
    cluster = mock.Mock(broker_configs=lambda: {VERIFICATION: told})
    (found,) = check_broker_limits(context_of(cluster, mode))
    assert (found.status, VERIFICATION in found.detail) == (status, status == "failed")


def test_the_newest_release_that_a_broker_speaks_counts() -> None:
    """Brokers also speak the protocol of earlier releases."""
    speaks: dict[int, int] = {}
    for name, key, version in reversed(_RELEASES):
        speaks[key] = version
        assert release_of(speaks) == name
    assert release_of({}) is None


class Admin:
    """Brokers whose topics and defaults have these configurations; an error in place of one is their answer."""

    def __init__(self, configs: Mapping[str, Mapping[str, str] | int]) -> None:
        self.configs = configs

    def describe_cluster(self, **_: Any) -> Future[Any]:
        return done(SimpleNamespace(cluster_id="id", nodes=[SimpleNamespace(id=1, host="", port=1)], controller=None))

    def describe_configs(self, asked: list[Any], **_: Any) -> dict[Any, Future[Any]]:
        return {resource: self._answer(resource.name) for resource in asked}

    def _answer(self, name: str) -> Future[Any]:
        config = self.configs.get(DEFAULT if name == "1" else name, OFF)
        if isinstance(config, Mapping):
            return done({key: SimpleNamespace(value=value) for key, value in config.items()})
        refused: Future[Any] = Future()
        refused.set_exception(KafkaException(KafkaError(config)))
        return refused

    def poll(self, _: float) -> int:
        return 0


def done(value: object) -> Future[Any]:
    """An answer."""
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def elections(**configs: Mapping[str, str] | int) -> list[Finding]:
    """Findings, with these configurations of topics or of the brokers' default, and sound ones elsewhere."""
    cluster = Cluster(Settings.of({"kafka": {"common": {"bootstrap.servers": "127.0.0.1:1"}}}), timeout_s=1)
    cluster._admin = Admin({DEFAULT if name == "default" else name: told for name, told in configs.items()})  # type: ignore[assignment]
    return list(check_unclean_elections(context_of(cluster)))


def test_unclean_elections_are_warned_of_wherever_they_lose_something() -> None:
    """On delay topics, dead-letter topics, targets, the brokers' own topics and by default; each with the command."""
    (well,) = elections()
    assert (well.status, "5 topics" in well.detail) == ("ok", True)
    for topic in ("delay", "delay.dlt", "orders", *BROKERS_OWN):
        (found,) = elections(**{topic: ON})
        assert (found.status, f"true of {topic}:" in found.detail) == ("warning", True)
        assert f"--entity-type topics --entity-name {topic} --add-config {UNCLEAN}=false" in found.remedy
    (found,) = elections(default=ON)
    assert "--entity-type brokers --entity-default" in found.remedy


def test_elections_that_may_not_be_looked_at_are_not_known() -> None:
    """DescribeConfigs is missing: that is said, and what may be read is told all the same."""
    (found,) = elections(**dict.fromkeys(BROKERS_OWN, DENIED), default=KafkaError.CLUSTER_AUTHORIZATION_FAILED)
    assert (found.status, found.detail) == ("warning", f"unknown for {', '.join(BROKERS_OWN)}, {DEFAULT}")
    assert "DescribeConfigs" in found.remedy
    told = [each.detail.partition(":")[0] for each in elections(delay=ON, __transaction_state=DENIED)]
    assert told == [f"{UNCLEAN}=true of delay", "unknown for __transaction_state"]
    missing = KafkaError.UNKNOWN_TOPIC_OR_PART
    assert elections(__transaction_state=missing)[0].status == "ok", "it comes with the first transaction"
