"""A batch on its way into a store: rows in order of position, and the payload of each.

Small batches come hundreds of times a second. Facts about a batch hold for all its parts, so that `part` costs a few
microseconds only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import pyarrow as pa

from timerstore.memory.chunks import SPARSE_SHARE
from timerstore.memory.sorted_runs import RowRefs, select
from timerstore.rows.entry import Kind, payload_of
from timerstore.rows.position import Bools

KEPT_BYTES_MAX: Final = 1 << 19
"""A part of a smaller batch is not copied: runs of few rows are soon put together, and a copy for each partition would
double the cost of a batch."""


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
        kind, origin = (payload.column(name).to_numpy() for name in ("kind", "origin"))
        is_plain = payload.column("id").null_count == count and bool(
            (((kind == Kind.TIMER) | (kind == Kind.REJECT)) & (origin == rows.offset)).all()
        )
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
