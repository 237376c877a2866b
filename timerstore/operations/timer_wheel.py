"""TimerWheel: the next due rows, and the load window that memory needs before they are due.

RocketMQ's wheel has a slot for each second, which points into the TimerLog. Kafka's has levels, and an overflow wheel
whose buckets move down a level when the clock comes near them. This one has two levels, divided by the frontier L, a
position:

    ready rows      every pending row in (P, L], in order: the next due time is known to the millisecond
    beyond L        the memtable's rows, and segments on disk. A histogram in slots of ten seconds shows empty stretches
                    of segments; the first position and the bytes of each row group give the largest window that fits
                    into memory. Neither needs a read.

The counts beyond L are of physical rows, with finished and cancelled ones: they may be too high, never too low
(invariant I3). `PendingHistogram`, which cancels lower, is for gauges alone. With a horizon of 60 s:

    now       what happens                                      L         ready  segments  then
    10:00:00  a timer for 10:00:40 is ingested                  10:01:00  1      0         next_due_ms is 10:00:40
    10:00:05  a timer for 10:02:15 is ingested, and flushed     10:01:00  1      1         slot 10:02:10 has 1 row
    10:00:30  L is near: no slot up to 10:01:30 has a row       10:01:30  1      1         no read
    10:00:40  the first is due, and is taken                    10:01:30  0      1         next_due_ms is None
    10:01:30  L is near: a slot up to 10:02:30 has a row        10:01:30  0      1         next_window names the segment
              its rows up to there are read, and admitted       10:02:30  1      1         next_due_ms is 10:02:15

A row of a window is either in a segment that is read for it, or in the memtable when the window is admitted. A flush in
between would take unread rows out of the memtable, so `admit` refuses a window into which a newer segment reaches.
"""

from __future__ import annotations

from typing import Final

import pyarrow as pa

from timerstore.log.timerlog import Window
from timerstore.memory.chunks import ROW_REFERENCE_BYTES
from timerstore.memory.sorted_runs import select
from timerstore.operations.state import StoreState
from timerstore.rows.entry import payload_of
from timerstore.rows.position import Position, end_of

NEAR_MS: Final = 2_000
"""The reach of the first window, from now on, when the frontier is behind the clock."""


class TimerWheel:
    """See the module. The dispatcher calls `next_due_ms`, the maintenance thread the others."""

    def __init__(self, state: StoreState) -> None:
        self._state = state

    def next_due_ms(self) -> int | None:
        """See `TimerStore.next_due_ms`."""
        resident = self._state.resident
        with self._state.lock:
            waits = (resident.overtaken.first_offset() or 0) >= self._state.waiting_offset()
            overtaken_ms = self._state.commands.wait_until_ms if waits else resident.overtaken.first_at_ms()
            candidates = (resident.ready.first_own_ms(), overtaken_ms)
            return min((at for at in candidates if at is not None), default=None)

    def is_behind(self, now_ms: int) -> bool:
        """Whether the frontier is near enough to load the next window."""
        return self._state.resident.frontier.at_ms < now_ms + self._state.limits.horizon_ms // 2

    def next_window(self, now_ms: int) -> Window | None:
        """The next window to read; None if the frontier is far enough ahead, or memory has no room.

        A stretch without rows in any segment is passed at once (invariant I3).
        """
        limits, resident = self._state.limits, self._state.resident
        with self._state.lock:
            if not self.is_behind(now_ms):
                return None
            room = self._room()
            if room < min(limits.window_bytes, self._state.loaded_bytes_max) // 4 and len(resident.ready):
                return None
            timerlog = self._state.timerlog
            upper, near = end_of(now_ms + limits.horizon_ms), end_of(now_ms + min(NEAR_MS, limits.horizon_ms))
            if resident.frontier.at_ms < now_ms and timerlog.segments_between(resident.frontier, near):
                upper = near  # after a start or a release due rows wait for this load, so it is small
            window = timerlog.window(resident.frontier, upper, room)
            if resident.memtable.bytes > room:
                fits = resident.memtable.largest_within(window.upper, room)
                if fits is not None:  # the window reaches at least the memtable's first row
                    upper = max(fits, min(window.upper, resident.memtable.first()))
                    segments = timerlog.segments_between(window.lower, upper)
                    window = Window(lower=window.lower, upper=upper, segments=segments)
            if not window.segments:
                with self._state.changing():
                    self._advance(window.upper)
                return None
            return window

    def admit(self, window: Window, entries: pa.Table) -> bool:
        """Take in the rows read for a window: `entry.ENTRY`, in any order; rows outside the window are ignored.

        Without enough room for all of them, the frontier moves to the last row that fits. Returns False if the frontier
        has moved back meanwhile, or a new segment reaches into the window: the caller asks for the next window again.
        Raises Inconsistent.
        """
        resident = self._state.resident
        rows = select(entries).sorted()
        rows = rows[rows.at_or_below(window.upper) & ~rows.at_or_below(window.lower)]
        payload = payload_of(entries)
        with self._state.lock:
            if not self._is_current(window):
                return False
            # No row of the window can become finished meanwhile, because all are above P.
            rows = rows[~resident.finished(rows)]
            row_bytes = -(-payload.nbytes // max(1, payload.num_rows)) + ROW_REFERENCE_BYTES
            fitting = max(1, self._room() // row_bytes)
        upper = window.upper
        if fitting < len(rows):
            rows = rows[:fitting]
            upper = rows.last()
        payload = payload.take(pa.array(rows.row))
        with self._state.lock:
            if not self._is_current(window):
                return False
            with self._state.changing():
                self._advance(upper)
                if not self._state.is_closed:  # a closed store holds no memory of the others
                    resident.add(rows, payload)
            return True

    def _room(self) -> int:
        """The bytes that a window may load. Loads leave a part of the budget to ingest, or each batch would push the
        window out again."""
        room = self._state.loaded_bytes_max - self._state.resident.ready.bytes
        return min(room, self._state.limits.window_bytes)

    def _is_current(self, window: Window) -> bool:
        """Whether the rows read for a window are still all rows of segments in it."""
        reaching = self._state.timerlog.segments_between(window.lower, window.upper)
        return self._state.resident.frontier == window.lower and all(s in window.segments for s in reaching)

    def _advance(self, upper: Position) -> None:
        self._state.resident.advance_frontier(upper)
        self._state.wake()
