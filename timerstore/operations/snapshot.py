"""A snapshot of a store's rows, for passes over all rows without the lock: searches, and cancels by origin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Self, TypeVar

import numpy as np
import pyarrow as pa

from timerstore.cancels.tombstones import Lookup
from timerstore.errors import Corrupt
from timerstore.log.segment import Segment
from timerstore.memory.sorted_runs import RowRefs
from timerstore.operations.state import StoreState
from timerstore.rows.entry import PAYLOAD
from timerstore.rows.position import Bools, Int64s, Position, Progress

T = TypeVar("T")
ATTEMPTS: Final = 3
"""Attempts of a pass: it begins anew if a segment was removed before it was opened."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """References, immutable batches and segments of one moment; `runs` have the open transaction's rows, too."""

    runs: tuple[RowRefs, ...]
    chunks: dict[int, pa.RecordBatch]
    segments: tuple[Segment, ...]
    frontier: Position
    committed: Progress
    tombstones: Lookup

    @classmethod
    def of(cls, state: StoreState) -> Self:
        """A snapshot of now. Under the lock it only copies lists."""
        resident = state.resident
        with state.lock:
            ready = resident.ready.of_now()
            others = (*resident.memtable, resident.overtaken.all(), state.rows_on_loan())
            chunks, segments = resident.chunks.all(), tuple(state.timerlog)
            frontier, committed = resident.frontier, resident.committed
            tombstones = state.cancels.tombstones.lookup()
        runs = (*ready(), *others)
        used = np.flatnonzero(np.bincount(np.concatenate([run.chunk for run in runs]))).tolist()
        return cls(
            runs=runs,
            chunks={chunk: chunks[chunk] for chunk in used},  # others are of other stores
            segments=segments,
            frontier=frontier,
            committed=committed,
            tombstones=tombstones,
        )

    def payload(self, columns: Sequence[str]) -> tuple[pa.Table, Int64s]:
        """Some columns of all chunks with rows of the store, and for each chunk the index of its first row there."""
        ids = sorted(self.chunks)
        begins = np.zeros(ids[-1] + 1 if ids else 0, dtype=np.int64)
        begins[ids] = np.cumsum([0, *(self.chunks[c].num_rows for c in ids)])[:-1]
        return pa.Table.from_batches([self.chunks[c] for c in ids], schema=PAYLOAD).select(list(columns)), begins

    def is_resident(self, rows: RowRefs) -> Bools:
        """Mask of the rows of a segment that are in memory, too: rows up to the frontier."""
        return rows.at_or_below(self.frontier)


def looked(state: StoreState, look: Callable[[Snapshot], T]) -> T:
    """The result of `look` for a snapshot; for a new one, if a segment was removed before it was opened. Raises as
    `look` does."""
    for _ in range(ATTEMPTS - 1):
        try:
            return look(Snapshot.of(state))
        except Corrupt as error:
            with state.lock:
                if error.path in [str(segment.path) for segment in state.timerlog]:
                    raise
    return look(Snapshot.of(state))
