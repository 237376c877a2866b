"""TimerWheel: what is due next, and which stretch of time is loaded before it is due.

RocketMQ's wheel has a slot for each second, which points into the TimerLog; Kafka's has levels, and an overflow wheel
whose buckets move down a level when the clock comes near them. Here are two levels, and the loaded frontier L, a
position, divides them:

    ready rows      every pending row in (P, L], in order: what is due next is known to the millisecond
    beyond L        the memtable's rows, and segments on disk: of these a histogram in slots of ten seconds, and the
                    first position and the bytes of each row group; it says that a stretch is empty, or how far it fits
                    into memory, without reading

The counts beyond L are of physical rows, finished and cancelled ones too: they may say too much and never too little
(invariant I3). `PendingHistogram`, which cancels lower, is for gauges alone. With a horizon of 60 s:

    now       what happens                                      L         ready  segments  then
    10:00:00  a timer for 10:00:40 is ingested                  10:01:00  1      0         next_due_ms is 10:00:40
    10:00:05  a timer for 10:02:15 is ingested, and flushed     10:01:00  1      1         slot 10:02:10 has 1 row
    10:00:30  L is near: no slot up to 10:01:30 has a row       10:01:30  1      1         nothing was read
    10:00:40  the first is due, and is taken                    10:01:30  0      1         next_due_ms is None
    10:01:30  L is near: a slot up to 10:02:30 has a row        10:01:30  0      1         next_window names the segment
              its rows up to there are read, and admitted       10:02:30  1      1         next_due_ms is 10:02:15

A row that a window needs is either in a segment that is read for it, or still in the memtable when it is admitted. A
flush in between would take rows out of the memtable that were not read; so `admit` refuses a window into which a newer
segment reaches.
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
"""How far ahead is loaded first when the frontier lies behind the clock."""


class TimerWheel:
    """See the module. `next_due_ms` is the dispatcher's; the thread of the maintenance calls the others."""

    def __init__(self, state: StoreState) -> None:
        self._state = state

    def next_due_ms(self) -> int | None:
        resident = self._state.resident
        with self._state.lock:
            candidates = (resident.next_ready_ms(), resident.overtaken.first_at_ms())
            return min((at for at in candidates if at is not None), default=None)

    def is_behind(self, now_ms: int) -> bool:
        """Whether the frontier is so near that windows are to be loaded."""
        return self._state.resident.frontier.at_ms < now_ms + self._state.limits.horizon_ms // 2

    def next_window(self, now_ms: int) -> Window | None:
        """The next window to read, or None when the frontier is far enough ahead or memory has no room.

        A stretch in which no segment has a row is passed here at once (invariant I3).
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
                upper = near  # after a start or a release: what is due waits for this, so little is loaded first
            window = timerlog.window(resident.frontier, upper, room)
            if resident.memtable.bytes > room:
                fits = resident.memtable.largest_within(window.upper, room)
                if fits is not None:  # to the memtable's first row at least
                    upper = max(fits, min(window.upper, resident.memtable.first()))
                    segments = timerlog.segments_between(window.lower, upper)
                    window = Window(lower=window.lower, upper=upper, segments=segments)
            if not window.segments:
                with self._state.changing():
                    self._advance(window.upper)
                return None
            return window

    def admit(self, window: Window, entries: pa.Table) -> bool:
        """Take in what was read for a window (rows of `entry.ENTRY`, any order; rows outside it are
        ignored).

        Where there is not enough room for all of it, the frontier moves to the last row that fits. False when the
        frontier has moved back meanwhile, or a new segment reaches into the window: it has to be asked for again.
        """
        resident = self._state.resident
        rows = select(entries).sorted()
        rows = rows[rows.at_or_below(window.upper) & ~rows.at_or_below(window.lower)]
        payload = payload_of(entries)
        with self._state.lock:
            if not self._is_current(window):
                return False
            # Nothing in the window can become finished meanwhile: it lies above P.
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
                resident.add(rows, payload)
            return True

    def _room(self) -> int:
        """Bytes that a window may load. Loading stops short of the budget: the rest is for what ingest brings, else
        each batch would push the window out again."""
        room = self._state.loaded_bytes_max - self._state.resident.ready_bytes
        return min(room, self._state.limits.window_bytes)

    def _is_current(self, window: Window) -> bool:
        """Whether what was read for a window is still all that segments have in it."""
        reaching = self._state.timerlog.segments_between(window.lower, window.upper)
        return self._state.resident.frontier == window.lower and all(s in window.segments for s in reaching)

    def _advance(self, upper: Position) -> None:
        self._state.resident.advance_frontier(upper)
        self._state.wake()
