"""Stretches: the times in which a segment has rows, in bounded memory.

A segment's histogram has sixteen bytes for each slot with rows: with delays of up to a year, up to 50 MB for each
segment, or sixteen bytes a row. A plan needs less: whether a time has no row. Its long empty times matter, as each
saves the reads of many windows; so only the shortest gaps are closed:

    slots with rows     1 2 3     7     10               31 32
    four stretches      [1 3]    [7]    [10]             [31 32]
    at most three       [1 3]    [7      10]             [31 32]

The number of stretches follows the rows, too: many small segments, one of each partition, take a byte a row.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Self

import numpy as np

from timerstore.rows.position import Int64s

STRETCHES_MAX: Final = 4_096
STRETCHES_MIN: Final = 64
ROWS_OF_STRETCH: Final = 16
"""Above STRETCHES_MIN there is a stretch for this many rows: one byte a row."""


@dataclass(frozen=True, slots=True, eq=False)
class Stretches:
    """Stretches of slots, in order: `first` and `last`, int64[n], both inclusive. Outside them there is no row."""

    first: Int64s
    last: Int64s

    @classmethod
    def of(cls, pieces: Iterable[Int64s], rows: int) -> Self:
        """The stretches of pieces of slots, which rise, of a segment with this number of rows. Beyond the limit of
        their number, the shortest gaps are closed."""
        most = min(STRETCHES_MAX, STRETCHES_MIN + rows // ROWS_OF_STRETCH)
        first = last = np.empty(0, np.int64)
        for slots in pieces:
            first, last = np.concatenate([first, slots]), np.concatenate([last, slots])
            gaps = first[1:] - last[:-1]
            ends = np.flatnonzero(gaps > 1)
            shortest_first = np.argsort(gaps[ends], kind="stable")
            ends = np.delete(ends, shortest_first[: max(0, len(ends) - most + 1)])
            first, last = first[np.r_[0, ends + 1]], last[np.r_[ends, len(last) - 1]]
        return cls(first, last)

    def meet(self, first: int, last: int) -> bool:
        """Whether a stretch has any slot from `first` to `last`."""
        nearest = self.first_from(first)
        return nearest is not None and nearest <= last

    def first_from(self, slot: int) -> int | None:
        """The first slot of a stretch that is not below `slot`, or None."""
        at = int(np.searchsorted(self.last, slot))
        return max(slot, int(self.first[at])) if at < len(self.last) else None
