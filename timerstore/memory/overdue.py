"""Since when the oldest of what is pending waits: since it was due, or since it was written where that is later.

A producer may date a message back by years; it is delivered at once, and late by nothing. Rows in memory are looked at
themselves. Rows that are on disk alone, those beyond the loaded frontier and those of sources that are held, are seen
in counts by slots of ten seconds: they are overdue too when no window is loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from timerstore.memory.pending import Pending
from timerstore.memory.sorted_runs import RowRefs
from timerstore.memory.wheel import SLOT_MS
from timerstore.rows.position import AT_MAX

if TYPE_CHECKING:
    from timerstore.store import TimerStore

FIRST_ROWS: Final = 16
"""Looked at in a run; four times as many then, and so on. Only a flood of dated back messages needs more."""


def waits_since_ms(store: TimerStore, pending: Pending) -> int | None:
    """See the module; in the future where nothing is due, None where nothing is pending. Of what is not in memory,
    rather too late by up to ten seconds. The caller holds the lock."""
    resident = store.resident
    first = AT_MAX
    for run in (*resident.ready, *resident.memtable, *resident.withheld):
        first = _earliest(store, run, first)
    for rows in (resident.overtaken.all(), store.transaction_rows()):
        nearer = rows[rows.at < first]
        if len(nearer):
            first = min(first, _waits(store, nearer))
    first = min(first, _beyond(store, pending))
    return None if first == AT_MAX else first


def _earliest(store: TimerStore, rows: RowRefs, known_ms: int) -> int:
    """The smallest of max(at, ts) of rows in the order of position, or what is known if that is smaller."""
    start, count = 0, FIRST_ROWS
    while start < len(rows) and rows.at[start] < known_ms:
        part = rows[start : start + count]
        known_ms = min(known_ms, _waits(store, part))
        start, count = start + count, 4 * count
    return known_ms


def _waits(store: TimerStore, rows: RowRefs) -> int:
    return int(np.maximum(rows.at, store.resident.chunks.timestamps(rows.chunk, rows.row)).min())


def _beyond(store: TimerStore, pending: Pending) -> int:
    """Something pending was counted there, and a segment has something there."""
    resident = store.resident
    held = [resident.committed[source].position for source in resident.held_sources()]
    after_ms = min((resident.frontier, *held)).at_ms
    counted_ms = pending.wheel.first_ms(after_ms)
    stored = [each.timers.slots[each.timers.slots >= after_ms // SLOT_MS] for each in store.timerlog]
    slots = [int(found[0]) for found in stored if len(found)]
    if counted_ms is None or not slots:
        return AT_MAX
    return max(counted_ms, (min(slots) + 1) * SLOT_MS - 1)
