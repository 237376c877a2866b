"""Bounds and paces of a store."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20
DAY_MS = 86_400_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds and paces of a store; bytes are of rows in memory. `window_ms` is the largest W in force, `tombstone_rows`
    how many cancels are in memory before they are written (36 bytes each; ingest waits at twice as many)."""

    flush_bytes: int = 128 * MIB
    flush_interval_ms: int = 60_000
    flush_records: int = 10_000
    """A restart reads again what was read since the last flush: with so much of it, about a second's work while a JVM
    starts, a flush is due before that interval is over,"""
    flush_pause_ms: int = 5_000
    """but not sooner than this after the last one: small segments have to be merged."""
    ready_rows_bytes: int = 256 * MIB
    horizon_ms: int = 60_000
    overtaken_bytes: int = 64 * MIB
    window_bytes: int = 64 * MIB
    window_ms: int = 7 * DAY_MS
    tombstone_rows: int = 250_000
    compaction_segments: int = 8
    """How many segments of like size become one."""
    segment_bytes_max: int = 1 << 30
    """Larger than half of this, a segment is merged no more."""
    sparse_ms: int = 3_600_000
    """A segment of which half is dead is rewritten, unless all of it is delivered within this time anyway."""
    repacked_bytes: int = 16 * MIB
    """So much memory must be gained by it before rows are copied out of chunks of which little is left."""
    clock_step_ms: int = 2_000
    """A clock that was set back by less is waited for: what arrives meanwhile is late by no more than that."""

    @property
    def memtable_bytes_max(self) -> int:
        """Where ingest stops: a flush is under way and half of the next one has come in."""
        return self.flush_bytes + self.flush_bytes // 2


DEFAULTS = Limits()
