"""A batch on its way into a store: rows in order of position, and the payload of each.

Small batches come hundreds of times a second. Facts about a batch hold for all its parts, so that `part` costs a few
microseconds only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from timerstore.memory.chunks import SPARSE_SHARE
from timerstore.memory.ready import with_log
from timerstore.memory.sorted_runs import RowRefs, select
from timerstore.rows.entry import Kind, payload_of
from timerstore.rows.position import OFFSET_MAX, Bools, Int64s, order_by_position

KEPT_BYTES_MAX: Final = 1 << 19
"""The parts of a smaller batch are not copied: a copy for each log would double the cost of a batch."""


@dataclass(frozen=True, slots=True, eq=False)
class RowBatch:
    """`row` of `rows` is the index in `payload`, `row_bytes` the mean size of a row there. `is_plain`: all rows are
    originals without ids, or rejects; cancels and commands do not concern them on arrival. `kept_bytes` is the memory
    that the payload keeps: a part keeps the whole."""

    rows: RowRefs
    payload: pa.RecordBatch
    row_bytes: int
    is_plain: bool
    kept_bytes: int

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
        size = -(-payload.nbytes // max(1, count))
        return cls(RowRefs(rows.at, rows.offset, rows.chunk, index), payload, size, is_plain, size * count)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def bytes(self) -> int:
        """The estimated size of the rows."""
        return self.row_bytes * len(self.rows)

    def part(self, begin: int, end: int) -> RowBatch:
        """The rows from `begin` to `end` (exclusive)."""
        rows = self.rows[begin:end]
        index = self.rows.row[: end - begin]
        return RowBatch(
            RowRefs(rows.at, rows.offset, rows.chunk, index),
            self.payload.slice(begin, end - begin),
            self.row_bytes,
            self.is_plain,
            self.kept_bytes,
        )

    def owned(self) -> RowBatch:
        """The same, with a copy of a payload that keeps much more than its rows."""
        if self.kept_bytes <= max(KEPT_BYTES_MAX, SPARSE_SHARE * self.bytes):
            return self
        return replace(self, payload=self.payload.take(pa.array(self.rows.row)), kept_bytes=self.bytes)

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
            self.row_bytes * len(index),
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
    `row` is the index in `payload`."""

    rows: RowRefs
    payload: pa.RecordBatch
    row_bytes: int
    parts: Mapping[int, LogPart]

    @classmethod
    def of_originals(cls, log: Int64s, rows: RowRefs, payload: pa.RecordBatch) -> MergedBatch | None:
        """The batch of rows of several logs, in any order; None if commands, replaces or copies are among them, if it
        is large (each log then keeps the memory of its own rows only), or without rows. `log` is the number of each
        row's log."""
        whole = RowBatch.sorted(rows, payload)
        if not 0 < whole.kept_bytes <= KEPT_BYTES_MAX or not (whole.is_plain or _are_originals(rows, payload)):
            return None
        rows = with_log(rows, log)
        order = order_by_position(rows.at, rows.offset)
        rows, log, offset = rows[order], log[order], rows.offset[order] & OFFSET_MAX
        by_log = np.argsort(log, kind="stable")
        begins = np.concatenate([[0], np.flatnonzero(np.diff(log[by_log])) + 1])
        ends = [*begins[1:].tolist(), len(log)]
        low, high = (f.reduceat(offset[by_log], begins).tolist() for f in (np.minimum, np.maximum))
        first, last = by_log[begins], by_log[np.array(ends) - 1]
        firsts, lasts = (zip(rows.at[i].tolist(), offset[i].tolist(), strict=True) for i in (first, last))
        indices = (by_log[begin:end] for begin, end in zip(begins.tolist(), ends, strict=True))
        parts = map(LogPart, indices, low, high, firsts, lasts)
        numbers = log[first].tolist()
        references = RowRefs(rows.at, rows.offset, rows.chunk, whole.rows.row)
        return cls(references, payload.take(pa.array(order)), whole.row_bytes, dict(zip(numbers, parts, strict=True)))


def _are_originals(rows: RowRefs, payload: pa.RecordBatch) -> bool:
    """Whether all rows are rejects, or originals that replace no others."""
    kind, origin = (payload.column(name).to_numpy() for name in ("kind", "origin"))
    is_original = ((kind == Kind.TIMER) | (kind == Kind.REJECT)) & (origin == rows.offset)
    return bool(is_original.all()) and not pc.any(payload.column("replace")).as_py()
