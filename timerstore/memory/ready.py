"""Ready rows, of one log and of several.

Each log has its own ready rows. While a log is delivered together with others, they are merged: a transaction takes the
next rows of all logs in one step, in the order of (due, log, offset). A merged row has the number of its log above its
offset, in one integer.

    log 0, own            [5, 1] [9, 2]
    log 1, own            [5, 7]
    merge of both         merged [5, 0|1] [5, 1|7] [9, 0|2]
    a batch of both       comes to the merged rows at once
    rows placed again     come to the log's own rows, until the next merge
    log 1 is held         its rows are given back
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np
import numpy.typing as npt

from timerstore.memory.chunks import Chunks
from timerstore.memory.sorted_runs import RowRefs, SortedRuns, concat
from timerstore.rows.position import OFFSET_BITS, OFFSET_MAX, Bools, Int64s, Position, RowBound, groups


class MergedRows(SortedRuns):
    """The rows of several logs; `offset` has the number of the log above it. They come from few batches, each of all
    logs, so runs keep their chunks."""

    def __init__(self, chunks: Chunks) -> None:
        super().__init__(chunks)
        self._size_of: dict[int, tuple[int, int]] = {}
        """(Rows, bytes) by log, without zeros."""

    def size_of(self, log: int) -> tuple[int, int]:
        """The number of a log's rows, and their bytes."""
        return self._size_of.get(log, (0, 0))

    def below(self, offsets: Mapping[int, int]) -> Callable[[], dict[int, RowRefs]]:
        """A function that returns, by log, the present rows below its offset. It needs no lock, and passes once over
        the rows of all logs."""
        bound: Int64s = np.zeros(max((*offsets, *self._size_of), default=-1) + 1, np.int64)
        bound[[*offsets]] = [*offsets.values()]
        runs = self._runs[:]

        def look() -> dict[int, RowRefs]:
            rows = concat([run[(run.offset & OFFSET_MAX) < bound[run.offset >> OFFSET_BITS]] for run in runs])
            return {log: plain(rows[mine]) for log, mine in groups(rows.offset >> OFFSET_BITS)}

        return look

    def insert(self, rows: RowRefs) -> None:
        super().insert(rows)
        self._count(rows, 1)

    def pop_until(self, bound: Position | RowBound, limit: int | None = None) -> RowRefs:
        rows = super().pop_until(bound, limit)
        self._count(rows, -1)
        return rows

    def remove(self, gone: Callable[[RowRefs], Bools]) -> RowRefs:
        rows = super().remove(gone)
        self._count(rows, -1)
        return rows

    def of(self, log: int) -> Callable[[], list[RowRefs]]:
        """A function that returns the present rows of a log, with plain offsets: runs in order of position. It needs no
        lock, and passes over the rows of all logs."""
        runs = self._runs[:] if log in self._size_of else []
        first, end = log << OFFSET_BITS, (log + 1) << OFFSET_BITS
        return lambda: [plain(run[(run.offset >= first) & (run.offset < end)]) for run in runs]

    def take_over(self, logs: Iterable[ReadyRows]) -> None:
        """Merge all rows of some logs."""
        rows = [with_log(run, each.log) for each in logs for run in each.pop_own()]
        if rows:
            self.insert(concat(rows).sorted())

    def give_back(self, logs: Iterable[ReadyRows]) -> None:
        """Have all rows of some logs as own ones, by one pass over all rows."""
        holders = {each.log: each for each in logs if each.log in self._size_of}
        if holders:
            rows = self.remove(lambda run: np.isin(run.offset >> OFFSET_BITS, [*holders])).sorted()
            for log, mine in groups(rows.offset >> OFFSET_BITS):
                holders[log].insert(plain(rows[mine]))

    def _count(self, rows: RowRefs, sign: int) -> None:
        if len(rows):
            logs = rows.offset >> OFFSET_BITS
            counts, sizes = np.bincount(logs), np.bincount(logs, weights=self._chunks.row_bytes[rows.chunk])
            for log in np.flatnonzero(counts).tolist():
                count, size = self.size_of(log)
                self._size_of[log] = left = count + sign * int(counts[log]), size + sign * int(sizes[log])
                if not left[0]:
                    del self._size_of[log]

    def _put_together(self, run: RowRefs) -> RowRefs:
        return run


class ReadyRows(SortedRuns):
    """The ready rows of one log: its own ones, and those among the merged ones.

    A look sees both. What removes rows by position sees own ones only: `MergedRows.give_back` comes before."""

    def __init__(self, chunks: Chunks, merged: MergedRows, log: int) -> None:
        super().__init__(chunks)
        self.log = log
        self._merged = merged
        self.is_merged = False
        """Whether rows may be merged."""

    def __len__(self) -> int:
        return sum(map(len, self._runs)) + self._merged.size_of(self.log)[0]

    def __iter__(self) -> Iterator[RowRefs]:
        return iter(self.of_now()())

    def of_now(self) -> Callable[[], list[RowRefs]]:
        """A function that returns the present runs, as `MergedRows.of`."""
        own, merged = self._runs[:], self._merged.of(self.log)
        return lambda: [*own, *(run for run in merged() if len(run))]

    @property
    def bytes(self) -> int:
        return self._bytes + self._merged.size_of(self.log)[1]

    def first_own_ms(self) -> int | None:
        """Effective time of the first row that is not merged, or None."""
        return min((int(run.at[0]) for run in self._runs), default=None)

    def with_others(self) -> list[RowRefs]:
        """The runs of this log, and of all logs with which it is merged; the latter have the numbers of their logs."""
        return [*self._runs, *(self._merged if self.is_merged else ())]

    def nearest_ms(self) -> int | None:
        """Effective time of the first row, or of a nearer one of a log with which it is merged; None without rows."""
        return min((int(run.at[0]) for run in self.with_others()), default=None)

    def pop_own(self) -> list[RowRefs]:
        """Remove and return the runs that are not merged."""
        runs, self._runs, self._bytes = self._runs, [], 0
        return runs


def plain(rows: RowRefs) -> RowRefs:
    """Rows of one log, without its number."""
    return RowRefs(rows.at, rows.offset & OFFSET_MAX, rows.chunk, rows.row)


def with_log(rows: RowRefs, log: int | npt.NDArray[np.int16] | Int64s) -> RowRefs:
    """Rows with the numbers of their logs."""
    return RowRefs(rows.at, np.asarray(log, np.int64) << OFFSET_BITS | rows.offset, rows.chunk, rows.row)
