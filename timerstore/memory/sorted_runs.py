"""SortedRuns: resident rows in the order of position.

The ready rows (rows at or below the loaded frontier) and the memtable (rows beyond it, not yet in a segment) are each
one `SortedRuns`: a short list of sorted vectors of row references. An inserted batch becomes a run; runs of like size
are merged, so that a row is merged a logarithmic number of times and there are never many runs to look at (the
log-structured merge of Patrick O'Neil et al., 1996, in memory). Runs of few rows wait until they are eight. A pop of
due rows moves the head of each run. If no run waited:

    insert [3 5 9]       runs: [3 5 9]
    insert [4 6 7]       runs: [3 4 5 6 7 9]          (equal sizes are merged)
    insert [8]           runs: [3 4 5 6 7 9] [8]
    pop_until 5          -> 3 4 5;  runs: [6 7 9] [8]

A merge of runs from small batches also merges their payloads: rows of one due time were sent over a long time, and a
take from hundreds of batches costs a hundred times as much as one from a few.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from timerstore.memory.chunks import Chunks, materialize
from timerstore.rows.position import (
    OFFSET_MAX,
    ORIGIN,
    Bools,
    Position,
    Positions,
    RowBound,
    end_of,
    order_by_position,
    search,
)

Int32s = npt.NDArray[np.int32]

MERGED_ROWS_MAX = 1 << 16
"""Larger runs are not merged: a merge holds the store's lock, and may hold up delivery for about 10 ms only."""
SMALL_ROWS: Final = 64
SMALL_RUNS: Final = 8
"""Runs of fewer rows wait until this number of them are merged together."""
GATHERED_CHUNKS: Final = 8
"""A run with payloads from at least this number of chunks is copied into a chunk of its own, unless it exceeds the
limits below. Each row is copied once or twice."""
GATHERED_ROWS_MAX: Final = 1 << 13
GATHERED_BYTES_MAX: Final = 4 << 20
SCATTERED_CHUNKS: Final = 4
SCATTERED_ROWS: Final = 32
"""Rows are scattered if they come from at least SCATTERED_CHUNKS chunks, on average fewer than SCATTERED_ROWS rows from
each: see `gather_near`."""


@dataclass(frozen=True, slots=True, eq=False)
class RowRefs(Positions):
    """References to resident rows: their positions, and the places of their payloads (`chunk` and `row`, int32[n])."""

    chunk: Int32s
    row: Int32s

    def __getitem__(self, key: slice | Bools | npt.NDArray[np.intp]) -> RowRefs:
        return RowRefs(self.at[key], self.offset[key], self.chunk[key], self.row[key])

    def where(self, mask: Bools) -> RowRefs:
        """The rows of a mask; the usual masks, of all rows or none, need no copy."""
        if mask.all():
            return self
        return self[mask] if mask.any() else EMPTY

    def last(self) -> Position:
        return Position(int(self.at[-1]), int(self.offset[-1]))

    def sorted(self) -> RowRefs:
        """The same rows in order of position."""
        return self[order_by_position(self.at, self.offset)]


EMPTY = RowRefs(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int32), np.empty(0, np.int32))


def _bound_at(rows: RowRefs, index: int) -> RowBound:
    return RowBound(int(rows.at[index]), int(rows.offset[index]))


def concat(parts: Sequence[RowRefs]) -> RowRefs:
    some = [s for s in parts if len(s)]
    if not some:
        return EMPTY
    if len(some) == 1:
        return some[0]
    return RowRefs(
        np.concatenate([s.at for s in some]),
        np.concatenate([s.offset for s in some]),
        np.concatenate([s.chunk for s in some]),
        np.concatenate([s.row for s in some]),
    )


def gathered(chunks: Chunks, rows: RowRefs) -> RowRefs:
    """The same rows, in their order, with their payloads in a new chunk."""
    if not len(rows):
        return rows
    payload = materialize(chunks.payloads(rows.chunk), rows.chunk, rows.row)
    chunks.release(rows.chunk)
    chunk = np.full(len(rows), chunks.add(payload), dtype=np.int32)
    return RowRefs(rows.at, rows.offset, chunk, np.arange(len(rows), dtype=np.int32))


def select(entries: pa.Table) -> RowRefs:
    """The positions of an entry table; `row` is the index in the table, `chunk` has no meaning."""
    at, offset = (entries.column(name).to_numpy().astype(np.int64, copy=False) for name in ("at", "offset"))
    return RowRefs(at, offset, np.zeros(len(at), np.int32), np.arange(len(at), dtype=np.int32))


class SortedRuns:
    """Row references in order of position; the module has an example of the merges."""

    def __init__(self, chunks: Chunks) -> None:
        self._chunks = chunks
        self._runs: list[RowRefs] = []
        self._bytes = 0

    def __len__(self) -> int:
        return sum(len(run) for run in self)

    @property
    def bytes(self) -> int:
        """The size of the rows, with their payloads."""
        return self._bytes

    def insert(self, rows: RowRefs) -> None:
        """Add rows, given in order of position."""
        if not len(rows):
            return
        self._runs.append(rows)
        self._bytes += self._chunks.bytes_of(rows.chunk)
        count, size = 1, len(rows)
        for run in reversed(self._runs[:-1]):
            if len(run) >= 2 * size or len(run) + size > MERGED_ROWS_MAX:
                break
            count, size = count + 1, size + len(run)
        if count >= SMALL_RUNS or (count > 1 and len(rows) >= SMALL_ROWS):
            self._runs[-count:] = [self._put_together(concat(self._runs[-count:]).sorted())]

    def __iter__(self) -> Iterator[RowRefs]:
        """The runs, each in order of position."""
        return iter(self._runs)

    def own_runs(self) -> Sequence[RowRefs]:
        """The runs that have no other holder."""
        return self._runs

    def first_at_ms(self) -> int | None:
        """Effective time of the first row, or None without rows."""
        return min((int(run.at[0]) for run in self), default=None)

    def first(self) -> Position:
        """Position of the first row; there must be one."""
        return min(Position(int(run.at[0]), int(run.offset[0])) for run in self)

    def count_until(self, bound: Position | RowBound) -> int:
        """The number of rows at or below `bound`."""
        return sum(search(run.at, run.offset, bound) for run in self)

    def pop_until(self, bound: Position | RowBound, limit: int | None = None) -> RowRefs:
        """Remove and return the rows at or below `bound` in order of position, at most the first `limit`."""
        cuts = [search(run.at, run.offset, bound) for run in self._runs]
        if limit is not None and sum(cuts) > limit:
            cuts = self._first(cuts, limit) if limit else []
        if not any(cuts):
            return EMPTY
        heads = [run[:cut] for run, cut in zip(self._runs, cuts, strict=True) if cut]
        popped = heads[0] if len(heads) == 1 else concat(heads).sorted()
        self._runs = [run[cut:] if cut else run for run, cut in zip(self._runs, cuts, strict=True) if cut < len(run)]
        self._bytes -= self._chunks.bytes_of(popped.chunk)
        return popped

    def split_until(self, bound: Position) -> list[RowRefs]:
        """Remove and return the rows at or below `bound` in runs, each in the order of position."""
        heads, self._runs = self._split(bound)
        return self._left(heads)

    def split_after(self, bound: Position) -> list[RowRefs]:
        """Remove and return the rows above `bound` in runs, each in the order of position."""
        self._runs, tails = self._split(bound)
        return self._left(tails)

    def _split(self, bound: Position) -> tuple[list[RowRefs], list[RowRefs]]:
        cuts = [search(run.at, run.offset, bound) for run in self._runs]
        heads = [run[:cut] for run, cut in zip(self._runs, cuts, strict=True) if cut]
        tails = [run[cut:] for run, cut in zip(self._runs, cuts, strict=True) if cut < len(run)]
        return heads, tails

    def _first(self, cuts: list[int], limit: int) -> list[int]:
        """The number of rows of each run among the first `limit` rows of all runs. The candidates, the first `cuts`
        rows of each run, are more than `limit`.

        Only about `limit` rows are sorted: runs are much alike, so an equal share of each ends at nearly the same
        position.
        """
        share = -(-limit // len(cuts))
        reach = max(_bound_at(run, share - 1) for run, cut in zip(self._runs, cuts, strict=True) if cut >= share)
        near = [min(cut, limit, search(run.at, run.offset, reach)) for run, cut in zip(self._runs, cuts, strict=True)]
        if sum(near) < limit:
            near = [min(cut, limit) for cut in cuts]
        heads = concat([run[:cut] for run, cut in zip(self._runs, near, strict=True)]).sorted()
        last = _bound_at(heads, limit - 1)
        return [search(run.at, run.offset, last) for run in self._runs]

    def largest_within(self, bound: Position, budget_bytes: int) -> Position | None:
        """The last row at or below `bound` up to which the rows fit into a budget; None if all rows fit, ORIGIN if none
        does.

        Nothing is sorted: the search halves each run's cumulative bytes.
        """
        runs = [run[: search(run.at, run.offset, bound)] for run in self]
        runs = [run for run in runs if len(run)]
        totals = [np.cumsum(self._chunks.row_bytes[run.chunk]) for run in runs]
        if sum(int(total[-1]) for total in totals) <= budget_bytes:
            return None

        def too_many(position: Position) -> bool:
            cuts = (search(run.at, run.offset, position) for run in runs)
            return sum(int(total[cut - 1]) for total, cut in zip(totals, cuts, strict=True) if cut) > budget_bytes

        low, high = min(int(run.at[0]) for run in runs), max(int(run.at[-1]) for run in runs)
        at_ms = low + bisect.bisect_left(range(high - low), True, key=lambda ms: too_many(end_of(low + ms)))
        offset = bisect.bisect_left(range(OFFSET_MAX), True, key=lambda o: too_many(Position(at_ms, o)))
        # (at_ms, offset) is the first row that does not fit; the result is the last row before it.
        beyond = Position(at_ms, offset).before()
        cuts = [search(run.at, run.offset, beyond) for run in runs]
        return max((run[:cut].last() for run, cut in zip(runs, cuts, strict=True) if cut), default=ORIGIN)

    def remove(self, gone: Callable[[RowRefs], Bools]) -> RowRefs:
        """Remove and return the rows for which `gone` is true (it returns a mask of its argument), in no order."""
        removed, kept = [], []
        for run in self._runs:
            mask = gone(run)
            removed.append(run.where(mask))
            kept.append(run.where(~mask))
        removed, kept = [run for run in removed if len(run)], [run for run in kept if len(run)]
        self._runs = kept
        return concat(self._left(removed))

    def all(self) -> RowRefs:
        """All rows, in no order."""
        return concat(list(self))

    def pop_all(self) -> RowRefs:
        """Remove and return all rows, in no order."""
        rows, self._runs, self._bytes = self.all(), [], 0
        return rows

    def copy_where(self, mask: Callable[[RowRefs], Bools]) -> int:
        """Put the payloads of some rows (`mask` is of its argument) into a chunk of their own; returns their number."""
        rows = self.remove(mask).sorted()
        self.insert(gathered(self._chunks, rows))
        return len(rows)

    def gather_near(self, popped: RowRefs, until: Position | RowBound) -> int:
        """Copy the next rows, up to `until`, into one chunk in order, if the popped rows came from many; returns the
        number of rows.

        Rows that were sent over a long time and are due at one time are pieces of one or two rows each, and a take
        copies dozens of these. In one chunk they are one slice.
        """
        if len(popped) < SCATTERED_CHUNKS:
            return 0
        pieces = len(set(popped.chunk.tolist()))
        if pieces < SCATTERED_CHUNKS or len(popped) >= SCATTERED_ROWS * pieces:
            return 0
        rows = self.pop_until(until, GATHERED_ROWS_MAX)
        fit = int(np.searchsorted(np.cumsum(self._chunks.row_bytes[rows.chunk]), GATHERED_BYTES_MAX, side="right"))
        self.insert(rows[fit:])
        self.insert(gathered(self._chunks, rows[:fit]))
        return fit

    def _left(self, runs: list[RowRefs]) -> list[RowRefs]:
        self._bytes -= sum(self._chunks.bytes_of(run.chunk) for run in runs)
        return runs

    def _put_together(self, run: RowRefs) -> RowRefs:
        """The run, in a new chunk if it is small and from many chunks."""
        if len(run) > GATHERED_ROWS_MAX or np.count_nonzero(np.bincount(run.chunk)) < GATHERED_CHUNKS:
            return run
        before = self._chunks.bytes_of(run.chunk)
        if before > GATHERED_BYTES_MAX:
            return run
        run = gathered(self._chunks, run)
        self._bytes += self._chunks.bytes_of(run.chunk) - before
        return run
