"""The overdue policy: the treatment of messages that have waited for the bridge. Pure.

The wait of a message begins at its effective time, or at its record's timestamp if that is later: neither a message
with a due time in the past nor a retry is overdue.

After a downtime the position must pass all overdue messages before it reaches those that are due now. So messages in
excess of the catch-up rate are written back into the delay topic, each with a time slot of its own, at the rate's
number of slots a second. That happens once for each message and downtime, since in its slot a message is on time.

    rate 1000/s, 5,000 overdue at 12:00:00      1,000 at once, the others in slots up to 12:00:05, a millisecond apart
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from timerstore.rows.position import Bools, Int64s

WAITED_MS_MAX: Final = 10_000
"""A message with a shorter wait does not count against the rate: a hiccup is not a downtime."""
BURST_MS: Final = 1_000
"""A message with an earlier slot is delivered at once: that saves a copy, and the rate is a number for a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverduePolicy:
    """`give_up_ms`: a message with a longer wait becomes a dead letter (None: never); `rate`: messages a second (0: no
    limit)."""

    give_up_ms: int | None = None
    rate: int = 0

    @property
    def is_any(self) -> bool:
        """Whether there is a special treatment of overdue messages."""
        return self.give_up_ms is not None or self.rate > 0


class CatchUp:
    """Assigns slots. A commit keeps a transaction's slots; otherwise they are assigned again."""

    def __init__(self, policy: OverduePolicy) -> None:
        self.policy = policy
        self._next_ms = 0.0
        self._planned_ms = 0.0

    def begin(self) -> None:
        """Begin a transaction."""
        self._planned_ms = self._next_ms

    def commit(self) -> None:
        """The transaction was committed."""
        self._next_ms = self._planned_ms

    def waited_ms(self, now_ms: int, at: Int64s, ts: Int64s) -> Int64s:
        """Each row's wait, int64[n]; `at` and `ts` as in an entry."""
        waited: Int64s = now_ms - np.maximum(at, ts)
        return waited

    def given_up(self, waited_ms: Int64s) -> Bools:
        """The rows that become dead letters; bool[n]."""
        if self.policy.give_up_ms is None:
            return np.zeros(len(waited_ms), dtype=np.bool_)
        over: Bools = waited_ms > self.policy.give_up_ms
        return over

    def is_behind(self, waited_ms: Int64s) -> Bools:
        """The rows that count against the rate; bool[n]."""
        behind: Bools = (waited_ms > WAITED_MS_MAX) & (self.policy.rate > 0)
        return behind

    def slots_ms(self, now_ms: int, count: int) -> Int64s:
        """The next slots, int64[count], ascending; those up to `now_ms` + BURST_MS mean delivery now."""
        first = max(self._planned_ms, float(now_ms))
        self._planned_ms = first + count * 1000 / self.policy.rate
        slots: Int64s = (first + np.arange(count) * (1000 / self.policy.rate)).astype(np.int64)
        return slots
