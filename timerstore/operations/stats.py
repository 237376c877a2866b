"""What the store says of itself, for metrics and progress."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from timerstore.memory.pending import Pending
from timerstore.rows.sources import SourceName

if TYPE_CHECKING:
    from timerstore.store import TimerStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """A consistent look at the store. `pending_by_target` has "" for a delay topic's default target;
    `cancelled` counts from the opening of the store."""

    pending: int
    pending_by_target: dict[str, int]
    pending_until: tuple[int, ...]
    ready_rows: int
    ready_rows_bytes: int
    memtable_rows: int
    memtable_bytes: int
    overtaken_rows: int
    physical_bytes: int
    segments: int
    segment_bytes: int
    tombstones: int
    cancelled: int
    frontier_ms: int
    checkpoint_ms: int | None
    ingested: dict[SourceName, int]
    committed: dict[SourceName, int]


def look(store: TimerStore, pending: Pending, edges_ms: Sequence[int]) -> Stats:
    """Everything as it is now; the caller holds the lock."""
    resident = store.resident
    owned = [(store.sources.name(source), source) for source in resident.committed]
    return Stats(
        pending=len(pending),
        pending_by_target=pending.by_target(),
        pending_until=tuple(pending.wheel.until(edge) for edge in edges_ms),
        ready_rows=len(resident.ready),
        ready_rows_bytes=resident.ready_rows_bytes,
        memtable_rows=len(resident.memtable),
        memtable_bytes=resident.memtable_bytes,
        overtaken_rows=len(resident.overtaken),
        physical_bytes=resident.chunks.physical_bytes,
        segments=len(store.timerlog),
        segment_bytes=store.timerlog.bytes,
        tombstones=len(store.cancels.tombstones),
        cancelled=store.cancels.cancelled,
        frontier_ms=resident.frontier.at_ms,
        checkpoint_ms=store.checkpoint_ms,
        ingested={name: int(resident.ends[source]) for name, source in owned},
        committed={name: resident.committed[source].offset for name, source in owned},
    )
