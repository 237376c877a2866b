"""A batch on its way into a store: rows in order of position, and the payload of each.

Small batches come hundreds of times a second. Facts about a batch hold for all its parts, so that `part` costs a few
microseconds only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from timerstore.memory.ready import plain, with_log
from timerstore.memory.sorted_runs import EMPTY, RowRefs, select
from timerstore.rows.entry import Kind, payload_of
from timerstore.rows.position import OFFSET_BITS, OFFSET_MAX, Bools, Int64s, grouped, order_by_position

SHARED_BYTES_MAX: Final = 1 << 19
"""A larger batch is copied for each log: as one chunk, it would stay until the last row of any log has left."""


@dataclass(frozen=True, slots=True, eq=False)
class RowBatch:
    """`row` of `rows` is the index in `payload`, `row_bytes` the mean size of a row there. `is_plain`: all rows are
    originals without ids, or rejects; cancels and commands do not concern them on arrival."""

    rows: RowRefs
    payload: pa.RecordBatch
    row_bytes: int
    is_plain: bool

    @classmethod
    def of(cls, entries: pa.Table) -> RowBatch:
        """A batch of rows of `entry.ENTRY`, in any order."""
        rows = select(entries).sorted()
        return cls.sorted(rows, payload_of(entries.take(pa.array(rows.row))))

    @classmethod
    def sorted(cls, rows: RowRefs, payload: pa.RecordBatch) -> RowBatch:
        """A batch of rows in order of position; `payload` has one row for each."""
        count = len(rows)
        is_plain = payload.column("id").null_count == count and _are_originals(rows, payload)
        index = np.arange(count, dtype=np.int32)
        return cls(RowRefs(rows.at, rows.offset, rows.chunk, index), payload, _row_bytes(payload), is_plain)

    def __len__(self) -> int:
        return len(self.rows)

    def where(self, mask: Bools) -> RowBatch:
        """The rows of a mask."""
        if mask.all():
            return self
        index = np.flatnonzero(mask)
        rows = self.rows[index]
        return RowBatch(
            RowRefs(rows.at, rows.offset, rows.chunk, self.rows.row[: len(index)]),
            self.payload.take(pa.array(index)),
            self.row_bytes,
            self.is_plain,
        )


@dataclass(frozen=True, slots=True)
class LogPart:
    """The rows of one log in a `MergedBatch`: their indices, in order of position; their smallest and largest offset;
    the positions of the first and the last one, as (at in ms, offset)."""

    index: npt.NDArray[np.intp]
    low: int
    high: int
    first: tuple[int, int]
    last: tuple[int, int]


@dataclass(frozen=True, slots=True, eq=False)
class MergedBatch:
    """A batch of several logs, in the order of (at, log, offset). `rows` have the number of the log above the offset;
    `row` is the index in `payload`. `is_whole`: the batch becomes one chunk. It is small, has no commands, replaces or
    copies, and its payload is in the same order."""

    rows: RowRefs
    payload: pa.RecordBatch
    row_bytes: int
    parts: Mapping[int, LogPart]
    is_whole: bool

    @classmethod
    def of(cls, log: Int64s, rows: RowRefs, payload: pa.RecordBatch) -> MergedBatch:
        """The batch of rows of several logs, in any order. `log` is the number of each row's log."""
        is_whole = payload.nbytes <= SHARED_BYTES_MAX and _are_originals(rows, payload)
        rows = with_log(rows, log)
        order = order_by_position(rows.at, rows.offset)
        rows = rows[order]
        if is_whole:
            payload = payload.take(pa.array(order))
            rows = RowRefs(rows.at, rows.offset, rows.chunk, np.arange(len(rows), dtype=np.int32))
        return cls(rows, payload, _row_bytes(payload), _parts(rows), is_whole)

    def part(self, log: int) -> RowBatch:
        """The rows of a log, with a payload of their own: a batch would keep the memory of all its rows."""
        rows = plain(self.rows[self.parts[log].index]) if log in self.parts else EMPTY
        is_all = len(rows) == len(self.payload) and bool((rows.row[1:] > rows.row[:-1]).all())
        return RowBatch.sorted(rows, self.payload if is_all else self.payload.take(pa.array(rows.row)))


def _parts(rows: RowRefs) -> dict[int, LogPart]:
    if not len(rows):
        return {}
    log, offset = rows.offset >> OFFSET_BITS, rows.offset & OFFSET_MAX
    order, begins = grouped(log)
    ends = [*begins[1:], len(order)]
    low, high = (f.reduceat(offset[order], begins).tolist() for f in (np.minimum, np.maximum))
    first, last = order[begins], order[np.array(ends) - 1]
    firsts, lasts = (zip(rows.at[i].tolist(), offset[i].tolist(), strict=True) for i in (first, last))
    indices = (order[begin:end] for begin, end in zip(begins, ends, strict=True))
    return dict(zip(log[first].tolist(), map(LogPart, indices, low, high, firsts, lasts), strict=True))


def _row_bytes(payload: pa.RecordBatch) -> int:
    size: int = payload.nbytes
    return -(-size // max(1, len(payload)))


def _are_originals(rows: RowRefs, payload: pa.RecordBatch) -> bool:
    """Whether all rows are rejects, or originals that replace no others."""
    kind, origin = (payload.column(name).to_numpy() for name in ("kind", "origin"))
    is_original = ((kind == Kind.TIMER) | (kind == Kind.REJECT)) & (origin == rows.offset)
    return bool(is_original.all()) and not pc.any(payload.column("replace")).as_py()
