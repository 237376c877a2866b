"""What the store says of itself, for metrics, progress and alarms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from timerstore.memory.pending import SLOT_MS
from timerstore.memory.sorted_runs import RowRefs
from timerstore.operations.state import StoreState
from timerstore.rows.position import AT_MAX

FIRST_ROWS: Final = 16
"""Looked at in a run for the oldest; four times as many then, and so on. Only a flood of messages that are dated back
needs more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """A consistent look at the store. `pending_by_target` has "" for the log's default target;
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

    @classmethod
    def sum(cls, parts: Sequence[Stats], edges: int) -> Stats:
        """Of several stores, asked for so many edges: sums, and the oldest checkpoint."""
        by_target: Counter[str] = Counter()
        for part in parts:
            by_target.update(part.pending_by_target)
        until = tuple(sum(each) for each in zip(*(part.pending_until for part in parts), strict=True))
        sums = {name: sum(getattr(part, name) for part in parts) for name in _SUMMED}
        written = [part.checkpoint_ms for part in parts]
        return cls(
            pending_by_target=dict(by_target),
            pending_until=until if parts else (0,) * edges,
            checkpoint_ms=min((ms for ms in written if ms is not None), default=None),
            **sums,
        )


_SUMMED: Final = (
    *("pending", "recurring", "ready_rows", "ready_rows_bytes", "memtable_bytes", "physical_bytes"),
    *("segments", "segment_bytes", "tombstones", "cancelled"),
)


def look(state: StoreState, edges_ms: Sequence[int]) -> Stats:
    """Everything as it is now; `pending_until` answers for each of `edges_ms` (epoch ms)."""
    with state.lock:
        resident, pending = state.resident, state.pending
        return Stats(
            pending=len(pending),
            pending_by_target=pending.by_target(),
            recurring=pending.recurring(),
            pending_until=pending.histogram.until(*edges_ms),
            ready_rows=len(resident.ready),
            ready_rows_bytes=resident.ready.bytes,
            memtable_bytes=resident.memtable.bytes,
            physical_bytes=resident.chunks.physical_bytes,
            segments=len(state.timerlog),
            segment_bytes=state.timerlog.bytes,
            tombstones=len(state.cancels.tombstones),
            cancelled=state.cancels.cancelled,
            checkpoint_ms=state.checkpoint_ms,
        )


def waits_since_ms(state: StoreState) -> int | None:
    """Since when the oldest of what is pending waits: since it was due, or since it was written where that is later (a
    producer may date a message back by years; it is delivered at once, and late by nothing). In the future where
    nothing is due, None where nothing is pending.

    Rows in memory are looked at. Rows on disk alone, beyond the frontier, are overdue too when no window is loaded:
    they are seen in slots of ten seconds, so that the answer may be later by as much.
    """
    with state.lock:
        resident, first_ms = state.resident, AT_MAX
        for run in (*resident.ready, *resident.memtable):
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
    after_ms = state.resident.frontier.at_ms
    counted_ms = state.pending.histogram.first_ms(after_ms)
    stored = [each.timers.slots[each.timers.slots >= after_ms // SLOT_MS] for each in state.timerlog]
    slots = [int(found[0]) for found in stored if len(found)]
    return AT_MAX if counted_ms is None or not slots else max(counted_ms, (min(slots) + 1) * SLOT_MS - 1)


@dataclass(frozen=True, slots=True)
class Trimmed:
    """Whether there are unfinished rows whose records are gone from the log, and which are in this store alone; whether
    some are in memory alone; and whether a flush would store some of these."""

    is_any: bool = False
    is_unstored: bool = False
    can_flush: bool = False


def trimmed(state: StoreState, log_start: int) -> Trimmed:
    """`log_start` is the first offset that the log still has.

    Rows in memory are looked at one by one; of a segment only the footer is, which names one unfinished row, the last.
    That says too little rather than too much: no alarm is false, but one may come a segment's length late.
    """
    with state.lock:
        resident = state.resident
        lasts = (segment.last for segment in state.timerlog if segment.last.offset < log_start)
        is_any = not all(resident.committed.finishes(last.offset + 1, last) for last in lasts)
        is_unstored = can_flush = False
        for rows in _in_memory(state):
            gone = rows[rows.offset < log_start]
            is_any |= len(gone) > 0
            unstored = gone[~resident.is_stored(gone)]
            is_unstored |= len(unstored) > 0
            can_flush |= bool((unstored.offset < resident.covered()).any())
        return Trimmed(is_any, is_unstored, can_flush)


def may_hold_below(state: StoreState, bound: int) -> bool:
    """Whether something below this offset may be unfinished: said too often rather than too seldom."""
    with state.lock:
        position = state.resident.position
        if any(segment.begin < bound and segment.last > position for segment in state.timerlog):
            return True
        return any(bool((rows.offset < bound).any()) for rows in (*_in_memory(state), state.rows_on_loan()))


def _in_memory(state: StoreState) -> Iterator[RowRefs]:
    resident = state.resident
    for holder in (resident.ready, resident.memtable, resident.overtaken):
        yield holder.all()
