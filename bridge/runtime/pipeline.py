"""The pipeline of one assignment: from the committed states to a store that is filled by the query and emptied by the
dispatcher.

    settle      committed (O, P) of the owned partitions, first commits where they are due
    amend       the decode epochs: another one from O on where the configuration has changed
    open        the index of store.directory
    catch up    read from where the index ends up to O; nothing is dispatched before (invariant I6)
    run         query, maintenance, dispatcher

When the assignment changes, or a segment turns out to be damaged, a pipeline is stopped and a new one made; it never
changes hands while it runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
import structlog
from pyspark.sql import SparkSession

from bridge.delivery.dispatcher import Dispatcher
from bridge.errors import BridgeError, EnvironmentFailure, StateError
from bridge.ingest.batch_size import BatchLimits
from bridge.ingest.query import Ingest, Restart
from bridge.kafka.admin import Cluster
from bridge.kafka.membership import Ownership
from bridge.runtime.gauges import Lag
from bridge.runtime.maintenance_thread import MaintenanceThread
from bridge.settings.clients import java
from bridge.settings.model import Settings
from bridge.spark.segments import gather
from bridge.start.first_commits import facts_of, settle
from bridge.start.retention import RetentionGuard, Windows, must_hold_what_is_pending
from bridge.start.roll_window import decode_parameters, limits_of
from bridge.telemetry.heartbeats import CALLS_S, SPARK_S, Heartbeats
from bridge.telemetry.http import Health
from bridge.telemetry.metrics import Metrics
from bridge.telemetry.progress_bar import LongWork
from bridge.wire.committed_state import CommittedState, largest_roll_window_ms
from bridge.wire.decode_epochs import DecodeEpochs
from timerstore.clock import Clock
from timerstore.disk.checkpoint import Identity
from timerstore.errors import DirectoryInUse, DiskFailure, TimerStoreError
from timerstore.limits import Limits
from timerstore.log.timerlog import Window
from timerstore.operations import recovery
from timerstore.operations.recovery import Found
from timerstore.rows.sources import SourceName
from timerstore.store import TimerStore

INGEST: Final = "ingest"
QUERY: Final = "query"
MAINTENANCE: Final = "maintenance"
"""Names of hearts."""

END_S_MAX: Final = 5.0
"""How long maintenance has when the process ends, which must not take longer than `app.STOP_S_MAX`."""

WINDOW_BYTES_MAX: Final = 40 << 20
"""A gathered window is in memory up to three times for a moment: in the JVM, as it came, and sorted."""

log = structlog.get_logger("bridge.runtime.pipeline")


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineContext:
    """What outlives a pipeline and is handed to each."""

    settings: Settings
    clock: Clock
    cluster: Cluster
    spark: SparkSession
    ownership: Ownership
    dispatcher: Dispatcher
    metrics: Metrics
    health: Health
    hearts: Heartbeats
    on_fatal: Callable[[BridgeError], None]
    on_rebuild: Callable[[], None]


class Pipeline:
    """See the module. `start` and `stop` are called by one thread, `cancel` by any."""

    def __init__(self, context: PipelineContext, owned: frozenset[SourceName], revocations: int) -> None:
        """`owned` and `revocations` are of one `Membership`."""
        self._context = context
        self._owned = owned
        self._revocations = revocations
        self._cancelled = threading.Event()
        self._ingest: Ingest | None = None
        self._maintenance: MaintenanceThread | None = None
        self._found: Found | None = None
        self.store: TimerStore | None = None
        self.retention: RetentionGuard | None = None

    # ---- life

    def start(self) -> bool:
        """Bring the pipeline up; False when it was cancelled, or its assignment is out of date already.

        Raises StateError where going on would lose or repeat something, EnvironmentFailure where something does not
        answer.
        """
        context = self._context
        context.health.enter("settling", reasons=("reading the committed offsets",))
        identity = self._identity()
        settled = self._settle(identity)
        if settled is None or self._cancelled.is_set():
            return False
        found, states = settled
        store = self.store = self._open(found, states)
        start, end = self._starts(store, states), {name: state.offset for name, state in states.items()}
        log.info(
            "index-opened",
            partitions=len(self._owned),
            without_index=sum(covered is None for covered in store.resume_offsets().values()),
            read_again=sum(max(0, end[name] - start[name]) for name in end),
            segments=store.stats().segments,
            reports=list(store.reports),
        )
        store.start_at(start, {name: self._log_marks[name].end for name in start})
        self._maintenance = self._make_maintenance(store)
        self._maintenance.start()
        ingest = self._ingest = self._make_ingest(store, states)
        with LongWork(
            "catching-up", "records up to the committed offsets", health=context.health, clock=context.clock
        ) as work:
            ingest.warm_up(end)
            offsets = ingest.catch_up(start, end, work.report)
        if self._cancelled.is_set():
            return False
        ingest.start(offsets)
        context.dispatcher.resume(store, states, self._revocations)
        return not self._cancelled.is_set()

    def cancel(self) -> None:
        """Let a `start` that is under way return soon, and take in nothing more."""
        self._cancelled.set()
        if self._ingest is not None:
            self._ingest.cancel()
        if self.store is not None:
            self.store.close_intake()

    def stop(self, patience_s: float = END_S_MAX) -> bool:
        """Stop the query, hold the dispatcher, write down what is in memory, and give up the directory. Maintenance
        may be at a piece of work that takes long on a slow disk, for `patience_s` at most.

        False when it does not end: the directory then stays locked, and only the end of the process frees it.
        """
        self.cancel()
        self._context.dispatcher.quiesce(timeout_s=3.0)
        if self._ingest is not None:
            self._ingest.stop(timeout_s=4.0)
            self._context.hearts.forget(INGEST, QUERY)
        if self._maintenance is not None:
            if not self._maintenance.stop(patience_s):
                return False
            self._context.hearts.forget(MAINTENANCE)
            try:
                self._maintenance.flush()
            except TimerStoreError as error:
                log.warning("last-flush-failed", reason=error.message, hint=error.hint)
        if self.store is not None:
            self.store.close()
        if self._found is not None:
            self._found.release()
            self._found = None
        return True

    def clock_jumped(self, jump_ms: int) -> None:
        """The wall clock jumped (negative: back)."""
        if jump_ms < 0 and self._ingest is not None:
            self._ingest.restart(Restart.CLOCK_JUMPED)

    def problems(self) -> list[str]:
        """What has died, in words."""
        found = []
        if self._maintenance is not None and not self._maintenance.is_alive and not self._cancelled.is_set():
            found.append("maintenance has ended")
        return found

    def impediments(self) -> tuple[str, ...]:
        """Why the pipeline does not take in or deliver right now although it runs."""
        if self._maintenance is not None and self._maintenance.disk_is_full:
            return ("the disk is full: ingest waits, delivery goes on",)
        return ()

    def look_at_retention(self, lag: Lag) -> None:
        """Now and then: does the topic keep what is pending?"""
        if self.retention is not None and self.store is not None:
            ingested = self.store.next_offsets()
            self.retention.refresh(self._context.cluster, self.store, lag.marks(ingested), lag.behind_s(ingested))

    def alarms(self) -> tuple[str, ...]:
        """What an operator should know although messages are delivered."""
        return () if self.retention is None else self.retention.alarms()

    # ---- parts of start

    def _identity(self) -> Identity:
        cluster = self._context.cluster
        topics = sorted(self._context.settings.delay_topics)
        return Identity(cluster_id=cluster.describe().cluster_id, topic_ids=cluster.topic_ids(topics))

    def _settle(self, identity: Identity) -> tuple[Found, dict[SourceName, CommittedState]] | None:
        context = self._context
        directory, now_ms = context.settings.store.directory, context.clock.now_ms()
        directory.mkdir(parents=True, exist_ok=True)
        with as_bridge_errors():
            found = self._found = recovery.find(directory, identity, now_ms)
        for report in found.reports:
            log.error("checkpoint-corrupt", report=report)
        limits = self._limits = limits_of(context.cluster, sorted({topic for topic, _ in self._owned}))
        parameters = {topic: decode_parameters(context.settings, topic, limit) for topic, limit in limits.items()}
        for topic, decoded in parameters.items():
            kept_ms = limits[topic].retention_ms
            log.info("roll-window", topic=topic, window_ms=decoded.roll_window_ms, retention_ms=kept_ms)
        settled = settle(
            context.ownership,
            owned=self._owned,
            look_up=lambda topic: facts_of(context.cluster, topic),
            checkpointed=[] if found.checkpoint is None else list(found.checkpoint.offsets),
            parameters=parameters.__getitem__,
            clock=context.clock,
        )
        if settled is None:
            return None
        covered = {} if found.checkpoint is None else found.checkpoint.offsets
        first = {name: state.first_offset for name, state in settled.items() if name in covered and state.first_offset}
        with as_bridge_errors():
            # An operator has given up what lies below (`delay-bridge adopt`), and this index may still hold it.
            if any(covered[name] < offset for name, offset in first.items()) or recovery.holds(
                found, {name for name, offset in first.items() if covered[name] == offset}
            ):
                found = recovery.give_up(found, now_ms)
        self._log_marks = context.cluster.watermarks(sorted(settled))
        self._windows = {
            topic: Windows(
                current_ms=decoded.roll_window_ms,
                largest_ms=largest_roll_window_ms(state for (name, _), state in settled.items() if name == topic),
            )
            for topic, decoded in parameters.items()
        }
        self.retention = RetentionGuard(context.settings, self._windows, context.clock)
        return found, settled

    def _open(self, found: Found, states: Mapping[SourceName, CommittedState]) -> TimerStore:
        context = self._context
        settings = context.settings
        topics = context.cluster.topics(sorted(settings.delay_topics))
        covered = {} if found.checkpoint is None else found.checkpoint.offsets
        # Of a partition that was given up once, nothing that the index does not cover counts, wherever its log begins.
        given_up = {name for name, state in states.items() if state.first_offset and name not in covered}
        self._found = None  # whether it can be opened or not, it is not ours to give back
        with (
            LongWork("recovering", "segments opened", health=context.health, clock=context.clock) as work,
            as_bridge_errors(),
        ):
            return TimerStore.restore(
                found,
                partitions=[(name, p) for name, topic in topics.items() for p in range(topic.partitions)],
                committed={name: (state.offset, state.position) for name, state in states.items()},
                frozen={name: state.frozen for name, state in states.items() if state.frozen},
                log_starts={name: 0 if name in given_up else mark.start for name, mark in self._log_marks.items()},
                now_ms=context.clock.now_ms(),
                limits=limits(settings, [state.epochs for state in states.values()]),
                progress=work.report,
            )

    def _starts(self, store: TimerStore, states: Mapping[SourceName, CommittedState]) -> dict[SourceName, int]:
        """As the function below; refuses what may have lost something."""
        log_starts = {name: mark.start for name, mark in self._log_marks.items()}
        starts, unheld = starting_offsets(store, states, log_starts)
        must_hold_what_is_pending(
            self._context.cluster,
            {name: states[name].offset for name in unheld},
            {name: self._log_marks[name] for name in unheld},
            {
                topic: limit.retention_ms - self._windows[topic].largest_ms
                for topic, limit in self._limits.items()
                if limit.retention_ms >= 0
            },
            self._context.clock.now_ms(),
        )
        return starts

    def _make_maintenance(self, store: TimerStore) -> MaintenanceThread:
        context = self._context

        def read(window: Window) -> pa.Table:
            return gather(context.spark, store.sources, window)

        return MaintenanceThread(
            store=store, gather=read, clock=context.clock, metrics=context.metrics,
            on_corrupt=context.on_rebuild, on_fatal=context.on_fatal, beat=context.hearts.watch(MAINTENANCE, SPARK_S),
        )  # fmt: skip

    def _make_ingest(self, store: TimerStore, states: Mapping[SourceName, CommittedState]) -> Ingest:
        context = self._context
        settings = context.settings
        return Ingest(
            spark=context.spark,
            kafka_options=java(settings),
            group_prefix=f"{settings.group_id}-spark",
            store=store,
            all_epochs={name: state.epochs for name, state in states.items()},
            limits=BatchLimits(
                records=settings.ingest.batch_records,
                bytes=settings.ingest.batch_bytes,
                trigger_ms=settings.ingest.trigger,
            ),
            clock=context.clock,
            metrics=context.metrics,
            on_fatal=context.on_fatal,
            beat=context.hearts.watch(INGEST, CALLS_S),
            beat_query=context.hearts.watch(QUERY, SPARK_S),
        )


def starting_offsets(
    store: TimerStore, states: Mapping[SourceName, CommittedState], log_starts: Mapping[SourceName, int]
) -> tuple[dict[SourceName, int], list[SourceName]]:
    """Where reading begins, by partition: the end of what the index covers; where it covers nothing, the log's start,
    or where the bridge's part of the topic begins. And the partitions that begin where records are gone already."""
    starts, unheld = {}, []
    for name, covered in store.resume_offsets().items():
        first, log_start = states[name].first_offset, log_starts[name]
        starts[name] = max(log_start, first) if covered is None else covered
        if covered is None and log_start > first:
            unheld.append(name)
    return starts, unheld


@contextmanager
def as_bridge_errors() -> Iterator[None]:
    """What is wrong with the volume is the environment's; what is wrong with whose index it is, a state's."""
    try:
        yield
    except (DirectoryInUse, DiskFailure) as error:
        raise EnvironmentFailure(error.message, hint=error.hint) from error
    except TimerStoreError as error:
        raise StateError(error.message, hint=error.hint) from error


def limits(settings: Settings, all_epochs: Iterable[DecodeEpochs]) -> Limits:
    """The store's bounds. Cancels are kept for the largest roll window that any record is read with."""
    windows = [epoch.parameters.roll_window_ms for epochs in all_epochs for epoch in epochs]
    return Limits(
        flush_bytes=settings.store.flush_bytes,
        flush_interval_ms=settings.store.flush_interval,
        ready_rows_bytes=settings.ready_rows.bytes,
        horizon_ms=settings.ready_rows.horizon,
        window_bytes=min(settings.ready_rows.bytes // 4, WINDOW_BYTES_MAX),
        window_ms=max(windows),
    )
