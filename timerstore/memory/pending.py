"""Counts of pending timers: of all, by target, and by time.

A producer chooses the names of targets: the first thousand are counted each, the others together, here as in a
segment's footer and in the index of ids. With more names, a part of a name's count may be among the others; the sum is
always exact.

Counts go up when a timer without a cancel is taken in, and down when its delivery is known to be committed or its
cancel is read (cancels.py), nowhere else; after a restart they are counted from the segments.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from timerstore.rows.entry import Kind
from timerstore.rows.position import Bools, Int64s, groups

SLOT_MS = 10_000
DAY_MS = 86_400_000
SPAN_SLOTS = 11 * 366 * DAY_MS // SLOT_MS
CHANGES_MIN = 4_096
BLOCK_SLOTS = 4_096
TARGETS_MAX = 1_000
OTHER_TARGETS = "(other)"
RECURS = "*"
"""Suffix of the target of a recurring message, in counts; names of topics cannot have it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tally:
    """Counts of timers: `counts` (int64) by absolute slot (`slots`, int64, distinct), and `targets`, by label (see
    `labels`)."""

    slots: Int64s
    counts: Int64s
    targets: Mapping[str, int]


def labels(rows: pa.RecordBatch | pa.Table) -> pa.Array | pa.ChunkedArray:
    """The labels of rows with the columns `target` and `schedule`: their targets (null: the delay topic's default),
    with a mark behind those that recur."""
    target, schedule = rows.column("target"), rows.column("schedule")
    if schedule.null_count == len(schedule):
        return target
    recurring = pc.binary_join_element_wise(pc.fill_null(target, ""), RECURS, "")
    return pc.if_else(pc.is_valid(schedule), recurring, target)


def tally(at: Int64s, label: pa.Array | pa.ChunkedArray) -> Tally:
    """Count timers by their effective times (ms) and labels."""
    slots, counts = np.unique(at // SLOT_MS, return_counts=True)
    return Tally(slots=slots, counts=counts, targets=count_labels(label))


def tally_coded(at: Int64s, target: npt.NDArray[np.int32], names: Sequence[str]) -> Tally:
    """Count timers by their effective times (ms) and the indices of their targets in `names`."""
    slots, counts = np.unique(at // SLOT_MS, return_counts=True)
    targets: dict[str, int] = {}
    for code, count in zip(*(v.tolist() for v in np.unique(target, return_counts=True)), strict=True):
        count_in(targets, names[code], count)
    return Tally(slots=slots, counts=counts, targets=targets)


TALLIED = ("kind", "target", "schedule")
"""The columns that `tally_timers` reads."""


def tally_timers(at: Int64s, payload: pa.RecordBatch | pa.Table, left_out: Bools | None = None) -> Tally:
    """Count the timers among rows of `entry.PAYLOAD`, without the rows of the mask `left_out`. (Rejects and cancels are
    no pending deliveries.)"""
    timers = payload.column("kind").to_numpy() == Kind.TIMER
    if left_out is not None:
        timers &= ~left_out
    label = labels(payload)
    if timers.all():
        return tally(at, label)
    return tally(at[timers], label.filter(pa.array(timers)))


def count_labels(label: pa.Array | pa.ChunkedArray) -> dict[str, int]:
    """The count of each label; the empty string stands for null, the delay topic's default."""
    counts: dict[str, int] = {}
    for pair in pc.value_counts(label).to_pylist():
        count_in(counts, pair["values"] or "", pair["counts"])
    return counts


def count_in(counts: dict[str, int], name: str, count: int) -> None:
    """Add to the count of a target; for a new one beside a thousand others, to the shared count."""
    label = label_of(name, counts)
    counts[label] = counts.get(label, 0) + count


def label_of(name: str, known: Mapping[str, int]) -> str:
    """The name for the count of a target: its own, or that of the others; the default is always itself."""
    return name if not name or name in known or len(known) < TARGETS_MAX else OTHER_TARGETS


_NONE: Final = np.empty(0, np.int32)


class PendingHistogram:
    """Pending timers counted by slots of ten seconds, for gauges. (`TimerWheel` has the next due time.)

    Only used slots are held, 8 bytes for each, in order; new ones wait beside them until they are many. So memory is
    bounded by the number of timers, however far apart they are. A producer may choose any time. All times before
    `since_ms` share a slot, and so do those more than eleven years after it. The slot of a timer does not depend on the
    clock, so the timer is counted out of the slot that it was counted into.
    """

    def __init__(self, since_ms: int) -> None:
        self._first_slot = since_ms // SLOT_MS - 1
        self._total = 0
        self._slots = self._counts = _NONE
        self._blocks = np.zeros(1, np.int64)
        """The sums of each BLOCK_SLOTS of `_counts`."""
        self._new: list[tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]] = []
        """Slots that are not in `_slots`, and counts."""
        self._is_in_order = False
        """Whether the new slots are, each once."""
        self._changes = 0
        """New slots, and decrements, since the last merge."""

    def __len__(self) -> int:
        return self._total

    @property
    def slots(self) -> int:
        """The number of slots in memory."""
        return len(self._slots) + sum(len(slots) for slots, _ in self._new)

    def add_slots(self, slots: Int64s, counts: Int64s) -> None:
        """Add `counts`, which may be negative, to absolute `slots`, as in a segment's histogram."""
        narrow, added = self._within(slots), counts.astype(np.int32)
        places = np.searchsorted(self._slots, narrow)
        is_new = places == len(self._slots)
        is_new[~is_new] = self._slots[places[~is_new]] != narrow[~is_new]
        places, known = places[~is_new], added[~is_new]
        np.add.at(self._counts, places, known)  # a slot may occur twice: see the class
        np.add.at(self._blocks, places // BLOCK_SLOTS, known)
        if is_new.any():
            self._new.append((narrow[is_new], added[is_new]))
            self._is_in_order = False
        self._total += int(counts.sum())
        self._changes += int(np.count_nonzero(is_new | (added < 0)))
        if self._total == 0 or self._changes > max(CHANGES_MIN, len(self._slots) // 8):
            self._merge()

    def until(self, *times_ms: int) -> tuple[int, ...]:
        """The number of pending entries before each time: of earlier slots, and a share of its own slot."""
        new, counts = self._new_slots()
        sums = np.cumsum(np.append(np.int64(0), counts))
        edges = self._within(np.array([ms // SLOT_MS for ms in times_ms], dtype=np.int64), beyond=1)
        results = []
        for edge, at, later, ms in zip(
            edges, np.searchsorted(self._slots, edges), np.searchsorted(new, edges), times_ms, strict=True
        ):
            block = at // BLOCK_SLOTS
            earlier = self._blocks[:block].sum() + self._counts[block * BLOCK_SLOTS : at].sum() + sums[later]
            own = self._counts[at : at + 1][self._slots[at : at + 1] == edge].sum()
            own += counts[later : later + 1][new[later : later + 1] == edge].sum()
            results.append(int(earlier) + int(own) * (ms % SLOT_MS) // SLOT_MS)
        return tuple(results)

    def first_ms(self, after_ms: int) -> int | None:
        """The last millisecond of the first slot with pending entries, from that of `after_ms` on, or None."""
        new, counts = self._new_slots()
        first = self._within(np.array([after_ms // SLOT_MS], dtype=np.int64), beyond=1)
        slots = new[(counts > 0) & (new >= first)][:1].tolist()
        begin = int(np.searchsorted(self._slots, first)[0])
        block = begin // BLOCK_SLOTS
        for each in [block, *(np.flatnonzero(self._blocks[block + 1 :] > 0)[:1] + block + 1).tolist()]:
            part = slice(max(begin, each * BLOCK_SLOTS), (each + 1) * BLOCK_SLOTS)
            slots += self._slots[part][self._counts[part] > 0][:1].tolist()
        return (min(slots) + 1) * SLOT_MS - 1 if slots else None

    def _within(self, slots: Int64s, beyond: int = 0) -> npt.NDArray[np.int32]:
        least, most = self._first_slot - beyond, self._first_slot + SPAN_SLOTS + beyond
        return np.clip(slots, least, most).astype(np.int32)

    def _new_slots(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """The new slots in order, each once."""
        if len(self._new) != 1 or not self._is_in_order:
            slots, inverse = np.unique(np.concatenate([_NONE, *(slots for slots, _ in self._new)]), return_inverse=True)
            counts = np.zeros(len(slots), np.int32)
            np.add.at(counts, inverse, np.concatenate([_NONE, *(counts for _, counts in self._new)]))
            self._new, self._is_in_order = [(slots, counts)], True
        return self._new[0]

    def _merge(self) -> None:
        """Put the new slots in their places, and drop those without a count."""
        new, counts = self._new_slots()
        at = np.searchsorted(self._slots, new)
        self._slots, self._counts = np.insert(self._slots, at, new), np.insert(self._counts, at, counts)
        used = self._counts != 0
        if not used.all():
            self._slots, self._counts = self._slots[used], self._counts[used]
        self._blocks = np.zeros(len(self._counts) // BLOCK_SLOTS + 1, np.int64)
        starts = np.arange(0, len(self._counts), BLOCK_SLOTS)
        self._blocks[: len(starts)] = np.add.reduceat(self._counts, starts, dtype=np.int64) if len(starts) else 0
        self._new, self._is_in_order, self._changes = [], False, 0


UNCOUNTED_PIECES: Final = 64
UNCOUNTED_ROWS: Final = 1 << 15
"""The limits of uncounted rows: they keep three columns of their batches in memory."""


class _Rows:
    """Timers of one later count."""

    def __init__(self) -> None:
        self._parts: list[tuple[Int64s, Int64s, Sequence[pa.RecordBatch], Bools]] = []
        self._pieces = self._count = 0

    @property
    def is_full(self) -> bool:
        return self._pieces >= UNCOUNTED_PIECES or self._count >= UNCOUNTED_ROWS

    def add(self, log: int | Int64s, at: Int64s, pieces: Sequence[pa.RecordBatch], left_out: Bools | None) -> None:
        if len(at):
            logs = np.full(len(at), log, np.int64) if isinstance(log, int) else log
            none = np.zeros(len(at), np.bool_) if left_out is None else left_out
            self._parts.append((logs, at, [each.select(TALLIED) for each in pieces], none))
            self._pieces += len(pieces)
            self._count += len(at)

    def pop(self) -> Iterator[tuple[int, Tally]]:
        """Remove the timers, and return the counts of each log."""
        if not self._parts:
            return
        parts, self._parts, self._pieces, self._count = self._parts, [], 0, 0
        log, at, left_out = (np.concatenate([part[i] for part in parts]) for i in (0, 1, 3))
        rows = pa.Table.from_batches([each for part in parts for each in part[2]]).combine_chunks()
        for number, mine in groups(log):
            payload = rows if len(mine) == len(log) else rows.take(pa.array(mine))
            yield number, tally_timers(at[mine], payload, left_out[mine])


class Uncounted:
    """Timers of several logs that are counted later: a count costs as much for a row as for a thousand."""

    def __init__(self) -> None:
        self._pending: dict[int, Pending] = {}
        self._added, self._removed = _Rows(), _Rows()

    def join(self, log: int, pending: Pending) -> None:
        """Count the timers of a log in `pending`."""
        self._pending[log] = pending

    def leave(self, log: int) -> None:
        """Forget a closed log."""
        self.count()
        self._pending.pop(log, None)

    def add(self, log: int | Int64s, at: Int64s, payload: pa.RecordBatch, left_out: Bools | None = None) -> None:
        """Add the timers among rows of `entry.PAYLOAD`, without the rows of the mask `left_out`. `log` is the number of
        their log, or that of each row."""
        self._added.add(log, at, [payload], left_out)
        if self._added.is_full:
            self.count()

    def remove(self, log: int | Int64s, at: Int64s, pieces: Sequence[pa.RecordBatch]) -> None:
        """Remove timers that were added before."""
        self._removed.add(log, at, pieces, None)
        if self._removed.is_full:
            self.count()

    def count(self) -> None:
        """Count all timers now."""
        for log, timers in self._added.pop():
            if log in self._pending:
                self._pending[log].add(timers)
        for log, timers in self._removed.pop():
            if log in self._pending:
                self._pending[log].remove_counted(timers)


class Pending:
    """Pending timers; all that are due before `since_ms` share a slot. A name is forgotten with its last timer."""

    def __init__(self, since_ms: int, uncounted: Uncounted | None = None, log: int = 0) -> None:
        self._histogram = PendingHistogram(since_ms)
        self._by_target: dict[str, int] = {}
        self._log, self._uncounted = log, Uncounted() if uncounted is None else uncounted
        self._uncounted.join(log, self)
        self._is_by_target = True

    def __len__(self) -> int:
        return len(self.histogram)

    @property
    def histogram(self) -> PendingHistogram:
        """The histogram of all pending timers."""
        self._count()
        return self._histogram

    def add_rows(self, at: Int64s, payload: pa.RecordBatch, left_out: Bools | None = None) -> None:
        """Add the timers among rows of `entry.PAYLOAD`, without the rows of the mask `left_out`. They are counted
        later, many at once."""
        self._uncounted.add(self._log, at, payload, left_out)

    def remove_rows(self, at: Int64s, pieces: Sequence[pa.RecordBatch]) -> None:
        """Remove timers that were added before; they are counted later, too."""
        self._uncounted.remove(self._log, at, pieces)

    def _count(self) -> None:
        self._uncounted.count()

    @property
    def is_by_target(self) -> bool:
        """Whether each target's count is its own: not after some were counted together, until nothing is pending."""
        self._count()
        return self._is_by_target

    def by_target(self) -> dict[str, int]:
        """Counts of pending timers by target; the empty string stands for the delay topic's default target."""
        self._count()
        counts: dict[str, int] = {}
        for label, count in self._by_target.items():
            name = label.removesuffix(RECURS)
            counts[name] = counts.get(name, 0) + count
        return counts

    def recurring(self) -> int:
        """The number of pending recurring messages, one for each schedule, without those in the shared count."""
        self._count()
        return sum(count for label, count in self._by_target.items() if label.endswith(RECURS))

    def remove(self, timers: Tally) -> None:
        """Remove counted timers that were added before."""
        self._count()
        self.remove_counted(timers)

    def add(self, timers: Tally) -> None:
        """Add counted timers."""
        self._histogram.add_slots(timers.slots, timers.counts)
        for name, count in timers.targets.items():
            count_in(self._by_target, name, count)
        self._is_by_target &= OTHER_TARGETS not in self._by_target

    def remove_counted(self, timers: Tally) -> None:
        """As `remove`, of timers that are not uncounted."""
        self._histogram.add_slots(timers.slots, -timers.counts)
        for name, count in timers.targets.items():
            left = self._take(name, count)
            left = self._take(OTHER_TARGETS, left)
            while left and self._by_target:
                left = self._take(max(self._by_target, key=self._by_target.__getitem__), left)
        self._is_by_target |= not self._by_target

    def _take(self, label: str, count: int) -> int:
        """Count out timers of a label, as far as it has them; returns the number that is left."""
        there = self._by_target.get(label, 0)
        if there > count:
            self._by_target[label] = there - count
        else:
            self._by_target.pop(label, None)
        return max(0, count - there)
