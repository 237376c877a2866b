"""What was sent, what arrived, and whether that adds up. Pure: no Kafka, no clock.

Every message has a number. It is *planned* before it is produced, *acknowledged* when the delay topic has taken it
(from then on it is owed), and *arrived* once for each time that a consumer sees it:

    lost        acknowledged, never arrived
    doubled     arrivals of one message beyond its first
    early       the first arrival's timestamp is before the time at which it is due
    altered     arrived in another topic, or with another key, value or due time, than planned
    unknown     arrived without having been planned
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A message as it is to arrive."""

    topic: str
    key: bytes | None
    value: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A message as a consumer saw it. `at_ms`: its record's timestamp; `due_ms`: its `delay-due` header, if any."""

    topic: str
    key: bytes | None
    value: bytes | None
    at_ms: int
    due_ms: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lateness:
    """Distribution of arrival minus due, in ms; zeros where there was no arrival."""

    count: int
    p50_ms: float
    p99_ms: float
    max_ms: float

    @staticmethod
    def of(lateness_ms: Sequence[int]) -> Lateness:
        """Of these values, in any order."""
        if not lateness_ms:
            return Lateness(count=0, p50_ms=0, p99_ms=0, max_ms=0)
        p50, p99, most = np.percentile(np.asarray(lateness_ms), [50, 99, 100])
        return Lateness(count=len(lateness_ms), p50_ms=float(p50), p99_ms=float(p99), max_ms=float(most))


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """The state of one topic, or of all of them (`topic` is then "all")."""

    topic: str
    sent: int
    delivered: int
    lateness: Lateness

    @property
    def pending(self) -> int:
        """Taken by the delay topic, and not yet arrived."""
        return self.sent - self.delivered


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What is to be said at the end; `good` only if every message arrived once, unaltered and not early."""

    sent: int
    delivered: int
    lost: int
    doubled: int
    early: int
    altered: int
    unknown: int

    @property
    def good(self) -> bool:
        return self.sent > 0 and not (self.lost or self.doubled or self.early or self.altered or self.unknown)


@dataclass(slots=True)
class _Entry:
    plan: Plan
    due_ms: int | None = None  # None: not acknowledged
    arrivals: list[Arrival] = field(default_factory=list)

    @property
    def latest_due_ms(self) -> int:
        """The later one of the producer's due time and the header's: a message must be early for neither."""
        known = (self.due_ms, self.arrivals[0].due_ms)
        return max((due_ms for due_ms in known if due_ms is not None), default=0)

    @property
    def lateness_ms(self) -> int:
        """Of the first arrival; negative means early."""
        return self.arrivals[0].at_ms - self.latest_due_ms

    @property
    def altered(self) -> bool:
        """Whether something arrived otherwise than planned. (A due time that was never acknowledged is not known.)"""
        plan = self.plan
        return any(
            (plan.topic, plan.key, plan.value) != (seen.topic, seen.key, seen.value)
            or seen.due_ms is None
            or self.due_ms not in (None, seen.due_ms)
            for seen in self.arrivals
        )


class Ledger:
    """The books. Safe to use from the producing and the consuming thread at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[int, _Entry] = {}
        self._unknown = 0
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

    def planned(self, number: int, plan: Plan) -> None:
        """Message `number` is about to be produced. Raises ValueError if that number was used before."""
        with self._lock:
            if number in self._entries:
                raise ValueError(f"message {number} was planned before")
            self._entries[number] = _Entry(plan)

    def acknowledged(self, number: int, due_ms: int) -> None:
        """The delay topic has taken the message, which is due at `due_ms` by the producer's own reckoning."""
        with self._lock:
            entry = self._entries[number]
            entry.due_ms = due_ms
            self._pending += not entry.arrivals

    def arrived(self, number: int | None, arrival: Arrival) -> None:
        """A consumer saw message `number` (None: it bears no number)."""
        with self._lock:
            entry = None if number is None else self._entries.get(number)
            if entry is None:
                self._unknown += 1
                return
            if not entry.arrivals:
                self._delivered += 1
                self._pending -= entry.due_ms is not None
            entry.arrivals.append(arrival)

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

    def verdict(self) -> Verdict:
        """What the books say now; before everything had time to arrive, what is pending counts as lost."""
        with self._lock:
            entries = list(self._entries.values())
            arrived = [entry for entry in entries if entry.arrivals]
            return Verdict(
                sent=sum(entry.due_ms is not None for entry in entries),
                delivered=len(arrived),
                lost=sum(entry.due_ms is not None and not entry.arrivals for entry in entries),
                doubled=sum(len(entry.arrivals) - 1 for entry in arrived),
                early=sum(entry.lateness_ms < 0 for entry in arrived),
                altered=sum(entry.altered for entry in arrived),
                unknown=self._unknown,
            )

    def lateness_around(self, down_from_ms: int, up_from_ms: int) -> dict[str, Lateness]:
        """Lateness before the bridge went down, of what had to wait for its return, and after that.

        What had to wait is what was due before `up_from_ms` and arrived after `down_from_ms`.
        """
        before: list[int] = []
        waited: list[int] = []
        after: list[int] = []
        with self._lock:
            for entry in self._entries.values():
                if entry.arrivals:
                    first = entry.arrivals[0]
                    group = (
                        before if first.at_ms < down_from_ms else waited if entry.latest_due_ms < up_from_ms else after
                    )
                    group.append(entry.lateness_ms)
        return {
            "before the kill": Lateness.of(before),
            "waited for the restart": Lateness.of(waited),
            "after the restart": Lateness.of(after),
        }


def _account(topic: str, entries: Sequence[_Entry]) -> Account:
    return Account(
        topic=topic,
        # What arrived was sent, even where the consumer was told before the producer.
        sent=sum(entry.due_ms is not None or bool(entry.arrivals) for entry in entries),
        delivered=sum(bool(entry.arrivals) for entry in entries),
        lateness=Lateness.of([entry.lateness_ms for entry in entries if entry.arrivals]),
    )
