"""Delay topics that change while the bridge runs: cut, created again, trimmed, configured otherwise."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from confluent_kafka import ConsumerGroupTopicPartitions, TopicPartition
from confluent_kafka.admin import AdminClient

from bridge.errors import StateError
from dev.broker import EmbeddedBroker
from dev.harness.kafka import Outgoing, ReadRecord, TopicReader, Topics, produce
from dev.harness.waiting import wait_until
from tests.system.bridge import RunningBridge
from tests.system.broker import own_broker
from timerstore.clock import SystemClock

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(600)]

DELIVERED_S_MAX: Final = 120
SEEN_S_MAX: Final = 60
KEPT, LOST, NEW = 40, 20, 25
"""Records below the cut, above it, and written after it: more than were lost."""
AFTER_MS, LATER_MS = 20_000, 3_600_000
"""The due times of messages that must be pending at the cut, and of those that must not."""


class Site:
    """A bridge with a topic for each fault, and one that has none, on a broker that may be stopped."""

    def __init__(self, broker: EmbeddedBroker, directory: Path) -> None:
        self.broker = broker
        self.topics = Topics(broker.bootstrap)
        self.cut, self.again, self.well = (self.topics.delay(name) for name in ("cut", "again", "well"))
        self.bridge = RunningBridge(directory, broker.bootstrap, self.cut, self.again, self.well)

    def send(self, delay: str, target: str, values: range, due_ms: int = 0) -> list[ReadRecord]:
        due = ("delay-until", b"%d" % due_ms) if due_ms else ("delay-for", b"0")
        headers = [due, ("delay-topic", target.encode())]
        return produce(
            self.broker.bootstrap, [Outgoing(topic=delay, value=b"%d" % value, headers=headers) for value in values]
        )

    def goes_on(self) -> None:
        """A message of the topic that is well is delivered."""
        target = self.topics.create("goes-on")
        self.send(self.well, target, range(1))
        with TopicReader(self.broker.bootstrap, [target]) as reader:
            reader.wait_for(1, DELIVERED_S_MAX)

    def committed(self, topic: str) -> int:
        place = ConsumerGroupTopicPartitions(self.bridge.id, [TopicPartition(topic, 0)])
        # A client of its own: one that was made before the broker was restarted may wait for the old one.
        admin = AdminClient({"bootstrap.servers": self.broker.bootstrap})
        [found] = admin.list_consumer_group_offsets([place]).values()
        return int(found.result(30).topic_partitions[0].offset)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with own_broker() as broker:
        site = Site(broker, tmp_path_factory.mktemp("identity"))
        with site.bridge as bridge:
            bridge.start()
            yield site


def cut_log(directory: Path, offset: int) -> None:
    """Take the records from this offset on out of a partition's log, as a leader that has never had them would."""
    [log] = directory.glob("*.log")
    data, at = log.read_bytes(), 0
    while at < len(data):
        base, size = struct.unpack_from(">qi", data, at)
        if base >= offset:
            break
        at += 12 + size
    log.write_bytes(data[:at])
    for path in (*directory.glob("*index"), *directory.glob("*.snapshot")):
        path.unlink()
    for name in ("replication-offset-checkpoint", "recovery-point-offset-checkpoint"):
        checkpoint = directory.parent / name
        lines = checkpoint.read_text().splitlines()
        place = directory.name.rpartition("-")
        lines = [line for line in lines if line.split(" ")[:2] != [place[0], place[2]]]
        checkpoint.write_text("\n".join([lines[0], str(len(lines) - 2), *lines[2:]]) + "\n")
    (directory.parent / ".kafka_cleanshutdown").unlink(missing_ok=True)


@pytest.mark.fault("acknowledged records that the brokers lose")
def test_a_log_that_is_cut_loses_no_record_that_is_there(site: Site) -> None:
    """Every record in the log is delivered once, old or new; the number of lost records is reported."""
    target = site.topics.create("orders")
    due_ms = SystemClock().now_ms() + AFTER_MS
    site.send(site.cut, target, range(KEPT), due_ms)
    lost = site.send(site.cut, target, range(KEPT, KEPT + LOST), due_ms + LATER_MS)
    assert lost[0].offset == KEPT
    wait_until(lambda: site.bridge.metric("pending_messages") == KEPT + LOST, SEEN_S_MAX, "they are read")
    wait_until(lambda: site.committed(site.cut) == KEPT + LOST, SEEN_S_MAX, "O is behind them")
    site.broker.stop()
    cut_log(site.broker.data / "kafka" / f"{site.cut}-0", KEPT)
    site.broker.start()
    new = site.send(site.cut, target, range(100, 100 + NEW), due_ms)
    assert new[0].offset == KEPT, "the log was cut"
    wait_until(lambda: site.bridge.events("log-truncated"), SEEN_S_MAX, site.bridge.tail)
    [told] = site.bridge.events("log-truncated")
    assert (told["topic"], told["offset"], told["dropped"]) == (site.cut, KEPT, LOST), told
    with TopicReader(site.broker.bootstrap, [target]) as reader:
        reader.wait_for(KEPT + NEW, DELIVERED_S_MAX)
        site.goes_on()
        values = sorted(int(record.value or b"") for record in reader.to_end())
    assert values == [*range(KEPT), *range(100, 100 + NEW)], site.bridge.tail()
    wait_until(
        lambda: site.bridge.metric("pending_messages") == 0, SEEN_S_MAX, "nothing is left of those that are lost"
    )
    assert "lost acknowledged records" in site.bridge.http("/readyz")[1]
    assert site.bridge.metrics()[f'records_truncated_total{{topic="{site.cut}"}}'] >= LOST


@pytest.mark.fault("a delay topic that is deleted and created again")
def test_a_topic_that_is_created_again_is_held(site: Site) -> None:
    """Nothing of the new topic is delivered or committed, /readyz and a gauge name it, and the others go on; the next
    start is refused."""
    target = site.topics.create("orders")
    site.send(site.again, target, range(5))
    wait_until(lambda: site.committed(site.again) == 5, SEEN_S_MAX, "it is read")
    site.topics.delete(site.again)
    config = {"message.timestamp.type": "LogAppendTime", "cleanup.policy": "delete"}
    site.topics.create(exactly=site.again, config=config)
    site.send(site.again, target, range(100, 104))
    gauge = f'partitions_in_doubt{{doubt="replaced",topic="{site.again}"}}'
    wait_until(lambda: site.bridge.metrics().get(gauge) == 1, SEEN_S_MAX, site.bridge.tail)
    site.goes_on()
    assert f"{site.again}/0 is held" in site.bridge.http("/readyz")[1]
    committed = site.committed(site.again)
    site.send(site.again, target, range(104, 110))
    site.goes_on()
    assert site.committed(site.again) == committed
    with TopicReader(site.broker.bootstrap, [target]) as reader:
        assert sorted(int(record.value or b"") for record in reader.to_end()) == [*range(5)]
    assert site.bridge.stop() == 0
    site.bridge.launch()
    assert site.bridge.wait_end(SEEN_S_MAX) == StateError.exit_code
