"""What the store says of itself, for metrics, progress and alarms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from timerstore.memory.pending import SLOT_MS
from timerstore.memory.sorted_runs import RowRefs
from timerstore.operations.state import StoreState
from timerstore.rows.position import AT_MAX, Bools, Int64s, Positions
from timerstore.rows.sources import SourceName

FIRST_ROWS: Final = 16
"""Looked at in a run for the oldest; four times as many then, and so on. Only a flood of messages that are dated back
needs more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """A consistent look at the store. `pending_by_target` has "" for a delay topic's default target;
    `recurring` is how many of the pending come again, one for each schedule; `cancelled` counts from the opening of the
    store."""

    pending: int
    pending_by_target: dict[str, int]
    recurring: int
    pending_until: tuple[int, ...]
    ready_rows: int
    ready_rows_bytes: int
    memtable_bytes: int
    physical_bytes: int
    segments: int
    segment_bytes: int
    tombstones: int
    cancelled: int
    checkpoint_ms: int | None
    ingested: dict[SourceName, int]
    committed: dict[SourceName, int]


def look(state: StoreState, edges_ms: Sequence[int]) -> Stats:
    """Everything as it is now; `pending_until` answers for each of `edges_ms` (epoch ms)."""
    with state.lock:
        resident, pending = state.resident, state.pending
        owned = [(state.sources.name(source), source) for source in resident.committed]
        return Stats(
            pending=len(pending),
            pending_by_target=pending.by_target(),
            recurring=pending.recurring(),
            pending_until=pending.histogram.until(*edges_ms),
            ready_rows=len(resident.ready),
            ready_rows_bytes=resident.ready.bytes,
            memtable_bytes=resident.memtable_bytes,
            physical_bytes=resident.chunks.physical_bytes,
            segments=len(state.timerlog),
            segment_bytes=state.timerlog.bytes,
            tombstones=len(state.cancels.tombstones),
            cancelled=state.cancels.cancelled,
            checkpoint_ms=state.checkpoint_ms,
            ingested={name: int(resident.ends[source]) for name, source in owned},
            committed={name: resident.committed[source].offset for name, source in owned},
        )


def waits_since_ms(state: StoreState) -> int | None:
    """Since when the oldest of what is pending waits: since it was due, or since it was written where that is later (a
    producer may date a message back by years; it is delivered at once, and late by nothing). In the future where
    nothing is due, None where nothing is pending.

    Rows in memory are looked at. Rows on disk alone, beyond the frontier or of sources that are held, are overdue too
    when no window is loaded: they are seen in slots of ten seconds, so that the answer may be later by as much.
    """
    with state.lock:
        resident, first_ms = state.resident, AT_MAX
        for run in (*resident.ready, *resident.memtable, *resident.withheld):
            start, count = 0, FIRST_ROWS
            while start < len(run) and run.at[start] < first_ms:
                first_ms = min(first_ms, _waits_since_ms(state, run[start : start + count]))
                start, count = start + count, 4 * count
        for rows in (resident.overtaken.all(), state.rows_on_loan()):
            nearer = rows[rows.at < first_ms]
            if len(nearer):
                first_ms = min(first_ms, _waits_since_ms(state, nearer))
        first_ms = min(first_ms, _stored_since_ms(state))
        return None if first_ms == AT_MAX else first_ms


def _waits_since_ms(state: StoreState, rows: RowRefs) -> int:
    """The smallest of max(at, ts)."""
    return int(np.maximum(rows.at, state.resident.chunks.timestamps(rows.chunk, rows.row)).min())


def _stored_since_ms(state: StoreState) -> int:
    """From when on something pending was counted beyond what is loaded, and a segment has something there."""
    resident = state.resident
    held = [resident.committed[source].position for source in resident.held_sources()]
    after_ms = min((resident.frontier, *held)).at_ms
    counted_ms = state.pending.histogram.first_ms(after_ms)
    stored = [each.timers.slots[each.timers.slots >= after_ms // SLOT_MS] for each in state.timerlog]
    slots = [int(found[0]) for found in stored if len(found)]
    return AT_MAX if counted_ms is None or not slots else max(counted_ms, (min(slots) + 1) * SLOT_MS - 1)


def trimmed(state: StoreState, log_starts: Mapping[SourceName, int]) -> list[SourceName]:
    """The owned sources with unfinished rows whose records are gone from Kafka, and are in this store alone;
    `log_starts` are the first offsets that Kafka still has.

    Rows in memory are looked at one by one; of a segment only the footer is, which names one unfinished row of each
    source, the last. That says too little rather than too much: no alarm is false, but one may come a segment's length
    late.
    """
    with state.lock:
        resident, sources, starts = state.resident, state.sources, _by_source(state, log_starts)
        last = [position for segment in state.timerlog for position in segment.largest.values()]
        at = np.array([position.at_ms for position in last], dtype=np.int64)
        stored = Positions(at, np.array([position.seq for position in last], dtype=np.int64))
        gone = np.zeros(len(sources), dtype=np.bool_)
        gone[stored.source[~resident.finished(stored) & (stored.offset < starts[stored.source])]] = True
        for rows in _in_memory(state):
            gone[rows.source[rows.offset < starts[rows.source]]] = True
        return [sources.name(source) for source in np.flatnonzero(gone).tolist()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unstored:
    """Sources whose unfinished rows are in memory alone, though their records are gone from Kafka; `can_flush`: a flush
    would store some of them."""

    sources: list[SourceName]
    can_flush: bool


def trimmed_in_memory(state: StoreState, log_starts: Mapping[SourceName, int]) -> Unstored:
    """What of `trimmed` would be lost with this process. Rows at or above the committed O have to wait for that."""
    with state.lock:
        resident, sources = state.resident, state.sources
        starts, covered = _by_source(state, log_starts), resident.covered()
        only: Bools = np.zeros(len(sources), dtype=np.bool_)
        can_flush = False
        for rows in _in_memory(state):
            rows = rows[(rows.offset < starts[rows.source]) & ~resident.is_stored(rows)]
            only[rows.source] = True
            can_flush = can_flush or bool((rows.offset < covered[rows.source]).any())
        return Unstored(sources=[sources.name(each) for each in np.flatnonzero(only).tolist()], can_flush=can_flush)


def may_hold_below(state: StoreState, bounds: Mapping[SourceName, int]) -> set[SourceName]:
    """The sources of which something below these offsets may be unfinished: too many rather than too few."""
    with state.lock:
        resident, sources = state.resident, state.sources
        limits = _by_source(state, bounds)
        found: Bools = np.zeros(len(sources), dtype=np.bool_)
        for segment in state.timerlog:
            for source, last in segment.largest.items():
                owned = resident.committed.get(source)
                if owned is not None and segment.begins[source] < limits[source] and last > owned.position:
                    found[source] = True
        for rows in (*_in_memory(state), state.rows_on_loan()):
            found[rows.source[rows.offset < limits[rows.source]]] = True
        return {sources.name(each) for each in np.flatnonzero(found).tolist()}


def _by_source(state: StoreState, offsets: Mapping[SourceName, int]) -> Int64s:
    """Of the owned sources; 0 where nothing is said."""
    found: Int64s = np.zeros(len(state.sources), dtype=np.int64)
    for source in state.resident.committed:
        found[source] = offsets.get(state.sources.name(source), 0)
    return found


def _in_memory(state: StoreState) -> Iterator[RowRefs]:
    resident = state.resident
    for holder in (resident.ready, resident.memtable, resident.withheld, resident.overtaken):
        yield holder.all()
