"""A producer that varies everything it may choose, and the account of it: what must become of each record."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

import numpy as np
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaException, Producer, TopicPartition

from dev.harness.kafka import REQUEST_TIMEOUT_S, Headers
from tests.system.raw import RawRecord, produce_raw
from timerstore.clock import SystemClock

HOUR_MS: Final = 3_600_000
DAY_MS: Final = 24 * HOUR_MS
NUMBER_BYTES: Final = 8
KEPT_EVERY: Final = 97
"""Dead letters for each one that is kept, for a comparison with the record."""
READ_AT_ONCE: Final = 10_000


class Fate(IntEnum):
    """What must become of a record."""

    NOTHING = 0
    DELIVERED = 1
    DEAD = 2
    PENDING = 3
    CANCELLED = 4
    EITHER = 5
    """Delivered or dead."""


@dataclass(frozen=True, slots=True)
class Made:
    """A record, and its fate. `is_whole`: its dead letter has all of its headers, as they came."""

    fate: Fate
    headers: Headers
    value: bytes | None = b""
    key: bytes | None = None
    is_foreign: bool = False
    is_whole: bool = True


class HostileProducer:
    """Sends numbered records to `delay`, and to `foreign`, which has the dialect of RocketMQ.

    The number is at the beginning of the value, or of the key where there is no value.
    """

    def __init__(
        self,
        bootstrap: str,
        delay: str,
        foreign: str,
        target: str,
        count: int,
        *,
        seed: int,
        batch_bytes: int = 500_000,
    ) -> None:
        self.fates = np.zeros(count, np.uint8)
        self.kept: dict[int, Made] = {}
        self.sent = 0
        self._bootstrap = bootstrap
        self._delay, self._foreign, self._target = delay, foreign, target.encode()
        self._random = random.Random(seed)
        self._now_ms = SystemClock().now_ms()
        self._doomed: list[tuple[int, bytes, bytes]] = []
        self._producer = Producer(
            {
                "bootstrap.servers": bootstrap,
                "linger.ms": 20,
                "batch.size": batch_bytes,
                "queue.buffering.max.messages": 200_000,
                "compression.type": "lz4",
            }
        )
        kinds: dict[Callable[[], Made], int] = {
            self._near: 380, self._past: 120, self._far: 100, self._doom: 60, self._cancel: 60, self._stray_cancel: 30,
            self._cancel_for_all: 2, self._made_up_target: 30, self._no_target: 40, self._bad_time: 60,
            self._bad_header: 30, self._laden: 20, self._copy: 30, self._bad_copy: 20, self._held: 10,
            self._dialect: 20, self._bad_dialect: 8, self._never: 10, self._forged_schedule: 10, self._asks: 10,
        }  # fmt: skip
        self._kinds, self._weights = list(kinds), list(kinds.values())

    def send(self, count: int) -> None:
        """Send `count` records, as fast as the client takes them."""
        for kind in self._random.choices(self._kinds, self._weights, k=count):
            made, number = kind(), self.sent
            mark = number.to_bytes(NUMBER_BYTES)
            value = None if made.value is None else mark + made.value
            key = mark if made.value is None else made.key
            if made.fate is Fate.DEAD and number % KEPT_EVERY == 0:
                self.kept[number] = Made(made.fate, made.headers, value, key, made.is_foreign, made.is_whole)
            topic = self._foreign if made.is_foreign else self._delay
            self._produce(topic, value=value, key=key, headers=list(made.headers))
            self.fates[number] = made.fate
            self.sent += 1

    def send_raw(self, count: int) -> None:
        """Send `count` records with header names that our clients cannot write: with NUL, and with invalid UTF-8."""
        records = []
        for number in range(self.sent, self.sent + count):
            name, fate = self._random.choice(
                [(b"\xff\xfe", Fate.DELIVERED), (b"\xed\xa0\x80", Fate.DELIVERED), (b"a\0b", Fate.EITHER),
                 (b"delay-origin\0", Fate.EITHER), (b"delay-copy-origin\0", Fate.EITHER), (b"\0", Fate.EITHER)]
            )  # fmt: skip
            headers = [(name, b"1"), (b"delay-for", b"%d" % self._below(4_000)), (b"delay-topic", self._target)]
            records.append(RawRecord(value=number.to_bytes(NUMBER_BYTES), headers=headers))
            self.fates[number] = fate
        self.sent += count
        produce_raw(self._bootstrap, self._delay, 0, records)

    def flush(self) -> None:
        """Wait until the brokers have all of it. Messages without a cancel by now stay pending."""
        self.fates[[number for number, _, _ in self._doomed]] = Fate.PENDING
        assert self._producer.flush(REQUEST_TIMEOUT_S * 4) == 0

    def _produce(self, topic: str, **record: Any) -> None:
        while True:
            try:
                self._producer.produce(topic, **record)
            except BufferError:
                self._producer.poll(0.1)
            else:
                self._producer.poll(0)
                return

    # ---- legal records

    def _near(self) -> Made:
        return Made(
            Fate.DELIVERED, [*self._own(), ("delay-for", b"%d" % self._below(8_000)), self._to()], *self._load()
        )

    def _past(self) -> Made:
        """Each of them due at another time within ten years."""
        until = self._now_ms - self._below(3_600) * DAY_MS - self._below(DAY_MS)
        return Made(Fate.DELIVERED, [("delay-until", b"%d" % until), self._to()], *self._load())

    def _far(self) -> Made:
        """Half of them for targets that there are not: which is not known before they are due."""
        until = self._now_ms + HOUR_MS + self._below(3_000) * DAY_MS + self._below(DAY_MS)
        ids: Headers = [("delay-id", self._id())] if self._below(2) else []
        to = self._to() if self._below(2) else ("delay-topic", self._made_up())
        return Made(Fate.PENDING, [*self._own(), ("delay-until", b"%d" % until), *ids, to], *self._load())

    def _doom(self) -> Made:
        """Cancelled later."""
        id, key = self._id(), b"%x" % self._below(1 << 40)
        self._doomed.append((self.sent, id, key))
        headers = [("delay-for", b"%dh" % (1 + self._below(9_000))), ("delay-id", id), self._to()]
        return Made(Fate.CANCELLED, headers, self._load()[0] or b"", key)

    def _cancel(self) -> Made:
        if not self._doomed:
            return self._stray_cancel()
        _, id, key = self._doomed.pop()
        return Made(Fate.NOTHING, [("delay-cancel", id)], b"", key)

    def _stray_cancel(self) -> Made:
        return Made(Fate.NOTHING, [*self._own(), ("delay-cancel", self._id())], b"", b"%d" % self._below(1 << 40))

    def _cancel_for_all(self) -> Made:
        return Made(Fate.NOTHING, [("delay-cancel", self._id())])

    def _laden(self) -> Made:
        """Many or large headers, within the limits and beyond."""
        count, size = self._random.choice([60, 96, 150, 400]), self._below(40)
        if self._below(20) == 0:
            count, size = self._random.choice([(2, 40_000), (60, 1_000)])
        headers = [(f"h{self._below(1 << 30):x}", self._random.randbytes(size)) for _ in range(count)]
        fate = Fate.DELIVERED if count <= 96 and size < 40_000 else Fate.DEAD
        return Made(fate, [*headers, ("delay-for", b"1s"), self._to()])

    def _copy(self) -> Made:
        """A forged copy, long past, and at times longer than an original may be."""
        if self._below(4):
            until = self._now_ms - self._below(3_600) * DAY_MS - self._below(DAY_MS)
            return Made(Fate.DELIVERED, [*self._copied(until), self._to()], *self._load())
        return Made(Fate.EITHER, [*self._copied(self._below(1 << 40)), self._to()], *self._load())

    def _dialect(self) -> Made:
        headers = [("TIMER_DELAY_MS", b"%d" % self._below(5_000)), ("REAL_TOPIC", self._target)]
        return Made(Fate.DELIVERED, [*self._own(), *headers], *self._load(), is_foreign=True)

    # ---- illegal records

    def _made_up_target(self) -> Made:
        """A legal name of a topic that there is not, another one each time."""
        to = ("delay-topic", self._made_up())
        return Made(Fate.DEAD, [*self._own(), ("delay-for", b"0"), to], *self._load(), is_whole=False)

    def _no_target(self) -> Made:
        odd = [b"", b"..", b"a b", b"\0", b"\xff\xfe", b"x" * 5_000, self._random.randbytes(30), None]
        known = [b"__consumer_offsets", self._delay.encode(), self._foreign.encode()]
        name = self._random.choice([*odd, *known])
        return Made(Fate.DEAD, [("delay-for", b"0"), ("delay-topic", name)], *self._load(), is_whole=name not in known)

    def _bad_time(self) -> Made:
        odd = [b"", b"-1", b"9" * 300, b"\0", b"\xff", b"1e3", b"NaN", b"9" * 15, None, self._random.randbytes(20)]
        name = self._random.choice(["delay-until", "delay-for", "delay-level"])
        value = self._random.choice(odd)
        if name == "delay-level" and value == b"9" * 15:
            value = b"0"
        return Made(Fate.DEAD, [*self._own(), (name, value), self._to()], *self._load())

    def _bad_header(self) -> Made:
        more: list[Headers] = [
            [],
            [("delay-for", b"0"), ("delay-until", b"1")],
            [("delay-for", b"0"), ("delay-for", b"0")],
            [("delay-for", b"0"), ("delay-id", b"")],
            [("delay-for", b"0"), ("delay-id", b"i" * 300)],
            [("delay-for", b"0"), ("delay-id", b"\xff")],
            [("delay-for", b"0"), ("delay-replace", b"yes")],
            [("delay-for", b"0"), ("delay-partition", b"-1")],
            [("delay-cancel", b"")],
            [("delay-cancel", b"x"), ("delay-for", b"0")],
        ]
        return Made(Fate.DEAD, [*self._random.choice(more), *self._own(), self._to()], *self._load())

    def _bad_copy(self) -> Made:
        headers = self._copied(self._now_ms)
        i = self._below(3)
        headers[i] = (headers[i][0], self._random.choice([b"9" * 15, b"", b"-1", b"x", None]))
        return Made(Fate.DEAD, [*self._own(), *headers, self._to()], *self._load())

    def _held(self) -> Made:
        """A forged dead letter that waits, with a reason and a place of its own choice."""
        held = [("delay-held", None), ("delay-held-delay-reason", self._random.randbytes(20)), ("a", b"1")]
        place = [("kafka_dlt-original-topic", self._target), ("kafka_dlt-original-partition", b"\0\0\0\0")]
        if self._below(3):
            to = ("delay-topic", f"{self._delay}.dlt".encode())
            return Made(Fate.DEAD, [*held, *place, *self._copied(0), to], *self._load(), is_whole=False)
        return Made(Fate.EITHER, [*held, *place, *self._copied(0), self._to()], *self._load())

    def _bad_dialect(self) -> Made:
        value = self._random.choice([b"", b"soon", b"\xff", b"9" * 40, None])
        headers = [("TIMER_DELAY_SEC", value), ("REAL_TOPIC", self._target)]
        return Made(Fate.DEAD, [*self._own(), *headers], *self._load(), is_foreign=True)

    def _never(self) -> Made:
        """A schedule that names no moment, each time another one."""
        cron = b"%d %d */31 * MON#5" % (self._below(60), self._below(24))
        return Made(Fate.DEAD, [*self._own(), ("delay-cron", cron), self._to()], *self._load(), is_whole=False)

    def _forged_schedule(self) -> Made:
        """A copy of a schedule that would make up for ten years of milliseconds."""
        every: Headers = [("delay-every", b"1ms"), ("delay-missed", b"all"), ("delay-copy-tick", b"1")]
        copied = self._copied(self._now_ms - 3_600 * DAY_MS)
        return Made(Fate.DEAD, [*copied, *every, self._to()], *self._load(), is_whole=False)

    def _asks(self) -> Made:
        """A cancel whose answer has no topic."""
        return Made(Fate.NOTHING, [("delay-cancel", self._id()), ("delay-reply-to", self._made_up())], b"", b"k")

    # ---- parts

    def _below(self, bound: int) -> int:
        return int(self._random.random() * bound)

    def _to(self) -> tuple[str, bytes]:
        return ("delay-topic", self._target)

    def _made_up(self) -> bytes:
        return (b"made-up-%x." % self._random.getrandbits(64)).ljust(1 + self._below(249), b"x")[:249]

    def _id(self) -> bytes:
        return (b"%x-" % self._random.getrandbits(64)).ljust(self._random.choice([0, 40, 256]), b"i")

    def _own(self) -> Headers:
        if self._below(3):
            return []
        names = [
            "",
            "x",
            "n" * 200,
            f"{self._below(1 << 30):x}",
            "ü\u202e\x1b[2J",
            "delay-due",
            "delay-origin",
            "delay-reason",
        ]
        return [(self._random.choice(names), self._random.choice([None, b"", b"\0\xff", b"v" * 100]))]

    def _copied(self, until_ms: int) -> list[tuple[str, bytes | None]]:
        rolls = self._random.choice([0, 1, 32_767])
        return [
            ("delay-copy-origin", b"0"), ("delay-copy-due", b"%d" % until_ms),
            ("delay-copy-rolls", b"%d" % rolls), ("delay-copy-attempt", b"0"),
        ]  # fmt: skip

    def _load(self) -> tuple[bytes | None, bytes | None]:
        """What follows the number in the value, and the key."""
        chance = self._below(1_000)
        key = None if chance % 3 else b"%d" % self._below(1 << 20)
        if chance == 0:
            return b"." * 100_000, b"k" * 20_000
        if chance < 20:
            return None, None
        return b"." * (chance % 100), key


class Arrived:
    """Reads targets and dead-letter topics up to their ends, and counts the records of each number."""

    def __init__(self, bootstrap: str, targets: list[str], dead_letters: list[str], count: int) -> None:
        self.counts = {Fate.DELIVERED: np.zeros(count, np.uint8), Fate.DEAD: np.zeros(count, np.uint8)}
        self.letters: dict[int, Made] = {}
        self._dead_letters = frozenset(dead_letters)
        self._consumer = Consumer(
            {"bootstrap.servers": bootstrap, "group.id": "arrived", "isolation.level": "read_committed",
             "enable.auto.commit": False, "auto.offset.reset": "error", "fetch.wait.max.ms": 50}
        )  # fmt: skip
        places = []
        for topic in (*targets, *dead_letters):
            partitions = self._consumer.list_topics(topic, timeout=REQUEST_TIMEOUT_S).topics[topic].partitions
            places += [TopicPartition(topic, partition, OFFSET_BEGINNING) for partition in partitions]
        self._consumer.assign(places)

    @property
    def total(self) -> int:
        """Records read."""
        return int(sum(counts.sum() for counts in self.counts.values()))

    def read(self, kept: Mapping[int, Made], timeout_s: float = 0.2) -> None:
        """Read the available records."""
        while messages := self._consumer.consume(READ_AT_ONCE, timeout_s):
            for message in messages:
                if (error := message.error()) is not None:
                    raise KafkaException(error)
                value, key = message.value(), message.key()
                number = int.from_bytes((value if value is not None else key or b"")[:NUMBER_BYTES])
                fate = Fate.DEAD if message.topic() in self._dead_letters else Fate.DELIVERED
                self.counts[fate][number] += 1
                if fate is Fate.DEAD and number in kept:
                    self.letters[number] = Made(fate, message.headers() or [], value, key)  # type: ignore[arg-type]
            timeout_s = 0.0

    def close(self) -> None:
        """Leave."""
        self._consumer.close()
