"""Ingest: a batch goes into the store; the flow control of the stream."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np
import pyarrow as pa

from timerstore.cancels.cancels import Judged, Known
from timerstore.cancels.effects import NoRoom, effects_of
from timerstore.cancels.id_index import Timers
from timerstore.errors import Closed, Misuse
from timerstore.memory.pending import Tally, tally_timers
from timerstore.memory.sorted_runs import RowRefs, select
from timerstore.operations.by_origin import pending_of, rows_of, uncopyable_of
from timerstore.operations.state import StoreState
from timerstore.rows.entry import Kind, payload_of
from timerstore.rows.position import OFFSET_MAX, Bools, Int64s, pack
from timerstore.rows.sources import SourceName

UNBOUNDED: Final = sys.maxsize


class Ingest:
    """See the module. Batches are taken in one after the other."""

    def __init__(self, state: StoreState) -> None:
        self._state = state
        self._one_at_a_time = threading.Lock()

    def append(
        self, entries: pa.Table, ends: Mapping[SourceName, int], now_ms: int, beat: Callable[[], None] = lambda: None
    ) -> int:
        """Take in a batch of `entry.ENTRY` rows, read at `now_ms`; `ends` are the exclusive end offsets it
        reaches, by source.

        Blocks while there is no room, and calls `beat` meanwhile, each second or more often. Rows below the next
        expected offset (a batch seen before) and finished ones are dropped. Returns how many rows were new. Raises
        Closed when the store is closed meanwhile; Corrupt, DiskFailure where a cancel by origin has segments read;
        Inconsistent after a change that failed.
        """
        taken = 0
        with self._one_at_a_time:
            while True:
                try:
                    return taken + self._append(entries, ends, now_ms, None, beat)
                except NoRoom as no_room:
                    below, first_ends, above = self._cut(entries, ends, no_room.cuts)
                    taken += self._append(below, first_ends, now_ms, UNBOUNDED, beat)
                    entries = above

    def _cut(
        self, entries: pa.Table, ends: Mapping[SourceName, int], cuts: Mapping[int, int]
    ) -> tuple[pa.Table, dict[SourceName, int], pa.Table]:
        """The rows below the cuts, by source, with their ends, and the others."""
        sources = self._state.sources
        rows = select(entries, sources)
        limits = np.full(len(sources), OFFSET_MAX + 1, dtype=np.int64)
        limits[list(cuts)] = list(cuts.values())
        is_below: Bools = np.zeros(len(entries), dtype=np.bool_)
        is_below[rows.row] = rows.offset < limits[rows.source]
        first_ends = {name: min(end, int(limits[sources.index(*name)])) for name, end in ends.items()}
        return entries.filter(pa.array(is_below)), first_ends, entries.filter(pa.array(~is_below))

    def _append(
        self,
        entries: pa.Table,
        ends: Mapping[SourceName, int],
        now_ms: int,
        room_bytes: int | None,
        beat: Callable[[], None],
    ) -> int:
        state, resident = self._state, self._state.resident
        everything = select(entries, state.sources)
        payload = payload_of(entries)
        with state.lock:
            self._wait_for_room(beat)
            reached = resident.ends.copy()
            for name, end in ends.items():
                source = state.sources.index(*name)
                reached[source] = max(int(reached[source]), end)
            fresh = everything[everything.offset >= resident.ends[everything.source]]
            if not (fresh.offset < reached[fresh.source]).all():
                raise Misuse("a batch has rows beyond the end offsets that it is said to reach", code="DB-7003")
            # Stays so until the rows are placed: what is not ingested yet cannot become finished.
            unfinished = ~resident.finished(fresh)
            parts = resident.parts(fresh[unfinished].sorted())
            assignments = state.assignments
            known = state.cancels.known([s.ids for s in state.timerlog if s.ids is not None])
            if room_bytes is None:
                room_bytes = state.limits.overtaken_bytes - state.commands.bytes
            waiting = state.commands.moved_ids()
        # Copies and counts are made, and cancels looked up, without the lock: delivery goes on.
        judged = state.cancels.judge(
            known, payload, fresh, unfinished, state.finished, pending_of(state), partial(uncopyable_of, state), now_ms
        )
        chunks = [(part, payload.take(pa.array(part.row))) for part in parts]
        covered = None if judged is None else judged.covered
        covered_rows = np.zeros(len(fresh), np.bool_) if judged is None else judged.covered[fresh.row]
        is_over = partial(_is_over, state, known)
        is_pending, seeds = unfinished & ~covered_rows, state.commands.seeds
        of_origins = partial(rows_of, state)
        effects = effects_of(seeds, known, payload, fresh, is_pending, is_over, of_origins, room_bytes, waiting)
        tallies = _tallies(chunks, covered)
        with state.changing():
            if state.assignments != assignments:  # what was given up meanwhile is not ours to keep
                chunks = [_owned(part, chunk, resident.owned) for part, chunk in chunks]
                tallies = _tallies(chunks, covered)
                if judged is not None:
                    judged = _judged_owned(judged, resident.owned)
                effects = [each for each in effects if resident.owned[each.source]]
            nearest_ms = resident.ready.first_at_ms()
            resident.ends = reached
            for part, chunk in chunks:
                resident.add(part, chunk)
            for timers in tallies:
                state.pending.add(timers)
            if judged is not None:
                self._cancel(judged)
            read = state.commands.in_transit.remove(_copied(fresh, payload))
            if state.loan is not None:
                state.loan.copies_read.append(read)
            state.commands.take_in(effects, resident.finished, state.is_unread)
            state.bound_ready_rows()
            first_ms = resident.ready.first_at_ms()
            is_nearer = first_ms is not None and (nearest_ms is None or first_ms < nearest_ms)
            if is_nearer or len(resident.overtaken) or state.needs_offset_commit():
                state.wake()
        return len(fresh)

    def has_room(self) -> bool:
        """Whether a batch may come in. Room is made by a flush, or by delivery; where neither is possible there is
        nothing to wait for.

        (Delivery waits until ingest has caught up with the committed O: before that only a flush can make room.)
        """
        state = self._state
        with state.lock:
            limits, resident = state.limits, state.resident
            delivers = state.is_caught_up()
            flushes = bool((resident.covered() > resident.stored)[resident.owned].any())
            is_full = resident.memtable_bytes >= limits.memtable_bytes_max and (delivers or flushes)
            is_flooded = resident.overtaken.bytes + state.commands.bytes >= limits.overtaken_bytes and delivers
            return not (is_full or is_flooded or state.cancels.tombstones.memory_rows >= 2 * limits.tombstone_rows)

    def _cancel(self, judged: Judged) -> None:
        """Tombstones, and what they cover leaves the counts."""
        state = self._state
        hits, lent = state.cancels.take_in(judged, state.resident, state.timers_in_hand())
        state.pending.remove(hits)
        if state.loan is not None:
            state.loan.cancelled.append(lent)

    def _wait_for_room(self, beat: Callable[[], None]) -> None:
        state = self._state
        while not (state.is_closed or state.is_intake_closed):
            beat()
            if self.has_room():
                return
            state.changed.wait(1.0)
        raise Closed("the store was closed while a batch waited for room")


def _is_over(state: StoreState, known: Known, timers: Timers) -> Bools:
    """Which of the timers, by id, are finished, or covered by tombstones that are known."""
    return state.finished(timers) | state.cancels.are_covered(known.lookup, timers)


def _copied(fresh: RowRefs, payload: pa.RecordBatch) -> Int64s:
    """The originals of the copies among these rows, packed."""
    origin = payload.column("origin").to_numpy()[fresh.row]
    is_copy = (payload.column("kind").to_numpy()[fresh.row] == Kind.TIMER) & (origin != fresh.offset)
    return pack(fresh.source[is_copy], origin[is_copy])


def _tallies(chunks: list[tuple[RowRefs, pa.RecordBatch]], covered: Bools | None) -> list[Tally]:
    return [tally_timers(part.at, chunk, None if covered is None else covered[part.row]) for part, chunk in chunks]


def _owned(part: RowRefs, chunk: pa.RecordBatch, owned: Bools) -> tuple[RowRefs, pa.RecordBatch]:
    mask = owned[part.source]
    return part[mask], chunk.filter(pa.array(mask))


def _judged_owned(judged: Judged, owned: Bools) -> Judged:
    """A tombstone of a source that is given up would hide from `Assignment.settle` what was counted of it."""
    timers, tombstones = judged.timers, judged.tombstones
    return replace(judged, timers=timers[owned[timers.source]], tombstones=tombstones[owned[tombstones.source]])
