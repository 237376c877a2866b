"""Positions: the total order in which entries are delivered, and the committed state that is made of them.

An entry's position is (at, source, offset): its effective time, the partition of the delay topic it was read from, and
its offset there. In vectors a position is two int64 columns, `at` and `seq`, where `seq` packs the source (15 bits)
above the offset (48 bits), so that comparing (at, seq) compares positions.

    finished  =  {entries: offset < O  and  position <= P}        (invariant I1; O and P are kept per source)
"""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """Where an entry stands in the order of delivery: effective time (ms), source (index), offset."""

    at_ms: int
    source: int
    offset: int

    def __post_init__(self) -> None:
        if not 0 <= self.source <= SOURCE_MAX:
            raise Misuse(f"source {self.source} is outside 0..{SOURCE_MAX}")
        if not 0 <= self.offset <= OFFSET_MAX:
            raise Misuse(f"offset {self.offset} is outside 0..2^{OFFSET_BITS}-1")
        if not AT_MIN <= self.at_ms <= AT_MAX:
            raise Misuse(f"effective time {self.at_ms} ms is not an int64")

    @property
    def seq(self) -> int:
        """Source and offset packed as in the `seq` columns."""
        return (self.source << OFFSET_BITS) | self.offset

    @classmethod
    def of(cls, at_ms: int, seq: int) -> Position:
        """The position of a row of `at` and `seq` columns."""
        return cls(int(at_ms), int(seq) >> OFFSET_BITS, int(seq) & OFFSET_MAX)

    def before(self) -> Position:
        """The largest position smaller than this one (rows lie on every integer, so this is exact)."""
        if self.seq > 0:
            return Position.of(self.at_ms, self.seq - 1)
        return Position.of(self.at_ms - 1, SEQ_MAX)


ORIGIN = Position(AT_MIN, SOURCE_MAX, OFFSET_MAX)
"""Minus infinity: smaller than every timer, and not smaller than any reject or cancel (whose `at` is minus
infinity)."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The committed state of one source: `offset` is O (exclusive), `position` is P."""

    offset: int
    position: Position = ORIGIN

    def finished(self, at_ms: int, source: int, offset: int) -> bool:
        """Whether the entry at that position is finished under this state (invariant I1)."""
        return offset < self.offset and Position(at_ms, source, offset) <= self.position


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


def order_by_position(at: Int64s, seq: Int64s) -> npt.NDArray[np.intp]:
    """Indices that sort rows by position."""
    return np.lexsort((seq, at))
