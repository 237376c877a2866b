"""The index on shared storage (`store.remote`): instances whose disks are lost."""

from __future__ import annotations

import os
import random
import shutil
from functools import partial
from pathlib import Path
from typing import Final

import pytest
from confluent_kafka import ConsumerGroupTopicPartitions, TopicPartition

from bridge.errors import StateError
from dev.harness.kafka import Outgoing, TopicReader, Topics, produce
from dev.harness.ledger import Balance
from dev.harness.load import LEVELS_MS, Load
from dev.harness.waiting import pause, wait_until
from tests.profiles import IS_NIGHTLY, seed
from tests.system.bridge import RunningBridge
from tests.system.broker import Broker

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(600)]

DELIVERED_S_MAX: Final = 90
COMMITTED_S_MAX: Final = 60
PENDING_MIN: Final = 50
KILLS: Final = 20 if IS_NIGHTLY else 3
LOST_DISKS: Final = 0.7
"""The share of kills after which the disk is empty."""
SWAPS: Final = 0.5
"""The share of kills after which the other instance gets all partitions."""
RUNNING_S: Final = 4.0


def config(remote: Path | None) -> dict[str, dict[str, object]]:
    """Segments are written soon, and read back: the horizon ends before the load does."""
    return {
        "store": {"flush_interval": "500ms", "remote": None if remote is None else f"file://{remote}"},
        "ready_rows": {"horizon": "2s"},
        "delay": {"levels": " ".join(f"{ms}ms" for ms in LEVELS_MS)},
    }


@pytest.mark.fault("a kill and the loss of the disk, with a copy of the index on shared storage")
def test_an_instance_with_an_empty_disk_goes_on(broker: Broker, topics: Topics, tmp_path: Path) -> None:
    """After a kill and the loss of its disk, a bridge adopts the index, and reads only the records behind it."""
    remote = tmp_path / "remote"
    remote.mkdir()
    delay = topics.delay(partitions=2)
    load = Load(broker.bootstrap, delay, [topics.create("orders", partitions=2)], seed=5, delay_ms_max=20_000)
    with RunningBridge(tmp_path, broker.bootstrap, delay, config=config(remote), spark=False) as bridge:
        bridge.start()
        load.send(600)
        wait_until(lambda: bridge.metrics()["pending_messages"] >= PENDING_MIN, COMMITTED_S_MAX, "pending messages")
        wait_until(lambda: bridge.metrics()["segments"] > 0, COMMITTED_S_MAX, bridge.tail)
        wait_until(lambda: is_copied(bridge), COMMITTED_S_MAX, bridge.tail)
        bridge.kill()
        shutil.rmtree(bridge.data)
        bridge.start()
        [opened] = bridge.events("index-opened")
        assert opened["without_index"] == 0 and opened["read_again"] < 600
        assert {each["partition"] for each in bridge.events("index-adopted")} == {0, 1}
        records = load.wait_delivered(broker.bootstrap, DELIVERED_S_MAX)
        balance = load.balance(records)
        assert balance == Balance(), f"{balance}; log:\n{bridge.tail()}"


def is_copied(bridge: RunningBridge) -> bool:
    """Whether committed manifests have the present indexes."""
    return bridge.metrics()["remote_manifest_age_seconds"] == 0


def owns(bridge: RunningBridge, partitions: int) -> bool:
    return bridge.owned == partitions


def told(topics: Topics, bridge: RunningBridge, delay: str, key: str) -> set[bool]:
    """For each partition with a commit: has the committed metadata this key?"""
    partitions = [TopicPartition(delay, partition) for partition in range(2)]
    asked = ConsumerGroupTopicPartitions(bridge.id, partitions)
    [found] = topics.admin.list_consumer_group_offsets([asked]).values()
    texts = [place.metadata for place in found.result(30).topic_partitions or ()]
    return {f',"{key}":' in text for text in texts if text}


def test_shared_storage_can_be_left_and_used_again(broker: Broker, topics: Topics, tmp_path: Path) -> None:
    """Without a rebuild. A start without it takes the names of manifests out of Kafka, for earlier versions."""
    remote = tmp_path / "remote"
    remote.mkdir()
    delay, target = topics.delay(partitions=2), topics.create("orders")
    with RunningBridge(tmp_path, broker.bootstrap, delay, config=config(remote), spark=False) as bridge:
        bridge.start()
        headers = [("delay-for", b"90s"), ("delay-topic", target.encode())]
        produce(broker.bootstrap, [Outgoing(topic=delay, headers=headers, partition=p) for p in (0, 1)])
        wait_until(lambda: bridge.metrics()["segments"] == 2, COMMITTED_S_MAX, bridge.tail)
        wait_until(lambda: is_copied(bridge), COMMITTED_S_MAX, bridge.tail)
        assert told(topics, bridge, delay, "m") == {True}
        assert bridge.stop() == 0
        bridge.configure(config(None))
        bridge.start()
        wait_until(lambda: told(topics, bridge, delay, "m") == {False}, COMMITTED_S_MAX, bridge.tail)
        assert bridge.events("index-opened")[-1]["without_index"] == 0
        assert bridge.stop() == 0
        bridge.configure(config(remote))
        bridge.start()
        wait_until(lambda: told(topics, bridge, delay, "m") == {True}, COMMITTED_S_MAX, bridge.tail)
        assert bridge.events("index-opened")[-1]["without_index"] == 0 and not bridge.events("index-adopted")
        with TopicReader(broker.bootstrap, [target]) as reader:
            assert len(reader.wait_for(2, DELIVERED_S_MAX + 90)) == 2
        assert bridge.stop() == 0


@pytest.mark.fault("a lost disk, after Kafka has deleted records of pending messages")
def test_messages_that_the_copy_alone_has(broker: Broker, topics: Topics, tmp_path: Path) -> None:
    """A start without the index waits for the copy, while an empty directory is in its place; one without the key is
    refused."""
    remote = tmp_path / "remote"
    remote.mkdir()
    delay, target = topics.delay(config={"retention.ms": "100000"}), topics.create("orders")
    tree = {**config(remote), "roll": {"window": "40s"}, "delay": {}}
    with RunningBridge(tmp_path, broker.bootstrap, delay, config=tree, spark=False) as bridge:
        bridge.start()
        headers = [("delay-for", b"35s"), ("delay-topic", target.encode())]
        [sent] = produce(broker.bootstrap, [Outgoing(topic=delay, headers=headers)])
        trimmed = f'trimmed_partitions{{topic="{delay}"}}'
        wait_until(lambda: bridge.metrics()["segments"] == 1, COMMITTED_S_MAX, bridge.tail)
        [deleted] = topics.admin.delete_records([TopicPartition(delay, 0, sent.offset + 1)]).values()
        deleted.result(30)
        wait_until(lambda: bridge.metrics()[trimmed] == 1, COMMITTED_S_MAX, bridge.tail)
        wait_until(lambda: told(topics, bridge, delay, "g") == {True}, COMMITTED_S_MAX, bridge.tail)
        wait_until(lambda: is_copied(bridge), COMMITTED_S_MAX, bridge.tail)
        bridge.kill()
        shutil.rmtree(bridge.data)
        bridge.configure({"store": {"remote": None}})
        bridge.launch()
        assert bridge.wait_end(60) == StateError.exit_code and "DB-4012" in bridge.last_words()
        shutil.rmtree(bridge.data)
        kept = remote.rename(tmp_path / "kept")
        remote.mkdir()
        bridge.configure({"store": {"remote": f"file://{remote}"}})
        bridge.launch()
        wait_until(lambda: bool(bridge.events("index-awaited")), COMMITTED_S_MAX, bridge.tail)
        kept.rename(remote)
        with TopicReader(broker.bootstrap, [target]) as reader:
            [arrived] = reader.wait_for(1, DELIVERED_S_MAX)
        assert arrived.header("delay-origin") == f"{delay}/0/{sent.offset}".encode()
        assert bridge.stop() == 0


@pytest.mark.fault("a copy of an index that does not come, on a mount that hangs")
def test_a_copy_that_does_not_come_delays_no_other_partition(broker: Broker, topics: Topics, tmp_path: Path) -> None:
    """A start delivers the partitions whose indexes are there, and is not ready before the others have come."""
    remote = tmp_path / "remote"
    remote.mkdir()
    delay, target = topics.delay(partitions=2), topics.create("orders")
    headers = [("delay-for", b"1s"), ("delay-topic", target.encode())]
    kept = [("delay-for", b"1h"), ("delay-topic", target.encode())]
    tree = {**config(remote), "delay": {}}
    with RunningBridge(tmp_path, broker.bootstrap, delay, config=tree, spark=False) as bridge:
        bridge.start()
        produce(broker.bootstrap, [Outgoing(topic=delay, headers=kept, partition=partition) for partition in (0, 1)])
        wait_until(lambda: bridge.metrics()["segments"] == 2, COMMITTED_S_MAX, bridge.tail)
        wait_until(lambda: is_copied(bridge), COMMITTED_S_MAX, bridge.tail)
        bridge.kill()
        shutil.rmtree(bridge.data / delay / "1")
        manifests = list(remote.rglob("1/*.manifest"))
        for manifest in manifests:  # a read waits for a writer
            manifest.unlink()
            os.mkfifo(manifest)
        bridge.launch()
        wait_until(lambda: f"are not open yet: {delay}/1" in bridge.http("/readyz")[1], COMMITTED_S_MAX, bridge.tail)
        produce(broker.bootstrap, [Outgoing(topic=delay, headers=headers, partition=0)])
        with TopicReader(broker.bootstrap, [target]) as reader:
            reader.wait_for(1, DELIVERED_S_MAX)
        assert bridge.http("/readyz")[0] == 503
        for manifest in manifests:
            os.close(os.open(manifest, os.O_RDWR | os.O_NONBLOCK))
        bridge.wait_ready()
        assert bridge.metrics()["pending_messages"] == 2
        assert bridge.stop() == 0


@pytest.mark.fault("an instance that dies with its disk, beside another one")
def test_partitions_of_a_dead_instance_come_with_their_index(broker: Broker, topics: Topics, tmp_path: Path) -> None:
    """The other instance adopts them beside its own partitions, which are delivered meanwhile."""
    remote = tmp_path / "remote"
    remote.mkdir()
    delay = topics.delay(partitions=4)
    load = Load(broker.bootstrap, delay, [topics.create("orders", partitions=2)], seed=6, delay_ms_max=30_000)
    name, tree = f"bridge-{delay}", {**config(remote), "delivery": {"session_timeout": "6s"}}
    with (
        RunningBridge(tmp_path / "a", broker.bootstrap, delay, id=name, instance="a", config=tree, spark=False) as a,
        RunningBridge(tmp_path / "b", broker.bootstrap, delay, id=name, instance="b", config=tree, spark=False) as b,
    ):
        a.start()
        b.start()
        wait_until(lambda: a.owned == 2 and b.owned == 2, COMMITTED_S_MAX, lambda: f"a {a.owned}, b {b.owned} of 4")
        load.send(1_000)
        wait_until(lambda: b.metrics()["segments"] > 0, COMMITTED_S_MAX, b.tail)
        wait_until(lambda: is_copied(b), COMMITTED_S_MAX, b.tail)
        for given_up in a.events("partitions-given-up"):
            for place in given_up["partitions"].split(", "):  # an old index of these may be near enough
                shutil.rmtree(a.data / place, ignore_errors=True)
        before = len(a.events("index-adopted"))
        b.kill()
        wait_until(lambda: a.owned == 4, COMMITTED_S_MAX, a.tail)
        adopted = a.events("index-adopted")[before:]
        assert len(adopted) == 2, a.tail()
        assert sum(each["read_again"] for each in a.events("partitions-come")[-2:]) < 300
        balance = load.balance(load.wait_delivered(broker.bootstrap, DELIVERED_S_MAX))
        assert balance == Balance(), f"{balance}; log:\n{a.tail()}"
        assert a.stop() == 0


@pytest.mark.fault("kills of instances that lose their disks and swap partitions, with a copy on shared storage")
@pytest.mark.timeout(1800)
def test_pods_that_swap_partitions_lose_and_double_nothing(broker: Broker, topics: Topics, tmp_path: Path) -> None:
    """Kills at random moments hit either of two instances. Most of them cost the disk; after half of them the other
    instance takes the partitions over."""
    drawn, remote = seed(), tmp_path / "remote"
    chance = random.Random(drawn)
    remote.mkdir()
    delay = topics.delay(partitions=4)
    load = Load(broker.bootstrap, delay, [topics.create("orders", partitions=2)], seed=drawn, delay_ms_max=15_000)
    name, tree = f"bridge-{delay}", {**config(remote), "delivery": {"session_timeout": "6s"}}
    with (
        RunningBridge(tmp_path / "a", broker.bootstrap, delay, id=name, instance="a", config=tree, spark=False) as a,
        RunningBridge(tmp_path / "b", broker.bootstrap, delay, id=name, instance="b", config=tree, spark=False) as b,
    ):
        a.start()
        b.start()
        adopted = 0
        with load.running(100):
            for _ in range(KILLS):
                killed, other = chance.sample([a, b], 2)
                pause(chance.uniform(0, RUNNING_S))
                killed.kill()
                if chance.random() < LOST_DISKS:
                    shutil.rmtree(killed.data)
                if chance.random() < SWAPS:
                    wait_until(partial(owns, other, 4), COMMITTED_S_MAX, other.tail)
                killed.start()
                adopted += len(killed.events("index-adopted"))
        balance = load.balance(load.wait_delivered(broker.bootstrap, DELIVERED_S_MAX))
        assert balance == Balance(), f"seed {drawn}: {balance}; log:\n{a.tail()}\n{b.tail()}"
        assert adopted or not IS_NIGHTLY  # a few kills may all come before the first copy
        assert a.metrics()["early_deliveries_total"] == b.metrics()["early_deliveries_total"] == 0
        assert a.stop() == b.stop() == 0
