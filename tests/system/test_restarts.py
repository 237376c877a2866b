"""What survives a restart: pending messages, a lost or damaged directory, another configuration, deleted offsets."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from confluent_kafka import ConsumerGroupTopicPartitions, KafkaException

from bridge.errors import StateError
from dev.harness.kafka import Outgoing, ReadRecord, TopicReader, Topics, produce
from dev.harness.ledger import Balance
from dev.harness.load import LEVELS_MS, Load
from dev.harness.waiting import wait_until
from tests.system.bridge import RunningBridge
from tests.system.broker import Broker

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(600)]

DELIVERED_S_MAX: Final = 90
REFUSED_S_MAX: Final = 120
WRITTEN_S_MAX: Final = 90
LOOKS: Final = 200
"""Looks for new output before more is sent: some ten seconds."""
PENDING_MIN: Final = 50
PARTITIONS: Final = 3
READY_LATE_MS_MAX: Final = 5_000
"""300 ms on a machine that does nothing else (`bench/on_time.py`)."""
# Segments are written soon, and read back: the horizon ends before the load does.
BUSY_DISK: Final = {
    "store": {"flush_interval": "500ms"},
    "ready_rows": {"horizon": "2s"},
    "delay": {"levels": " ".join(f"{ms}ms" for ms in LEVELS_MS)},
}


class Site:
    """One bridge that the tests of this module stop and start, and a load whose balance must be right after each."""

    def __init__(self, broker: Broker, topics: Topics, bridge: RunningBridge, load: Load) -> None:
        self.bootstrap = broker.bootstrap
        self.topics = topics
        self.bridge = bridge
        self.load = load

    def running(self) -> RunningBridge:
        """The bridge, started if the test before left it down."""
        return self.bridge if self.bridge.running else self.bridge.start()

    def fill(self) -> None:
        """Send a load of which much is pending, and wait until some of that is in segments: there may be one of the
        load before, which is about to go.
        """

        def is_written() -> bool:
            if next(looks) % LOOKS == 0:  # on a busy machine all of it may be due before it is read
                self.load.send(300)
            metrics = self.bridge.metrics()
            return metrics["pending_messages"] >= PENDING_MIN and metrics["segments"] > 0

        looks = itertools.count()
        wait_until(is_written, WRITTEN_S_MAX, "a segment, and messages for it")

    def settle(self) -> None:
        """Wait until everything has arrived; once, unaltered, not early."""
        records = self.load.wait_delivered(self.bootstrap, DELIVERED_S_MAX)
        balance = self.load.balance(records)
        assert balance == Balance(), f"{balance}; log:\n{self.bridge.tail()}"


@pytest.fixture(scope="module")
def site(broker: Broker, topics: Topics, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A bridge with its load; down until a test asks for it."""
    delay = topics.delay(partitions=3)
    load = Load(broker.bootstrap, delay, [topics.create("orders", partitions=2)], seed=3, delay_ms_max=9_000)
    directory = tmp_path_factory.mktemp("restarts")
    with RunningBridge(directory, broker.bootstrap, delay, config=BUSY_DISK, spark=False) as bridge:
        yield Site(broker, topics, bridge, load)


@pytest.mark.fault("a stop and a restart with pending messages")
def test_pending_messages_survive_a_graceful_stop(site: Site) -> None:
    """SIGTERM ends the bridge within 10 s with status 0; pending messages, and those sent meanwhile, arrive after a
    restart."""
    bridge = site.running()
    site.fill()
    assert bridge.stop() == 0
    assert "Traceback" not in bridge.logs
    bridge.wait_no_orphans()
    site.load.send(100)
    bridge.start()
    [opened] = bridge.events("index-opened")
    assert opened["segments"] > 0
    assert (opened["without_index"], opened["read_again"]) == (0, 0), "what was in memory was written down"
    site.settle()


@pytest.mark.fault("a lost directory")
def test_a_deleted_directory_is_rebuilt(site: Site) -> None:
    """The directory is an index: without it, the bridge reads the topic again, and repeats nothing."""
    bridge = site.running()
    site.fill()
    assert bridge.stop() == 0
    shutil.rmtree(bridge.data)
    bridge.start()
    [opened] = bridge.events("index-opened")
    assert opened["without_index"] == opened["partitions"]
    assert opened["read_again"] > 0, "what is finished is read as well"
    site.settle()


@pytest.mark.fault("a damaged segment at a start")
def test_a_damaged_segment_is_set_aside_at_start(site: Site) -> None:
    """A segment that fails its checksum is set aside when it is read, and its rows come from Kafka again."""
    bridge = site.running()
    site.fill()
    assert bridge.stop() == 0
    for segment in segments(bridge):
        damage(segment)
    bridge.start()
    site.settle()
    assert "set aside" in bridge.logs


@pytest.mark.fault("a damaged segment in a running bridge")
def test_a_damaged_segment_is_set_aside_while_running(site: Site) -> None:
    """A segment that is damaged under a running bridge is found when it is read, set aside, and rebuilt from Kafka."""
    bridge = site.running()
    site.load.wait_delivered(site.bootstrap, DELIVERED_S_MAX)
    for _ in range(3):
        site.fill()
    for segment in segments(bridge):
        damage(segment)
    site.settle()
    assert bridge.running
    assert "set aside" in bridge.logs


@pytest.mark.fault("a damaged checkpoint")
def test_a_damaged_checkpoint_is_set_aside(site: Site) -> None:
    """A checkpoint that cannot be read is set aside, and the index is rebuilt from Kafka."""
    bridge = site.running()
    site.fill()
    assert bridge.stop() == 0
    checkpoints = [path for path in bridge.data.rglob("*") if "checkpoint" in path.name]
    assert checkpoints
    for path in checkpoints:
        damage(path)
    bridge.start()
    assert "set aside" in bridge.logs
    site.settle()


def test_what_is_sent_once_it_is_ready_does_not_wait_for_spark(broker: Broker, topics: Topics, tmp_path: Path) -> None:
    """From any partition, on the first start and on one that finds an index."""
    delay, target = topics.delay(partitions=PARTITIONS), topics.create("orders")
    headers = [("delay-for", b"200ms"), ("delay-topic", target.encode())]
    at_once = [Outgoing(topic=delay, partition=each, value=b"x", headers=headers) for each in range(PARTITIONS)]
    with (
        RunningBridge(tmp_path, broker.bootstrap, delay) as bridge,
        TopicReader(broker.bootstrap, [target]) as reader,
    ):
        for count in (PARTITIONS, 2 * PARTITIONS):
            bridge.start()
            produce(broker.bootstrap, at_once)
            reader.wait_for(count, DELIVERED_S_MAX)
            assert not bridge.events("query-serves")
            assert bridge.stop() == 0
    late_ms = [record.timestamp_ms - int(record.header("delay-due") or b"") for record in reader.records]
    assert min(late_ms) >= 0 and max(late_ms) < READY_LATE_MS_MAX


@pytest.mark.fault("a kill in the mode at-least-once")
def test_at_least_once_delivers(broker: Broker, topics: Topics, tmp_path: Path) -> None:
    """Without transactions every message arrives, unaltered and not early; a kill may repeat messages, but loses
    none."""
    delay = topics.delay(partitions=2)
    load = Load(broker.bootstrap, delay, [topics.create("orders")], seed=4, delay_ms_max=8_000)
    config = {**BUSY_DISK, "delivery": {"mode": "at-least-once"}}
    with RunningBridge(tmp_path, broker.bootstrap, delay, config=config, spark=False) as bridge:
        bridge.start()
        load.send(300)
        balance = load.balance(load.wait_delivered(broker.bootstrap, DELIVERED_S_MAX))
        assert balance == Balance(), balance
        load.send(300)
        bridge.kill()
        bridge.start()
        balance = load.balance(load.wait_delivered(broker.bootstrap, DELIVERED_S_MAX))
        assert (balance.lost, balance.early, balance.altered, balance.unknown) == ([], [], [], []), balance
        assert bridge.stop() == 0


def test_decode_parameters_may_change_between_two_runs(broker: Broker, topics: Topics, tmp_path: Path) -> None:
    """Records that were taken in keep the due time of the old levels and maximum; those read later get the new ones."""
    delay, target = topics.delay(partitions=2), topics.create("orders")
    to = ("delay-topic", target.encode())

    def send(tag: str, *times: tuple[str, bytes]) -> list[ReadRecord]:
        messages = [
            Outgoing(topic=delay, value=f"{tag} {time} {i}".encode(), headers=[time, to], partition=i)
            for time in times
            for i in range(2)
        ]
        return produce(broker.bootstrap, messages)

    level, far = ("delay-level", b"2"), ("delay-for", b"15s")
    with RunningBridge(
        tmp_path, broker.bootstrap, delay, config={"delay": {"levels": "1s 12s", "max": "1m"}}, spark=False
    ) as bridge:
        bridge.start()
        old = send("old", level, far)
        end = 1 + max(record.offset for record in old)
        wait_until(lambda: set(committed(topics, bridge.id, delay)) == {end}, 30, "offsets committed")
        assert bridge.stop() == 0
        bridge.configure({"delay": {"levels": "1s 2s", "max": "10s"}})
        new = send("new", level, far)
        bridge.start()
        due_ms = {(record.value, record.timestamp_ms + (12_000 if i < 2 else 15_000)) for i, record in enumerate(old)}
        due_ms |= {(record.value, record.timestamp_ms + 2_000) for record in new[:2]}
        with TopicReader(broker.bootstrap, [target, f"{delay}.dlt"]) as reader:
            reader.wait_for(len(old) + len(new), DELIVERED_S_MAX)
            bridge.wait_idle(30)
            records = reader.to_end()
        delivered = [record for record in records if record.topic == target]
        assert sorted((record.value or b"", int(record.header("delay-due") or b"")) for record in delivered) == sorted(
            due_ms
        )
        assert all(record.timestamp_ms >= int(record.header("delay-due") or b"") for record in delivered)
        letters = [record for record in records if record.topic != target]
        assert sorted(record.value or b"" for record in letters) == sorted(record.value or b"" for record in new[2:])
        assert {record.header("delay-reason") for record in letters} == {b"beyond-max"}
        # And back: several decode epochs.
        bridge.stop()
        bridge.configure({"delay": {"levels": "1s 12s", "max": "1m"}})
        send("third", ("delay-level", b"1"))
        bridge.start()
        with TopicReader(broker.bootstrap, [target]) as reader:
            reader.wait_for(len(delivered) + 2, DELIVERED_S_MAX)
            bridge.wait_idle(30)
            assert len(reader.to_end()) == len(delivered) + 2


def test_offsets_removed_by_an_admin_are_refused(broker: Broker, topics: Topics, tmp_path: Path) -> None:
    """When the group's offsets are gone, the bridge does not guess: it ends with status 4 and names the remedy."""
    delay, target = topics.delay(partitions=2), topics.create("orders")
    config = {"delivery": {"session_timeout": "6s"}}
    with RunningBridge(tmp_path, broker.bootstrap, delay, config=config, spark=False) as bridge:
        bridge.start()
        message = Outgoing(topic=delay, headers=[("delay-for", b"1"), ("delay-topic", target.encode())])
        produce(broker.bootstrap, [message])
        with TopicReader(broker.bootstrap, [target]) as reader:
            reader.wait_for(1, DELIVERED_S_MAX)
        assert bridge.stop() == 0
        wait_until(lambda: deleted(topics, bridge.id), 60, "the group's end, which its session time-out allows")
        bridge.launch()
        assert bridge.wait_end(REFUSED_S_MAX) == StateError.exit_code
        words = bridge.last_words()
        assert "committed offset" in words
        assert "delay-bridge reset-offsets" in words
        with TopicReader(broker.bootstrap, [target]) as reader:
            assert len(reader.to_end()) == 1, "nothing was repeated"


# ---- treatments of a bridge


def segments(bridge: RunningBridge) -> list[Path]:
    """The segments on disk."""
    return sorted(bridge.data.rglob("*.parquet"))


def damage(path: Path) -> None:
    """Flip a stretch in the middle of a file, in place."""
    with path.open("r+b") as file:
        size = file.seek(0, 2)
        file.seek(size // 4)
        piece = bytearray(file.read(max(1, size // 2)))
        for i in range(0, len(piece), 7):
            piece[i] ^= 0x5A
        file.seek(size // 4)
        file.write(piece)


def committed(topics: Topics, group: str, topic: str) -> list[int]:
    """The group's committed offsets of the topic, by partition."""
    asked = topics.admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(group)])
    found = asked[group].result(30).topic_partitions
    return [each.offset for each in sorted(found, key=lambda each: each.partition) if each.topic == topic]


def deleted(topics: Topics, group: str) -> bool:
    """Delete the group with its offsets; False while it has members."""
    try:
        topics.admin.delete_consumer_groups([group])[group].result(30)
    except KafkaException:
        return False
    return True
