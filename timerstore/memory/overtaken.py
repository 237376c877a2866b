"""Overtaken rows: entries at positions that P had passed before they were ingested. They are delivered in the order of
offset.

A move of O over such a row finishes it (invariant I1), so O stops at the first one that is not delivered.
"""

from __future__ import annotations

import numpy as np

from timerstore.memory.chunks import Chunks
from timerstore.memory.sorted_runs import EMPTY, RowRefs, concat
from timerstore.rows.position import OFFSET_MAX


class Overtaken:
    """Rows by offset. They are few: a limit on them blocks ingest."""

    def __init__(self, chunks: Chunks) -> None:
        self._chunks = chunks
        self._rows: RowRefs = EMPTY
        self.bytes = 0
        """The size of the rows, with their payloads."""

    def __len__(self) -> int:
        return len(self._rows)

    def insert(self, rows: RowRefs) -> None:
        """Add rows in any order."""
        if len(rows):
            self.bytes += self._chunks.bytes_of(rows.chunk)
            both = concat([self._rows, rows])
            self._rows = both[np.argsort(both.offset, kind="stable")]

    def count_due(self, now_ms: int, below: int = OFFSET_MAX) -> int:
        """The number of rows in front of the first one that is not due, or not `below` an offset."""
        if not len(self):
            return 0
        early = np.flatnonzero(self._rows.at > now_ms)
        # A replace may be two rows of one offset, a cancel and the timer: O passes both or none.
        return int(np.searchsorted(self._rows.offset, min([below, *self._rows.offset[early[:1]].tolist()])))

    def take(self, now_ms: int, limit: int, below: int = OFFSET_MAX) -> RowRefs:
        """Remove and return due rows in order of offset, of at most `limit` offsets, up to the first one that is not
        due, or not `below` an offset."""
        if not len(self._rows) or limit <= 0:
            return EMPTY
        offset = self._rows.offset
        nth = np.cumsum(offset[1:] != offset[:-1])
        end = min(self.count_due(now_ms, below), 1 + int(np.searchsorted(nth, limit)))
        taken, self._rows = self._rows[:end], self._rows[end:]
        self.bytes -= self._chunks.bytes_of(taken.chunk)
        return taken

    def first_offset(self) -> int | None:
        """The smallest offset, or None without rows."""
        return int(self._rows.offset[0]) if len(self._rows) else None

    def first_at_ms(self) -> int | None:
        """The time (ms) at which the first rows may leave, or None; rows of one offset leave together."""
        if not len(self._rows):
            return None
        at, offset = self._rows.at, self._rows.offset
        return int(at[: int(np.searchsorted(offset, offset[0], side="right"))].max())

    def all(self) -> RowRefs:
        return self._rows

    def pop_all(self) -> RowRefs:
        rows, self._rows, self.bytes = self._rows, EMPTY, 0
        return rows
