"""The demo's producer and consumer. The ledger gets the sent messages and the arrivals."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from bridge.client import DelayClient
from dev.harness.kafka import TopicReader
from dev.harness.ledger import NUMBER, Expected, Ledger
from timerstore.clock import Clock

DELAY_MS: Final = (500, 20_000)
KEYS: Final = 200
# librdkafka's log lines would break the live view; errors reach the demo anyway.
QUIET: Final[Mapping[str, Any]] = {"log_level": 2}
POLL_S: Final = 0.1


class Sender:
    """Sends numbered messages with random delays and targets from `seed`."""

    def __init__(
        self,
        kafka: Mapping[str, str],
        delay_topic: str,
        topics: Sequence[str],
        ledger: Ledger,
        clock: Clock,
        *,
        seed: int,
        delay_ms: tuple[int, int] = DELAY_MS,
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
        self._delay_ms = delay_ms
        self.sent = 0
        self._failure: KafkaError | None = None

    def send_up_to(self, count: int) -> None:
        """Send messages up to a total of `count`. Raises KafkaException after a refusal."""
        while self.sent < count:
            self._send(self.sent)
            self.sent += 1
        self._client.producer.poll(0)
        self._raise_failure()

    def flush(self) -> None:
        """Wait until the delay topic has taken all messages. Raises KafkaException or EnvironmentFailure."""
        self._client.flush()
        self._raise_failure()

    def _send(self, number: int) -> None:
        delay_ms = self._random.randint(*self._delay_ms)
        plan = Expected(
            topic=self._random.choice(self._topics),
            key=b"customer-%d" % self._random.randrange(KEYS),
            value=json.dumps({"number": number, "delay_ms": delay_ms}).encode(),
            headers=((NUMBER, b"%d" % number),),
        )
        self._ledger.planned(number, plan)
        # Every other message has an absolute due time; a relative delay counts from the broker's timestamp.
        due_ms = self._clock.now_ms() + delay_ms if number % 2 else None
        when: dict[str, Any] = {"after": timedelta(milliseconds=delay_ms)} if due_ms is None else {"at": due_ms}

        def on_delivery(error: KafkaError | None, message: Message) -> None:
            if error is not None:
                self._failure = error
                return
            origin = f"{message.topic()}/{message.partition()}/{message.offset()}"
            self._ledger.acknowledged(number, message.timestamp()[1] + delay_ms if due_ms is None else due_ms, origin)

        self._client.send(plan.topic, plan.value, plan.key, list(plan.headers), on_delivery=on_delivery, **when)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise KafkaException(self._failure)


class ArrivalListener:
    """Reads the targets as a read_committed consumer on its own thread, and notes every arrival."""

    def __init__(self, kafka: Mapping[str, str], topics: Sequence[str], ledger: Ledger) -> None:
        self._ledger = ledger
        self._reader = TopicReader(kafka["bootstrap.servers"], topics, client={**kafka, **QUIET})
        self._stop = threading.Event()
        self._thread = ThreadPoolExecutor(1, "demo-consumer")
        self._reading: Future[None] | None = None

    def start(self) -> None:
        """Start reading."""
        self._reading = self._thread.submit(self._run)

    def check(self) -> None:
        """Raises the error that ended the reading, if any."""
        if self._reading is not None and self._reading.done():
            self._reading.result()

    def finish(self) -> None:
        """Read to the present end of every topic, and close. Raises the errors of reading."""
        self._stop.set()
        self._thread.shutdown()
        self.check()

    def _run(self) -> None:
        with self._reader as reader:
            noted = 0
            while not self._stop.is_set():
                reader.poll(POLL_S)
                noted = self._note(noted)
            # Up to the present ends: a second copy of a message would come before them.
            reader.to_end()
            self._note(noted)

    def _note(self, noted: int) -> int:
        """Note the new arrivals; returns the number of all arrivals."""
        for record in self._reader.records[noted:]:
            self._ledger.arrived(record)
        return len(self._reader.records)
