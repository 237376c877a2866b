"""How many records a micro-batch may have, so that it stays within its bytes whatever the size of the records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

RECORDS_MIN: Final = 64
"""A micro-batch is never limited to fewer, however large records are."""
RECORDS_FIRST: Final = 2_000
"""The first micro-batch has no more: the records that come may be larger than those of the sample (sample.py)."""
GROWTH_MAX: Final = 8
"""Each step restarts the query, which takes about a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """A micro-batch holds at most `records`, and about `bytes` of decoded entries; `trigger_ms` is the shortest time
    between two."""

    records: int
    bytes: int
    trigger_ms: int


class BatchSize:
    """The limit in force, `records`: Spark's Kafka source counts records only, not bytes.

    It follows the mean size seen: down, at once, when a batch has more than twice the bytes wanted; up, by GROWTH_MAX
    at most, when a full one has less than half. So a batch exceeds its bytes by no more than the records that come are
    larger than those that came, times GROWTH_MAX.
    """

    def __init__(self, limits: BatchLimits, mean_bytes: float) -> None:
        """`mean_bytes` is the expected size of a record."""
        self._limits = limits
        self.records = min(RECORDS_FIRST, self._fitting(mean_bytes))

    def observe(self, rows: int, size_bytes: int) -> bool:
        """Note a batch; True when `records` has changed, for which the query must be restarted."""
        if not rows:
            return False
        wanted = self._fitting(size_bytes / rows)
        is_too_large = size_bytes > 2 * self._limits.bytes and wanted < self.records
        is_too_small = rows >= self.records // 2 and wanted >= 2 * self.records
        if is_too_large or is_too_small:
            self.records = min(wanted, GROWTH_MAX * self.records)
        return is_too_large or is_too_small

    def _fitting(self, mean_bytes: float) -> int:
        return max(RECORDS_MIN, min(self._limits.records, int(self._limits.bytes / max(mean_bytes, 1.0))))
