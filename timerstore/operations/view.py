"""A snapshot of a store's rows, for what looks at all of them without the lock: searches, and cancels by origin."""

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
"""Segments may be gone when they are to be opened: a look begins anew."""


@dataclass(frozen=True, kw_only=True)
class View:
    """References, immutable batches and segments of one moment; rows of the open transaction are among `runs`."""

    runs: tuple[RowRefs, ...]
    chunks: dict[int, pa.RecordBatch]
    segments: tuple[Segment, ...]
    frontier: Position
    committed: Progress
    tombstones: Lookup

    @classmethod
    def of(cls, state: StoreState) -> Self:
        """Copies lists under the lock, and nothing else."""
        resident = state.resident
        with state.lock:
            runs = [run for holder in (resident.ready, resident.memtable) for run in holder]
            return cls(
                runs=(*runs, resident.overtaken.all(), state.rows_on_loan()),
                chunks=resident.chunks.all(),
                segments=tuple(state.timerlog),
                frontier=resident.frontier,
                committed=resident.committed,
                tombstones=state.cancels.tombstones.lookup(),
            )

    def payload(self, columns: Sequence[str]) -> tuple[pa.Table, Int64s]:
        """Some columns of everything in memory, and by chunk the index at which it begins there."""
        ids = sorted(self.chunks)
        begins = np.zeros(ids[-1] + 1 if ids else 0, dtype=np.int64)
        begins[ids] = np.cumsum([0, *(self.chunks[c].num_rows for c in ids)])[:-1]
        return pa.Table.from_batches([self.chunks[c] for c in ids], schema=PAYLOAD).select(list(columns)), begins

    def is_resident(self, rows: RowRefs) -> Bools:
        """Mask of the rows of a segment that are in memory too: those up to the frontier."""
        return rows.at_or_below(self.frontier)


def looked(state: StoreState, look: Callable[[View], T]) -> T:
    """What `look` makes of a snapshot; of another one where a segment was removed before it was opened. Raises as
    `look` does."""
    for _ in range(ATTEMPTS - 1):
        try:
            return look(View.of(state))
        except Corrupt as error:
            with state.lock:
                if error.path in [str(segment.path) for segment in state.timerlog]:
                    raise
    return look(View.of(state))
