"""TimerLog: all live segments, and the questions asked of them together.

RocketMQ's TimerLog is one file with a linked list for each slot; here it is a set of sorted, immutable files, so that a window is read
sequentially and space is freed by unlinking.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from timerstore.position import Position, Progress, order_by_position
from timerstore.segment import Segment


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Window:
    """The next stretch (lower, upper] of positions to load, and the segments that have rows in it (none: memory has them all)."""

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
        """Size of all segment files."""
        return sum(segment.named.bytes for segment in self._segments)

    def add(self, segment: Segment) -> None:
        """A segment has become durable."""
        self._segments.append(segment)

    def remove(self, segments: list[Segment]) -> None:
        """Segments are no longer part of the log."""
        self._segments = [s for s in self._segments if s not in segments]

    def finished(self, committed: Mapping[int, Progress]) -> list[Segment]:
        """Segments of which every row is finished: each source's largest position is at or below its committed P."""
        return [
            segment
            for segment in self._segments
            if all(
                source in committed and largest <= committed[source].position
                for source, largest in segment.largest.items()
            )
        ]

    def window(self, lower: Position, upper: Position, room_bytes: int, *, at_least_one: bool) -> Window | None:
        """The largest window (lower, X], X <= upper, whose row groups fit into `room_bytes`.

        It ends just before the first row group that does not fit, which may be in the middle of a millisecond. None when not even the first row
        group fits, unless `at_least_one` asks for it all the same.
        """
        touched = [(segment, segment.groups_between(lower, upper)) for segment in self._segments]
        touched = [(segment, mask) for segment, mask in touched if mask.any()]
        if not touched:
            return Window(lower=lower, upper=upper, segments=())
        at = np.concatenate([segment.group_at[mask] for segment, mask in touched])
        seq = np.concatenate([segment.group_seq[mask] for segment, mask in touched])
        size = np.concatenate([segment.group_bytes[mask] for segment, mask in touched])
        order = order_by_position(at, seq)
        fitting = int(np.searchsorted(np.cumsum(size[order]), room_bytes, side="right"))
        # Groups that begin at or below `lower` all have to be read, whatever the window's end is.
        begun = int(np.count_nonzero((at < lower.at_ms) | ((at == lower.at_ms) & (seq <= lower.seq))))
        if fitting <= begun and fitting < len(order):
            if not at_least_one:
                return None
            fitting = begun + 1
        if fitting < len(order):
            next_group = order[fitting]
            upper = min(upper, Position.of(int(at[next_group]), int(seq[next_group])).before())
        segments = tuple(segment for segment, _ in touched if segment.groups_between(lower, upper).any())
        return Window(lower=lower, upper=upper, segments=segments)
