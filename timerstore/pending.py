"""What is pending, counted: in all, by target, and by time.

Counts go up when a timer is taken in and down when its delivery is known to be committed, nowhere else; after a restart they are counted from the segments.
"""

from __future__ import annotations

import pyarrow as pa

from timerstore.position import Int64s
from timerstore.segment import Segment, count_targets
from timerstore.wheel import TimerWheel

TARGETS_MAX = 1_000
OTHER_TARGETS = "(other)"


class Pending:
    """Pending timers. Targets beyond the first thousand names are counted together, so that producers cannot grow the metrics without bound."""

    def __init__(self) -> None:
        self.wheel = TimerWheel()
        self._by_target: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.wheel)

    def by_target(self) -> dict[str, int]:
        """Pending timers by target; the delay topic's default target is the empty string."""
        return {target: count for target, count in self._by_target.items() if count}

    def add(self, at: Int64s, target: pa.Array | pa.ChunkedArray) -> None:
        """Count timers in: effective times (ms) and target names."""
        self.wheel.add(at)
        self._count(target, 1)

    def remove(self, at: Int64s, target: pa.Array | pa.ChunkedArray) -> None:
        """Count timers out."""
        self.wheel.remove(at)
        self._count(target, -1)

    def add_segment(self, segment: Segment) -> None:
        """Count in a segment of which nothing is finished, by its footer."""
        self.wheel.add_slots(segment.slots, segment.counts)
        self._merge(segment.targets)

    def _count(self, target: pa.Array | pa.ChunkedArray, sign: int) -> None:
        counts: dict[str, int] = {}
        count_targets(target, counts, sign)
        self._merge(counts)

    def _merge(self, counts: dict[str, int]) -> None:
        for name, count in counts.items():
            known = name in self._by_target or len(self._by_target) < TARGETS_MAX
            label = name if known else OTHER_TARGETS
            self._by_target[label] = self._by_target.get(label, 0) + count
