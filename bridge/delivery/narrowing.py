"""How the attempt after an abort differs from the one before it: each is narrower, until something can be committed.

    what the abort tells                                  the next attempt
    one record is refused, alone or by its name           goes without it: it becomes a dead letter
    a record of a batch is refused                        is careful, the batch in groups, then in smaller ones
    ... the same target, often in a short time            goes without the suspects, or all that may be too large
    ... more often                                        goes without the target
    a target or a partition takes nothing                 goes without it
    the same partition failed several times, by any code  goes without it
    nothing                                               is careful
    nothing, though it was careful; it took too long      has an eighth of the rows
    nothing, several times, and it had one row            goes without the target of that row
    neither dead letter nor copy can be written           goes without the source of that record (held_sources.py)

What goes without a target puts its records off, as retry copies. A partition of a delay topic has no such way out: a
source that needs it is held.

*Careful* means that the fate of what is sent is waited for, batch by batch: a broker answers for a batch of records,
not for one. Where it names the records of a batch that it refuses (KIP-467), the client marks the others as bystanders;
a named record between two bystanders was of their batch, and is believed. (One name in a batch the client ignores, and
two batches that were refused one after the other look like one.) Everything stays in the order of position throughout.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import structlog
from confluent_kafka import KafkaError

from bridge.delivery.open_transaction import Culprit
from bridge.delivery.plan.due_rows import Batch
from bridge.delivery.plan.fates import Findings
from bridge.delivery.targets.breakers import EVERY, LARGE
from bridge.delivery.targets.cache import Targets
from bridge.kafka.errors import Fault, Refusal, fault_of, meaning_of, refusal_of
from bridge.wire.headers import RejectReason
from timerstore.clock import Clock
from timerstore.rows.position import SOURCE_MAX, Int64s, sources_of

GROUPS: Final = 64
"""Groups of suspects in one transaction: each costs a round trip, and all of them must be over before the transaction
times out.
"""
CONDEMNED_MAX: Final = 100_000
NARROWER: Final = 8
"""Rows of the next attempt: one in so many. It takes five attempts from 20,000 rows to one."""
WIDER: Final = 4
"""Rows after a commit: so many times as many."""
STRIKES_MAX: Final = 3
PASSING_STRIKES_MAX: Final = 10
"""As STRIKES_MAX, where brokers are busy, or the producer has broken, and no record has failed."""
REFUSALS_MAX: Final = 6
REFUSALS_S: Final = 10.0
"""So many aborts for records of one target and one code, within so many seconds, and what is suspected is put off;
after TRIPPED_AFTER times as many the target is left alone for a while.
"""
TRIPPED_AFTER: Final = 6
LEARNED_MAX: Final = 8
"""After so many aborts without a commit, each of which taught something, the next attempt has fewer rows as well: what
comes in meanwhile may be as bad as what was found.
"""

Place = tuple[str, int]
"""A topic and a partition, or EVERY."""

log = structlog.get_logger("bridge.delivery.narrowing")


@dataclass(slots=True)
class _Refusals:
    """Aborts for records that one target refused with one code."""

    since_s: float
    count: int = 0


@dataclass(slots=True)
class _Lessons:
    """What the culprits of one abort say: `learned` is whether the next attempt differs."""

    suspects: list[int] = field(default_factory=list)
    put_off: Refusal | None = None
    blamed: dict[Place, KafkaError] = field(default_factory=dict)
    learned: bool = False


class Narrowing:
    """State of the search. Records are named by packed (source, offset)."""

    def __init__(
        self,
        targets: Targets,
        delay_topics: frozenset[str],
        dead_letter_topics: frozenset[str],
        clock: Clock,
        rows_max: int = 20_000,
    ) -> None:
        """What the bridge's own topics do not take has to go to the other of the two, or nowhere. `rows_max` is how
        many rows a transaction has when all is well.
        """
        self.condemned: dict[int, Refusal] = {}
        self.is_careful = False
        self.rows = rows_max
        """How many rows the next transaction may have."""
        self.until_ms: int | None = None
        """What fell due later is not in the next transaction (None: it may be). With every attempt after an abort, more
        would come that may be as bad, and none would ever be committed.
        """
        self.stuck: dict[int, Refusal] = {}
        """Sources of records that nothing takes, until `take_stuck`."""
        self._rows_max = rows_max
        self._no_letter: set[int] = set()
        self._no_copy: set[int] = set()
        self._cut: set[int] = set()
        self._put_off: dict[int, Refusal] = {}
        self._targets = targets
        self._delay_topics = delay_topics
        self._dead_letter_topics = dead_letter_topics
        self._clock = clock
        self._keys: Int64s = np.empty(0, np.int64)
        self._learned = 0
        self._strikes: dict[Place, int] = {}
        self._refusals: dict[tuple[str, int], _Refusals] = {}

    @property
    def findings(self) -> Findings:
        """What is known of single records."""
        return Findings(self.condemned, self._no_letter, self._no_copy, self._cut, self._put_off)

    @property
    def is_narrowest(self) -> bool:
        """Whether the next transaction has one row: then it moves nothing but that row's source."""
        return self.rows == 1

    def clear(self) -> None:
        """Forget everything: another store, other numbers."""
        self._forget_records()
        self._strikes.clear()
        self.stuck.clear()
        self.rows = self._rows_max

    def committed(self, rows: int) -> None:
        """A transaction of so many rows went through, or had nothing to do: what was condemned was in it, and nothing
        else is suspected.
        """
        self._forget_records()
        self._strikes.clear()
        if rows:
            self.rows = min(self._rows_max, self.rows * WIDER)

    def bound(self, until_ms: int) -> None:
        """What was due by then was aborted: until a commit, the next attempts hold nothing else."""
        self.until_ms = until_ms if self.until_ms is None else min(self.until_ms, until_ms)

    def take_stuck(self) -> dict[int, Refusal]:
        """The sources of records that nothing takes, by index."""
        stuck, self.stuck = self.stuck, {}
        return stuck

    def split(self, batch: Batch, keys: Int64s) -> Iterator[Batch]:
        """The batch in parts to be sent one after the other; `keys` int64[len(batch)] are its records' names."""
        suspected = np.isin(keys, self._keys) if len(self._keys) else np.zeros(len(keys), dtype=np.bool_)
        group = max(1, len(self._keys) // GROUPS)
        start = 0
        while start < len(keys):
            same = suspected[start:] == suspected[start]
            end = start + (len(same) if same.all() else int(np.argmin(same)))
            if suspected[start]:
                end = min(end, start + group)
            yield batch.part(start, end)
            start = end

    def learn(self, culprits: Mapping[int, Culprit], *, is_exact: bool) -> bool:
        """Draw the conclusions of an abort; `culprits` by name, in the order in which they were sent; `is_exact`: there
        is one, and it was alone. Returns whether the next attempt differs.
        """
        lessons = _Lessons()
        for place, mine in _by_place(culprits).items():
            self._learn_of(place, mine, lessons, is_exact=is_exact)
        lessons.learned |= self._blame(lessons.blamed)
        if lessons.suspects:
            self._keys = np.array(sorted(lessons.suspects), dtype=np.int64)
        if lessons.put_off is not None:
            self._put_off.update(dict.fromkeys(self._keys.tolist(), lessons.put_off))
            self._keys = np.empty(0, np.int64)
        if lessons.learned:
            self.is_careful = True
            self._learned += 1
            if self._learned > LEARNED_MAX:
                self.rows = max(1, self.rows // NARROWER)
        return lessons.learned

    def narrow(
        self, rows: int, places: Collection[Place], error: KafkaError, *, is_careful: bool, is_passing: bool
    ) -> bool:
        """Nothing was learned from an abort with this error of a transaction of so many rows, which wrote to `places`:
        the next one is careful, if that may tell more, or smaller. `is_passing`: most likely nothing of ours is to
        blame. Returns whether the next attempt differs.
        """
        if is_careful and not self.is_careful:
            self.is_careful = True
            return True
        if not rows:
            return False  # nothing was taken: fewer rows would not help
        before, self.rows = self.rows, max(1, min(self.rows, max(1, rows)) // NARROWER)
        if self.rows < before:
            return True
        limit = PASSING_STRIKES_MAX if is_passing else STRIKES_MAX
        return self._blame({place: error for place in places if self._strike(place, limit)})

    # -- inside

    def _forget_records(self) -> None:
        self.condemned.clear()
        self._no_letter.clear()
        self._no_copy.clear()
        self._cut.clear()
        self._put_off.clear()
        self.is_careful = False
        self.until_ms = None
        self._learned = 0
        self._keys = np.empty(0, np.int64)

    def _learn_of(self, place: Place, mine: list[tuple[int, KafkaError]], lessons: _Lessons, *, is_exact: bool) -> None:
        """What failed records of one partition say."""
        error = next((error for _, error in mine if fault_of(error) is not Fault.BYSTANDER), mine[0][1])
        fault, (topic, _) = fault_of(error), place
        if fault is Fault.RECORD:
            lessons.learned = True
            refused = [key for key, each in mine if fault_of(each) is Fault.RECORD]
            named = set(refused) if is_exact else _named(mine)
            for key in named:
                self._condemn(key, topic, error)
            # Without what is named for certain there may be nothing left to find.
            lessons.suspects += [] if named else refused
            if is_exact or not named:
                self._learn_of_refusals(topic, error, lessons)
        elif fault in (Fault.TARGET, Fault.CLOCK, Fault.MISSING):
            lessons.blamed[topic, EVERY] = error
        elif fault is Fault.PARTITION or self._strike(place):
            lessons.blamed[place] = error

    def _learn_of_refusals(self, topic: str, error: KafkaError, lessons: _Lessons) -> None:
        """One target has had one more abort for its records. (Records for our own topics have no other place.)"""
        if topic in self._delay_topics or topic in self._dead_letter_topics:
            return
        count = self._count_refusal(topic, error)
        if count >= REFUSALS_MAX and self._may_be_wary(topic, error):
            lessons.blamed[topic, LARGE] = error
        elif count >= TRIPPED_AFTER * REFUSALS_MAX:
            lessons.blamed[topic, EVERY] = error
        elif count >= REFUSALS_MAX:
            lessons.put_off = refusal_of(error)

    def _may_be_wary(self, topic: str, error: KafkaError) -> bool:
        """Whether it may help to leave out what may be too large: not where that is left out already."""
        target = self._targets.resolve([topic])[topic]
        return (
            meaning_of(error).reason is RejectReason.TOO_LARGE and target.bytes_max is not None and not target.is_wary
        )

    def _count_refusal(self, topic: str, error: KafkaError) -> int:
        """How many aborts there were lately for records of this target and this code."""
        now_s, key = self._clock.monotonic_s(), (topic, error.code())
        refusals = self._refusals.get(key)
        if refusals is None or now_s - refusals.since_s > REFUSALS_S:
            self._refusals = {k: r for k, r in self._refusals.items() if now_s - r.since_s <= REFUSALS_S}
            refusals = self._refusals[key] = _Refusals(now_s)
        refusals.count += 1
        return refusals.count

    def _strike(self, place: Place, limit: int = STRIKES_MAX) -> bool:
        """Whether the same place has failed often enough, whatever the code says."""
        count = self._strikes[place] = self._strikes.get(place, 0) + 1
        if count < limit:
            return False
        del self._strikes[place]
        return True

    def _blame(self, blamed: Mapping[Place, KafkaError]) -> bool:
        """Targets, or partitions of them, take nothing. Returns whether that leads anywhere."""
        if not blamed:
            return False
        # The brokers may be able to say it themselves, and will say when it is over; else there is the breaker.
        told = self._targets.look_again({topic for topic, _ in blamed})
        if told is None:
            return False  # it is not this target that does not answer
        for (topic, partition), error in blamed.items():
            if topic not in told:
                self._targets.trip(topic, partition, refusal_of(error))
        return True

    def _condemn(self, key: int, topic: str, error: KafkaError) -> None:
        if len(self.condemned) + len(self._no_letter) + len(self._no_copy) >= CONDEMNED_MAX:
            self._forget_records()
        nowhere = False
        if topic in self._delay_topics:
            # Refused before, and sent there all the same: a cancel that is sent on has no other place.
            nowhere = key in self._no_letter or key in self._no_copy
            self._no_copy.add(key)
        elif topic in self._dead_letter_topics:
            # Refused before, and sent there all the same: it does not fit into the delay topic either.
            nowhere = key in self._no_copy or key in self._no_letter
            self._no_letter.add(key)
        else:
            self.condemned[key] = refusal_of(error)
        if nowhere:
            self._cut_letter(key, topic, error)
        self._keys = self._keys[self._keys != key]

    def _cut_letter(self, key: int, topic: str, error: KafkaError) -> None:
        """Neither of our topics takes a record: its letter is cut, or its source has to wait."""
        if key in self._cut or meaning_of(error).reason is not RejectReason.TOO_LARGE:
            source = int(sources_of(np.array([key], np.int64))[0]) & SOURCE_MAX
            self.stuck[source] = Refusal(meaning_of(error).reason, f"{topic}: {error.str()}")
            return
        log.warning("dead-letter-cut", topic=topic, reason=error.str())
        self._cut.add(key)


def _by_place(culprits: Mapping[int, Culprit]) -> dict[Place, list[tuple[int, KafkaError]]]:
    places: dict[Place, list[tuple[int, KafkaError]]] = {}
    for key, culprit in culprits.items():
        places.setdefault((culprit.topic, culprit.partition), []).append((key, culprit.error))
    return places


def _named(mine: list[tuple[int, KafkaError]]) -> set[int]:
    """Failed records of one partition, in the order in which they were sent, that stand between two bystanders."""
    faults = [fault_of(error) for _, error in mine]
    between = zip(mine[1:-1], faults, faults[1:], faults[2:], strict=False)
    wanted = (Fault.BYSTANDER, Fault.RECORD, Fault.BYSTANDER)
    return {key for (key, _), *around in between if tuple(around) == wanted}
