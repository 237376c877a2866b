"""Compares the committed states with the bridge's own: Kafka may not hold the states that it has confirmed.

A repeated request may arrive late, within a later transaction of the same id, and put its offsets in place of newer
committed ones. As long as a partition is the bridge's own, the bridge knows the right state. It reads states back where
no message waits for delivery: once at the end of a busy period, before it gives partitions up or ends, and after a
transaction in doubt. A state that differs is written again, under the group's metadata: if the partition belongs to
another instance by then, which has written that state itself, brokers refuse the write.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Final

import structlog

from bridge.errors import BridgeError, FencedError, StateError
from bridge.kafka.membership import Membership
from bridge.stores.names import SourceName
from bridge.telemetry.metrics import Metrics
from bridge.wire.committed_state import CommittedState
from timerstore.clock import Clock

IDLE_S: Final = 1.0
"""Time from the last commit to the end of a busy period."""
ANSWER_S: Final = 0.5
"""The longest wait for the brokers: messages that fall due meanwhile are late."""
AGAIN_S: Final = 10.0
"""Interval between attempts without an answer."""
FOREIGN: Final = frozenset({"DB-4003", "DB-4004"})
"""Codes of states that other programs have written."""

States = Mapping[SourceName, CommittedState]
ReadCommitted = Callable[[Collection[SourceName], float | None], Mapping[SourceName, CommittedState | None]]
"""Reads stable states within a number of seconds (None: as long as a transaction may be open)."""

log = structlog.get_logger("bridge.delivery.doubt.read_back")


class ReadBack:
    """See the module. One thread."""

    def __init__(
        self, read: ReadCommitted, membership: Callable[[], Membership], clock: Clock, metrics: Metrics
    ) -> None:
        self._read = read
        self._membership = membership
        self._clock = clock
        self._metrics = metrics
        self._is_new = False
        """Whether there was a commit since the last look."""
        self._is_in_doubt = False
        self._not_before_s = 0.0
        self.wrong: dict[SourceName, CommittedState | None] = {}
        """The states in Kafka that differ from the bridge's own, which are written again."""
        self._unsure: frozenset[SourceName] = frozenset()

    def is_due(self, idle_s: float) -> bool:
        """Whether it is time to look, `idle_s` after the last commit."""
        is_over = idle_s >= IDLE_S or self._is_in_doubt
        return self._is_new and is_over and self._clock.monotonic_s() >= self._not_before_s

    @property
    def again(self) -> frozenset[SourceName]:
        """Partitions whose states must be written again."""
        return self._unsure.union(self.wrong)

    def doubt(self, names: Collection[SourceName]) -> None:
        """An unasked commit of a transaction with these partitions is possible: write their states again in any
        case."""
        self._unsure |= frozenset(names)

    @property
    def is_new(self) -> bool:
        """Whether Kafka may hold other states than at the last look."""
        return self._is_new

    def committed(self, written: Collection[SourceName], *, is_in_doubt: bool) -> None:
        """A transaction with these partitions was committed; `is_in_doubt`: a request may have been sent twice."""
        self._is_new, self._is_in_doubt = True, self._is_in_doubt or is_in_doubt
        self._unsure -= frozenset(written)
        again = {name: self.wrong.pop(name) for name in written if name in self.wrong}
        if again:
            names = ", ".join(f"{topic}/{number}" for topic, number in sorted(again))
            held = ", ".join("another" if state is None else str(state.offset) for _, state in sorted(again.items()))
            log.error("committed-state-written-again", code="DB-4072", partitions=names, offsets=held)
            self._metrics.states_rewritten.inc(len(again))

    def begin(self) -> None:
        """Begin with another store, opened on Kafka's states."""
        self._is_new = False
        self._unsure = frozenset()
        self.wrong.clear()

    def forget(self, names: Collection[SourceName]) -> None:
        """Forget partitions of another instance."""
        self._unsure -= frozenset(names)
        for name in names:
            self.wrong.pop(name, None)

    def look(self, states: States, revocations: int) -> None:
        """Compare, unless a partition may belong to another instance: `revocations` is the number as of
        `states`."""
        try:
            committed = self._found(states)
            is_ours = self._membership().revocations == revocations
        except FencedError:
            raise
        except BridgeError as failure:
            log.warning("committed-states-not-read-back", code=failure.code, reason=str(failure))
            self._not_before_s = self._clock.monotonic_s() + AGAIN_S
            return
        if not is_ours:
            self._not_before_s = self._clock.monotonic_s() + IDLE_S
            return
        self._is_new = self._is_in_doubt = False
        self.wrong = {name: committed[name] for name in states if not _is_held(states[name], committed[name])}

    def _found(self, states: States) -> Mapping[SourceName, CommittedState | None]:
        try:
            return self._read(list(states), ANSWER_S)
        except StateError as failure:
            if failure.code not in FOREIGN:
                raise
            return dict.fromkeys(states)


def _is_held(state: CommittedState, found: CommittedState | None) -> bool:
    return found is not None and state.is_written_as(found) and state.written_manifest() == found.manifest
