"""Targets that fail: the messages for them wait, all others go on, and nothing is lost or delivered twice.

A cluster of two nodes with an authorizer. Everything the bridge needs is on the first one; the second one can be
stopped, and takes the partitions that it alone holds with it.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import NewTopic  # type: ignore[attr-defined]  # public, but not marked as exported

from bridge.delivery.targets.partitioner import murmur2
from dev.broker import EmbeddedBroker
from dev.harness.kafka import AUTHORIZER, Outgoing, ReadRecord, TopicReader, Topics, produce, read_committed
from dev.harness.ledger import Balance
from dev.harness.load import Load
from dev.harness.waiting import wait_until
from tests.broker.rig import Rig
from tests.entries import timer
from tests.system.bridge import RunningBridge
from tests.system.broker import own_broker

pytestmark = [pytest.mark.system, pytest.mark.slow]

DEADLINE_S: Final = 90
RETRY: Final = {"attempts": 1_000, "backoff": "300ms", "backoff_max": "1s"}
# A misspelt name must not make a topic, even where the brokers would.
PROPERTIES: Final = {**AUTHORIZER, "auto.create.topics.enable": "true"}
NAMES: Final = iter(range(1_000))
FOUND_OUT_S: Final = {"stop": 6, "kill": 6, "hang": 16}
"""Less than the 9 s that it takes the brokers to notice a killed node. One that hangs may be just the one that the
spare producer, which has sent nothing yet, asks for leaders or the group's coordinator: a request time-out more."""
ID_CHANGES: Final = ("transactional-id-left", "request-may-arrive-late")
"""An id gets a new epoch: its abort had no answer, and another id goes on; or a copy of a request may arrive late, and
perhaps all ids wait."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Two nodes; the second one may be stopped by a test, which starts it again."""

    one: EmbeddedBroker
    two: EmbeddedBroker
    topics: Topics

    def create(self, *nodes: int | list[int], name: str | None = None, more: dict[str, str] | None = None) -> str:
        """A topic whose partitions are on these nodes, one after the other; several for one partition: its replicas,
        the leader first."""
        name = name or f"target-{next(NAMES)}"
        replicas = [[node] if isinstance(node, int) else node for node in nodes]
        new = NewTopic(name, num_partitions=len(nodes), replica_assignment=replicas, config=more or {})
        self.topics.admin.create_topics([new])[name].result(DEADLINE_S)
        wait_until(lambda: self.topics._partitions(name) == len(nodes), DEADLINE_S, name)
        return name

    def create_delay(self, name: str) -> str:
        """A delay topic and its dead-letter topic, on the first node."""
        self.create(1, name=f"{name}.dlt", more={"max.message.bytes": str(1_048_588 + (64 << 10))})
        return self.create(1, 1, name=name, more={"message.timestamp.type": "LogAppendTime"})

    def lose(self, how: str) -> None:
        """The second node stops, is killed, or hangs: the kernel takes connections for it, and nothing reads them."""
        if how == "hang":
            os.kill(self.two.pid, signal.SIGSTOP)
        else:
            {"stop": self.two.stop, "kill": self.two.kill}[how]()

    def regain(self, how: str) -> None:
        """It is there again."""
        if how == "hang":
            os.kill(self.two.pid, signal.SIGCONT)
        else:
            self.two.start()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """The first node makes the cluster's internal topics before there is a second one that could get them."""
    with own_broker(properties=PROPERTIES) as one:
        topics = Topics(one.bootstrap)
        topics.create("first")
        Producer({"bootstrap.servers": one.bootstrap, "transactional.id": "first"}).init_transactions(DEADLINE_S)
        consumer = Consumer({"bootstrap.servers": one.bootstrap, "group.id": "first"})
        wait_until(lambda: _has_coordinator(consumer), DEADLINE_S, "a coordinator")
        consumer.close()
        with own_broker(joins=one, properties=PROPERTIES) as two:
            yield Cluster(one, two, topics)


def _has_coordinator(consumer: Consumer) -> bool:
    try:
        return bool(consumer.committed([TopicPartition("first", 0)], timeout=DEADLINE_S))
    except KafkaException:
        return False


@pytest.mark.fault("a node that stops, dies or hangs in mid-transaction")
@pytest.mark.parametrize(
    ("mode", "how"),
    [(mode, how) for mode in ("exactly-once", "at-least-once") for how in ("stop", "kill", "hang")],
)
def test_a_transaction_under_way_finds_out_within_seconds(cluster: Cluster, mode: str, how: str) -> None:
    """One transaction is repeated, with copies in place of undeliverable messages; later ones do not wait for the node.
    Where it was killed, or hangs and still takes connections, that is before the brokers notice, and while they take
    nothing more under the first transactional id. Nothing has been sent under the spare one yet.
    """
    delay = cluster.create_delay(f"delay-{mode}-{how}")
    good, late, dead = cluster.create(1), cluster.create(1), cluster.create(2)
    with Rig(cluster.one.bootstrap, delay, mode=mode) as rig:
        rig.start()
        assert rig.dispatcher.wait_open(DEADLINE_S)
        numbers = itertools.count(0, 100)
        wait_until(lambda: _all_arrive(rig, [good, dead, late], next(numbers)), DEADLINE_S, "all nodes answer")
        wait_until(rig.is_ready, DEADLINE_S, "the spare transactional id is ready")
        before, retried, aborted = Counter(rig.tally.by_topic), Counter(rig.tally.by_retry), rig.tally.aborted
        cluster.lose(how)
        try:
            gone_s = rig.clock.monotonic_s()
            rig.add(_due(rig, [good, dead] * 10 + [late], next(numbers)))
            rig.wait_delivered(DEADLINE_S)
            assert rig.clock.monotonic_s() - gone_s < FOUND_OUT_S[how]
            assert rig.tally.by_topic - before == {good: 10, late: 1}
            assert Counter(rig.tally.by_retry) - retried == {"target-unavailable": 10}
            assert 1 <= rig.tally.aborted - aborted <= 3
            aborted = rig.tally.aborted
            for _ in range(19):
                rig.add(_due(rig, [good, dead], next(numbers)))
                rig.wait_delivered(DEADLINE_S)
            assert rig.tally.aborted == aborted
            assert rig.tally.by_topic - before == {good: 29, late: 1}
        finally:
            cluster.regain(how)
        wait_until(lambda: not rig.targets.failing(), DEADLINE_S, "it is well again")
        rig.add(_due(rig, [dead], next(numbers)))
        rig.wait_delivered(DEADLINE_S)
        assert rig.tally.by_topic - before == {good: 29, late: 1, dead: 1}


def _all_arrive(rig: Rig, targets: Sequence[str], number: int) -> bool:
    """Whether a message to each of `targets` is delivered; a node that was just started may answer too late."""
    before = Counter(rig.tally.by_topic)
    rig.add(_due(rig, targets, number))
    rig.wait_delivered(DEADLINE_S)
    return rig.tally.by_topic - before == Counter(targets)


@pytest.mark.fault("a kill while a node is dead")
def test_a_kill_under_a_spare_id_loses_and_doubles_nothing(cluster: Cluster, tmp_path: Path) -> None:
    """A kill while a transactional id gets a new epoch, and another one delivers or waits, neither loses nor doubles a
    message."""
    delay = cluster.create_delay("delay-spare")
    targets = [cluster.create(1), cluster.create([2, 1], [1, 2])]
    load = Load(cluster.one.bootstrap, delay, targets, seed=1, delay_ms_max=3_000)
    with RunningBridge(
        tmp_path, cluster.one.bootstrap, delay, config={"delivery": {"retry": RETRY}}, spark=False
    ) as bridge:
        bridge.start()
        with load.running(200):
            wait_until(lambda: _delivered(bridge) > 0, DEADLINE_S, bridge.tail)
            cluster.two.kill()
            try:
                wait_until(lambda: any(event in bridge.logs for event in ID_CHANGES), DEADLINE_S, bridge.tail)
                bridge.kill()
                bridge.start()
            finally:
                cluster.two.start()
        records = load.wait_delivered(cluster.one.bootstrap, DEADLINE_S)
        assert load.balance(records) == Balance(), load.balance(records)


@dataclass(frozen=True, slots=True)
class Site:
    """The cluster and a bridge on it."""

    cluster: Cluster
    bridge: RunningBridge
    delay: str

    def send(self, target: str, *values: bytes, key: bytes | None = None) -> None:
        """Messages that are due in half a second."""
        headers = [("delay-for", b"500ms"), ("delay-topic", target.encode()), ("own", b"1")]
        produce(
            self.cluster.one.bootstrap,
            [Outgoing(topic=self.delay, value=value, key=key, headers=headers) for value in values],
        )

    def receive(self, topic: str, count: int) -> list[ReadRecord]:
        """All records of a topic; there must be exactly `count`."""
        with TopicReader(self.cluster.one.bootstrap, [topic]) as reader:
            reader.wait_for(count, DEADLINE_S)
            records = reader.to_end()
        assert len(records) == count
        return records

    def keys_of(self, topic: str, partition: int, count: int) -> set[bytes | None]:
        """Keys of the records of one partition, when there are `count`."""

        def found() -> set[bytes | None]:
            own = TopicPartition(topic, partition, 0)
            consumer = Consumer({"bootstrap.servers": self.cluster.one.bootstrap, "group.id": "reader"})
            try:
                consumer.assign([own])
                records = consumer.consume(count, timeout=5)
                return {record.key() for record in records} if len(records) >= count else set()
            finally:
                consumer.close()

        return wait_until(found, DEADLINE_S, f"{count} records of {topic}/{partition}")

    def retried(self, reason: str) -> float:
        """The number of records put off for a reason up to now."""
        return self.bridge.metrics().get(f'records_retried_total{{reason="{reason}"}}', 0)

    def wait_retried(self, reason: str, more_than: float) -> None:
        """Wait until some more were."""
        wait_until(lambda: self.retried(reason) > more_than, DEADLINE_S, lambda: f"{reason}: {self.bridge.tail()}")


@pytest.fixture(scope="module")
def site(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """One bridge for all tests below; every test has targets of its own. Those above do not need it."""
    delay = cluster.create_delay("delay")
    config = {"delivery": {"retry": RETRY}}
    with RunningBridge(
        tmp_path_factory.mktemp("site"), cluster.one.bootstrap, delay, config=config, spark=False
    ) as bridge:
        bridge.start()
        yield Site(cluster, bridge, delay)


@pytest.mark.fault("a missing target")
def test_a_topic_that_is_made_later_gets_its_messages(site: Site) -> None:
    """Messages arrive once, unchanged, with origin and due time of the first record, after any number of attempts."""
    before = site.retried("unknown-target")
    site.send("made-later", b"a", b"b", key=b"k")
    site.wait_retried("unknown-target", before + 4)
    assert "made-later" not in site.cluster.topics.admin.list_topics(timeout=DEADLINE_S).topics
    site.cluster.create(1, name="made-later")
    records = site.receive("made-later", 2)
    originals = {
        r.value: (r.partition, r.offset, r.timestamp_ms)
        for r in read_committed(site.cluster.one.bootstrap, site.delay)
        if "delay-for" in dict(r.headers) and r.header("delay-topic") == b"made-later"
    }
    assert sorted(r.value or b"" for r in records) == [b"a", b"b"]
    for record in records:
        partition, offset, ts_ms = originals[record.value]
        assert record.key == b"k"
        assert record.headers == (
            ("own", b"1"),
            ("delay-origin", f"{site.delay}/{partition}/{offset}".encode()),
            ("delay-due", b"%d" % (ts_ms + 500)),
        )


def test_a_topic_that_is_deleted_and_made_again_gets_what_came_meanwhile(site: Site) -> None:
    """The bridge believed that it was there."""
    target = site.cluster.create(1)
    site.send(target, b"before")
    site.receive(target, 1)
    before = site.retried("unknown-target")
    site.cluster.topics.delete(target)
    site.send(target, b"meanwhile")
    site.wait_retried("unknown-target", before)
    site.cluster.create(1, name=target)
    assert [r.value for r in site.receive(target, 1)] == [b"meanwhile"]


@pytest.mark.fault("a revoked permission")
def test_a_permission_that_is_revoked_and_granted_again_loses_nothing(site: Site) -> None:
    """While it is revoked, the metrics name the target, and another target's messages arrive."""
    target, other = site.cluster.create(1), site.cluster.create(1)
    site.send(target, b"before")
    site.receive(target, 1)
    before = site.retried("target-denied")
    site.cluster.topics.forbid(target)
    site.send(target, b"meanwhile")
    site.send(other, b"fine")
    assert [r.value for r in site.receive(other, 1)] == [b"fine"]
    site.wait_retried("target-denied", before)
    failing = f'target_partitions_failing{{reason="target-denied",topic="{target}"}}'
    assert site.bridge.metrics()[failing] == 1
    site.cluster.topics.permit(target)
    assert [r.value for r in site.receive(target, 2)] == [b"before", b"meanwhile"]
    wait_until(lambda: failing not in site.bridge.metrics(), DEADLINE_S, "it is well again")


@pytest.mark.fault("a node that is down")
def test_a_node_that_is_down_holds_up_only_what_it_holds(site: Site) -> None:
    """Keys of its partitions wait and arrive once when it is back; the same topic's other keys do not wait."""
    half, dead = site.cluster.create(1, 2), site.cluster.create(2)
    keys = [b"%d" % i for i in range(20)]
    there = {key for key in keys if (murmur2(key) & 0x7FFFFFFF) % 2 == 1}
    site.send(half, b"warm", key=next(iter(there)))
    site.receive(half, 1)
    before = site.retried("target-unavailable")
    site.cluster.two.stop()
    try:
        for key in keys:
            site.send(half, b"value", key=key)
        site.send(dead, b"value")
        assert site.keys_of(half, 0, len(keys) - len(there)) >= set(keys) - there
        site.wait_retried("target-unavailable", before + len(there))
    finally:
        site.cluster.two.start()
    arrived = [r.key or b"" for r in site.receive(half, 1 + len(keys)) if r.value == b"value"]
    assert sorted(arrived) == sorted(keys)
    assert len(site.receive(dead, 1)) == 1


def _delivered(bridge: RunningBridge) -> float:
    return sum(n for name, n in bridge.metrics().items() if name.startswith("records_delivered_total"))


def _due(rig: Rig, targets: Sequence[str], first: int) -> list[dict[str, object]]:
    now = rig.clock.now_ms()
    return [timer(rig.delay_topic, 0, first + i, now, target) for i, target in enumerate(targets)]
