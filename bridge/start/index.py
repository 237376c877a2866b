"""The local index at a start: its lock, its checkpoint, and the open store."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Final

import structlog

from bridge.errors import EnvironmentFailure, StateError
from bridge.kafka.admin import Cluster
from bridge.settings.model import Settings
from bridge.start.facts import states_of_others
from bridge.start.first_commits import StartPlan
from bridge.stores.directory import StoreDirectory
from bridge.stores.names import SourceName
from bridge.stores.opening import Opening
from bridge.stores.stores import Life, Stores
from timerstore.errors import DirectoryInUse, DiskFailure, TimerStoreError
from timerstore.limits import Limits
from timerstore.operations import recovery
from timerstore.operations.recovery import Found

WINDOW_BYTES_MAX: Final = 40 << 20
"""Limit of a load window. While it is read, it is in memory twice: unsorted and sorted."""

Indexes = Mapping[SourceName, Found]
"""The index of each partition, as found."""

log = structlog.get_logger("bridge.start.index")


@contextmanager
def as_bridge_errors(**fields: object) -> Iterator[None]:
    """Convert the store's errors: faults of the volume to EnvironmentFailure, a foreign index to StateError."""
    try:
        yield
    except (DirectoryInUse, DiskFailure) as error:
        raise EnvironmentFailure(error.message, hint=error.hint, code=error.code, **fields) from error
    except TimerStoreError as error:
        raise StateError(error.message, hint=error.hint, code=error.code, **fields) from error


def find_index(
    settings: Settings,
    cluster: Cluster,
    *,
    without: Collection[str] = (),
    assigned: Callable[[], Collection[SourceName]] = frozenset,
) -> StoreDirectory:
    """Lock store.directory. Indexes of topics in `without`, which are not delivered, may belong to another topic of the
    same name; `assigned` returns this instance's partitions. Raises EnvironmentFailure, StateError."""
    topic_ids = cluster.topic_ids(sorted(settings.delay_topics.keys() - set(without)))
    with as_bridge_errors():
        is_spare = partial(spare, settings, cluster, assigned)
        directory = StoreDirectory.take(settings.store.directory, cluster.describe().cluster_id, topic_ids, is_spare)
    if directory.has_index_of_earlier_version():
        log.warning("index-of-earlier-version", directory=str(directory.path), hint="It is rebuilt from Kafka.")
    return directory


def find_indexes(directory: StoreDirectory, names: Iterable[SourceName], now_ms: int) -> Indexes:
    """The indexes of partitions. Raises EnvironmentFailure, StateError."""
    indexes = {}
    for topic, partition in sorted(names):
        with as_bridge_errors(topic=topic, partition=partition):
            index = indexes[topic, partition] = directory.find((topic, partition), now_ms)
        for report in index.reports:
            log.error("checkpoint-corrupt", topic=topic, partition=partition, report=report)
    return indexes


def spare(
    settings: Settings,
    cluster: Cluster,
    assigned: Callable[[], Collection[SourceName]],
    names: Collection[SourceName],
) -> set[SourceName]:
    """The partitions among these whose indexes nobody needs here: other instances own them, and their committed states
    say that Kafka has all records of their pending messages."""
    names = set(names).difference(assigned())
    try:
        states = dict(states_of_others(cluster, settings.group_id, names))
    except EnvironmentFailure as failure:
        log.warning("retention-unknown", reason=failure.message)
        return set()
    return {name for name, state in states.items() if not state.gone_below}


def drop_earlier(directory: StoreDirectory, store: Stores, assigned: Collection[SourceName]) -> None:
    """Remove the index of an earlier version, once all `assigned` partitions are read again, and Kafka has all records
    of the other partitions' pending messages. Raises EnvironmentFailure."""
    here = store.next_offsets().keys()
    others = set(store.sources) - here
    if here >= set(assigned) and not (store.in_life(Life.CATCHING_UP) or others - {*directory.spare(others)}):
        with as_bridge_errors():
            directory.drop_index_of_earlier_version()


def openings(indexes: Indexes, plan: StartPlan, now_ms: int) -> dict[SourceName, Opening]:
    """The openings of the stores of a plan's partitions. Raises EnvironmentFailure, StateError."""
    with as_bridge_errors():
        kept = {
            name: recovery.give_up(indexes[name], now_ms) if name in plan.gives_up_index else indexes[name]
            for name in plan.states
        }
    return {
        name: Opening(found=kept[name], committed=state.progress(), log_start=plan.log_starts[name], cuts=state.cuts)
        for name, state in plan.states.items()
    }


def make_stores(
    directory: StoreDirectory, cluster: Cluster, settings: Settings, plan: StartPlan, on_damage: Callable[[], None]
) -> Stores:
    """The stores, none of them open yet. All partitions of the delay topics get numbers."""
    topics = cluster.topics(sorted(settings.delay_topics))
    partitions = [(name, partition) for name, topic in topics.items() for partition in range(topic.partitions)]
    limits = limits_of_stores(settings, max(each.cancels_ms for each in plan.windows.values()))
    return Stores(directory, partitions, limits, on_damage)


def limits_of_stores(settings: Settings, window_ms: int) -> Limits:
    """The stores' limits. Cancels are kept for `window_ms` at least."""
    return Limits(
        flush_bytes=settings.store.flush_bytes,
        flush_interval_ms=settings.store.flush_interval,
        ready_rows_bytes=settings.ready_rows.bytes,
        horizon_ms=settings.ready_rows.horizon,
        window_bytes=min(settings.ready_rows.bytes // 4, WINDOW_BYTES_MAX),
        window_ms=window_ms,
    )
