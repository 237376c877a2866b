"""Overtaken rows: entries whose position P had passed when they were ingested. They are delivered in the order of
offset.

One is finished by moving O over it (invariant I1), so O of its source stops in front of the first one that is not
delivered yet.
"""

from __future__ import annotations

import numpy as np

from timerstore.memory.chunks import Chunks
from timerstore.memory.sorted_runs import EMPTY, RowRefs, concat
from timerstore.rows.position import Bools, Int64s, offsets_of, sources_of


class Overtaken:
    """Rows by source and offset. Few at any time: a bound on them blocks ingest."""

    def __init__(self, chunks: Chunks) -> None:
        self._chunks = chunks
        self._rows: RowRefs = EMPTY
        self._starts: Int64s = np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def bytes(self) -> int:
        """Of the rows, with their payloads."""
        return self._chunks.bytes_of(self._rows.chunk)

    def insert(self, rows: RowRefs) -> None:
        """Add rows in any order."""
        if len(rows):
            both = concat([self._rows, rows])
            self._set(both[np.argsort(both.seq, kind="stable")])

    def take(self, now_ms: int, limit: int, held: Bools) -> RowRefs:
        """Remove and return, source by source in the order of offset, at most `limit` rows; a row that is not due stops
        its source, and nothing is taken of a source in the mask `held`.

        Every source gets its share of the limit (one row at least), so that a flood in one does not hold up another.
        """
        if not len(self._rows) or limit <= 0:
            return EMPTY
        counts = np.diff(np.r_[self._starts, len(self._rows)])
        # Two rows may share an offset (a cancel and the timer that takes its target's place): O passes both or none.
        nth = np.cumsum(np.r_[0, self._rows.seq[1:] != self._rows.seq[:-1]])
        rank = nth - np.repeat(nth[self._starts], counts)
        early = np.where(self._rows.at > now_ms, rank, np.iinfo(np.int64).max)
        due_before = np.repeat(np.minimum.reduceat(early, self._starts), counts)
        chosen = (rank < np.minimum(max(1, limit // len(self._starts)), due_before)) & ~held[self._rows.source]
        taken = self._rows[chosen]
        self._set(self._rows[~chosen])
        return taken

    def first_offsets(self) -> dict[int, int]:
        """The smallest offset of every source that has rows here."""
        first = self._rows.seq[self._starts]
        return dict(zip(sources_of(first).tolist(), offsets_of(first).tolist(), strict=True))

    def first_at_ms(self, held: Bools) -> int | None:
        """The earliest time at which some source that is not in the mask `held` can go on, or None."""
        first = self._rows[self._starts]
        at = first.at[~held[first.source]]
        return int(at.min()) if len(at) else None

    def all(self) -> RowRefs:
        return self._rows

    def pop_all(self) -> RowRefs:
        rows = self._rows
        self._set(EMPTY)
        return rows

    def _set(self, rows: RowRefs) -> None:
        source = rows.source
        self._rows = rows
        self._starts = np.flatnonzero(np.r_[len(rows) > 0, source[1:] != source[:-1]][: len(rows)])
