"""Resident rows: the rows in memory, their places, and the moves of the delivered position and the loaded frontier over
them.

    position:   finished ... P ......... ready rows ......... L ......... memtable .........
                       overtaken rows                           (and segments' rows, on disk)

    overtaken  at or below P (after the open transaction, if there is one), and not finished: its offset is not covered
               by O yet
    ready      above P, at or below the loaded frontier L: every pending row there is resident
    memtable   above L, and not in a segment yet

A row is *stored*, in a segment that the checkpoint names, exactly when its offset lies below O_c.

No lock and no IO here: `StoreState` guards it, one instance is used by one thread at a time.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from timerstore.memory.batch import RowBatch
from timerstore.memory.chunks import Chunks
from timerstore.memory.overtaken import Overtaken
from timerstore.memory.ready import MergedRows, ReadyRows
from timerstore.memory.sorted_runs import EMPTY, RowRefs, SortedRuns
from timerstore.rows.position import OFFSET_MAX, Bools, Position, Positions, Progress, search


class Resident:
    """Rows in memory; `committed` is (O, P)."""

    def __init__(self, committed: Progress, chunks: Chunks, merged: MergedRows, log: int) -> None:
        self.chunks = chunks
        self.ready = ReadyRows(chunks, merged, log)
        self._merged = merged
        self.memtable = SortedRuns(chunks)
        self.overtaken = Overtaken(chunks)
        self.committed = committed
        self.passed = committed.position
        """P, or P after the open transaction. Rows that come at or below it are overtaken."""
        self.end = 0
        """Exclusive end of the ingested records."""
        self.stored = 0
        """O_c of the durable checkpoint."""
        self.frontier = committed.position
        """L: every pending row at or below it is resident. P <= L (invariant I3)."""
        self._places = self.overtaken.insert, self.ready.insert, self._keep_unstored

    @property
    def position(self) -> Position:
        """P: every row at or below it, with an offset below O, is finished."""
        return self.committed.position

    def finished(self, rows: Positions) -> Bools:
        """Mask of the rows that the committed state finishes (invariant I1)."""
        return self.committed.finished(rows)

    def covered(self) -> int:
        """The furthest O_c: the committed O, or the end of the ingested records."""
        return max(self.stored, min(self.committed.offset, self.end))

    def reachable(self) -> int:
        """The furthest O of a transaction that delivers all due rows: the end of the ingested records, or the offset of
        the first overtaken row."""
        first = self.overtaken.first_offset()
        return self.end if first is None else first

    def give_back(self) -> None:
        """Have all ready rows as own ones."""
        self._merged.give_back([self.ready])

    def is_apart(self) -> bool:
        """Whether there are ready rows that are not merged, or overtaken ones."""
        return len(self.ready.own_runs()) > 0 or len(self.overtaken) > 0

    def take_in(self, batch: RowBatch) -> None:
        """Take in the new rows of a batch.

        A chunk for each part (overtaken, ready, memtable) keeps rows together that leave together; a part that is
        placed elsewhere later is no mistake.
        """
        for part, insert in zip(self._parts(batch.rows), self._places, strict=True):
            if len(part):
                payload = batch.payload.slice(int(part.row[0]), len(part)) if len(part) < len(batch) else batch.payload
                insert(self._in_chunk(part, payload, batch.row_bytes))

    def add(self, rows: RowRefs, payload: pa.RecordBatch) -> None:
        """Take in rows, in the order of position, whose payloads are the rows of `payload` one by one."""
        if len(rows):
            self.place(self._in_chunk(rows, payload))

    def _in_chunk(self, rows: RowRefs, payload: pa.RecordBatch, row_bytes: int | None = None) -> RowRefs:
        """References to the rows of a payload, which is a chunk from now on."""
        chunk = np.full(len(rows), self.chunks.add(payload, row_bytes), dtype=np.int32)
        return RowRefs(rows.at, rows.offset, chunk, np.arange(len(rows), dtype=np.int32))

    def is_stored(self, rows: Positions) -> Bools:
        """Mask of the rows that are in a durable segment."""
        mask: Bools = rows.offset < self.stored
        return mask

    def place(self, rows: RowRefs) -> None:
        """Place row references, given in order of position, by the present P and L."""
        for part, insert in zip(self._parts(rows), self._places, strict=True):
            insert(part)

    def _parts(self, rows: RowRefs) -> tuple[RowRefs, RowRefs, RowRefs]:
        """The rows that belong to each of the places."""
        passed, near = (search(rows.at, rows.offset, bound) for bound in (self.passed, self.frontier))
        near = max(passed, near)
        return rows[:passed], rows[passed:near], rows[near:]

    def replace_all(self, rows: RowRefs) -> None:
        """Place the rows of an aborted transaction again, and all overtaken rows, since P may be before them again."""
        self.passed = self.position
        overtaken = self.overtaken.pop_all()
        for each in (rows, overtaken):
            self.place(each.sorted())

    def commit(self, committed: Progress) -> None:
        """Set the committed state, at the end of a transaction."""
        self.committed = committed
        self.passed = committed.position

    def step_back(self, now_ms: int) -> None:
        """Freeze the committed state if its P lies ahead of the clock, and go on just below `now_ms` (invariant I4).

        The finished set stays the same. Overtaken rows that are not due become ready rows again: nothing waits behind
        them.
        """
        self.committed = self.committed.stepped_back(Position(now_ms - 1, OFFSET_MAX))
        self.replace_all(EMPTY)

    def advance_frontier(self, upper: Position) -> None:
        """Move L up; rows of the memtable in between move with it."""
        self.frontier = upper
        for rows in self.memtable.split_until(upper):
            self.place(rows)

    def retreat_frontier(self, budget_bytes: int, floor: Position) -> None:
        """Move L back until the ready rows take at most `budget_bytes`; never below `floor` (invariant I8)."""
        self.give_back()
        last_in = self.ready.largest_within(self.frontier, budget_bytes)
        if last_in is None:
            return
        self.frontier = max(last_in, floor)
        for rows in self.ready.split_after(self.frontier):
            self.place(rows)

    def mark_stored(self, offset: int) -> None:
        """A durable checkpoint has O_c at `offset`: rows below leave the memtable."""
        self.stored = offset
        self.chunks.release(self.memtable.remove(self.is_stored).chunk)

    def _keep_unstored(self, rows: RowRefs) -> None:
        """Insert rows without those of segments, which are loaded again when the frontier comes to them."""
        stored = self.is_stored(rows)
        self.chunks.release(rows.chunk[stored])
        self.memtable.insert(rows.where(~stored))
