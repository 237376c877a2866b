"""Load: records sent at a rate, and a mixed load on a delay topic that must arrive once, unaltered, and not early."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from confluent_kafka import Producer

from dev.harness.kafka import Outgoing, ReadRecord, TopicReader, produce_with
from dev.harness.ledger import NUMBER, Balance, Expected, Ledger
from dev.harness.pace import scaled
from timerstore.clock import SystemClock

PACE_S: Final = 0.1
ABORTED_EVERY: Final = 40
"""Bursts between two aborted transactions of another producer."""
LEVELS_MS: Final = (1_000, 5_000, 10_000, 30_000)
CONTROL: Final = frozenset({"delay-for", "delay-until", "delay-level", "delay-topic"})
UNREADABLE: Final = b"soon"


class Load:
    """Sends numbered messages of many kinds: payloads from null to 50 kB, delays from 0 to `delay_ms_max`.

    `send` does it at once, `running` in the background for as long as the context lasts.
    """

    def __init__(
        self, bootstrap: str, delay_topic: str, targets: Sequence[str], *, seed: int, delay_ms_max: int = 30_000
    ) -> None:
        self.ledger = Ledger()
        self._delay_topic = delay_topic
        self._targets = list(targets)
        self._random = random.Random(seed)
        self._delay_ms_max = delay_ms_max
        self._clock = SystemClock()
        self._sent = 0
        self._producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 1, "enable.idempotence": True})
        self._aborter = Producer({"bootstrap.servers": bootstrap, "transactional.id": f"load-{delay_topic}"})
        self._aborter.init_transactions(scaled(30))

    @property
    def topics(self) -> list[str]:
        """The target of the messages."""
        return [*self._targets, f"{self._delay_topic}.dlt"]

    def send(self, count: int) -> None:
        """Send `count` messages and wait for their acknowledgements."""
        messages = [self._message() for _ in range(count)]
        for outgoing, _ in messages:
            self.ledger.planned(_number(outgoing), self._plan(outgoing))
        written = produce_with(self._producer, [outgoing for outgoing, _ in messages])
        for (outgoing, delay_ms), record in zip(messages, written, strict=True):
            until = dict(outgoing.headers).get("delay-until")
            due_ms = int(until) if until else None if delay_ms is None else record.timestamp_ms + delay_ms
            origin = f"{record.topic}/{record.partition}/{record.offset}"
            self.ledger.acknowledged(_number(outgoing), due_ms, origin)

    def abort(self, count: int) -> None:
        """Send `count` messages in a transaction that is aborted: none of them may arrive."""
        self._aborter.begin_transaction()
        produce_with(self._aborter, [self._message()[0] for _ in range(count)])
        self._aborter.abort_transaction(scaled(30))

    @contextmanager
    def running(self, per_second: int) -> Iterator[None]:
        """Send in the background."""
        stop = threading.Event()
        failures: list[Exception] = []

        def run() -> None:
            try:
                bursts = 0
                while not stop.wait(PACE_S):
                    self.send(max(1, int(per_second * PACE_S)))
                    bursts += 1
                    if bursts % ABORTED_EVERY == 0:
                        self.abort(3)
            except Exception as error:  # noqa: BLE001 - raised again in the thread that asked for the load
                failures.append(error)

        thread = threading.Thread(target=run, name="load")
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
        if failures:
            raise failures[0]

    def balance(self, arrived: Iterable[ReadRecord]) -> Balance:
        """Compare the expected messages with a consumer's records."""
        return self.ledger.against(arrived).balance()

    def wait_delivered(self, bootstrap: str, deadline_s: float) -> list[ReadRecord]:
        """Read until every acknowledged message has arrived; returns all records, at the deadline an incomplete
        list."""
        books = self.ledger.against([])
        with TopicReader(bootstrap, self.topics) as reader:
            end_s = self._clock.monotonic_s() + scaled(deadline_s)
            read = 0
            while self._clock.monotonic_s() < end_s and books.pending:
                reader.poll(0.2)
                for record in reader.records[read:]:
                    books.arrived(record)
                read = len(reader.records)
            return reader.to_end()

    # ---- records

    def _message(self) -> tuple[Outgoing, int | None]:
        """A message, and its delay in ms from the broker's timestamp; None: the header says when, or nothing."""
        number, self._sent = self._sent, self._sent + 1
        chance = self._random
        headers: list[tuple[str, bytes | None]] = [(NUMBER, b"%d" % number), ("x", b"1"), ("none", None), ("x", b"2")]
        target = chance.choice(self._targets)
        time, delay_ms = self._time()
        headers.insert(chance.randrange(len(headers) + 1), time)
        headers.append(("delay-topic", target.encode()))
        key = chance.choice([None, b"", b"k%d" % chance.randrange(100)])
        return Outgoing(topic=self._delay_topic, key=key, value=self._value(), headers=headers), delay_ms

    def _time(self) -> tuple[tuple[str, bytes], int | None]:
        chance = self._random
        delay_ms = chance.choice([0, chance.randrange(1_000), chance.randrange(self._delay_ms_max + 1)])
        kind = chance.randrange(20)
        if kind == 0:
            return ("delay-for", UNREADABLE), None
        if kind <= 4:
            return ("delay-until", b"%d" % (self._clock.now_ms() + delay_ms)), None
        if kind == 5:
            usable = [i for i, level_ms in enumerate(LEVELS_MS) if level_ms <= self._delay_ms_max] or [0]
            level = chance.choice(usable)
            return ("delay-level", b"%d" % (level + 1)), LEVELS_MS[level]
        return ("delay-for", b"%dms" % delay_ms), delay_ms

    def _value(self) -> bytes | None:
        chance = self._random
        size = chance.choices([-1, 0, 20, 1_000, 50_000], [1, 1, 12, 5, 0.2])[0]
        return None if size < 0 else chance.randbytes(size)

    def _plan(self, outgoing: Outgoing) -> Expected:
        given = dict(outgoing.headers)
        is_rejected = given.get("delay-for") == UNREADABLE
        headers = [(name, value) for name, value in outgoing.headers if is_rejected or name not in CONTROL]
        return Expected(
            topic=f"{self._delay_topic}.dlt" if is_rejected else (given["delay-topic"] or b"").decode(),
            key=outgoing.key,
            value=outgoing.value,
            headers=tuple(headers),
            reason=b"bad-for" if is_rejected else None,
        )


def _number(outgoing: Outgoing) -> int:
    return int(dict(outgoing.headers)[NUMBER] or b"")
