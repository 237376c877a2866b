"""Relay: a separate process that delivers every record of the topic `relay` at once, to the topic in its header.

It is the lower bound for the bridge: one consumer and one producer in one thread, exactly once, without delays, index
or failure handling. It begins at the end of the topic, prints `ready`, and stops on SIGTERM.

python -m bench.relay --bootstrap ... --interval 40
"""

from __future__ import annotations

import argparse
import signal
from typing import Any, Final

from confluent_kafka import Consumer, Message, Producer, TopicPartition

from timerstore.clock import SystemClock

TOPIC: Final = "relay"
GROUP: Final = "bench-relay"
ORIGIN: Final = "relay-origin"
"""The added header: topic/partition/offset/timestamp, the broker's, of the record."""
INTERVAL_MS: Final = 40
"""The bridge's commit interval; half of it after a transaction of `BUSY_ROWS`, as in the bridge."""
BUSY_ROWS: Final = 100
FETCHED: Final = 10_000
POLL_S: Final = 0.001
CALL_S: Final = 60


def main() -> None:
    """Relay until SIGTERM. Raises KafkaException on any failure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--bootstrap", required=True)
    parser.add_argument("--interval", type=int, default=INTERVAL_MS, help="from one commit to the next, in ms")
    arguments = parser.parse_args()
    client = {"bootstrap.servers": arguments.bootstrap, "log_level": 0}
    committed = {"isolation.level": "read_committed", "enable.auto.commit": False, "auto.offset.reset": "error"}
    consumer = Consumer({**client, **committed, "group.id": GROUP})
    queue = {"linger.ms": 100, "queue.buffering.max.messages": 100_000, "batch.num.messages": 10_000}
    producer = Producer({**client, **queue, "transactional.id": GROUP, "retry.backoff.ms": 1})
    producer.init_transactions(CALL_S)
    partitions = [TopicPartition(TOPIC, number) for number in consumer.list_topics(TOPIC).topics[TOPIC].partitions]
    for partition in partitions:
        partition.offset = consumer.get_watermark_offsets(partition)[1]
    consumer.assign(partitions)
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: stopped.append(number))
    print("ready", flush=True)
    relay(consumer, producer, arguments.interval / 1000, stopped)
    consumer.close()


def relay(consumer: Consumer, producer: Producer, interval_s: float, stopped: list[int]) -> None:
    """One transaction for each interval with records: the records, and the offsets behind them."""
    clock, group, commit_s = SystemClock(), consumer.consumer_group_metadata(), 0.0
    batch: list[Message] = []
    while not stopped:
        now_s = clock.monotonic_s()
        commit_s = max(now_s + POLL_S, commit_s + interval_s / (2 if len(batch) >= BUSY_ROWS else 1))
        batch = consumer.consume(FETCHED, commit_s - now_s)
        if not batch:
            continue
        producer.begin_transaction()
        ends: dict[int, int] = {}
        for record in batch:
            assert record.error() is None, record.error()
            headers: Any = record.headers()
            number, offset = record.partition() or 0, record.offset() or 0
            added = [*headers, (ORIGIN, f"{TOPIC}/{number}/{offset}/{record.timestamp()[1]}")]
            target = dict(headers)["delay-topic"].decode()
            producer.produce(target, value=record.value(), key=record.key(), headers=added)
            ends[number] = offset + 1
        offsets = [TopicPartition(TOPIC, number, end) for number, end in ends.items()]
        producer.send_offsets_to_transaction(offsets, group, CALL_S)
        producer.commit_transaction(CALL_S)


if __name__ == "__main__":
    main()
