"""The values of the gauges, read from the store at each scrape and never kept."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import replace
from heapq import nlargest
from itertools import pairwise
from pathlib import Path
from typing import Final

import structlog

from bridge.errors import EnvironmentFailure
from bridge.kafka.admin import Cluster, Watermarks
from bridge.settings.model import Settings
from bridge.start.identity import Looked
from bridge.start.retention import RetentionGuard
from bridge.stores.names import SourceName
from bridge.stores.stores import Stores
from bridge.telemetry.metrics import StoreSnapshot
from timerstore.clock import Clock
from timerstore.memory.pending import OTHER_TARGETS

EDGES_MS: Final = (60_000, 300_000, 3_600_000, 21_600_000, 86_400_000, 604_800_000)
"""The upper edges of `metrics.TIME_TO_GO`, without the last."""
REFRESH_INTERVAL_S: Final = 5.0
TOPICS_MAX: Final = 100
"""Limit of names in the metric of pending messages by topic."""
SAMPLES_MAX: Final = 512
"""Limit of remembered log ends; beyond it, every second one is dropped."""

NOTHING: Final = StoreSnapshot()

log = structlog.get_logger("bridge.runtime.gauges")


class Lag:
    """The ends of the delay topics' logs, looked up every few seconds; lag is their distance from ingest."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._looked_s: float | None = None
        self._ends: dict[SourceName, Watermarks] = {}
        self._samples: list[tuple[float, dict[SourceName, Watermarks]]] = []

    def refresh(self, cluster: Cluster, store: Stores, *, at_once: bool = False) -> dict[SourceName, Looked] | None:
        """Look up the ends if that is due, or `at_once`; None if it is not due. Without an answer from the brokers, or
        without a leader, the old ends stay."""
        now_s = self._clock.monotonic_s()
        if not at_once and self._looked_s is not None and now_s - self._looked_s < REFRESH_INTERVAL_S:
            return None
        self._looked_s = now_s
        committed, ingested = store.committed(), store.next_offsets()
        ingested = {
            name: at for name, at in ingested.items() if name in committed
        }  # others have gone or come meanwhile
        try:
            marks = cluster.watermarks(sorted(ingested), of_all=False)
        except EnvironmentFailure as error:
            log.warning("lag-unknown", reason=error.message)
            marks = {}
        else:
            self._ends = {name: mark for name, mark in self._ends.items() if name in ingested} | marks
            self.note(now_s, marks, ingested)
        return {
            name: Looked(expected=at, marks=marks.get(name), committed=committed[name].offset)
            for name, at in ingested.items()
        }

    def note(self, now_s: float, ends: dict[SourceName, Watermarks], ingested: dict[SourceName, int]) -> None:
        """Remember the ends until ingest has reached them."""
        self._samples = [
            sample
            for sample in [*self._samples, (now_s, ends)]
            if any(mark.end > ingested.get(name, mark.end) for name, mark in sample[1].items())
        ]
        if len(self._samples) > SAMPLES_MAX:
            del self._samples[1::2]

    def of(self, ingested: dict[SourceName, int]) -> dict[SourceName, int]:
        """The number of records between ingest and the log's end, by partition."""
        return {name: max(0, self._ends[name].end - at) for name, at in ingested.items() if name in self._ends}

    def marks(self, partitions: Iterable[SourceName]) -> dict[SourceName, Watermarks]:
        """The marks of the logs of these partitions; partitions without a look-up are left out."""
        return {name: self._ends[name] for name in partitions if name in self._ends}

    def behind_s(self, ingested: dict[SourceName, int]) -> dict[SourceName, float]:
        """The waiting time of unread records, by partition: since the oldest end that ingest has not reached."""
        now_s = self._clock.monotonic_s()
        return {
            name: next((now_s - at_s for at_s, ends in self._samples if name in ends and ends[name].end > at), 0.0)
            for name, at in ingested.items()
        }


def snapshot(
    store: Stores,
    settings: Settings,
    now_ms: int,
    lag: Lag,
    guard: RetentionGuard | None,
    base: StoreSnapshot = NOTHING,
) -> StoreSnapshot:
    """The gauges of the store's state, added to those in `base`."""
    stats = store.stats([now_ms + edge for edge in EDGES_MS])
    until = [0, *stats.pending_until, stats.pending]
    since_ms = store.waits_since_ms()
    defaults = sorted({topic.target for topic in settings.delay_topics.values() if topic.target})
    default = defaults[0] if len(defaults) == 1 else "(default)"
    by_topic: dict[str, int] = {}
    for target, count in stats.pending_by_target.items():
        by_topic[target or default] = by_topic.get(target or default, 0) + count
    disk_bytes, disk_free_bytes = _room(settings.store.directory)
    return replace(
        base,
        pending_total=stats.pending,
        schedules=stats.recurring,
        pending_by_topic=largest(by_topic),
        pending_by_time_to_go=tuple(max(0, b - a) for a, b in pairwise(until)),
        oldest_overdue_s=0.0 if since_ms is None else max(0, now_ms - since_ms) / 1000,
        ready_rows=stats.ready_rows,
        ready_rows_bytes=stats.ready_rows_bytes,
        segments=stats.segments,
        segment_bytes=stats.segment_bytes,
        disk_free_bytes=disk_free_bytes,
        disk_bytes=disk_bytes,
        cancelled_total=stats.cancelled,
        tombstones=stats.tombstones,
        checkpoint_age_s=None if stats.checkpoint_ms is None else max(0, now_ms - stats.checkpoint_ms) / 1000,
        consumer_lag=lag.of(store.next_offsets()),
        retention_headroom_s={} if guard is None else guard.headroom_s,
        trimmed_partitions={} if guard is None else guard.trimmed,
    )


def largest(counts: dict[str, int]) -> dict[str, int]:
    """The TOPICS_MAX largest counts by name, and the sum of the others: names come from headers."""
    if len(counts) <= TOPICS_MAX:
        return counts
    named = nlargest(TOPICS_MAX, counts.keys() - {OTHER_TARGETS}, key=counts.__getitem__)
    kept = {name: counts[name] for name in named}
    return {**kept, OTHER_TARGETS: sum(counts.values()) - sum(kept.values())}


def _room(directory: Path) -> tuple[int | None, int | None]:
    """Size and free space of the file system; None if unknown, so that the other gauges still work."""
    try:
        usage = shutil.disk_usage(directory)
    except OSError:
        return None, None
    return usage.total, usage.free
