"""Ready rows, of one log and of several.

Each log has its own ready rows. While a log is delivered together with others, they are merged: a transaction takes the
next rows of all logs in one step, in the order of (due, log, offset). A merged row has the number of its log above its
offset, in one integer.

    log 0, own            [5, 1] [9, 2]
    log 1, own            [5, 7]
    merge of both         merged [5, 0|1] [5, 1|7] [9, 0|2]
    a batch of both       comes to the merged rows at once
    rows placed again     come to the log's own rows, until the next merge
    log 1 is held         its rows are taken back
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from timerstore.memory.chunks import Chunks
from timerstore.memory.sorted_runs import RowRefs, SortedRuns
from timerstore.rows.position import OFFSET_BITS, OFFSET_MAX, Bools, Int64s, Position, RowBound

LOG_MAX: Final = (1 << 15) - 1


class MergedRows(SortedRuns):
    """The rows of several logs; `offset` has the number of the log above it. They come from few batches, each of all
    logs, so runs keep their chunks."""

    def __init__(self, chunks: Chunks) -> None:
        super().__init__(chunks)
        self._bytes_of: dict[int, int] = {}
        """By log, without zeros."""

    def bytes_of(self, log: int) -> int:
        """The size of a log's rows."""
        return self._bytes_of.get(log, 0)

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

    def of(self, log: int) -> list[RowRefs]:
        """The rows of a log, with plain offsets: runs in order of position."""
        if log not in self._bytes_of:
            return []
        runs = [run[run.offset >> OFFSET_BITS == log] for run in self]
        return [plain(run) for run in runs if len(run)]

    def take_back(self, log: int) -> list[RowRefs]:
        """Remove and return the rows of a log, as `of`."""
        runs = self.of(log)
        if runs:
            self.remove(lambda run: run.offset >> OFFSET_BITS == log)
        return runs

    def _count(self, rows: RowRefs, sign: int) -> None:
        if len(rows):
            sizes = np.bincount(rows.offset >> OFFSET_BITS, weights=self._chunks.row_bytes[rows.chunk])
            for log in np.flatnonzero(sizes).tolist():
                self._bytes_of[log] = left = self._bytes_of.get(log, 0) + sign * int(sizes[log])
                if not left:
                    del self._bytes_of[log]

    def _put_together(self, run: RowRefs) -> RowRefs:
        return run


class ReadyRows(SortedRuns):
    """The ready rows of one log: its own ones, and those among the merged ones.

    A look sees both. What removes rows by position takes the merged ones back first."""

    def __init__(self, chunks: Chunks, merged: MergedRows, log: int) -> None:
        super().__init__(chunks)
        self._merged, self._log = merged, log
        self.is_merged = False
        """Whether rows may be merged."""

    def __iter__(self) -> Iterator[RowRefs]:
        return iter([*self._runs, *self._merged.of(self._log)])

    @property
    def bytes(self) -> int:
        return self._bytes + self._merged.bytes_of(self._log)

    def first_own_ms(self) -> int | None:
        """Effective time of the first row that is not merged, or None."""
        return min((int(run.at[0]) for run in self._runs), default=None) if self._runs else None

    def nearest_ms(self) -> int | None:
        """Effective time of the first row, or of a nearer one of a log with which it is merged; None without rows."""
        times = (self.first_own_ms(), self._merged.first_at_ms() if self.is_merged else None)
        return min((at_ms for at_ms in times if at_ms is not None), default=None)

    def merge(self) -> None:
        """Merge all rows."""
        if self._runs:
            runs, self._runs, self._bytes = self._runs, [], 0
            for run in runs:
                self._merged.insert(with_log(run, self._log))

    def take_back(self) -> None:
        """Have all rows as own ones."""
        for run in self._merged.take_back(self._log):
            self.insert(run)

    def pop_until(self, bound: Position | RowBound, limit: int | None = None) -> RowRefs:
        self.take_back()
        return super().pop_until(bound, limit)

    def split_until(self, bound: Position) -> list[RowRefs]:
        self.take_back()
        return super().split_until(bound)

    def split_after(self, bound: Position) -> list[RowRefs]:
        self.take_back()
        return super().split_after(bound)

    def pop_all(self) -> RowRefs:
        self.take_back()
        return super().pop_all()


def plain(rows: RowRefs) -> RowRefs:
    """Rows of one log, without its number."""
    return RowRefs(rows.at, rows.offset & OFFSET_MAX, rows.chunk, rows.row)


def with_log(rows: RowRefs, log: int | npt.NDArray[np.int16] | Int64s) -> RowRefs:
    """Rows with the numbers of their logs."""
    return RowRefs(rows.at, np.asarray(log, np.int64) << OFFSET_BITS | rows.offset, rows.chunk, rows.row)
