"""The local index, as a start finds and opens it."""

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
"""A window that is read is in memory twice for a moment: as it came, and sorted."""

log = structlog.get_logger("bridge.start.index")


@contextmanager
def as_bridge_errors() -> Iterator[None]:
    """What is wrong with the volume is the environment's; what is wrong with whose index it is, a state's."""
    try:
        yield
    except (DirectoryInUse, DiskFailure) as error:
        raise EnvironmentFailure(error.message, hint=error.hint, code=error.code) from error
    except TimerStoreError as error:
        raise StateError(error.message, hint=error.hint, code=error.code) from error


def find_index(settings: Settings, cluster: Cluster, now_ms: int, *, without: Collection[str] = ()) -> Found:
    """Lock store.directory, and read its checkpoint. What it has of the topics in `without`, none of whose partitions
    are delivered, may be another topic's. Raises EnvironmentFailure, StateError."""
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
    """The store over what was found; `partitions` are all of the delay topics'. It has the directory's lock, and gives
    it back when this fails. Raises EnvironmentFailure, StateError.
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
    """The store's bounds. Cancels are kept for `window_ms`, the largest roll window that any record is read with."""
    return Limits(
        flush_bytes=settings.store.flush_bytes,
        flush_interval_ms=settings.store.flush_interval,
        ready_rows_bytes=settings.ready_rows.bytes,
        horizon_ms=settings.ready_rows.horizon,
        window_bytes=min(settings.ready_rows.bytes // 4, WINDOW_BYTES_MAX),
        window_ms=window_ms,
    )
