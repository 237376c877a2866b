"""Figures of a store, for metrics, progress and alarms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from timerstore.memory.pending import SLOT_MS
from timerstore.memory.sorted_runs import RowRefs
from timerstore.operations.state import StoreState
from timerstore.rows.position import AT_MAX

FIRST_ROWS: Final = 16
"""Rows of a run in the first look for the oldest one; each further look has four times as many. Only a flood of
messages that are dated back needs more than one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Consistent figures of one moment. `pending_by_target` has "" for the log's default target. `recurring` is the
    number of pending recurring messages, one for each schedule. `cancelled` counts since the store was opened."""

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
    is_behind: bool
    """Whether a new checkpoint would cover more."""

    @classmethod
    def sum(cls, parts: Sequence[Stats], edges: int) -> Stats:
        """The sums of several stores, with the oldest checkpoint of those that are behind, or else the latest of all.
        `edges` is the length of `pending_until`."""
        by_target: Counter[str] = Counter()
        for part in parts:
            by_target.update(part.pending_by_target)
        until = tuple(sum(each) for each in zip(*(part.pending_until for part in parts), strict=True))
        sums = {name: sum(getattr(part, name) for part in parts) for name in _SUMMED}
        written_ms = [part.checkpoint_ms for part in parts if part.checkpoint_ms is not None]
        behind_ms = [part.checkpoint_ms for part in parts if part.checkpoint_ms is not None and part.is_behind]
        return cls(
            pending_by_target=dict(by_target),
            pending_until=until if parts else (0,) * edges,
            checkpoint_ms=min(behind_ms) if behind_ms else max(written_ms, default=None),
            is_behind=bool(behind_ms),
            **sums,
        )


_SUMMED: Final = (
    *("pending", "recurring", "ready_rows", "ready_rows_bytes", "memtable_bytes", "physical_bytes"),
    *("segments", "segment_bytes", "tombstones", "cancelled"),
)


def look(state: StoreState, edges_ms: Sequence[int]) -> Stats:
    """The figures of now; `pending_until` has one count for each of `edges_ms` (epoch ms)."""
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
            is_behind=resident.covered() != (state.checkpoint.offset or 0),
        )


def waits_since_ms(state: StoreState) -> int | None:
    """The time since which the oldest pending message waits (epoch ms): its due time, or its write time if that is
    later. (A producer may date a message back by years; it is delivered at once, without lateness.) A time in the
    future if no message is due; None if no message is pending. It may be that of another log, whose ready rows are
    merged with this one's.

    For rows in memory it is exact. Rows beyond the frontier, on disk only, may be overdue before their window is
    loaded; they count by slots of ten seconds, so that the result may be ten seconds late.
    """
    with state.lock:
        resident, first_ms = state.resident, AT_MAX
        for run in (*resident.ready.with_others(), *resident.memtable):
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
    """The time (ms) from which rows beyond the frontier wait: the later one of the first counted pending timer there,
    and of the end of the first slot in a stretch of a segment; AT_MAX if one is missing. (A closed gap has slots
    without rows. Such a slot makes the time too early only if a row in memory is counted in it; that row's own time is
    earlier anyway.)"""
    after_ms = state.resident.frontier.at_ms
    counted_ms = state.pending.histogram.first_ms(after_ms)
    found = [each.stretches.first_from(after_ms // SLOT_MS) for each in state.timerlog]
    slots = [slot for slot in found if slot is not None]
    return AT_MAX if counted_ms is None or not slots else max(counted_ms, (min(slots) + 1) * SLOT_MS - 1)


@dataclass(frozen=True, slots=True)
class Trimmed:
    """Whether this store alone has unfinished rows, because their records are gone from the log; whether some of them
    are in memory only; and whether a flush would store any of those."""

    is_any: bool = False
    is_unstored: bool = False
    can_flush: bool = False


def trimmed(state: StoreState, log_start: int) -> Callable[[RowRefs], Trimmed]:
    """Unfinished rows that only this store has; `log_start` is the log's first offset. The state is that of now; the
    result examines it without the lock, and gets the merged rows below `log_start`.

    Rows in memory are examined one by one. Of a segment only the last row is, from the footer. So no alarm is false,
    but one may be late by a segment's length.
    """
    with state.lock:
        resident = state.resident
        lasts = (segment.last for segment in state.timerlog if segment.last.offset < log_start)
        is_any = not all(resident.committed.finishes(last.offset + 1, last) for last in lasts)
        rows, stored, covered = _in_memory(state), resident.stored, resident.covered()

    def examine(merged: RowRefs) -> Trimmed:
        offsets = [each.offset[each.offset < log_start] for each in (merged, *rows)]
        unstored = [each[each >= stored] for each in offsets]
        return Trimmed(
            is_any=is_any or any(map(len, offsets)),
            is_unstored=any(map(len, unstored)),
            can_flush=any(bool((each < covered).any()) for each in unstored),
        )

    return examine


def may_hold_below(state: StoreState, bound: int) -> Callable[[RowRefs], bool]:
    """Whether rows below this offset may be unfinished. It may be wrongly true, never wrongly false. The result: as
    that of `trimmed`."""
    with state.lock:
        position = state.resident.position
        is_stored = any(segment.begin < bound and segment.last > position for segment in state.timerlog)
        rows = [state.rows_on_loan(), *_in_memory(state)]
    return lambda merged: is_stored or any(bool((each.offset < bound).any()) for each in (merged, *rows))


def _in_memory(state: StoreState) -> list[RowRefs]:
    """The rows in memory of this log, but for merged and lent ones."""
    resident = state.resident
    return [*resident.ready.own_runs(), *resident.memtable, resident.overtaken.all()]
