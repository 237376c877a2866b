"""How the attempt after an abort differs from the one before it: each is narrower, until something can be committed.

First, what failed records tell (`learn`):

    the record was alone, or is named between bystanders  goes without it: it becomes a dead letter
    it is one of a batch                                  is careful, the batch in groups, then in smaller ones
    ... the same target, often in a short time            goes without what failed, or all that may be too large
    ... more often                                        goes without the target
    a target or a partition takes nothing                 goes without it
    the same partition failed several times, by any code  goes without it
    neither dead letter nor copy can be written           goes without the source of that record (held_sources.py)

Where that tells nothing, the cause of the abort does (`REMEDIES`, `narrow`):

    CAREFUL       is careful; if it was already, SMALLER
    SMALLER       has an eighth of the rows; if it had one, and several times, goes without the target of that row
    PLANNED_ANEW  differs by itself

What goes without a target puts its records off, as retry copies. A partition of a delay topic has no such way out: a
source that needs it is held.

*Careful* means that the fate of what is sent is waited for, batch by batch: a broker answers for a batch of records,
not for one. Where it names the records of a batch that it refuses (KIP-467), the client marks the others as bystanders;
a named record between two bystanders was of their batch, and is believed. (One name in a batch the client ignores, and
two batches that were refused one after the other look like one.) Everything stays in the order of position throughout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from types import MappingProxyType
from typing import Final

import numpy as np
import structlog

from bridge.delivery.doubt.findings import Findings, Part
from bridge.delivery.open_transaction import OpenTransaction
from bridge.delivery.plan.due_rows import Batch
from bridge.delivery.plan.fates import Unwritable
from bridge.delivery.producer.outcomes import Aborted, Cause, FailedRecord, Failure
from bridge.delivery.targets.breakers import EVERY, LARGE
from bridge.delivery.targets.cache import Targets
from bridge.kafka.errors import Fault, Refusal
from bridge.wire.reasons import RejectReason
from timerstore.clock import Clock
from timerstore.rows.position import SOURCE_MAX, Int64s, sources_of

GROUPS: Final = 64
"""Groups of failed records in one transaction: each costs a round trip, and all must be over before it times out."""
REJECTED_MAX: Final = 100_000
NARROWER: Final = 8
"""What the rows of the next attempt are divided by: it takes five attempts from 20,000 rows to one."""
WIDER: Final = 4
"""What they are multiplied by after a commit."""
STRIKES_MAX: Final = 3
PASSING_STRIKES_MAX: Final = 10
"""As STRIKES_MAX, where brokers are busy, or the producer has broken, and no record has failed."""
REFUSALS_MAX: Final = 6
REFUSALS_S: Final = 10.0
"""After REFUSALS_MAX aborts within this time, for records of one target and one code, what failed is put off; after
TRIPPED_AFTER times as many the target is left alone for a while."""
TRIPPED_AFTER: Final = 6
LARGE_REFUSALS_MAX: Final = 3
"""As REFUSALS_MAX, for records that may be too large, since compressing may not be enough. Such a record is a batch of
its own, so that no abort is spent on finding it among others."""
LEARNED_MAX: Final = 8
"""After this many aborts without a commit, each of which taught something, the next attempt has fewer rows as well:
what comes in meanwhile may be as bad."""

Place = tuple[str, int]
"""A topic and a partition, or EVERY."""

log = structlog.get_logger("bridge.delivery.narrowing")


class Next(Enum):
    """What the next attempt is; see the module."""

    CAREFUL = "careful"
    SMALLER = "smaller"
    PLANNED_ANEW = "planned anew"


@dataclass(frozen=True, slots=True)
class Remedy:
    """What the next attempt needs after a cause."""

    next: Next
    passes: bool = False
    """Most likely nothing of ours is the reason, and the producer is as good as before. Else the next attempt has
    nothing that fell due later."""
    waits: bool = False
    """It is not made at once."""

    @property
    def renews(self) -> bool:
        """Whether it needs a new producer: a batch that was refused leaves a gap in the sequence numbers of the client,
        on which the next one stumbles. (Another one is in use already where targets had become worse.)
        """
        return not self.passes and self.next is not Next.PLANNED_ANEW


REMEDIES: Final[Mapping[Cause, Remedy]] = {
    Cause.REFUSED: Remedy(Next.CAREFUL),
    Cause.UNACKNOWLEDGED: Remedy(Next.CAREFUL),
    Cause.TOO_SLOW: Remedy(Next.SMALLER),
    Cause.TARGETS_WORSE: Remedy(Next.PLANNED_ANEW),
    Cause.BROKERS_BUSY: Remedy(Next.CAREFUL, passes=True, waits=True),
    Cause.QUEUE_FULL: Remedy(Next.SMALLER, passes=True, waits=True),
    Cause.CLOCK_SET_BACK: Remedy(Next.PLANNED_ANEW, passes=True, waits=True),
    Cause.PRODUCER_LOST: Remedy(Next.SMALLER, passes=True),
    Cause.COMMIT_NOT_MADE: Remedy(Next.SMALLER, passes=True),
}


class Narrowing:
    """State of the search. Records are named by packed (source, offset)."""

    def __init__(
        self,
        targets: Targets,
        delay_topics: frozenset[str],
        dead_letter_topics: frozenset[str],
        clock: Clock,
        rows_max: int = 20_000,
        written: Mapping[int, Part] = MappingProxyType({}),
    ) -> None:
        """`rows_max` is how many rows a transaction has when all is well; `written` changes with what is known."""
        self._written = written
        self.findings = Findings(written=written)
        """What is known of single records."""
        self.is_careful = False
        self.rows = rows_max
        """How many rows the next transaction may have."""
        self.until_ms: int | None = None
        """What fell due later is not in the next transaction (None: it may be). With every attempt after an abort, more
        would come that may be as bad, and none would ever be committed.
        """
        self._stuck: dict[int, Unwritable] = {}
        self._rows_max = rows_max
        self._targets = targets
        self._delay_topics = delay_topics
        self._own_topics = delay_topics | dead_letter_topics
        self._clock = clock
        self._unclear: Int64s = np.empty(0, np.int64)
        """Records that failed with others; which of them is the reason is to be found out."""
        self._learned = 0
        self._strikes: dict[Place, int] = {}
        self._refusals: dict[tuple[str, str | None], tuple[float, int]] = {}
        """Since when, and how often, one target has refused records with one code."""

    @property
    def is_narrowest(self) -> bool:
        """Whether the next transaction has one row: then it moves nothing but that row's source."""
        return self.rows == 1

    def clear(self) -> None:
        """Forget everything: another store, other numbers."""
        self._forget_records()
        self._strikes.clear()
        self._stuck.clear()
        self.rows = self._rows_max

    def committed(self, rows: int, *, is_pending: bool = False) -> None:
        """A transaction of so many rows was committed, or had nothing to do: what was rejected was in it. Not so
        while that is looked up, and `is_pending`."""
        if is_pending:
            return
        self._forget_records()
        self._strikes.clear()
        if rows:
            self.rows = min(self._rows_max, self.rows * WIDER)

    def take_stuck(self) -> dict[int, Unwritable]:
        """The sources of records that nothing takes, by index."""
        stuck, self._stuck = self._stuck, {}
        return stuck

    def split(self, batch: Batch, keys: Int64s) -> Iterator[Batch]:
        """The batch in parts to be sent one after the other; `keys` int64[len(batch)] are its records' names."""
        suspected = np.isin(keys, self._unclear)
        group = max(1, len(self._unclear) // GROUPS)
        borders = np.flatnonzero(suspected[1:] != suspected[:-1]) + 1
        for start, end in pairwise([0, *borders.tolist(), len(keys)]):
            step = group if suspected[start] else end - start
            for first in range(start, end, step):
                yield batch.part(first, min(first + step, end))

    def after(self, transaction: OpenTransaction, aborted: Aborted) -> bool:
        """Decide how the next attempt differs. Returns whether it may be made at once."""
        remedy = REMEDIES[aborted.cause]
        if not remedy.passes:
            bound_ms = transaction.until_ms
            self.until_ms = bound_ms if self.until_ms is None else min(self.until_ms, bound_ms)
        if remedy.next is Next.PLANNED_ANEW:
            return not remedy.waits
        if self.learn(transaction.failed_records(aborted.failed), was_alone=aborted.was_alone):
            return True
        if not remedy.passes:
            # The brokers may know the targets otherwise than we do. Asking again is cheap, aborting again is not.
            for topic in transaction.counts.delivered:
                self._targets.expire(topic)
        return self.narrow(transaction, aborted.cause, aborted.failure) and not remedy.waits

    def learn(self, failed: Mapping[int, FailedRecord], *, was_alone: bool) -> bool:
        """Draw the conclusions from failed records, by name, in the order in which they were sent; `was_alone`: there
        is one, and it was sent by itself. Returns whether the next attempt differs.
        """
        blamed: dict[Place, Failure] = {}
        unclear: list[int] = []
        put_off: Refusal | None = None
        learned = False
        for (topic, partition), mine in _by_place(failed).items():
            failure = next((each for _, each in mine if each.fault is not Fault.BYSTANDER), mine[0][1])
            if failure.fault is Fault.RECORD:
                learned = True
                refused = [key for key, each in mine if each.fault is Fault.RECORD]
                named = set(refused) if was_alone else _named(mine)
                for key in named:
                    self._reject(key, topic, failure)
                if not named:  # without what is named for certain there may be nothing left to find
                    unclear += refused
                if was_alone or not named:
                    put_off = self._after_refusal(topic, failure, blamed) or put_off
            elif failure.fault in (Fault.TARGET, Fault.CLOCK, Fault.MISSING):
                blamed[topic, EVERY] = failure
            elif failure.fault is Fault.PARTITION or self._strike((topic, partition)):
                blamed[topic, partition] = failure
        learned |= self._avoid(blamed)
        if unclear:
            self._unclear = np.array(sorted(unclear), dtype=np.int64)
        if put_off is not None:
            self.findings.put_off.update(dict.fromkeys(self._unclear.tolist(), put_off))
            self._unclear = np.empty(0, np.int64)
        if learned:
            self.is_careful = True
            self._learned += 1
            if self._learned > LEARNED_MAX:
                self.rows = max(1, self.rows // NARROWER)
        return learned

    def narrow(self, transaction: OpenTransaction, cause: Cause, failure: Failure) -> bool:
        """Failed records tell nothing: the next attempt is careful, if that may tell more, or smaller. Returns whether
        it differs.
        """
        remedy = REMEDIES[cause]
        if remedy.next is Next.CAREFUL and not self.is_careful:
            self.is_careful = True
            return True
        if not transaction.rows:
            return False  # nothing was taken: fewer rows would not help
        before, self.rows = self.rows, max(1, min(self.rows, transaction.rows) // NARROWER)
        if self.rows < before:
            return True
        limit = PASSING_STRIKES_MAX if remedy.passes else STRIKES_MAX
        return self._avoid({place: failure for place in transaction.places() if self._strike(place, limit)})

    def _forget_records(self) -> None:
        self.findings = Findings(written=self._written)
        self.is_careful = False
        self.until_ms = None
        self._learned = 0
        self._unclear = np.empty(0, np.int64)

    def _after_refusal(self, topic: str, failure: Failure, blamed: dict[Place, Failure]) -> Refusal | None:
        """One target has had one more abort for its records. Returns why what failed is put off, if it is."""
        if topic in self._own_topics:
            return None  # records for these have no other place
        count = self._count_refusal(topic, failure)
        if count >= LARGE_REFUSALS_MAX and self._may_be_wary(topic, failure):
            blamed[topic, LARGE] = failure
        elif count >= TRIPPED_AFTER * REFUSALS_MAX:
            blamed[topic, EVERY] = failure
        elif count >= REFUSALS_MAX:
            return failure.refusal
        return None

    def _may_be_wary(self, topic: str, failure: Failure) -> bool:
        """Whether it may help to leave out what may be too large: not where that is left out already."""
        target = self._targets.resolve([topic])[topic]
        return failure.meaning.reason is RejectReason.TOO_LARGE and target.bytes_max is not None and not target.is_wary

    def _count_refusal(self, topic: str, failure: Failure) -> int:
        """How many aborts there were lately for records of this target and this code."""
        now_s, key = self._clock.monotonic_s(), (topic, failure.code)
        lately = {each: told for each, told in self._refusals.items() if now_s - told[0] <= REFUSALS_S}
        since_s, count = lately.get(key, (now_s, 0))
        self._refusals = {**lately, key: (since_s, count + 1)}
        return count + 1

    def _strike(self, place: Place, limit: int = STRIKES_MAX) -> bool:
        """Whether the same place has failed often enough, whatever the code says."""
        count = self._strikes[place] = self._strikes.get(place, 0) + 1
        if count < limit:
            return False
        del self._strikes[place]
        return True

    def _avoid(self, blamed: Mapping[Place, Failure]) -> bool:
        """Targets, or partitions of them, take nothing. Returns whether that leads anywhere."""
        if not blamed:
            return False
        # Where the brokers say it themselves, they also say when it is over; else there is the breaker.
        told = self._targets.look_again({topic for topic, _ in blamed})
        if told is None:
            return False  # it is not this target that does not answer
        for (topic, partition), failure in blamed.items():
            if topic not in told:
                self._targets.trip(topic, partition, failure.refusal)
        return True

    def _reject(self, key: int, topic: str, failure: Failure) -> None:
        if topic in self._delay_topics and self._has_shrunk(topic, failure):
            return  # of all that a command copies, the next attempt leaves out what is too large
        found = self.findings
        if len(found.rejected) + len(found.no_letter) + len(found.no_copy) >= REJECTED_MAX:
            self._forget_records()
            found = self.findings
        if topic not in self._own_topics:
            found.rejected[key] = failure.refusal
        else:
            # A cancel that is sent on can only go to the delay topic, and what does not fit there only to the dead
            # letters. So the first refusal leads to the other topic of the two, the second one nowhere.
            nowhere = key in found.no_letter or key in found.no_copy
            (found.no_copy if topic in self._delay_topics else found.no_letter).add(key)
            if nowhere:
                self._cut_letter(key, topic, failure)
        self._unclear = self._unclear[self._unclear != key]

    def _has_shrunk(self, topic: str, failure: Failure) -> bool:
        """Whether a topic that refuses a record for its size turns out to take smaller ones only than was known."""
        if failure.meaning.reason is not RejectReason.TOO_LARGE:
            return False
        before = self._targets.resolve([topic])[topic].bytes_max
        self._targets.look_again([topic])
        now = self._targets.resolve([topic])[topic].bytes_max
        return before is not None and now is not None and now < before

    def _cut_letter(self, key: int, topic: str, failure: Failure) -> None:
        """Neither of our own topics takes a record: its dead letter is cut, or its source has to wait."""
        if key in self.findings.cut or failure.meaning.reason is not RejectReason.TOO_LARGE:
            source = int(sources_of(np.array([key], np.int64))[0]) & SOURCE_MAX
            self._stuck[source] = Unwritable(detail=f"{topic}: {failure.detail}")
            return
        log.warning("dead-letter-cut", topic=topic, reason=failure.detail)
        self.findings.cut.add(key)


def _by_place(failed: Mapping[int, FailedRecord]) -> dict[Place, list[tuple[int, Failure]]]:
    places: dict[Place, list[tuple[int, Failure]]] = {}
    for key, record in failed.items():
        places.setdefault((record.topic, record.partition), []).append((key, record.failure))
    return places


def _named(mine: list[tuple[int, Failure]]) -> set[int]:
    """Failed records of one partition, in the order in which they were sent, that stand between two bystanders."""
    faults = [failure.fault for _, failure in mine]
    between = zip(mine[1:-1], faults, faults[1:], faults[2:], strict=False)
    wanted = (Fault.BYSTANDER, Fault.RECORD, Fault.BYSTANDER)
    return {key for (key, _), *around in between if tuple(around) == wanted}
