"""Delays that outlive the delay topic's retention: rolled many times, and delivered once, on time."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import OffsetSpec  # type: ignore[attr-defined]  # public, but not marked as exported

from bridge.errors import StateError
from dev.harness.kafka import Outgoing, ReadRecord, TopicReader, Topics, produce
from dev.harness.ledger import Balance
from dev.harness.load import Load
from dev.harness.waiting import wait_until
from tests.system.bridge import RunningBridge
from tests.system.broker import Broker

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(600)]

DELIVERED_S_MAX: Final = 120
LATE_MS_MAX: Final = 20_000
WINDOW_MS: Final = 2_000
RETENTION_MS: Final = 15_000
SHORT: Final = {"retention.ms": str(RETENTION_MS), "segment.ms": "1000"}
BUSY_DISK: Final = {"store": {"flush_interval": "500ms"}, "ready_rows": {"horizon": "1s"}}


class Site:
    """A bridge that rolls every two seconds, with a topic that keeps its records and one that does so for a moment."""

    def __init__(self, broker: Broker, topics: Topics, bridge: RunningBridge, delay: str, short: str) -> None:
        self.bootstrap = broker.bootstrap
        self.topics = topics
        self.bridge = bridge
        self.delay = delay
        self.short = short

    def receive(self, target: str, count: int) -> list[ReadRecord]:
        """All records of `target` when there are `count`; there must not be more."""
        with TopicReader(self.bootstrap, [target]) as reader:
            try:
                reader.wait_for(count, DELIVERED_S_MAX)
            except AssertionError as error:
                error.add_note(f"log:\n{self.bridge.tail()}")
                raise
            records = reader.to_end()
        assert len(records) == count, f"{len(records)} records; log:\n{self.bridge.tail()}"
        return records


@pytest.fixture(scope="module")
def site(broker: Broker, topics: Topics, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """One bridge for this module, warm; every test has targets of its own."""
    delay, short = topics.delay(partitions=2), topics.delay("short", partitions=2, config=SHORT)
    config = {**BUSY_DISK, "roll": {"window": f"{WINDOW_MS}ms"}}
    with RunningBridge(tmp_path_factory.mktemp("rolls"), broker.bootstrap, delay, short, config=config) as bridge:
        bridge.start()
        site = Site(broker, topics, bridge, delay, short)
        target = topics.create("warm")
        headers = [("delay-for", b"0"), ("delay-topic", target.encode())]
        produce(broker.bootstrap, [Outgoing(topic=delay, headers=headers)])
        # A start takes its time, and the short topic keeps nothing for that long on a busy machine.
        site.receive(target, 1)
        yield site


def log_start(topics: Topics, topic: str, partition: int) -> int:
    """The first offset that is still there. (It is asked for: records may be deleted after they are read.)"""
    place = TopicPartition(topic, partition)
    earliest = OffsetSpec.earliest()  # type: ignore[no-untyped-call]
    found = topics.admin.list_offsets({place: earliest})[place].result(30)
    return int(found.offset)


@pytest.mark.fault("a retention that is shorter than the delay")
def test_a_delay_outlives_the_retention(site: Site) -> None:
    """A message that is due long after the deletion of its record arrives once, on time and complete, with only the
    necessary rolls (RocketMQ #11156)."""
    target = site.topics.create("orders")
    to = ("delay-topic", target.encode())
    own = [("a", b"1"), ("none", None), ("a", b"2"), ("b", b"\xff")]
    delays_ms = [1_000, WINDOW_MS + 1, 2 * WINDOW_MS, RETENTION_MS + 3_000, RETENTION_MS + 4_000]
    messages = [
        Outgoing(
            topic=site.short,
            key=b"k%d" % i,
            value=b"v%d" % i,
            partition=i % 2,
            headers=[own[0], ("delay-for", b"%dms" % delay_ms), *own[1:], to, ("delay-id", b"id-%d" % i)],
        )
        for i, delay_ms in enumerate(delays_ms)
    ]
    before = site.bridge.metrics()["records_rolled_total"]
    sent = produce(site.bootstrap, messages)
    arrived = {record.key: record for record in site.receive(target, len(sent))}
    for record, delay_ms in zip(sent, delays_ms, strict=True):
        got = arrived[record.key]
        due_ms = record.timestamp_ms + delay_ms
        assert (got.value, got.headers[: len(own)]) == (record.value, tuple(own))
        assert got.header("delay-origin") == f"{record.topic}/{record.partition}/{record.offset}".encode()
        assert got.header("delay-due") == b"%d" % due_ms
        assert due_ms <= got.timestamp_ms <= due_ms + LATE_MS_MAX
        assert {name for name, _ in got.headers} == {"a", "b", "none", "delay-origin", "delay-due"}
    for partition in range(2):
        last = max(record.offset for record in sent if record.partition == partition)
        assert log_start(site.topics, site.short, partition) > last, "no record has outlived the retention"
    metrics = site.bridge.wait_idle(30)
    # A roll moves a message on by three quarters of the window at least, and the last window needs none.
    rolls = metrics["records_rolled_total"] - before
    most = sum(max(0, delay_ms - WINDOW_MS) // (WINDOW_MS * 3 // 4) + (delay_ms > WINDOW_MS) for delay_ms in delays_ms)
    assert sum(delay_ms > WINDOW_MS for delay_ms in delays_ms) <= rolls <= most
    assert metrics["early_deliveries_total"] == 0
    assert not any(count for name, count in metrics.items() if name.startswith("records_rejected_total"))


def test_a_cancel_finds_its_message_after_any_number_of_rolls(site: Site) -> None:
    """Odd or even (RocketMQ #7991), with a key or without, in whatever partition: cancelled messages never arrive."""
    target = site.topics.create("orders")
    far = (("delay-for", b"8s"), ("delay-topic", target.encode()))
    ids = [b"once", b"twice", b"kept", b"keyless"]
    before = site.bridge.metrics()["records_cancelled_total"]
    produce(
        site.bootstrap,
        [
            Outgoing(topic=site.delay, value=id, key=None if id == b"keyless" else id, partition=0, headers=headers)
            for id in ids
            for headers in [[*far, ("delay-id", id)]]
        ],
    )

    def cancel(id: bytes, partition: int) -> Outgoing:
        key = None if id == b"keyless" else id
        return Outgoing(topic=site.delay, key=key, partition=partition, headers=[("delay-cancel", id)])

    with TopicReader(site.bootstrap, [site.delay]) as reader:
        for id, rolls, partition in ((b"once", b"1", 0), (b"keyless", b"1", 1), (b"twice", b"2", 0)):
            wait_until(lambda id=id, rolls=rolls: copied(reader, id, rolls), 60, f"{id!r} rolled")  # type: ignore[misc]
            produce(site.bootstrap, [cancel(id, partition), cancel(b"unknown", partition)])
        [arrived] = site.receive(target, 1)
        assert arrived.value == b"kept"
        metrics = site.bridge.wait_idle(30)
        records = reader.to_end()
    assert [record.value for record in site.receive(target, 1)] == [b"kept"]
    assert metrics["records_cancelled_total"] - before == 3
    forwarded = [record for record in records if "delay-copy-forwarded" in dict(record.headers)]
    assert [(r.partition, r.key, r.header("delay-cancel")) for r in forwarded] == [(0, None, b"keyless")]
    # No cancel is delivered, and none is a dead letter.
    assert not any(count for name, count in metrics.items() if name.startswith("records_rejected_total"))


def copied(reader: TopicReader, id: bytes, rolls: bytes) -> bool:
    """Whether the delay topic holds a copy of this message after this number of rolls."""
    reader.poll(0.1)
    wanted = {("delay-id", id), ("delay-copy-rolls", rolls)}
    return any(wanted <= set(record.headers) for record in reader.records)


def test_a_replacement_without_a_key_is_found_in_any_partition(site: Site) -> None:
    """The new one arrives in place of the old one, which another partition holds, before that is due."""
    target = site.topics.create("orders")
    to, id = ("delay-topic", target.encode()), ("delay-id", b"order-42")
    old = Outgoing(topic=site.delay, value=b"old", partition=0, headers=[("delay-for", b"30s"), to, id])
    new = Outgoing(
        topic=site.delay, value=b"new", partition=1, headers=[("delay-for", b"3s"), to, id, ("delay-replace", b"true")]
    )
    before = site.bridge.metrics()
    produce(site.bootstrap, [old])
    produce(site.bootstrap, [new])
    assert [record.value for record in site.receive(target, 1)] == [b"new"]
    # Long before the old one is due. (It rolls: for a moment it may be neither pending nor unread.)
    cancelled = "records_cancelled_total"
    wait_until(lambda: site.bridge.metrics()[cancelled] > before[cancelled], 25, "the old one is cancelled")
    metrics = site.bridge.wait_idle(30)
    assert metrics[cancelled] - before[cancelled] == 1
    assert metrics["cancels_forwarded_total"] - before["cancels_forwarded_total"] == 1
    assert [record.value for record in site.receive(target, 1)] == [b"new"]


@pytest.mark.fault("kills and a lost directory between rolls")
def test_rolls_survive_kills_another_window_and_a_lost_directory(
    broker: Broker, topics: Topics, tmp_path: Path
) -> None:
    """Killed between rolls, and started again with another window and without its index, the bridge delivers every
    message once, not early, unaltered and with the origin of its first record."""
    delay = topics.delay(partitions=2)
    load = Load(broker.bootstrap, delay, [topics.create("orders", partitions=2)], seed=7, delay_ms_max=25_000)
    config = {**BUSY_DISK, "roll": {"window": "2s"}}
    with RunningBridge(tmp_path, broker.bootstrap, delay, config=config, spark=False) as bridge:
        bridge.start()
        load.send(300)
        wait_until(lambda: bridge.metrics()["records_rolled_total"] > 100, 60, "rolls")
        bridge.kill()
        shutil.rmtree(bridge.data)
        bridge.configure({"roll": {"window": "1s"}})
        bridge.start()
        load.send(100)
        wait_until(lambda: bridge.metrics()["records_rolled_total"] > 0, 60, "a roll with the new window")
        bridge.kill()
        bridge.configure({"roll": {"window": "3s"}})
        bridge.start()
        balance = load.balance(load.wait_delivered(broker.bootstrap, DELIVERED_S_MAX))
        assert balance == Balance(), f"{balance}; log:\n{bridge.tail()}"
        metrics = bridge.wait_idle(30)
        assert metrics["early_deliveries_total"] == 0
        assert bridge.stop() == 0
        # Nothing was rolled once more after it was delivered.
        balance = load.balance(load.wait_delivered(broker.bootstrap, 30))
        assert balance == Balance(), balance


@pytest.mark.fault("records of pending messages deleted from the log")
@pytest.mark.fault("records of pending messages that leave the log, and a process that is killed then")
def test_a_topic_that_is_trimmed_under_the_bridge(broker: Broker, topics: Topics, tmp_path: Path) -> None:
    """Pending messages whose records are deleted are reported at once, by log, gauge and /readyz, and stored at once: a
    kill then loses none. A start without the index is refused; with it, they are delivered."""
    delay, target = topics.delay(config={"retention.ms": "100000"}), topics.create("orders")
    with RunningBridge(tmp_path, broker.bootstrap, delay, config={"roll": {"window": "40s"}}, spark=False) as bridge:
        bridge.start()
        headers = [("delay-for", b"35s"), ("delay-topic", target.encode())]
        [sent] = produce(broker.bootstrap, [Outgoing(topic=delay, headers=headers)])
        label = f'{{topic="{delay}"}}'
        headroom, trimmed = f"retention_headroom_seconds{label}", f"trimmed_partitions{label}"
        wait_until(lambda: bridge.metrics()["pending_messages"], 20, "it is read")
        metrics = bridge.metrics()
        assert 0 < metrics[headroom] <= 60
        assert metrics[trimmed] == 0
        [deleted] = topics.admin.delete_records([TopicPartition(delay, 0, sent.offset + 1)]).values()
        deleted.result(30)
        wait_until(lambda: bridge.metrics()[trimmed] == 1, 20, "an alarm")
        assert bridge.events("unfinished-records-deleted")[0]["partitions"] == [f"{delay}/0"]
        wait_until(lambda: "store.directory alone" in bridge.http("/readyz")[1], 20, "it is stored")
        assert bridge.http("/readyz")[0] == 200
        bridge.kill()
        kept = bridge.data.rename(tmp_path / "kept")
        bridge.launch()
        assert bridge.wait_end(60) == StateError.exit_code and "DB-4012" in bridge.last_words()
        shutil.rmtree(bridge.data)
        kept.rename(bridge.data)
        bridge.start()
        with TopicReader(broker.bootstrap, [target]) as reader:
            [arrived] = reader.wait_for(1, DELIVERED_S_MAX)
        assert arrived.header("delay-origin") == f"{delay}/0/{sent.offset}".encode()
        wait_until(lambda: bridge.metrics()[trimmed] == 0, 20, "it is over")
        assert bridge.stop() == 0
