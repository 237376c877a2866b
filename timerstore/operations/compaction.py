"""Compaction: several segments become one, without finished or cancelled rows.

It is size-tiered, after the log-structured merge trees: when a tier (sizes within a factor of four) has
`Limits.compaction_segments` segments, they are merged, which lifts their rows at least one tier. So frequent flushes
leave few segments, and a row is rewritten a logarithmic number of times. A single segment is rewritten when half of its
rows are dead, and the others stay for long: so disk use follows the pending rows.

One compaction runs at a time, window by window; loads for delivery and flushes come in between:

    window -> read (by the caller) -> take -> window -> ... -> close

It reads immutable files, which stay until its end. It writes a temporary file until `close`; after a crash the next
start removes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import pyarrow as pa

from timerstore.limits import Limits
from timerstore.log import segment
from timerstore.log.segment import Segment
from timerstore.log.timerlog import TimerLog, Window
from timerstore.memory.sorted_runs import select
from timerstore.operations.state import StoreState
from timerstore.rows.entry import payload_of
from timerstore.rows.position import Position

TIER_BYTES: Final = 1 << 20
"""The lowest tier ends at four times this size."""
TIER_FACTOR: Final = 4


def choose(
    segments: Sequence[Segment], limits: Limits, now_ms: int, dead_rows: Callable[[Segment], int]
) -> tuple[Segment, ...]:
    """The segments for the next compaction, or none; `dead_rows` returns the number of a segment's finished or
    cancelled rows."""
    tiers: dict[int, list[Segment]] = {}
    sparse: list[Segment] = []
    for candidate in segments:
        dead = dead_rows(candidate)
        live_bytes = candidate.named.bytes * (candidate.rows - dead) // candidate.rows
        if 2 * dead >= candidate.rows and candidate.last.at_ms > now_ms + limits.sparse_ms:
            sparse.append(candidate)
        if live_bytes <= limits.segment_bytes_max // 2:
            tier = int(np.log(max(live_bytes / TIER_BYTES, 1)) / np.log(TIER_FACTOR))
            tiers.setdefault(tier, []).append(candidate)
    for _, tier_segments in sorted(tiers.items()):
        if len(tier_segments) >= limits.compaction_segments:
            sizes = np.cumsum([candidate.named.bytes for candidate in tier_segments])
            fitting = max(2, int(np.searchsorted(sizes, limits.segment_bytes_max, side="right")))
            return tuple(tier_segments[: min(fitting, limits.compaction_segments)])
    return tuple(sparse[:1])


def passed_rows(each: Segment, position: Position) -> int:
    """The number of a segment's rows in row groups that end at or before a position."""
    is_passed = np.r_[each.fences.at_or_below(position)[1:], each.last <= position]
    return int(each.group_rows[is_passed].sum())


class Compaction:
    """See the module. For one thread."""

    def __init__(self, state: StoreState, segments: Sequence[Segment], number: int) -> None:
        """`number` is that of the new segment."""
        self.segments = tuple(segments)
        self._state = state
        self._log = TimerLog()
        for part in segments:
            self._log.add(part)
        self._writer = segment.SegmentWriter(state.directory, number, state.identity)
        self._end = max(part.last for part in segments)
        # A segment's rows are below O, so its rows at or below P are finished, and need no read.
        self._lower = state.resident.position

    def window(self) -> Window | None:
        """The next window to read; None after the last one."""
        while self._lower < self._end:
            window = self._log.window(self._lower, self._end, self._state.limits.window_bytes)
            if window.segments:
                return window
            self._lower = window.upper
        return None

    def take(self, window: Window, entries: pa.Table) -> None:
        """Write the live rows of a window; `entries` are in any order, and may have rows outside the window. Raises
        DiskFull, DiskFailure."""
        state = self._state
        rows = select(entries).sorted()
        rows = rows[rows.at_or_below(window.upper) & ~rows.at_or_below(window.lower)]
        with state.lock:
            kept = ~state.resident.finished(rows)
            # Only tombstones in files count: a crash loses the others until their cancels are read again.
            lookup = replace(state.cancels.tombstones.lookup(), memory=())
        rows = rows[kept]
        payload = payload_of(entries).take(pa.array(rows.row))
        covered = state.cancels.covered(lookup, rows.offset, payload)
        if covered is not None:
            rows, payload = rows[~covered], payload.filter(pa.array(~covered))
        self._lower = window.upper
        for start in range(0, len(rows), segment.ROW_GROUP_ROWS):
            end = start + segment.ROW_GROUP_ROWS
            self._writer.add(rows[start:end], payload.slice(start, segment.ROW_GROUP_ROWS))

    def close(self) -> Segment | None:
        """Make the new segment durable; None if no rows are left. Raises DiskFull, DiskFailure."""
        with self._writer:
            return self._writer.close()

    def abandon(self) -> None:
        self._writer.abandon()
