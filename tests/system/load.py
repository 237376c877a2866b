"""A mixed load on a delay topic, and the account of it: what was sent must arrive once, unaltered, and not early."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from confluent_kafka import Producer

from dev.harness.kafka import Outgoing, Reader, Record, produce_with
from timerstore.clock import SystemClock

NUMBER: Final = "n"
PACE_S: Final = 0.1
ABORTED_EVERY: Final = 40
"""Each so many bursts a transaction of another producer is aborted."""
LEVELS_MS: Final = (1_000, 5_000, 10_000, 30_000)
CONTROL: Final = frozenset({"delay-for", "delay-until", "delay-level", "delay-topic"})
ADDED: Final = frozenset({"delay-due", "delay-origin"})


@dataclass(frozen=True, slots=True)
class Owed:
    """What must arrive. `due_ms` None: as a dead letter, with no time to wait for."""

    topic: str
    due_ms: int | None
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    origin: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """Numbers of messages by what is wrong with them; all empty: nothing is."""

    lost: list[int] = field(default_factory=list)
    doubled: list[int] = field(default_factory=list)
    early: list[int] = field(default_factory=list)
    altered: list[int] = field(default_factory=list)
    unknown: list[int] = field(default_factory=list)

    def __str__(self) -> str:
        parts = {name: getattr(self, name) for name in self.__slots__}
        return ", ".join(f"{name}: {len(numbers)} {numbers[:10]}" for name, numbers in parts.items())


class Load:
    """Sends numbered messages of many kinds: payloads from null to 50 kB, delays from 0 to `delay_ms_max`.

    `send` does it at once, `running` in the background for as long as the context lasts.
    """

    def __init__(
        self, bootstrap: str, delay_topic: str, targets: Sequence[str], *, seed: int, delay_ms_max: int = 30_000
    ) -> None:
        self.owed: dict[int, Owed] = {}
        self._delay_topic = delay_topic
        self._targets = list(targets)
        self._random = random.Random(seed)
        self._delay_ms_max = delay_ms_max
        self._clock = SystemClock()
        self._sent = 0
        self._producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 1, "enable.idempotence": True})
        self._aborter = Producer({"bootstrap.servers": bootstrap, "transactional.id": f"load-{delay_topic}"})
        self._aborter.init_transactions(30)

    @property
    def topics(self) -> list[str]:
        """Where the messages arrive."""
        return [*self._targets, f"{self._delay_topic}.dlt"]

    def send(self, count: int) -> None:
        """Send `count` messages and wait for their acknowledgements."""
        planned = [self._message() for _ in range(count)]
        written = produce_with(self._producer, [outgoing for outgoing, _ in planned])
        for (outgoing, delay_ms), record in zip(planned, written, strict=True):
            number = int(dict(outgoing.headers)[NUMBER] or b"")
            self.owed[number] = self._owed(outgoing, delay_ms, record)

    def abort(self, count: int) -> None:
        """Send `count` messages in a transaction that is aborted: none of them may arrive."""
        self._aborter.begin_transaction()
        produce_with(self._aborter, [self._message()[0] for _ in range(count)])
        self._aborter.abort_transaction(30)

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
            except Exception as error:  # noqa: BLE001 - raised again by whoever asked for the load
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

    def balance(self, arrived: Iterable[Record]) -> Balance:
        """Compare what is owed with what a consumer has seen."""
        arrivals: dict[int, list[Record]] = {}
        for record in arrived:
            arrivals.setdefault(int(record.header(NUMBER) or b"-1"), []).append(record)
        return Balance(
            lost=sorted(self.owed.keys() - arrivals.keys()),
            doubled=sorted(n for n, records in arrivals.items() if len(records) > 1),
            unknown=sorted(arrivals.keys() - self.owed.keys()),
            early=sorted(n for n, records in arrivals.items() if n in self.owed and _is_early(self.owed[n], records)),
            altered=sorted(
                n for n, records in arrivals.items() if n in self.owed and _is_altered(self.owed[n], records)
            ),
        )

    def wait_delivered(self, bootstrap: str, deadline_s: float) -> list[Record]:
        """Read until every message that is owed has arrived; returns all records, or what there is at the deadline."""
        with Reader(bootstrap, self.topics) as reader:
            end_s = self._clock.monotonic_s() + deadline_s
            seen: set[int] = set()
            read = 0
            while self._clock.monotonic_s() < end_s and not self.owed.keys() <= seen:
                reader.poll(0.2)
                seen.update(int(record.header(NUMBER) or b"-1") for record in reader.records[read:])
                read = len(reader.records)
            return reader.to_end()

    # ---- what is sent

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
            return ("delay-for", b"soon"), None
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

    def _owed(self, outgoing: Outgoing, delay_ms: int | None, record: Record) -> Owed:
        given = dict(outgoing.headers)
        due_ms = record.timestamp_ms + delay_ms if delay_ms is not None else None
        if "delay-until" in given:
            due_ms = int(given["delay-until"] or b"")
        rejected = due_ms is None
        headers = [(name, value) for name, value in outgoing.headers if rejected or name not in CONTROL]
        return Owed(
            topic=f"{self._delay_topic}.dlt" if rejected else (given["delay-topic"] or b"").decode(),
            due_ms=due_ms,
            key=outgoing.key,
            value=outgoing.value,
            headers=tuple(headers),
            origin=f"{record.topic}/{record.partition}/{record.offset}",
        )


def _is_early(owed: Owed, records: Sequence[Record]) -> bool:
    return owed.due_ms is not None and any(record.timestamp_ms < owed.due_ms for record in records)


def _is_altered(owed: Owed, records: Sequence[Record]) -> bool:
    return any(_differs(owed, record) for record in records)


def _differs(owed: Owed, record: Record) -> bool:
    if (owed.topic, owed.key, owed.value) != (record.topic, record.key, record.value):
        return True
    if record.headers[: len(owed.headers)] != owed.headers or record.header("delay-origin") != owed.origin.encode():
        return True
    if owed.due_ms is None:
        return record.header("delay-reason") != b"bad-for"
    added = record.headers[len(owed.headers) :]
    return Counter(name for name, _ in added) != Counter(ADDED) or record.header("delay-due") != b"%d" % owed.due_ms
