"""A million messages due in the same second."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import pytest
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaException, Producer, TopicPartition

from dev.harness.kafka import Topics
from tests.system.bridge import AS_SHIPPED, RunningBridge
from tests.system.broker import Broker
from timerstore.clock import SystemClock

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(600)]

COUNT: Final = 1_000_000
VALUE_BYTES: Final = 200
PARTITIONS: Final = 4
AHEAD_MS: Final = 45_000
"""Longer than producing takes, so that all of them are due at once."""
DELIVERED_S_MAX: Final = 120
RSS_BYTES_MAX: Final = int(1.6 * (1 << 30))
READ_AT_ONCE: Final = 20_000


def test_a_million_messages_due_in_one_second(broker: Broker, topics: Topics, tmp_path: Path) -> None:
    """Each arrives once and none early, and Python and JVM together stay within 1.6 GiB throughout."""
    delay, target = topics.delay(partitions=PARTITIONS), topics.create("orders", partitions=PARTITIONS)
    clock = SystemClock()
    with RunningBridge(tmp_path, broker.bootstrap, delay, config=AS_SHIPPED) as bridge:
        bridge.start()
        due_ms = clock.now_ms() + AHEAD_MS
        send(broker.bootstrap, delay, [("delay-until", b"%d" % due_ms), ("delay-topic", target.encode())])
        print(f"sent {(due_ms - clock.now_ms()) / 1000:.1f} s ahead, RSS {bridge.rss_bytes() >> 20} MiB")
        counts, earliest_ms, latest_ms, rss_bytes = receive(broker.bootstrap, target, bridge, clock)
        metrics = bridge.wait_idle(30)
        print(f"the last one {(latest_ms - due_ms) / 1000:.1f} s late, RSS at most {rss_bytes >> 20} MiB")
        assert counts.min() == counts.max() == 1
        assert earliest_ms >= due_ms
        assert metrics["early_deliveries_total"] == 0
        assert metrics[f'records_delivered_total{{topic="{target}"}}'] == COUNT
        assert rss_bytes <= RSS_BYTES_MAX
        assert bridge.stop() == 0


def send(bootstrap: str, topic: str, headers: list[tuple[str, str | bytes | None]]) -> None:
    """Numbered messages, as fast as the client takes them."""
    producer = Producer(
        {"bootstrap.servers": bootstrap, "linger.ms": 20, "queue.buffering.max.messages": COUNT, "batch.size": 500_000}
    )
    padding = b"." * (VALUE_BYTES - 8)
    for number in range(COUNT):
        producer.produce(topic, b"%08d%b" % (number, padding), headers=headers, partition=number % PARTITIONS)
        if number % 10_000 == 0:
            producer.poll(0)
    assert producer.flush(60) == 0


def receive(bootstrap: str, topic: str, bridge: RunningBridge, clock: SystemClock) -> tuple[np.ndarray, int, int, int]:
    """How often each number arrived, first and last timestamp, and the most memory that the bridge had meanwhile."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": topic,
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
        }
    )
    counts = np.zeros(COUNT, dtype=np.int64)
    earliest_ms, latest_ms, rss_bytes, sampled_s = 1 << 62, 0, 0, 0.0
    try:
        consumer.assign([TopicPartition(topic, partition, OFFSET_BEGINNING) for partition in range(PARTITIONS)])
        end_s = clock.monotonic_s() + AHEAD_MS / 1000 + DELIVERED_S_MAX
        while counts.sum() < COUNT and clock.monotonic_s() < end_s:
            messages = consumer.consume(READ_AT_ONCE, 0.2)
            for message in messages:
                if (error := message.error()) is not None:
                    raise KafkaException(error)
            np.add.at(counts, [int((message.value() or b"")[:8]) for message in messages], 1)
            stamps = [message.timestamp()[1] for message in messages]
            earliest_ms, latest_ms = min([earliest_ms, *stamps]), max([latest_ms, *stamps])
            if clock.monotonic_s() - sampled_s > 0.5:
                sampled_s = clock.monotonic_s()
                rss_bytes = max(rss_bytes, bridge.rss_bytes())
        assert not consumer.consume(1, 1.0), "more than were sent"
    finally:
        consumer.close()
    return counts, earliest_ms, latest_ms, rss_bytes
