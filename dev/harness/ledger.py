"""The account of sent and arrived messages. No IO: callers pass the records.

Every message has a number, in its header `n`. It is *planned* before it is produced, *acknowledged* when the delay
topic has taken it (from then on it must arrive), and *arrived* once for each record that a consumer sees:

    lost        acknowledged, never arrived
    doubled     arrivals of one message beyond its first
    early       an arrival's timestamp is before its due time
    altered     arrived in another topic, or with another key, value, headers or due time, than planned
    unknown     arrived without having been planned
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Self

import numpy as np

from bridge.wire.headers import DUE, ORIGIN, REASON
from dev.harness.kafka import ReadRecord

NUMBER: Final = "n"
ADDED: Final = Counter((DUE, ORIGIN))
"""Headers of a delivered message that its producer did not write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """A message in the expected form, with its own headers first; `reason`: a dead letter with that reason."""

    topic: str
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()
    reason: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LatenessSummary:
    """Distribution of arrival minus due, in ms; zeros where there was no arrival."""

    count: int
    p50_ms: float
    p99_ms: float
    max_ms: float

    @staticmethod
    def of(lateness_ms: Sequence[int]) -> LatenessSummary:
        """Of these values, in any order."""
        if not lateness_ms:
            return LatenessSummary(count=0, p50_ms=0, p99_ms=0, max_ms=0)
        p50, p99, most = np.percentile(np.asarray(lateness_ms), [50, 99, 100])
        return LatenessSummary(count=len(lateness_ms), p50_ms=float(p50), p99_ms=float(p99), max_ms=float(most))


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """The state of one topic, or of all of them (`topic` is then "all")."""

    topic: str
    sent: int
    delivered: int
    lateness: LatenessSummary

    @property
    def pending(self) -> int:
        """Taken by the delay topic, and not yet arrived."""
        return self.sent - self.delivered


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """Numbers of messages by fault, a number in `doubled` for each extra arrival, and the origin of unknown messages.
    Equal to `Balance()` without a fault.
    """

    lost: list[int] = field(default_factory=list)
    doubled: list[int] = field(default_factory=list)
    early: list[int] = field(default_factory=list)
    altered: list[int] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    sent: int = field(default=0, compare=False)
    delivered: int = field(default=0, compare=False)

    @property
    def good(self) -> bool:
        """Whether every message arrived once, unaltered and not early, and at least one was sent."""
        return self.sent > 0 and self == Balance()

    def __str__(self) -> str:
        wrong = {name: getattr(self, name) for name in ("lost", "doubled", "early", "altered", "unknown")}
        parts = (f"{name}: {len(numbers)} {numbers[:10]}" for name, numbers in wrong.items())
        return f"of {self.sent}: " + ", ".join(parts)


@dataclass(slots=True)
class _Entry:
    plan: Expected
    is_acknowledged: bool = False
    due_ms: int | None = None
    origin: str | None = None
    arrivals: list[ReadRecord] = field(default_factory=list)

    @property
    def latest_due_ms(self) -> int | None:
        """The later one of the producer's due time and the header's: a message must be early for neither."""
        known = (self.due_ms, _due_ms(self.arrivals[0]))
        return max((due_ms for due_ms in known if due_ms is not None), default=None)

    @property
    def lateness_ms(self) -> int:
        """Of the first arrival; negative means early, and 0 that there is no time to wait for."""
        return self.arrivals[0].timestamp_ms - (self.latest_due_ms or self.arrivals[0].timestamp_ms)

    @property
    def is_early(self) -> bool:
        due_ms = self.latest_due_ms
        return due_ms is not None and any(seen.timestamp_ms < due_ms for seen in self.arrivals)

    @property
    def is_altered(self) -> bool:
        """Whether an arrival differs from the plan. (A due time without an acknowledgement is unknown.)"""
        return any(self._differs(seen) for seen in self.arrivals)

    def _differs(self, seen: ReadRecord) -> bool:
        plan, given = self.plan, dict(seen.headers)
        if (plan.topic, plan.key, plan.value) != (seen.topic, seen.key, seen.value):
            return True
        own = len(plan.headers)
        if seen.headers[:own] != plan.headers or self.origin not in (None, (given.get(ORIGIN) or b"").decode()):
            return True
        if plan.reason is not None:
            return given.get(REASON) != plan.reason
        return Counter(name for name, _ in seen.headers[own:]) != ADDED or self.due_ms not in (None, _due_ms(seen))


class Ledger:
    """The books. Safe to use from the producing and the consuming thread at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[int, _Entry] = {}
        self._unknown: list[str] = []
        self._delivered = 0
        self._pending = 0

    @property
    def delivered(self) -> int:
        """Messages that have arrived at least once."""
        return self._delivered

    @property
    def pending(self) -> int:
        """Messages that are acknowledged and have not arrived."""
        return self._pending

    def planned(self, number: int, plan: Expected) -> None:
        """Message `number` is about to be produced. Raises ValueError if that number was used before."""
        with self._lock:
            if number in self._entries:
                raise ValueError(f"message {number} was planned before")
            self._entries[number] = _Entry(plan)

    def acknowledged(self, number: int, due_ms: int | None, origin: str | None = None) -> None:
        """The delay topic has taken the message (as `topic/partition/offset`), which is due at `due_ms` by the
        producer's own reckoning; None: there is no time to wait for.
        """
        with self._lock:
            entry = self._entries[number]
            entry.is_acknowledged, entry.due_ms, entry.origin = True, due_ms, origin
            self._pending += not entry.arrivals

    def arrived(self, record: ReadRecord) -> None:
        """A consumer saw this."""
        with self._lock:
            number = message_number(record)
            entry = None if number is None else self._entries.get(number)
            if entry is None:
                self._unknown.append(f"{record.topic}/{record.partition}/{record.offset}")
                return
            if not entry.arrivals:
                self._delivered += 1
                self._pending -= entry.is_acknowledged
            entry.arrivals.append(record)

    def against(self, records: Iterable[ReadRecord]) -> Self:
        """The same messages, with these records as the only arrivals."""
        books = type(self)()
        with self._lock:
            for number, entry in self._entries.items():
                books.planned(number, entry.plan)
                if entry.is_acknowledged:
                    books.acknowledged(number, entry.due_ms, entry.origin)
        for record in records:
            books.arrived(record)
        return books

    def accounts(self) -> list[Account]:
        """One account for each topic, by name, and one for all of them at the end."""
        with self._lock:
            by_topic: dict[str, list[_Entry]] = {}
            for entry in self._entries.values():
                by_topic.setdefault(entry.plan.topic, []).append(entry)
            everything = list(self._entries.values())
            return [
                *(_account(topic, entries) for topic, entries in sorted(by_topic.items())),
                _account("all", everything),
            ]

    def balance(self) -> Balance:
        """The present account; messages that have not had time to arrive count as lost."""
        with self._lock:
            arrived = [(number, entry) for number, entry in self._entries.items() if entry.arrivals]
            return Balance(
                sent=sum(entry.is_acknowledged for entry in self._entries.values()),
                delivered=len(arrived),
                lost=[n for n, entry in self._entries.items() if entry.is_acknowledged and not entry.arrivals],
                doubled=[n for n, entry in arrived for _ in entry.arrivals[1:]],
                early=[n for n, entry in arrived if entry.is_early],
                altered=[n for n, entry in arrived if entry.is_altered],
                unknown=list(self._unknown),
            )

    def lateness_around(self, down_from_ms: int, up_from_ms: int) -> dict[str, LatenessSummary]:
        """Lateness before the bridge went down, of messages that waited for its return, and after that. A message
        waited if it was due before `up_from_ms` and arrived after `down_from_ms`.
        """
        before: list[int] = []
        waited: list[int] = []
        after: list[int] = []
        with self._lock:
            for entry in self._entries.values():
                if entry.arrivals:
                    first = entry.arrivals[0]
                    group = (
                        before
                        if first.timestamp_ms < down_from_ms
                        else waited
                        if (entry.latest_due_ms or 0) < up_from_ms
                        else after
                    )
                    group.append(entry.lateness_ms)
        return {
            "before the kill": LatenessSummary.of(before),
            "waited for the restart": LatenessSummary.of(waited),
            "after the restart": LatenessSummary.of(after),
        }


def _account(topic: str, entries: Sequence[_Entry]) -> Account:
    return Account(
        topic=topic,
        # An arrival proves the sending, even if the consumer knows of it before the producer.
        sent=sum(entry.is_acknowledged or bool(entry.arrivals) for entry in entries),
        delivered=sum(bool(entry.arrivals) for entry in entries),
        lateness=LatenessSummary.of([entry.lateness_ms for entry in entries if entry.arrivals]),
    )


def message_number(record: ReadRecord) -> int | None:
    """The message's number, if it has one."""
    try:
        return int(dict(record.headers).get(NUMBER) or b"")
    except ValueError:
        return None


def _due_ms(record: ReadRecord) -> int | None:
    value = dict(record.headers).get(DUE)
    return None if value is None else int(value)
