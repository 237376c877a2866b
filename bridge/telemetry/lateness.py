"""The lateness of delivered messages: a histogram that costs nothing for each message, and its last minutes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

# fmt: off
LATENESS_BUCKETS_MS: Final = (
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 30_000, 60_000, 300_000, 900_000, 3_600_000,
)
# fmt: on
RECENT_S: Final = 300.0
NOTE_INTERVAL_S: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RecentLateness:
    """The lateness of the `delivered` messages of the last `over_s` seconds; `p99_ms` is None without messages."""

    delivered: int
    p99_ms: float | None
    over_s: float


class LatenessHistogram(Collector):
    """The histogram. It takes a whole transaction at once: one searchsorted and one bincount. Any thread."""

    _EDGES_MS: Final = np.array(LATENESS_BUCKETS_MS, dtype=np.int64)
    _LABELS: Final = (*(str(ms / 1000) for ms in LATENESS_BUCKETS_MS), "+Inf")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = np.zeros(len(self._LABELS), dtype=np.int64)
        self._sum_ms = 0
        self._noted: deque[tuple[float, npt.NDArray[np.int64]]] = deque()

    def observe(self, lateness_ms: npt.NDArray[np.int64]) -> None:
        buckets = np.searchsorted(self._EDGES_MS, lateness_ms, side="left")
        counts = np.bincount(buckets, minlength=len(self._LABELS))
        total = int(lateness_ms.sum())
        with self._lock:
            self._counts += counts
            self._sum_ms += total

    def note(self, now_s: float) -> None:
        """Keep the present counts for `recent`; called about every second."""
        with self._lock:
            if not self._noted or now_s - self._noted[-1][0] >= NOTE_INTERVAL_S:
                self._noted.append((now_s, self._counts.copy()))
            while len(self._noted) > 1 and now_s - self._noted[1][0] >= RECENT_S:
                self._noted.popleft()

    def recent(self, now_s: float) -> RecentLateness | None:
        """The lateness of the last `RECENT_S` seconds, or since the first `note`; None before it."""
        with self._lock:
            if not self._noted:
                return None
            since_s, before = self._noted[0]
            counts = self._counts - before
        return RecentLateness(delivered=int(counts.sum()), p99_ms=_quantile_ms(counts, 0.99), over_s=now_s - since_s)

    def collect(self) -> Iterable[Metric]:
        with self._lock:
            cumulative, total_ms = np.cumsum(self._counts).tolist(), self._sum_ms
        text = "Time of delivery minus due time of each message. Seconds; the clock is the bridge's."
        family = HistogramMetricFamily("delay_bridge_lateness_seconds", text)
        family.add_metric([], list(zip(self._LABELS, cumulative, strict=True)), sum_value=total_ms / 1000)
        return [family]


def _quantile_ms(counts: npt.NDArray[np.int64], quantile: float) -> float | None:
    """The quantile as in Prometheus's histogram_quantile: linear within a bucket, and at most the last edge."""
    total = int(counts.sum())
    if total == 0:
        return None
    edges = [0, *LATENESS_BUCKETS_MS]
    rank, upto = quantile * total, np.cumsum(counts)
    bucket = int(np.searchsorted(upto, rank))
    if bucket >= len(LATENESS_BUCKETS_MS):
        return float(edges[-1])
    share = 1 - (int(upto[bucket]) - rank) / int(counts[bucket])
    return edges[bucket] + (edges[bucket + 1] - edges[bucket]) * share
