"""What is pending, counted: in all, by target, and by time.

Counts go up when a timer is taken in that nothing cancels, and down when its delivery is known to be committed or when
its cancel is read (cancels.py), nowhere else; after a restart they are counted from the segments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from timerstore.entry import Kind
from timerstore.position import Bools, Int64s
from timerstore.wheel import SLOT_MS, TimerWheel

TARGETS_MAX = 1_000
OTHER_TARGETS = "(other)"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tally:
    """Timers counted: `counts` (int64) by absolute wheel slot (`slots`, int64, distinct), and by target ("" is the
    delay topic's default)."""

    slots: Int64s
    counts: Int64s
    targets: Mapping[str, int]


def tally(at: Int64s, target: pa.Array | pa.ChunkedArray) -> Tally:
    """Count timers by their effective times (ms) and target names (null: the default)."""
    slots, counts = np.unique(at // SLOT_MS, return_counts=True)
    return Tally(slots=slots, counts=counts, targets=count_targets(target))


def tally_coded(at: Int64s, target: npt.NDArray[np.int32], names: Sequence[str]) -> Tally:
    """Count timers by their effective times (ms) and the indices of their targets in `names`."""
    slots, counts = np.unique(at // SLOT_MS, return_counts=True)
    targets: dict[str, int] = {}
    for code, count in zip(*(v.tolist() for v in np.unique(target, return_counts=True)), strict=True):
        targets[names[code]] = targets.get(names[code], 0) + count
    return Tally(slots=slots, counts=counts, targets=targets)


TALLIED = ("kind", "target")
"""The columns that `tally_timers` reads."""


def tally_timers(at: Int64s, payload: pa.RecordBatch | pa.Table, left_out: Bools | None = None) -> Tally:
    """Count the timers among rows of `entry.PAYLOAD`, without those of a mask; rejects and cancels are not pending
    deliveries."""
    timers = payload.column("kind").to_numpy() == Kind.TIMER
    if left_out is not None:
        timers &= ~left_out
    target = payload.column("target")
    if timers.all():
        return tally(at, target)
    return tally(at[timers], target.filter(pa.array(timers)))


def count_targets(target: pa.Array | pa.ChunkedArray) -> dict[str, int]:
    """How often each target occurs; null, the delay topic's default, as the empty string."""
    counts: dict[str, int] = {}
    for pair in pc.value_counts(target).to_pylist():
        name = pair["values"] or ""
        counts[name] = counts.get(name, 0) + pair["counts"]
    return counts


class Pending:
    """Pending timers. Targets beyond the first thousand names are counted together, so that producers cannot grow the
    metrics without bound."""

    def __init__(self) -> None:
        self.wheel = TimerWheel()
        self._by_target: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.wheel)

    def by_target(self) -> dict[str, int]:
        """Pending timers by target; the delay topic's default target is the empty string."""
        return {target: count for target, count in self._by_target.items() if count}

    def add(self, timers: Tally) -> None:
        """Count timers in."""
        self._move(timers, 1)

    def remove(self, timers: Tally) -> None:
        """Count timers out."""
        self._move(timers, -1)

    def _move(self, timers: Tally, sign: int) -> None:
        self.wheel.add_slots(timers.slots, sign * timers.counts)
        for name, count in timers.targets.items():
            known = name in self._by_target or len(self._by_target) < TARGETS_MAX
            label = name if known else OTHER_TARGETS
            self._by_target[label] = self._by_target.get(label, 0) + sign * count
