"""Positions: the total order in which entries are delivered, and the committed state that is made of them.

An entry's position is (at, source, offset): its effective time, the partition of the delay topic it was read from, and
its offset there. In vectors a position is two int64 columns, `at` and `seq`, where `seq` packs the source (15 bits)
above the offset (48 bits), so that comparing (at, seq) compares positions.

    finished  =  {entries: offset < O  and  position <= P}        (invariant I1; O and P are kept per source)

When the clock steps back below P, what is ingested from then on must not count as passed. So the state becomes a
staircase (invariant I4): the old (O1, P1) is frozen, and a second step (O2 >= O1, P2 < P1) goes on from the new time.
Finished is the union; it never shrinks. A frozen step is forgotten when the current one includes it.

    position
     P1 |-------+                          frozen: o < O1 and position <= P1
        |#######|   pending: due later
     P2 |#######+-------------+            current: o < O2 and position <= P2
        |#####################|
        +-------O1------------O2---- offset
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from timerstore.errors import Misuse

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

OFFSET_BITS = 48
OFFSET_MAX = (1 << OFFSET_BITS) - 1
SOURCE_MAX = (1 << 15) - 1
AT_MIN = -(1 << 63)
AT_MAX = (1 << 63) - 1
SEQ_MAX = (SOURCE_MAX << OFFSET_BITS) | OFFSET_MAX
PACKED_ROWS_MIN = 512
"""Fewer rows are sorted before their keys are packed."""


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """Where an entry stands in the order of delivery: effective time (ms), source (index), offset."""

    at_ms: int
    source: int
    offset: int

    def __post_init__(self) -> None:
        if not 0 <= self.source <= SOURCE_MAX:
            raise Misuse(f"source {self.source} is outside 0..{SOURCE_MAX}", code="DB-7003")
        if not 0 <= self.offset <= OFFSET_MAX:
            raise Misuse(f"offset {self.offset} is outside 0..2^{OFFSET_BITS}-1", code="DB-7003")
        if not AT_MIN <= self.at_ms <= AT_MAX:
            raise Misuse(f"effective time {self.at_ms} ms is not an int64", code="DB-7003")

    @property
    def seq(self) -> int:
        """Source and offset packed as in the `seq` columns."""
        return (self.source << OFFSET_BITS) | self.offset

    @classmethod
    def of(cls, at_ms: int, seq: int) -> Position:
        """The position of a row of `at` and `seq` columns."""
        return cls(int(at_ms), int(seq) >> OFFSET_BITS, int(seq) & OFFSET_MAX)

    def within(self, source: int) -> Position:
        """The largest position of `source` at or below this one."""
        if source == self.source:
            return self
        return Position(self.at_ms if source < self.source else self.at_ms - 1, source, OFFSET_MAX)

    def before(self) -> Position:
        """The largest position smaller than this one (rows lie on every integer, so this is exact)."""
        if self.seq > 0:
            return Position.of(self.at_ms, self.seq - 1)
        return Position.of(self.at_ms - 1, SEQ_MAX)


ORIGIN = Position(AT_MIN, SOURCE_MAX, OFFSET_MAX)
"""Minus infinity: smaller than every timer, and not smaller than any reject or cancel (whose `at` is minus
infinity)."""


@dataclass(frozen=True, slots=True)
class Step:
    """A frozen committed state: {entries: offset < `offset` and position <= `position`} is finished."""

    offset: int
    position: Position

    def includes(self, offset: int, position: Position) -> bool:
        """Whether everything below `offset` and at or below `position` is finished by this step."""
        return offset <= self.offset and position <= self.position


@dataclass(frozen=True, slots=True)
class Progress:
    """The committed state of one source: `offset` is O (exclusive), `position` is P; `frozen` are earlier steps of the
    staircase, the oldest (smallest O, largest P) first. There is none unless the clock has stepped back."""

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
        """The position above which nothing is finished."""
        return self.frozen[0].position if self.frozen else self.position

    def finishes(self, offset: int, position: Position) -> bool:
        """Whether everything below `offset` and at or below `position` is finished (invariant I1)."""
        return any(step.includes(offset, position) for step in self.steps)

    def includes(self, other: Progress, source: int) -> bool:
        """Whether every entry of `source` that `other` says is finished is so here too."""
        steps = (step for step in other.steps if step.offset)  # below offset 0 there is nothing
        return self.offset >= other.offset and all(self.finishes(s.offset, s.position.within(source)) for s in steps)

    def moved(self, offset: int, position: Position) -> Progress:
        """The state after (O, P) have moved on; frozen steps that the current one includes now are gone."""
        return Progress(offset, position, tuple(step for step in self.frozen if step.position > position))

    def stepped_back(self, source: int, position: Position) -> Progress:
        """The same finished set, from which the current step of `source` goes on at `position`, below P."""
        frozen, highest = self.frozen, self.position.within(source)
        if position >= highest:
            return self
        if self.offset > (frozen[-1].offset if frozen else 0):
            frozen = (*frozen, Step(self.offset, highest))
        return Progress(self.offset, position, frozen)


def end_of(at_ms: int) -> Position:
    """The last position of a millisecond: everything due at or before `at_ms` lies at or below it."""
    return Position(at_ms, SOURCE_MAX, OFFSET_MAX)


def pack(source: Int64s, offset: Int64s) -> Int64s:
    """`seq` of int64 vectors of sources and offsets."""
    return (source << OFFSET_BITS) | offset


def sources_of(seq: Int64s) -> Int64s:
    """Sources of a `seq` vector."""
    return seq >> OFFSET_BITS


def offsets_of(seq: Int64s) -> Int64s:
    """Offsets of a `seq` vector."""
    return seq & OFFSET_MAX


def at_or_below(at: Int64s, seq: Int64s, bound_at: Int64s | int, bound_seq: Int64s | int) -> Bools:
    """Mask of the rows whose position is <= the bound (a scalar bound or one bound a row)."""
    mask: Bools = (at < bound_at) | ((at == bound_at) & (seq <= bound_seq))
    return mask


def search(at: Int64s, seq: Int64s, bound: Position) -> int:
    """How many rows of sorted (at, seq) are <= `bound`."""
    low = int(np.searchsorted(at, bound.at_ms, side="left"))
    high = low + int(np.searchsorted(at[low:], bound.at_ms, side="right"))
    return low + int(np.searchsorted(seq[low:high], bound.seq, side="right"))


@dataclass(frozen=True, slots=True, eq=False)
class Positions:
    """Positions of many rows: `at` and `seq`, int64[n]."""

    at: Int64s
    seq: Int64s

    def __len__(self) -> int:
        return len(self.at)

    @property
    def source(self) -> Int64s:
        """Sources, int64[n]."""
        return sources_of(self.seq)

    @property
    def offset(self) -> Int64s:
        """Offsets, int64[n]."""
        return offsets_of(self.seq)

    def at_or_below(self, bound: Position) -> Bools:
        """Mask of the rows at or below a position."""
        return at_or_below(self.at, self.seq, bound.at_ms, bound.seq)


def order_by_position(at: Int64s, seq: Int64s) -> npt.NDArray[np.intp]:
    """Indices that sort rows by position.

    Most are a few sorted runs in a row. Timsort, numpy's stable sort of one key, only merges these, in a tenth of the
    time of `lexsort`; so positions that are near each other are packed into one key.
    """
    if len(at) < PACKED_ROWS_MIN:
        return np.lexsort((seq, at))
    source, offset = sources_of(seq), offsets_of(seq)
    (at_ms, times), (first, sources), (begin, offsets) = _span(at), _span(source), _span(offset)
    if times * sources * offsets > SEQ_MAX:
        return np.lexsort((seq, at))
    return np.argsort(((at - at_ms) * sources + (source - first)) * offsets + (offset - begin), kind="stable")


def _span(values: Int64s) -> tuple[int, int]:
    """The smallest value, and how many there are from it to the largest."""
    low, high = int(values.min()), int(values.max())
    return low, high - low + 1
