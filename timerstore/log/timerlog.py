"""TimerLog: all live segments, and queries over them.

RocketMQ's TimerLog is one file with a linked list for each slot. Here it is a set of sorted, immutable files, so that a
window is read sequentially, and removing a file frees its space.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from timerstore.log.segment import Segment, SegmentReader
from timerstore.memory.sorted_runs import select
from timerstore.rows.entry import ENTRY
from timerstore.rows.position import Bools, Position, Positions, Progress, order_by_position


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Window:
    """The next load window (lower, upper], and the segments that may have rows in it (none: memory has all its
    rows)."""

    lower: Position
    upper: Position
    segments: tuple[Segment, ...]


class TimerLog:
    """The live segments, oldest first."""

    def __init__(self) -> None:
        self._segments: list[Segment] = []

    def __len__(self) -> int:
        return len(self._segments)

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._segments)

    @property
    def bytes(self) -> int:
        return sum(segment.named.bytes for segment in self._segments)

    def add(self, segment: Segment) -> None:
        """Add a durable segment."""
        self._segments.append(segment)

    def remove(self, segments: Sequence[Segment]) -> None:
        """Remove segments from the log; their files stay."""
        self._segments = [s for s in self._segments if s not in segments]

    def finished(self, committed: Progress) -> list[Segment]:
        """Segments with finished rows only: one step of the committed state includes them."""
        return [segment for segment in self._segments if committed.finishes(segment.end, segment.last)]

    def window(self, lower: Position, upper: Position, room_bytes: int) -> Window:
        """The largest window (lower, X], X <= upper, whose row groups fit into `room_bytes`, with one new row group at
        least.

        It ends just before the first row group that does not fit, which may be in the middle of a millisecond. Row
        groups that begin at or below `lower` are read for every X. Only the read shows their part in the window, so
        half of their bytes is counted.
        """
        touched = self._touched(lower, upper)
        if not touched:
            return Window(lower=lower, upper=upper, segments=())
        at = np.concatenate([segment.fences.at[mask] for segment, mask in touched])
        offset = np.concatenate([segment.fences.offset[mask] for segment, mask in touched])
        size = np.concatenate([segment.group_bytes[mask] for segment, mask in touched])
        order = order_by_position(at, offset)
        is_begun = Positions(at, offset).at_or_below(lower)
        begun = int(np.count_nonzero(is_begun))
        size = np.where(is_begun, size // 2, size)
        fitting = int(np.searchsorted(np.cumsum(size[order]), room_bytes, side="right"))
        fitting = max(fitting, begun + 1)
        if fitting < len(order):
            next_group = order[fitting]
            upper = min(upper, Position(int(at[next_group]), int(offset[next_group])).before())
        return Window(lower=lower, upper=upper, segments=self.segments_between(lower, upper))

    def segments_between(self, lower: Position, upper: Position) -> tuple[Segment, ...]:
        """The segments that may have rows in (lower, upper]."""
        return tuple(segment for segment, _ in self._touched(lower, upper))

    def _touched(self, lower: Position, upper: Position) -> list[tuple[Segment, Bools]]:
        touched = [(segment, segment.groups_between(lower, upper)) for segment in self._segments]
        return [(segment, mask) for segment, mask in touched if mask.any()]


def read_window(window: Window) -> pa.Table:
    """The rows of a window as `entry.ENTRY`, in no order. Raises Corrupt, DiskFailure.

    It reads the row groups that may have rows in the window, one at a time: first the positions, and the other columns
    only if a row lies in the window. So of rows outside the window, memory holds at most one row group.
    """
    tables = [ENTRY.empty_table()]
    for segment in window.segments:
        groups = np.flatnonzero(segment.groups_between(window.lower, window.upper)).tolist()
        with SegmentReader(segment) as reader:
            for group in groups:
                rows = select(reader.read(group, ("offset", "at")))
                inside = rows.row[rows.at_or_below(window.upper) & ~rows.at_or_below(window.lower)]
                if len(inside):
                    table = reader.read(group, ENTRY.names)
                    tables.append((table if len(inside) == len(table) else table.take(pa.array(inside))).cast(ENTRY))
    return pa.concat_tables(tables)
