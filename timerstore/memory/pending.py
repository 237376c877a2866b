"""What is pending, counted: in all, by target, and by time.

A producer chooses the names of targets: the first thousand are counted each, the others together, here as in a
segment's footer and in the index of ids. With more than that, a name's count may be part of what is counted together;
the sum is always exact.

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

from timerstore.memory.wheel import SLOT_MS, TimerWheel
from timerstore.rows.entry import Kind
from timerstore.rows.position import Bools, Int64s

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
        count_in(targets, names[code], count)
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
        count_in(counts, pair["values"] or "", pair["counts"])
    return counts


def count_in(counts: dict[str, int], name: str, count: int) -> None:
    """Add to the count of a target, or of the other targets when a thousand are known."""
    label = label_of(name, counts)
    counts[label] = counts.get(label, 0) + count


def label_of(name: str, known: Mapping[str, int]) -> str:
    """Under which of the known names, or which new one, a target is counted; the default is always itself."""
    return name if not name or name in known or len(known) < TARGETS_MAX else OTHER_TARGETS


class Pending:
    """Pending timers; what is due before `since_ms` is counted in one slot. A name is forgotten when none of it is
    pending."""

    def __init__(self, since_ms: int) -> None:
        self.wheel = TimerWheel(since_ms)
        self._by_target: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.wheel)

    def by_target(self) -> dict[str, int]:
        """Pending timers by target; the delay topic's default target is the empty string."""
        return dict(self._by_target)

    def add(self, timers: Tally) -> None:
        """Count timers in."""
        self.wheel.add_slots(timers.slots, timers.counts)
        for name, count in timers.targets.items():
            count_in(self._by_target, name, count)

    def remove(self, timers: Tally) -> None:
        """Count timers out."""
        self.wheel.add_slots(timers.slots, -timers.counts)
        for name, count in timers.targets.items():
            left = self._take(name, count)
            left = self._take(OTHER_TARGETS, left)
            while left and self._by_target:
                left = self._take(max(self._by_target, key=self._by_target.__getitem__), left)

    def _take(self, label: str, count: int) -> int:
        """Count out as many under a label as there are; returns how many are left."""
        there = self._by_target.get(label, 0)
        if there > count:
            self._by_target[label] = there - count
        else:
            self._by_target.pop(label, None)
        return max(0, count - there)
