"""The demo's producer and consumer: numbered messages in, arrivals out, both into the ledger."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Final

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition

from bridge.client import DelayClient
from bridge.errors import EnvironmentFailure
from bridge.wire import headers
from demo.ledger import Arrival, Ledger, Plan
from timerstore.clock import Clock

DELAY_MS: Final = (500, 20_000)
KEYS: Final = 200
# librdkafka's own lines would tear the live picture; what matters comes back as an error.
QUIET: Final = {"log_level": 2}
METADATA_TIMEOUT_S: Final = 10
CONSUME_RECORDS: Final = 1_000
CONSUME_TIMEOUT_S: Final = 0.1
END_TIMEOUT_S: Final = 30


class Sender:
    """Sends numbered messages, with delays and topics by chance from `seed`."""

    def __init__(
        self,
        kafka: Mapping[str, str],
        delay_topic: str,
        topics: Sequence[str],
        ledger: Ledger,
        clock: Clock,
        *,
        seed: int,
    ) -> None:
        self._client = DelayClient(
            Producer({**kafka, **QUIET, "enable.idempotence": True, "partitioner": "murmur2_random", "linger.ms": 5}),
            delay_topic,
            clock=clock,
        )
        self._topics = topics
        self._ledger = ledger
        self._clock = clock
        self._random = random.Random(seed)
        self.sent = 0
        self._failure: KafkaError | None = None

    def send_up_to(self, count: int) -> None:
        """Send until `count` messages have been sent altogether. Raises KafkaException after a refusal."""
        while self.sent < count:
            self._send(self.sent)
            self.sent += 1
        self._client.producer.poll(0)
        self._raise_failure()

    def flush(self) -> None:
        """Wait until the delay topic has taken everything. Raises KafkaException or EnvironmentFailure."""
        self._client.flush()
        self._raise_failure()

    def _send(self, number: int) -> None:
        delay_ms = self._random.randint(*DELAY_MS)
        plan = Plan(
            topic=self._random.choice(self._topics),
            key=b"customer-%d" % self._random.randrange(KEYS),
            value=json.dumps({"number": number, "delay_ms": delay_ms}).encode(),
        )
        self._ledger.planned(number, plan)
        if number % 2:
            due_ms = self._clock.now_ms() + delay_ms
            self._client.send(
                plan.topic, plan.value, plan.key, at=due_ms, on_delivery=self._on_delivery(number, due_ms)
            )
        else:
            after = timedelta(milliseconds=delay_ms)
            told = self._on_delivery(number, None, delay_ms)
            self._client.send(plan.topic, plan.value, plan.key, after=after, on_delivery=told)

    def _on_delivery(
        self, number: int, due_ms: int | None, delay_ms: int = 0
    ) -> Callable[[KafkaError | None, Message], None]:
        def told(error: KafkaError | None, message: Message) -> None:
            if error is not None:
                self._failure = error
            else:
                # A relative delay counts from the timestamp that the broker gave to the record.
                self._ledger.acknowledged(number, due_ms if due_ms is not None else message.timestamp()[1] + delay_ms)

        return told

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise KafkaException(self._failure)


class Listener:
    """Reads the real topics as a read_committed consumer, on a thread of its own, and notes every arrival."""

    def __init__(
        self, kafka: Mapping[str, str], topics: Sequence[str], ledger: Ledger, clock: Clock, group: str
    ) -> None:
        self._ledger = ledger
        self._consumer = Consumer(
            {
                **kafka,
                **QUIET,
                "group.id": group,
                "isolation.level": "read_committed",
                "enable.auto.commit": False,
                "enable.partition.eof": True,
                "auto.offset.reset": "error",
                "fetch.wait.max.ms": 50,
            }
        )
        assigned = []
        for topic in topics:
            partitions = self._consumer.list_topics(topic, timeout=METADATA_TIMEOUT_S).topics[topic].partitions
            assigned += [TopicPartition(topic, partition, OFFSET_BEGINNING) for partition in partitions]
        self._consumer.assign(assigned)
        self._partitions = frozenset((each.topic, each.partition) for each in assigned)
        self._clock = clock
        self._stop = threading.Event()
        self._thread = ThreadPoolExecutor(1, "demo-consumer")
        self._reading: Future[None] | None = None

    def start(self) -> None:
        """Start reading."""
        self._reading = self._thread.submit(self._run)

    def check(self) -> None:
        """Raises what ended the reading, if something did."""
        if self._reading is not None and self._reading.done():
            self._reading.result()

    def finish(self) -> None:
        """Read to the end of every topic, as it is now, and close. Raises what went wrong while reading."""
        self._stop.set()
        self._thread.shutdown()
        self.check()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._consume()
            # Everything up to the ends that are there now: a second copy of a message would be among it.
            positions = self._consumer.position([TopicPartition(*place) for place in self._partitions])
            for position in positions:
                if position.offset < 0:
                    position.offset = OFFSET_BEGINNING
            self._consumer.assign(positions)  # so that each partition reports its end once more
            open_ends = set(self._partitions)
            deadline_s = self._clock.monotonic_s() + END_TIMEOUT_S
            while open_ends:
                open_ends -= self._consume()
                if self._clock.monotonic_s() > deadline_s:
                    raise EnvironmentFailure(
                        f"The ends of the topics were not reached within {END_TIMEOUT_S} s",
                        hint="A transaction hangs open, or the broker does not answer.",
                        partitions=sorted(open_ends),
                    )
        finally:
            self._consumer.close()

    def _consume(self) -> set[tuple[str, int]]:
        """Notes what has come; returns the partitions whose end was reached."""
        ends = set()
        for message in self._consumer.consume(CONSUME_RECORDS, CONSUME_TIMEOUT_S):
            error = message.error()
            if error is None:
                self._ledger.arrived(_number(message.value()), _arrival(message))
            elif error.code() == KafkaError._PARTITION_EOF:
                ends.add((str(message.topic()), int(message.partition() or 0)))
            elif not error.retriable():
                raise KafkaException(error)
        return ends


def _number(value: bytes | None) -> int | None:
    try:
        return int(json.loads(value or b"")["number"])
    except (ValueError, KeyError, TypeError):
        return None


def _arrival(message: Message) -> Arrival:
    due = dict(message.headers() or []).get(headers.DUE)
    return Arrival(
        topic=str(message.topic()),
        key=message.key(),
        value=message.value(),
        at_ms=message.timestamp()[1],
        due_ms=int(due) if due is not None else None,
    )
