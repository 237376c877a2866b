"""Resident rows: what is in memory, where each row belongs, and how the delivered position and the loaded frontier move
over it.

    position:   finished ... P ......... ready rows ......... L ......... memtable .........
                       overtaken rows                           (and segments' rows, on disk)

    overtaken  at or below P of its source, and not finished: its offset is not covered by O yet
    ready      above P, at or below the loaded frontier L: every pending row there is resident
    memtable   above L, and not in a segment yet
    withheld   above P of its source, below P of the others, of a source that is held; and not in a segment yet

A source is *held* while its partition of the delay topic takes nothing that a row of it needs (a roll, a retry): it
keeps its own P, the others go on. What is due of it meanwhile is withheld. When it is released P goes back to the
smallest one, and rows are loaded from there on again; what other sources have finished is left out by their own P, as
after a start.

A source that *joins* while the store is open (assignment.py) is held until it is ingested up to its committed O, and
released like any other.

A row is *stored*, in a segment that the checkpoint names, exactly when its offset lies below O_c of its source.

No lock and no IO here: `StoreState` guards it, one instance is used by one thread at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

import numpy as np
import pyarrow as pa

from timerstore.memory.chunks import Chunks
from timerstore.memory.finished import Finished
from timerstore.memory.overtaken import Overtaken
from timerstore.memory.sorted_runs import (
    EMPTY,
    GATHERED_BYTES_MAX,
    GATHERED_ROWS_MAX,
    RowRefs,
    SortedRuns,
    concat,
    gathered,
)
from timerstore.rows.position import OFFSET_MAX, ORIGIN, Bools, Int64s, Position, Positions, Progress

REPACKED_ROWS_MAX: Final = 1 << 16
"""At once: it happens under the store's lock."""

SCATTERED_CHUNKS: Final = 4
SCATTERED_ROWS: Final = 32
"""Rows from so many chunks or more, and fewer than so many of each, are scattered: see `gather_near`."""


class Resident:
    """Rows in memory of the owned sources, `sources` many in all; `committed` is (O, P) of every owned source."""

    def __init__(self, sources: int, committed: Mapping[int, Progress]) -> None:
        self.chunks = Chunks()
        self.ready = SortedRuns(self.chunks)
        self.memtable = SortedRuns(self.chunks)
        self.withheld = SortedRuns(self.chunks)
        self.overtaken = Overtaken(self.chunks)
        self.committed: dict[int, Progress] = dict(committed)
        self.done = Finished.of(sources, committed)
        """What is finished."""
        self.owned: Bools = self.done.owned
        self.held: Bools = np.zeros(sources, dtype=np.bool_)
        """Mask of the sources that are held, those that join among them."""
        self.joining: Bools = np.zeros(sources, dtype=np.bool_)
        """Mask of the sources that join: nothing is committed for them yet."""
        self.offset: Int64s = self.done.offset
        """O by source."""
        self.ends: Int64s = np.zeros(sources, dtype=np.int64)
        """Exclusive end of what is ingested, by source."""
        self.stored: Int64s = np.zeros(sources, dtype=np.int64)
        """O_c of the durable checkpoint, by source."""
        self.position = min((progress.position for progress in committed.values()), default=ORIGIN)
        """P: dispatch has finished every position up to here (each source's own P may be ahead)."""
        self.frontier = self.position
        """L: every pending row at or below it, of a source ingested so far, is resident. P <= L (invariant I3)."""

    @property
    def memtable_bytes(self) -> int:
        """Bytes of the rows that wait for a flush."""
        return self.memtable.bytes + self.withheld.bytes

    def finished(self, rows: Positions) -> Bools:
        """Mask of the rows that are finished under the committed state (invariant I1), or of no source of ours."""
        return self.done.includes(rows)

    def covered(self) -> Int64s:
        """Where O_c may go, by source: the committed O, as far as ingest has come."""
        return np.maximum(self.stored, np.minimum(self.offset, self.ends))

    def offsets_reachable(self) -> Int64s:
        """Where O can be moved by a transaction that delivers what is due, by source: the end of what is ingested, or
        the first overtaken row."""
        reachable = self.ends.copy()
        for source, offset in self.overtaken.first_offsets().items():
            reachable[source] = offset
        return reachable

    def parts(self, rows: RowRefs) -> list[RowRefs]:
        """Rows divided by where they belong now (overtaken, ready, memtable), without the empty parts.

        A chunk for each part keeps together what leaves together; a part that is placed elsewhere later is no mistake.
        """
        overtaken, near = self._is_overtaken(rows), rows.at_or_below(self.frontier)
        return [rows.where(mask) for mask in (overtaken, near & ~overtaken, ~near & ~overtaken) if mask.any()]

    def add(self, rows: RowRefs, payload: pa.RecordBatch) -> None:
        """Take in new rows, in the order of position, whose payloads are the rows of `payload` one by one."""
        if len(rows):
            chunk = np.full(len(rows), self.chunks.add(payload), dtype=np.int32)
            self.place(RowRefs(rows.at, rows.seq, chunk, np.arange(len(rows), dtype=np.int32)))

    def is_stored(self, rows: Positions) -> Bools:
        """Mask of the rows that a durable segment holds."""
        mask: Bools = rows.offset < self.stored[rows.source]
        return mask

    def place(self, rows: RowRefs) -> None:
        """Put row references, in the order of position, where they belong now."""
        overtaken, near = self._is_overtaken(rows), rows.at_or_below(self.frontier)
        self.overtake(rows.where(overtaken))
        self.ready.insert(rows.where(near & ~overtaken))
        self._keep_unstored(self.memtable, rows.where(~near & ~overtaken))

    def overtake(self, rows: RowRefs) -> None:
        """Rows that P passes in front of O: they are delivered by offset from now on."""
        # What only the P of the others has passed does not stand in the way of a held source's O: that must not go
        # back, and where it stood still nothing that comes in could be flushed.
        waits = self.held[rows.source] & ~self.done.is_passed(rows)
        if waits.any():
            self.withhold(rows[waits].sorted())
            rows = rows[~waits]
        self.overtaken.insert(rows)

    def withhold(self, rows: RowRefs) -> None:
        """Rows of held sources that P passes, in the order of position."""
        self._keep_unstored(self.withheld, rows)

    def held_sources(self) -> list[int]:
        """Those that are held, or join."""
        return [source for source in np.flatnonzero(self.held).tolist() if source in self.committed]

    def hold(self, held: Bools) -> None:
        """Hold these sources, and no others but those that join, from now on.

        Where one is released, P goes back to the smallest one, and with it the frontier: rows are loaded from there
        again.
        """
        held = held | self.joining
        released, is_more = self.held & ~held, bool((held & ~self.held).any())
        self.held = held
        if is_more:
            self.overtake(self.overtaken.pop_all())
        if not released.any():
            return
        free = [state.position for source, state in self.committed.items() if not held[source]]
        self.position = self.frontier = min((self.position, *free))
        self.place(concat([self.ready.pop_all(), self.withheld.pop_all(), self.overtaken.pop_all()]).sorted())

    def join(self, source: int, state: Progress) -> None:
        """A source is ours from now on, with this committed state. It is held, and below L nothing of it is here: its
        release goes back to where it stands."""
        self.committed[source] = state
        self.done.note(source, state)
        self.owned[source] = True
        self.joining = self.joining | self._only(source)
        self.held = self.held | self.joining

    def postpone(self, sources: Collection[int]) -> None:
        """These sources are ours, and join when they are ingested up to their committed O."""
        self.joining = self.joining | self._only(*sources)
        self.hold(self.held)

    def arrived(self) -> Bools:
        """Mask of the sources that join, and are ingested up to their committed O."""
        mask: Bools = self.joining & (self.ends >= self.offset)
        return mask

    def joined(self, sources: Collection[int]) -> list[int]:
        """Those of these sources that have arrived join no more: `hold` without them is next."""
        here = self.arrived() & self._only(*sources)
        self.joining = self.joining & ~here
        return np.flatnonzero(here).tolist()

    def give_up(self, sources: Collection[int]) -> RowRefs:
        """These sources are not ours any more; returns their rows, which are in memory no more."""
        gone = self._only(*sources)
        rows = [each.remove(lambda run: gone[run.source]) for each in (self.ready, self.memtable, self.withheld)]
        overtaken = self.overtaken.pop_all()
        self.overtaken.insert(overtaken[~gone[overtaken.source]])
        rows.append(overtaken[gone[overtaken.source]])
        for source in sources:
            del self.committed[source]
            self.done.note(source, Progress(0))
        self.owned[gone] = False
        self.joining, self.held = self.joining & ~gone, self.held & ~gone
        return concat(rows)

    def replace_all(self, rows: RowRefs) -> None:
        """Put rows back after a transaction that did not happen, and all overtaken rows with them: P may lie before
        them again."""
        overtaken = self.overtaken.pop_all()
        for each in (rows, overtaken):
            self.place(each.sorted())

    def commit(self, progress: Mapping[int, Progress], position: Position) -> None:
        """The committed state has moved; ready rows that P has passed are overtaken."""
        for source, state in progress.items():
            self.committed[source] = state
            self.done.note(source, state)
        self.position = max(self.position, position)
        self.overtake(self.ready.pop_until(self.position))

    def step_back(self, now_ms: int) -> None:
        """Freeze the committed states whose P lies ahead of the clock, and go on just below `now_ms` (invariant I4).

        What is finished stays the same. Overtaken rows that are not due become ready rows again: nothing waits
        behind them.
        """
        for source, state in self.committed.items():
            bound = Position(now_ms - 1, source, OFFSET_MAX)
            if state.position > bound:
                self.committed[source] = state.stepped_back(source, bound)
                self.done.note(source, self.committed[source])
        first = min(self.committed, default=0)
        self.position = min(self.position, Position(now_ms - 1, first, OFFSET_MAX))
        self.replace_all(EMPTY)

    def advance_frontier(self, upper: Position) -> None:
        """Move L up; rows of the memtable in between move with it."""
        self.frontier = upper
        for rows in self.memtable.split_until(upper):
            self.place(rows)

    def retreat_frontier(self, budget_bytes: int, floor: Position) -> None:
        """Move L back so that the ready rows holds at most `budget_bytes`; never below `floor` (invariant I8)."""
        last_in = self.ready.largest_within(self.frontier, budget_bytes)
        if last_in is None:
            return
        self.frontier = max(last_in, floor)
        for rows in self.ready.split_after(self.frontier):
            self.place(rows)

    def mark_stored(self, offsets: Int64s) -> None:
        """A durable checkpoint has O_c at `offsets` (by source): the memtable lets go of what lies below."""
        self.stored = np.where(self.owned, offsets, self.stored)
        for holder in (self.memtable, self.withheld):
            self.chunks.release(holder.remove(self.is_stored).chunk)

    def repack(self, gain_bytes_min: int) -> int:
        """Copy what is left of sparse chunks into new ones; returns how many rows, 0 when it is not worth while.

        A row that comes near before its chunk is flushed would keep all of it in memory, and of a mix of delays there
        is one in each chunk.
        """
        size, holders = len(self.chunks.row_bytes), (self.ready, self.memtable)
        referenced = sum(np.bincount(holder.all().chunk, minlength=size) for holder in holders)
        sparse = self.chunks.sparse(np.asarray(referenced), gain_bytes_min, REPACKED_ROWS_MAX)
        if not sparse.any():
            return 0
        return sum(self._copy_into(each, each.remove(lambda run: sparse[run.chunk]).sorted()) for each in holders)

    def gather_near(self, popped: RowRefs, until: Position) -> int:
        """Copy the next ready rows, up to `until`, into one chunk in the order of position, if what was just popped
        came from many; returns how many rows.

        What was sent over a long time and is due at one comes in pieces of one or two rows: some dozen copies for each
        take. Put together before, it is one slice.
        """
        pieces = len(np.unique(popped.chunk))
        if pieces < SCATTERED_CHUNKS or len(popped) >= SCATTERED_ROWS * pieces:
            return 0
        rows = self.ready.pop_until(until, GATHERED_ROWS_MAX)
        fit = int(np.searchsorted(np.cumsum(self.chunks.row_bytes[rows.chunk]), GATHERED_BYTES_MAX, side="right"))
        self.ready.insert(rows[fit:])
        return self._copy_into(self.ready, rows[:fit])

    def _copy_into(self, holder: SortedRuns, rows: RowRefs) -> int:
        """Insert rows, in the order of position, with their payloads in a chunk of their own; returns how many."""
        holder.insert(gathered(self.chunks, rows))
        return len(rows)

    def _keep_unstored(self, holder: SortedRuns, rows: RowRefs) -> None:
        """Rows that a segment holds are let go: they are loaded again when the frontier comes to them."""
        stored = self.is_stored(rows)
        self.chunks.release(rows.chunk[stored])
        holder.insert(rows.where(~stored))

    def _only(self, *sources: int) -> Bools:
        mask: Bools = np.zeros(len(self.owned), dtype=np.bool_)
        mask[list(sources)] = True
        return mask

    def _is_overtaken(self, rows: RowRefs) -> Bools:
        return self.done.is_passed(rows) | rows.at_or_below(self.position)
