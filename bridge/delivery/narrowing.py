"""Narrowing: after an abort each attempt is narrower than the one before, until a commit succeeds.

The first evidence is the failed records (`learn`):

    evidence                                              the next attempt
    the record was alone, or is named between bystanders  goes without it: it becomes a dead letter
    it is one of a batch                                  is careful, the batch in groups, then in smaller ones
    ... the same target, often in a short time            goes without the failed records, or possibly large ones
    ... more often                                        goes without the target
    a target or a partition takes nothing                 goes without it
    the same partition failed several times, by any code  goes without it
    neither dead letter nor copy can be written           goes without the source of that record (held_sources.py)

Without evidence from records, the cause of the abort decides (`REMEDIES`, `narrow`):

    CAREFUL       is careful; if it was already, SMALLER
    SMALLER       has an eighth of the rows; if it had one, and several times, goes without the target of that row
    PLANNED_ANEW  differs by itself

An attempt without a target puts its records off, as retry copies. A partition of a delay topic has no such way out: a
source that needs it is held.

A *careful* attempt waits for the result of each batch: a broker answers for a batch of records, not for one. If the
broker names the refused records of a batch (KIP-467), the client marks the others as bystanders. A named record between
two bystanders was of their batch, and is believed. (The client ignores a single name in a batch, and two batches that
were refused one after the other look like one.) Everything stays in the order of position throughout.
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
from bridge.stores.names import SOURCE_MAX, sources_of
from bridge.wire.reasons import RejectReason
from timerstore.clock import Clock
from timerstore.rows.position import Int64s

GROUPS: Final = 64
"""Groups of failed records in one transaction: each costs a round trip, and all must end before its time-out."""
REJECTED_MAX: Final = 100_000
NARROWER: Final = 8
"""Divisor for the rows of the next attempt: it takes five attempts from 20,000 rows to one."""
WIDER: Final = 4
"""Factor for the rows after a commit."""
STRIKES_MAX: Final = 3
PASSING_STRIKES_MAX: Final = 10
"""As STRIKES_MAX, for busy brokers or a broken producer without a failed record."""
REFUSALS_MAX: Final = 6
REFUSALS_S: Final = 10.0
"""REFUSALS_MAX aborts within this time, for records of one target and one code, put off the failed records. After
TRIPPED_AFTER times as many, the target is left alone for a while."""
TRIPPED_AFTER: Final = 6
LARGE_REFUSALS_MAX: Final = 3
"""As REFUSALS_MAX, for records that may be too large: compression may not be enough. Such a record is a batch of its
own, so that no abort is needed to find it among others."""
LEARNED_MAX: Final = 8
"""After this many instructive aborts without a commit, the next attempt also has fewer rows: new rows may be as bad."""

Place = tuple[str, int]
"""A topic and a partition, or EVERY."""

log = structlog.get_logger("bridge.delivery.narrowing")


class Next(Enum):
    """The kind of the next attempt; see the module."""

    CAREFUL = "careful"
    SMALLER = "smaller"
    PLANNED_ANEW = "planned anew"


@dataclass(frozen=True, slots=True)
class Remedy:
    """The needs of the next attempt after a cause."""

    next: Next
    passes: bool = False
    """The bridge's records are probably not the reason, and the producer is as good as before. Otherwise the next
    attempt leaves out rows that fell due later."""
    waits: bool = False
    """The next attempt is delayed."""

    @property
    def renews(self) -> bool:
        """Whether it needs a new producer: a refused batch leaves a gap in the sequence numbers of the client, which
        breaks the next one. (After TARGETS_WORSE, another producer is already in use.)"""
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
    """The state of the search. Records are named by packed (source, offset)."""

    def __init__(
        self,
        targets: Targets,
        delay_topics: frozenset[str],
        dead_letter_topics: frozenset[str],
        clock: Clock,
        rows_max: int = 20_000,
        written: Mapping[int, Part] = MappingProxyType({}),
    ) -> None:
        """`rows_max`: the rows of a transaction without trouble; `written` changes with new findings."""
        self._written = written
        self.findings = Findings(written=written)
        """The findings about single records."""
        self.is_careful = False
        self.rows = rows_max
        """The limit of rows for the next transaction."""
        self.until_ms: int | None = None
        """The bound of due times in the next transaction (None: no bound). Without it, each attempt after an abort
        would have new rows that may be as bad, and no commit would ever succeed."""
        self._stuck: dict[int, Unwritable] = {}
        self._rows_max = rows_max
        self._targets = targets
        self._delay_topics = delay_topics
        self._own_topics = delay_topics | dead_letter_topics
        self._clock = clock
        self._unclear: Int64s = np.empty(0, np.int64)
        """Records that failed together; the culprit among them is not yet known."""
        self._learned = 0
        self._strikes: dict[Place, int] = {}
        self._refusals: dict[tuple[str, str | None], tuple[float, int]] = {}
        """The first time, and the number, of one target's refusals with one code."""

    @property
    def is_narrowest(self) -> bool:
        """Whether the next transaction has one row: then it moves only that row's source."""
        return self.rows == 1

    def clear(self) -> None:
        """Forget everything: another store has other numbers."""
        self._forget_records()
        self._strikes.clear()
        self._stuck.clear()
        self.rows = self._rows_max

    def committed(self, rows: int, *, is_pending: bool = False) -> None:
        """A transaction of `rows` rows was committed, or had no work (0): it included the rejected records, which are
        forgotten. Not if `is_pending`: then they may still be looked up."""
        if is_pending:
            return
        self._forget_records()
        self._strikes.clear()
        if rows:
            self.rows = min(self._rows_max, self.rows * WIDER)

    def take_stuck(self) -> dict[int, Unwritable]:
        """The sources of records that no topic takes, by index."""
        stuck, self._stuck = self._stuck, {}
        return stuck

    def split(self, batch: Batch, keys: Int64s) -> Iterator[Batch]:
        """The batch in parts for sending one after the other; `keys` int64[len(batch)] are its records' names."""
        suspected = np.isin(keys, self._unclear)
        group = max(1, len(self._unclear) // GROUPS)
        borders = np.flatnonzero(suspected[1:] != suspected[:-1]) + 1
        for start, end in pairwise([0, *borders.tolist(), len(keys)]):
            step = group if suspected[start] else end - start
            for first in range(start, end, step):
                yield batch.part(first, min(first + step, end))

    def after(self, transaction: OpenTransaction, aborted: Aborted) -> bool:
        """Decide the difference of the next attempt. Returns whether it may be made at once."""
        remedy = REMEDIES[aborted.cause]
        if not remedy.passes:
            bound_ms = transaction.until_ms
            self.until_ms = bound_ms if self.until_ms is None else min(self.until_ms, bound_ms)
        if remedy.next is Next.PLANNED_ANEW:
            return not remedy.waits
        if self.learn(transaction.failed_records(aborted.failed), was_alone=aborted.was_alone):
            return True
        if not remedy.passes:
            # The brokers may have newer facts about the targets. Asking again is cheap, aborting again is not.
            for topic in transaction.counts.delivered:
                self._targets.expire(topic)
        return self.narrow(transaction, aborted.cause, aborted.failure) and not remedy.waits

    def learn(self, failed: Mapping[int, FailedRecord], *, was_alone: bool) -> bool:
        """Draw conclusions from failed records, by name, in the order of sending; `was_alone`: there is one, and it was
        sent by itself. Returns whether the next attempt differs."""
        blamed: dict[Place, Failure] = {}
        unclear: list[int] = []
        put_off: Refusal | None = None
        learned = False
        for (topic, partition), mine in _by_place(failed).items():
            failure = next((record for _, record in mine if record.fault is not Fault.BYSTANDER), mine[0][1])
            if failure.fault is Fault.RECORD:
                learned = True
                refused = [key for key, record in mine if record.fault is Fault.RECORD]
                named = set(refused) if was_alone else _named(mine)
                for key in named:
                    self._reject(key, topic, failure)
                if not named:  # without the certain culprits, none may be left to find
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
        """Without evidence from failed records, the next attempt is careful, if that may tell more, or smaller. Returns
        whether it differs."""
        remedy = REMEDIES[cause]
        if remedy.next is Next.CAREFUL and not self.is_careful:
            self.is_careful = True
            return True
        if not transaction.rows:
            return False  # no row was taken: fewer rows would not help
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
        """Count another abort for records of one target. Returns the refusal that puts failed records off, if any."""
        if topic in self._own_topics:
            return None  # their records have no other place
        count = self._count_refusal(topic, failure)
        if count >= LARGE_REFUSALS_MAX and self._may_be_wary(topic, failure):
            blamed[topic, LARGE] = failure
        elif count >= TRIPPED_AFTER * REFUSALS_MAX:
            blamed[topic, EVERY] = failure
        elif count >= REFUSALS_MAX:
            return failure.refusal
        return None

    def _may_be_wary(self, topic: str, failure: Failure) -> bool:
        """Whether leaving out possibly too large records may help: not if they are left out already."""
        target = self._targets.resolve([topic])[topic]
        return failure.meaning.reason is RejectReason.TOO_LARGE and target.bytes_max is not None and not target.is_wary

    def _count_refusal(self, topic: str, failure: Failure) -> int:
        """The number of recent aborts for records of this target and this code."""
        now_s, key = self._clock.monotonic_s(), (topic, failure.code)
        lately = {each: told for each, told in self._refusals.items() if now_s - told[0] <= REFUSALS_S}
        since_s, count = lately.get(key, (now_s, 0))
        self._refusals = {**lately, key: (since_s, count + 1)}
        return count + 1

    def _strike(self, place: Place, limit: int = STRIKES_MAX) -> bool:
        """Whether the same place has failed often enough, with any codes."""
        count = self._strikes[place] = self._strikes.get(place, 0) + 1
        if count < limit:
            return False
        del self._strikes[place]
        return True

    def _avoid(self, blamed: Mapping[Place, Failure]) -> bool:
        """Avoid targets, or partitions of them, that take nothing. Returns whether that makes a difference."""
        if not blamed:
            return False
        # If the brokers report the failure themselves, they also report its end; otherwise the breaker ends it.
        told = self._targets.look_again({topic for topic, _ in blamed})
        if told is None:
            return False  # the silence is not this target's
        for (topic, partition), failure in blamed.items():
            if topic not in told:
                self._targets.trip(topic, partition, failure.refusal)
        return True

    def _reject(self, key: int, topic: str, failure: Failure) -> None:
        if topic in self._delay_topics and self._has_shrunk(topic, failure):
            return  # the next attempt leaves out the command's copies that are too large
        findings = self.findings
        if len(findings.rejected) + len(findings.no_letter) + len(findings.no_copy) >= REJECTED_MAX:
            self._forget_records()
            findings = self.findings
        if topic not in self._own_topics:
            findings.rejected[key] = failure.refusal
        else:
            # A forwarded cancel can only go to the delay topic, and a record beyond that topic's limit only to the dead
            # letters. So the first refusal leads to the other of the two topics, and the second one nowhere.
            nowhere = key in findings.no_letter or key in findings.no_copy
            (findings.no_copy if topic in self._delay_topics else findings.no_letter).add(key)
            if nowhere:
                self._cut_letter(key, topic, failure)
        self._unclear = self._unclear[self._unclear != key]

    def _has_shrunk(self, topic: str, failure: Failure) -> bool:
        """Whether a topic that refuses a record for its size has a lower limit than the known one."""
        if failure.meaning.reason is not RejectReason.TOO_LARGE:
            return False
        before = self._targets.resolve([topic])[topic].bytes_max
        self._targets.look_again([topic])
        now = self._targets.resolve([topic])[topic].bytes_max
        return before is not None and now is not None and now < before

    def _cut_letter(self, key: int, topic: str, failure: Failure) -> None:
        """Neither of the bridge's own topics takes a record: cut its dead letter, or hold its source."""
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
    """Failed records of one partition, in the order of sending, that stand between two bystanders."""
    faults = [failure.fault for _, failure in mine]
    between = zip(mine[1:-1], faults, faults[1:], faults[2:], strict=False)
    wanted = (Fault.BYSTANDER, Fault.RECORD, Fault.BYSTANDER)
    return {key for (key, _), *around in between if tuple(around) == wanted}
