"""The local index at a start: its lock, its checkpoint, and the open store."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Final

import structlog

from bridge.errors import EnvironmentFailure, StateError
from bridge.kafka.admin import Cluster
from bridge.settings.model import Settings
from bridge.start.first_commits import StartPlan
from timerstore.disk.checkpoint import Identity
from timerstore.errors import DirectoryInUse, DiskFailure, TimerStoreError
from timerstore.limits import Limits
from timerstore.operations import recovery
from timerstore.operations.recovery import Found
from timerstore.rows.sources import SourceName
from timerstore.store import TimerStore

WINDOW_BYTES_MAX: Final = 40 << 20
"""Limit of a load window. While it is read, it is in memory twice: unsorted and sorted."""

log = structlog.get_logger("bridge.start.index")


@contextmanager
def as_bridge_errors() -> Iterator[None]:
    """Convert the store's errors: faults of the volume to EnvironmentFailure, a foreign index to StateError."""
    try:
        yield
    except (DirectoryInUse, DiskFailure) as error:
        raise EnvironmentFailure(error.message, hint=error.hint, code=error.code) from error
    except TimerStoreError as error:
        raise StateError(error.message, hint=error.hint, code=error.code) from error


def find_index(settings: Settings, cluster: Cluster, now_ms: int, *, without: Collection[str] = ()) -> Found:
    """Lock store.directory and read its checkpoint. The rows of topics in `without`, which are not delivered, may
    belong to another topic of the same name. Raises EnvironmentFailure, StateError."""
    topic_ids = cluster.topic_ids(sorted(settings.delay_topics.keys() - set(without)))
    identity = Identity(cluster_id=cluster.describe().cluster_id, topic_ids=topic_ids)
    with as_bridge_errors():
        found = recovery.find(settings.store.directory, identity, now_ms)
    for report in found.reports:
        log.error("checkpoint-corrupt", report=report)
    return found


def open_index(
    found: Found,
    plan: StartPlan,
    settings: Settings,
    partitions: Iterable[SourceName],
    now_ms: int,
    progress: Callable[[int, int], None],
) -> TimerStore:
    """The open store of the directory that was found; `partitions` are all partitions of the delay topics. The store
    takes over the directory's lock, which is released on failure. Raises EnvironmentFailure, StateError.
    """
    with as_bridge_errors():
        return TimerStore.open(
            found,
            partitions=partitions,
            committed=plan.progress,
            frozen=plan.frozen,
            log_starts=plan.log_starts,
            cuts=plan.cuts,
            now_ms=now_ms,
            limits=limits(settings, max(window.largest_ms for window in plan.windows.values())),
            progress=progress,
        )


def limits(settings: Settings, window_ms: int) -> Limits:
    """The store's limits. Cancels are kept for `window_ms`, the largest roll window of any record."""
    return Limits(
        flush_bytes=settings.store.flush_bytes,
        flush_interval_ms=settings.store.flush_interval,
        ready_rows_bytes=settings.ready_rows.bytes,
        horizon_ms=settings.ready_rows.horizon,
        window_bytes=min(settings.ready_rows.bytes // 4, WINDOW_BYTES_MAX),
        window_ms=window_ms,
    )
