"""The overdue policy: what is done about messages that have waited for the bridge. Pure.

How long a message has waited is counted from its effective time, or from when it was written if that is later: a
message sent with a due time in the past is not overdue, nor is a retry.

After a downtime the position must pass everything that is overdue before it comes to what is due now. What exceeds the
catch-up rate is therefore written back into the delay topic, each message with a time slot of its own, as many slots a
second as the rate says: once for each message and downtime, since in its slot a message is on time.

    rate 1000/s, 5,000 overdue at 12:00:00      1,000 at once, the others in slots up to 12:00:05, a millisecond apart
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from timerstore.rows.position import Bools, Int64s

WAITED_MS_MAX: Final = 10_000
"""A message that has waited no longer than this does not count against the rate: a hiccup is not a downtime."""
BURST_MS: Final = 1_000
"""A message whose slot is within this is delivered at once: less to write, and the rate is meant by the second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverduePolicy:
    """`give_up_ms`: a message that has waited longer becomes a dead letter (None: none does); `rate`: messages a second
    (0: any).
    """

    give_up_ms: int | None = None
    rate: int = 0

    @property
    def is_any(self) -> bool:
        """Whether overdue messages are treated otherwise than the rest."""
        return self.give_up_ms is not None or self.rate > 0


class CatchUp:
    """Hands out slots. A transaction's slots are its own when it is committed; else they are handed out again."""

    def __init__(self, policy: OverduePolicy) -> None:
        self.policy = policy
        self._next_ms = 0.0
        self._planned_ms = 0.0

    def begin(self) -> None:
        """A transaction begins."""
        self._planned_ms = self._next_ms

    def commit(self) -> None:
        """It was committed."""
        self._next_ms = self._planned_ms

    def waited_ms(self, now_ms: int, at: Int64s, ts: Int64s) -> Int64s:
        """How long each row has waited, int64[n]; `at` and `ts` as in an entry."""
        waited: Int64s = now_ms - np.maximum(at, ts)
        return waited

    def given_up(self, waited_ms: Int64s) -> Bools:
        """Which rows become dead letters; bool[n]."""
        if self.policy.give_up_ms is None:
            return np.zeros(len(waited_ms), dtype=np.bool_)
        over: Bools = waited_ms > self.policy.give_up_ms
        return over

    def is_behind(self, waited_ms: Int64s) -> Bools:
        """Which rows count against the rate; bool[n]."""
        behind: Bools = (waited_ms > WAITED_MS_MAX) & (self.policy.rate > 0)
        return behind

    def slots_ms(self, now_ms: int, count: int) -> Int64s:
        """The next slots, int64[count], rising; those up to `now_ms` + BURST_MS are for now."""
        first = max(self._planned_ms, float(now_ms))
        self._planned_ms = first + count * 1000 / self.policy.rate
        slots: Int64s = (first + np.arange(count) * (1000 / self.policy.rate)).astype(np.int64)
        return slots
