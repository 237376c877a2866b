"""Limits of a store: bytes, rows and intervals."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20
DAY_MS = 86_400_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a store. Bytes are those of rows in memory. `window_ms` is the least time for which a tombstone is
    kept. `tombstone_rows` is the number of tombstones in memory at which they are written (36 bytes each); ingest waits
    at twice the number."""

    flush_bytes: int = 128 * MIB
    flush_interval_ms: int = 60_000
    flush_records: int = 10_000
    """Records since the last flush at which the next one is due before its interval is over. A restart reads them
    again: about a second of work, while a JVM starts."""
    flush_pause_ms: int = 5_000
    """Minimum interval between flushes that `flush_records` triggers: small segments need merging."""
    ready_rows_bytes: int = 256 * MIB
    horizon_ms: int = 60_000
    overtaken_bytes: int = 64 * MIB
    window_bytes: int = 64 * MIB
    window_ms: int = 7 * DAY_MS
    tombstone_rows: int = 250_000
    compaction_segments: int = 8
    """Segments of like size that are merged into one."""
    segment_bytes_max: int = 1 << 30
    """Limit of a merged segment. A segment larger than half of it is not merged."""
    sparse_ms: int = 3_600_000
    """A segment whose rows are half dead is rewritten, unless its last row is due within this time."""
    repacked_bytes: int = 16 * MIB
    """Smallest gain of memory for which rows are copied out of sparse chunks."""
    clock_step_ms: int = 2_000
    """The store waits until the clock has passed a smaller step back; messages that arrive meanwhile are late by no
    more than the step."""

    @property
    def memtable_bytes_max(self) -> int:
        """The size of the memtable at which ingest waits: a flush is under way, and half of the next one is read."""
        return self.flush_bytes + self.flush_bytes // 2


DEFAULTS = Limits()
