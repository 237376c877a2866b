"""How large the records are that will be read first, so that already the first micro-batch fits into its bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from confluent_kafka import Consumer, TopicPartition

from bridge.kafka.construction import made
from bridge.settings.clients import librdkafka
from bridge.settings.model import Settings
from bridge.wire.received import record_bytes
from timerstore.clock import Clock
from timerstore.rows.sources import SourceName

SAMPLE_RECORDS: Final = 200
SAMPLE_WAIT_S: Final = 1.0
UNKNOWN_RECORD_BYTES: Final = 400.0
"""Assumed where no record waits to be read: the first batches are then small because little has come in."""


def sampled_record_bytes(settings: Settings, start: Mapping[SourceName, int], clock: Clock) -> float:
    """Mean size in bytes of the first records from `start` on, by a consumer of its own. Raises EnvironmentFailure."""
    properties = {
        **librdkafka(settings, "admin"),
        "group.id": f"{settings.group_id}-sample",
        "enable.auto.commit": False,
        "auto.offset.reset": "earliest",
    }
    sizes: list[int] = []
    consumer = made("for samples", lambda: Consumer(properties))
    try:
        consumer.assign([TopicPartition(topic, partition, offset) for (topic, partition), offset in start.items()])
        deadline_s = clock.monotonic_s() + SAMPLE_WAIT_S
        while len(sizes) < SAMPLE_RECORDS and clock.monotonic_s() < deadline_s:
            batch = consumer.consume(SAMPLE_RECORDS, timeout=0.2)
            sizes += [record_bytes(message) for message in batch if message.error() is None]
            if sizes and not batch:
                break
    finally:
        consumer.close()
    return sum(sizes) / len(sizes) if sizes else UNKNOWN_RECORD_BYTES
