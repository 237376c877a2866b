"""Who spoils a transaction: from an abort to the records that caused it, in as few further transactions as possible.

A broker answers for a batch of records, not for one. So after an abort the next transaction is *careful*: the fate of
what was sent is waited for, batch by batch, which gives suspects; in the one after it the suspects are sent in groups,
the groups of the next one are smaller, until a group of one is convicted and condemned. Everything stays in the order
of position throughout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np
import structlog
from confluent_kafka import KafkaError

from bridge.breakers import EVERY
from bridge.errors import EnvironmentFailure
from bridge.headers import RejectReason
from bridge.outgoing import Batch
from bridge.targets import Targets
from bridge.verdict import UNKNOWN_TARGET, Findings, Refusal, Verdict, judge_failure, reason_of, refusal_of
from bridge.work import Culprit
from timerstore.position import Int64s

GROUPS: Final = 64
"""Groups of suspects in one transaction: each costs a round trip, and all of them must be over before the transaction
times out.
"""
CONDEMNED_MAX: Final = 100_000

log = structlog.get_logger("bridge.suspects")


class Suspects:
    """State of the search. Records are named by packed (source, offset)."""

    def __init__(self, targets: Targets, delay_topics: frozenset[str], dead_letter_topics: frozenset[str]) -> None:
        """What the bridge's own topics do not take has to go to the other of the two, or nowhere."""
        self.condemned: dict[int, Refusal] = {}
        self.is_careful = False
        self._no_letter: set[int] = set()
        self._no_copy: set[int] = set()
        self._cut: set[int] = set()
        self._targets = targets
        self._delay_topics = delay_topics
        self._dead_letter_topics = dead_letter_topics
        self._keys: Int64s = np.empty(0, np.int64)

    @property
    def findings(self) -> Findings:
        """What is known of single records."""
        return Findings(self.condemned, self._no_letter, self._no_copy, self._cut)

    def clear(self) -> None:
        """Forget everything: another store, other numbers."""
        self.condemned.clear()
        self._no_letter.clear()
        self._no_copy.clear()
        self._cut.clear()
        self._end()

    def committed(self) -> None:
        """A transaction went through: whoever is condemned was in it, and nobody else is suspected."""
        self.clear()

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
        """Draw the conclusions of an abort; `culprits` by name; `is_exact`: there is one, and it was alone. Returns
        whether the next attempt differs.

        Raises EnvironmentFailure when a record has nowhere to go.
        """
        suspects = []
        blamed: dict[tuple[str, int], KafkaError] = {}
        learned = False
        for key, culprit in culprits.items():
            verdict = judge_failure(culprit.error)
            if verdict is Verdict.RECORD:
                learned = True
                if is_exact:
                    self._condemn(key, culprit)
                else:
                    suspects.append(key)
            elif verdict is Verdict.TARGET or culprit.error.code() in UNKNOWN_TARGET:
                blamed[culprit.topic, EVERY] = culprit.error
            elif verdict is Verdict.PARTITION:
                blamed[culprit.topic, culprit.partition] = culprit.error
        learned |= self._blame(blamed)
        if suspects:
            self._keys = np.array(sorted(suspects), dtype=np.int64)
        self.is_careful = learned
        return learned

    def _blame(self, blamed: Mapping[tuple[str, int], KafkaError]) -> bool:
        """Targets, or partitions of them, take nothing. Returns whether that leads anywhere."""
        found = dict(blamed)
        for (topic, partition), error in blamed.items():
            if topic in self._delay_topics and judge_failure(error) is not Verdict.TARGET:
                del found[topic, partition]  # there is no other place for a copy: wait
            elif topic in self._delay_topics or topic in self._dead_letter_topics:
                target = self._targets.resolve([topic])[topic]
                if target.refusal is not None and not target.is_unanswered:
                    raise _homeless(topic, error)  # it was sent there for want of another place
        # The brokers may be able to say it themselves, and will say when it is over; else there is the breaker.
        told = self._targets.look_again({topic for topic, _ in found}) if found else None
        if told is None:
            return False  # it is not this target that does not answer
        for (topic, partition), error in found.items():
            if topic not in told:
                self._targets.trip(topic, partition, refusal_of(error))
        return True

    def _condemn(self, key: int, culprit: Culprit) -> None:
        if len(self.condemned) + len(self._no_letter) + len(self._no_copy) >= CONDEMNED_MAX:
            self.clear()
        nowhere = False
        if culprit.topic in self._delay_topics:
            nowhere = key in self._no_letter
            self._no_copy.add(key)
        elif culprit.topic in self._dead_letter_topics:
            # Refused before, and sent there all the same: it does not fit into the delay topic either.
            nowhere = key in self._no_copy or key in self._no_letter
            self._no_letter.add(key)
        else:
            self.condemned[key] = refusal_of(culprit.error)
        if nowhere:
            if key in self._cut or reason_of(culprit.error) is not RejectReason.TOO_LARGE:
                raise _homeless(culprit.topic, culprit.error)
            log.warning("dead-letter-cut", topic=culprit.topic, reason=culprit.error.str())
            self._cut.add(key)
        self._keys = self._keys[self._keys != key]

    def _end(self) -> None:
        self.is_careful = False
        self._keys = np.empty(0, np.int64)


def _homeless(topic: str, error: KafkaError) -> EnvironmentFailure:
    return EnvironmentFailure(
        "a dead letter or a copy cannot be written",
        hint="Grant WRITE there; a dead-letter topic must take records 64 KiB larger than its delay topic.",
        topic=topic,
        reason=error.str(),
    )
