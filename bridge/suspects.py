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
from confluent_kafka import KafkaError

from bridge.deadletter import Condemned
from bridge.errors import EnvironmentFailure
from bridge.outgoing import Batch
from bridge.targets import Targets
from bridge.verdict import UNKNOWN_TARGET, Verdict, judge_failure, reason_of
from timerstore.position import Int64s

GROUPS: Final = 64
"""Groups of suspects in one transaction: each costs a round trip, and all of them must be over before the transaction
times out.
"""
CONDEMNED_MAX: Final = 100_000


class Suspects:
    """State of the search. Records are named by packed (source, offset)."""

    def __init__(self, targets: Targets, own_topics: frozenset[str]) -> None:
        """`own_topics`: delay and dead-letter topics. What cannot be written there has nowhere else to go."""
        self.condemned: dict[int, Condemned] = {}
        self.is_careful = False
        self._targets = targets
        self._own_topics = own_topics
        self._keys: Int64s = np.empty(0, np.int64)

    def clear(self) -> None:
        """Forget everything: another store, other numbers."""
        self.condemned.clear()
        self._end()

    def committed(self) -> None:
        """A transaction went through: whoever is condemned was in it, and nobody else is suspected."""
        self.condemned.clear()
        self._end()

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

    def learn(self, culprits: Mapping[int, tuple[str, KafkaError]], *, is_exact: bool) -> bool:
        """Draw the conclusions of an abort; `culprits` by name: topic and error; `is_exact`: there is one, and it was
        alone. Returns whether the next attempt differs.

        Raises EnvironmentFailure when a topic of the bridge's own refuses a record for good.
        """
        suspects = []
        learned = False
        for key, (topic, error) in culprits.items():
            verdict = judge_failure(error)
            if error.code() in UNKNOWN_TARGET:
                self._targets.forget(topic)
            if verdict is Verdict.PASSING:
                continue
            if topic in self._own_topics:
                raise _homeless(topic, error)
            learned = True
            if verdict is Verdict.TARGET:
                self._targets.refuse(topic, error.str())
            elif is_exact:
                self._condemn(key, error)
            else:
                suspects.append(key)
        if suspects:
            self._keys = np.array(sorted(suspects), dtype=np.int64)
        self.is_careful = learned
        return learned

    def _condemn(self, key: int, error: KafkaError) -> None:
        if len(self.condemned) >= CONDEMNED_MAX:
            self.condemned.clear()
        self.condemned[key] = Condemned(reason_of(error), error.str())
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
