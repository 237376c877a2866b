"""What the store says of itself, for metrics and progress."""

from __future__ import annotations

from dataclasses import dataclass

from timerstore.sources import SourceName


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """A consistent look at the store. `pending_by_target` has "" for a delay topic's default target."""

    pending: int
    pending_by_target: dict[str, int]
    pending_until: tuple[int, ...]
    first_at_ms: int | None
    hot_rows: int
    hot_bytes: int
    memtable_rows: int
    memtable_bytes: int
    late_rows: int
    physical_bytes: int
    segments: int
    segment_bytes: int
    frontier_ms: int
    checkpoint_ms: int | None
    ingested: dict[SourceName, int]
    committed: dict[SourceName, int]
