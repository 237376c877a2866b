"""Positions, the total order in which entries are delivered, and the committed state.

An entry's position is (at, offset): its effective time, and its offset in its log. Vectors of positions are two int64
columns.

    finished  =  {entries: offset < O  and  position <= P}        (invariant I1)

When the clock steps back below P, entries that are ingested from then on must not count as finished. So the state
becomes a staircase (invariant I4): the old (O1, P1) is frozen, and a second step (O2 >= O1, P2 < P1) goes on from the
new time. The finished set is the union of the steps, and never shrinks. A frozen step is dropped when the current one
includes it.

    position
     P1 |-------+                          frozen: o < O1 and position <= P1
        |#######|   pending: due later
     P2 |#######+-------------+            current: o < O2 and position <= P2
        |#####################|
        +-------O1------------O2---- offset
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from timerstore.errors import Misuse

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

OFFSET_BITS = 48
OFFSET_MAX = (1 << OFFSET_BITS) - 1
"""The bits above it in an int64 are free for the number of a log."""
AT_MIN = -(1 << 63)
AT_MAX = (1 << 63) - 1
KEY_MAX = (1 << 63) - 1
PACKED_ROWS_MIN = 512
"""Fewer rows are sorted before their keys are packed."""


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """An entry's place in the order of delivery: effective time (ms), offset."""

    at_ms: int
    offset: int

    def __post_init__(self) -> None:
        if not 0 <= self.offset <= OFFSET_MAX:
            raise Misuse(f"offset {self.offset} is outside 0..2^48-1", code="DB-7003")
        if not AT_MIN <= self.at_ms <= AT_MAX:
            raise Misuse(f"effective time {self.at_ms} ms is not an int64", code="DB-7003")

    def before(self) -> Position:
        """The largest position below this one (exact, because positions are pairs of integers)."""
        if self.offset > 0:
            return Position(self.at_ms, self.offset - 1)
        return Position(self.at_ms - 1, OFFSET_MAX)


class RowBound(NamedTuple):
    """A position whose offset may have the number of a log above it."""

    at_ms: int
    offset: int


ORIGIN = Position(AT_MIN, OFFSET_MAX)
"""Minus infinity: below every timer, and not below any reject or cancel, whose `at` is minus infinity."""


@dataclass(frozen=True, slots=True)
class Step:
    """A frozen committed state: {entries: offset < `offset` and position <= `position`} is finished."""

    offset: int
    position: Position

    def includes(self, offset: int, position: Position) -> bool:
        """Whether this step finishes all entries below `offset` that are at or below `position`."""
        return offset <= self.offset and position <= self.position


@dataclass(frozen=True, slots=True)
class Progress:
    """The committed state of a log: `offset` is O (exclusive), `position` is P. `frozen` are earlier steps of the
    staircase, the oldest (smallest O, largest P) first; only a step back of the clock makes one."""

    offset: int
    position: Position = ORIGIN
    frozen: tuple[Step, ...] = ()

    def __post_init__(self) -> None:
        if not self.frozen:
            return
        steps = self.steps
        offsets_rise = all(a.offset < b.offset for a, b in pairwise(self.frozen)) and steps[-2].offset <= self.offset
        if not offsets_rise or any(a.position <= b.position for a, b in pairwise(steps)):
            raise Misuse(f"offsets must rise and positions fall from step to step: {steps}", code="DB-7003")

    @property
    def steps(self) -> tuple[Step, ...]:
        """All steps, the current one last."""
        return (*self.frozen, Step(self.offset, self.position))

    @property
    def highest(self) -> Position:
        """The position above which no row is finished."""
        return self.frozen[0].position if self.frozen else self.position

    def finishes(self, offset: int, position: Position) -> bool:
        """Whether all entries below `offset` that are at or below `position` are finished (invariant I1)."""
        return any(step.includes(offset, position) for step in self.steps)

    def finished(self, rows: Positions) -> Bools:
        """Mask of the finished rows, bool[n]."""
        mask: Bools = (rows.offset < self.offset) & rows.at_or_below(self.position)
        for step in self.frozen:
            mask |= (rows.offset < step.offset) & rows.at_or_below(step.position)
        return mask

    def includes(self, other: Progress) -> bool:
        """Whether every entry that is finished in `other` is finished here, too."""
        if not (self.frozen or other.frozen):
            return self.offset >= other.offset and (self.position >= other.position or not other.offset)
        steps = (step for step in other.steps if step.offset)  # no record is below offset 0
        return self.offset >= other.offset and all(self.finishes(step.offset, step.position) for step in steps)

    def moved(self, offset: int, position: Position) -> Progress:
        """The state with new (O, P), without the frozen steps that the current one now includes."""
        frozen = self.frozen and tuple(step for step in self.frozen if step.position > position)
        return Progress(offset, position, frozen)

    def stepped_back(self, position: Position) -> Progress:
        """The same finished set, with a current step that goes on at `position`, below P."""
        frozen = self.frozen
        if position >= self.position:
            return self
        if self.offset > (frozen[-1].offset if frozen else 0):
            frozen = (*frozen, Step(self.offset, self.position))
        return Progress(self.offset, position, frozen)


NOTHING_FINISHED = Progress(0)


def end_of(at_ms: int) -> Position:
    """The last position of a millisecond: all rows due at or before `at_ms` are at or below it."""
    return Position(at_ms, OFFSET_MAX)


def search(at: Int64s, offset: Int64s, bound: Position | RowBound) -> int:
    """The number of rows of sorted (at, offset) that are <= `bound`."""
    if not len(at) or at[0] > bound.at_ms:
        return 0
    if at[-1] < bound.at_ms:
        return len(at)
    low, high = int(at.searchsorted(bound.at_ms)), int(at.searchsorted(bound.at_ms, "right"))
    return low + int(offset[low:high].searchsorted(bound.offset, "right"))


@dataclass(frozen=True, slots=True, eq=False)
class Positions:
    """Positions of many rows: `at` and `offset`, int64[n]."""

    at: Int64s
    offset: Int64s

    def __len__(self) -> int:
        return len(self.at)

    def at_or_below(self, bound: Position) -> Bools:
        """Mask of the rows at or below a position, bool[n]."""
        mask: Bools = (self.at < bound.at_ms) | ((self.at == bound.at_ms) & (self.offset <= bound.offset))
        return mask


def order_by_position(at: Int64s, offset: Int64s) -> npt.NDArray[np.intp]:
    """Indices that sort rows by position.

    Most inputs are a few sorted runs. Timsort, numpy's stable sort of one key, merges them in a tenth of the time of
    `lexsort`, so positions within a limited span are packed into one key.
    """
    if len(at) < PACKED_ROWS_MIN:
        return np.lexsort((offset, at))
    (at_ms, times), (begin, offsets) = _span(at), _span(offset)
    key = offset - begin
    if begin + offsets > OFFSET_MAX + 1:  # of several logs
        log, offset_in_log = offset >> OFFSET_BITS, offset & OFFSET_MAX
        (first_log, logs), (begin, offsets) = _span(log), _span(offset_in_log)
        key, offsets = (log - first_log) * offsets + (offset_in_log - begin), logs * offsets
    if times * offsets > KEY_MAX:
        return np.lexsort((offset, at))
    return np.argsort((at - at_ms) * offsets + key, kind="stable")


def grouped(numbers: Int64s) -> tuple[npt.NDArray[np.intp], list[int]]:
    """The indices of the rows of each number (of a log) in one vector, in their order, and where each number begins;
    there must be rows."""
    narrow = numbers.astype(np.int16)  # sorted in linear time
    order = np.argsort(narrow, kind="stable")
    narrow = narrow[order]
    return order, [0, *(np.flatnonzero(narrow[1:] != narrow[:-1]) + 1).tolist()]


def groups(numbers: Int64s) -> Iterator[tuple[int, npt.NDArray[np.intp]]]:
    """Each number, and the indices of its rows, in their order."""
    if len(numbers):
        order, begins = grouped(numbers)
        for begin, end in pairwise([*begins, len(order)]):
            yield int(numbers[order[begin]]), order[begin:end]


def _span(values: Int64s) -> tuple[int, int]:
    """The smallest value, and the number of integers from it to the largest."""
    low, high = int(values.min()), int(values.max())
    return low, high - low + 1
