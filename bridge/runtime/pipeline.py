"""The pipeline: from the committed states to a store that is filled by the query and emptied by the dispatcher.

    plan        the committed (O, P), first commits where they are due, and decode epochs: start/first_commits.py
    open        the index of store.directory
    catch up    read from where the index ends up to O; nothing is dispatched before (invariant I6)
    run         ingest, maintenance, dispatcher; Spark's session may still be starting. Messages wait until commands
                that were written before the start are read: delivery/commands_first.py

When the assignment changes, it follows: only the partitions that come or go are touched.

    go     flush; hold the dispatcher between two transactions (some 40 ms); their rows leave the store; go on without.
           A crash anywhere is one before or after the revocation: nothing is written but that flush
    come   plan as at a start, for them alone; count what the index holds of them; put them into the store, where they
           are held until they are read up to their O, and commands above it, too; then the dispatcher has them. A crash
           before their first commit leaves their committed states as they were

A second change in between drops what has not come yet, and it is planned anew. Where following is not possible (nothing
is left; the open transaction did not end, or the partitions were lost; the index must be opened differently), and when
a segment is found damaged, the pipeline is stopped and a new one is made.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import structlog

from bridge.delivery.dispatcher import Dispatcher
from bridge.delivery.states import AT_REST
from bridge.errors import BridgeError, EnvironmentFailure
from bridge.ingest.batches.suspects import Suspects
from bridge.ingest.frames import FrameReceiver
from bridge.ingest.ingest import Ingest
from bridge.ingest.plain_reader import PlainReader
from bridge.ingest.query import Query
from bridge.ingest.watch.waits import Wait
from bridge.install import connector
from bridge.kafka.admin import Cluster
from bridge.kafka.membership import Membership, Ownership
from bridge.runtime.gauges import Lag
from bridge.runtime.maintenance_thread import MaintenanceThread
from bridge.settings.clients import java, librdkafka
from bridge.settings.model import Settings
from bridge.spark.session import end_jvm, intact
from bridge.start.facts import gather, plan_start
from bridge.start.first_commits import StartFacts, StartPlan
from bridge.start.identity_watch import Change, IdentityWatch
from bridge.start.index import as_bridge_errors, find_index, open_index
from bridge.start.retention import RetentionGuard, ingest_start
from bridge.start.roll_window import Windows, decode_parameters, limits_of
from bridge.start.suspects import make_suspects
from bridge.telemetry.health import Health, LongWork
from bridge.telemetry.heartbeats import CALLS_S, SPARK_S, Heartbeats
from bridge.telemetry.metrics import Metrics
from bridge.wire.decode_epochs import DecodeEpochs
from timerstore.clock import Clock
from timerstore.errors import TimerStoreError
from timerstore.operations import recovery
from timerstore.rows.sources import SourceName
from timerstore.store import TimerStore

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

INGEST, QUERY, MAINTENANCE = "ingest", "query", "maintenance"
"""Names of hearts."""

FLUSH_S: Final = Wait.FLUSH_OF_GONE.s
"""How long a revocation waits for a flush, which spares reading again what comes back soon."""
JOIN_S: Final = Wait.ROOM_TO_JOIN.s
"""How long partitions that come wait for a batch that is taken in, before a flush may have to make room for it."""
END_S_MAX: Final = 5.0
"""How long maintenance has when the process ends, which must not take longer than `app.STOP_S_MAX`."""

log = structlog.get_logger("bridge.runtime.pipeline")


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineContext:
    """What outlives a pipeline and is handed to each."""

    settings: Settings
    clock: Clock
    cluster: Cluster
    spark: Future[SparkSession]
    make_session: Callable[[], SparkSession]
    ownership: Ownership
    dispatcher: Dispatcher
    metrics: Metrics
    health: Health
    hearts: Heartbeats
    on_fatal: Callable[[BridgeError], None]
    on_rebuild: Callable[[], None]
    identity: IdentityWatch
    on_plan: Callable[[StartPlan], None] = lambda _: None
    """Told before anything of its partitions is delivered."""
    look: Callable[[], Change] = lambda: Change.NONE
    """The periodic look at the logs, by the thread that starts and follows; it asks for another pipeline itself."""


class Pipeline:
    """See the module. `start`, `follow` and `stop` are called by one thread, the others by any."""

    def __init__(self, context: PipelineContext, owned: frozenset[SourceName], member: Membership) -> None:
        """`owned` are those partitions of `member` that are not left out."""
        self._context = context
        self._owned = owned
        self._member = member
        self._changing = threading.RLock()
        """Guards those above, and the two below: what is owned changes together in all parts."""
        self._follows = False
        self._joins = 0
        self._epochs: dict[SourceName, DecodeEpochs] = {}
        self._windows: Mapping[str, Windows] = {}
        self.topic_ids: Mapping[str, str] = {}
        """Of the delay topics that it has begun with."""
        self._cancelled = threading.Event()
        self._ingest: Ingest | None = None
        self._suspects: Suspects | None = None
        self._maintenance: MaintenanceThread | None = None
        self._found: recovery.Found | None = None
        self.store: TimerStore | None = None
        self.retention: RetentionGuard | None = None

    # ---- life

    def start(self) -> bool:
        """Bring the pipeline up; False when it was cancelled, or its assignment is out of date already.

        Raises StateError where going on would lose or repeat messages, EnvironmentFailure for missing answers."""
        context = self._context
        self._must_be_at_rest()
        context.health.enter("reading-offsets", reasons=("reading the committed offsets",))
        replaced, now_ms = context.identity.replaced, context.clock.now_ms()
        found = self._found = find_index(context.settings, context.cluster, now_ms, without=replaced)
        plan = self._plan(found, self._owned, self._member)
        if plan is None or self._cancelled.is_set():
            return False
        self._windows = plan.windows
        self.retention = RetentionGuard(context.settings, plan.windows, context.clock)
        self.retention.expect(plan.states)
        store = self.store = self._open(found, plan)
        start = ingest_start(context.cluster, plan, store.resume_offsets(), store.held_below(plan.states), now_ms)
        log.info(
            "index-opened",
            partitions=len(self._owned),
            without_index=sum(covered is None for covered in store.resume_offsets().values()),
            read_again=sum(max(0, offset - start[name]) for name, offset in plan.committed.items()),
            segments=store.stats().segments,
            reports=list(store.reports),
        )
        store.start_at(start, {name: end for name, end in _ends(plan).items() if name in start})
        self._maintenance = self._make_maintenance(store)
        self._maintenance.start()
        ingest = self._ingest = self._make_ingest(store, plan)
        cut = recovery.unseen_cuts(found, plan.cuts).keys()
        if cut and cut < plan.states.keys():  # they are read from their logs' starts: the others do not wait for that
            store.assignment.postpone(cut, context.clock.now_ms())
        if self._cancelled.is_set():
            return False
        work = LongWork(context.health, context.clock, "catching-up", "records up to the committed offsets")
        ingest.start()
        ingest.catch_up(lambda done, total: self._catching_up(work, store, done, total))
        if self._cancelled.is_set():
            return False
        with self._changing:
            if self._cancelled.is_set():
                return False
            context.on_plan(plan)
            context.dispatcher.resume(store, plan.states, self._member.revocations, _ends(plan))
            self._follows = True
        return True

    def _catching_up(self, work: LongWork, store: TimerStore, done: int, total: int) -> None:
        """A corrupt batch below the committed O holds up its own partition, and not the start; a log that has lost what
        is to be read, neither."""
        work.report(done, total)
        held = self.corrupt_batches().keys() - set(store.assignment.joining())
        if held:
            store.assignment.postpone(held, self._context.clock.now_ms())
        if self._context.look() is not Change.NONE:
            self.cancel()

    def cancel_start(self) -> None:
        """As `cancel`, unless it has started. (One that does so at this moment is made anew.)"""
        if not self._follows:
            self.cancel()

    def cancel(self) -> None:
        """Let a `start` that is under way return soon; nothing more is ingested."""
        self._cancelled.set()
        if self._ingest is not None:
            self._ingest.cancel()
        if self.store is not None:
            self.store.close_intake()

    def stop(self, patience_s: float = END_S_MAX) -> bool:
        """Stop the query, hold the dispatcher, flush, and unlock the directory. Maintenance has `patience_s` to end its
        piece of work, as a disk may be slow; else returns False, and the directory stays locked as long as the process
        lives."""
        with self._changing:
            self._follows = False
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

    # ---- partitions that come and go

    def follow(self, owned: frozenset[SourceName], member: Membership) -> bool:
        """Deliver `owned`, the partitions of `member` that are not left out, from now on. False where the pipeline must
        be made anew. Raises as `start`."""
        with self._changing:
            if not self._follows or self._cancelled.is_set():
                return False
            if member.revocations < self._member.revocations:
                return True  # sampled during a revocation: what the group says after it is still to come
            self._member, gone = member, self._owned - owned
            dispatcher = self._context.dispatcher
            if not gone and self.store is not None and dispatcher.is_held:
                # It holds itself where its assignment is out of date: this one is not.
                dispatcher.resume(self.store, {}, member.revocations)
        if gone and not self.give_up(gone, member.revocations):
            return False
        come = owned - self._owned
        return not come or self._take_on(come, member)

    def give_up(self, names: frozenset[SourceName], revocations: int) -> bool:
        """These partitions are another instance's from now on (`revocations` have been then). Returns when no
        transaction is open that carries them; False where it is, or where the pipeline must be made anew."""
        if self._follows and self._maintenance is not None:
            self._maintenance.flush_now(FLUSH_S)
        with self._changing:
            revocations = max(revocations, self._member.revocations)  # another may have come during the flush
            at_rest = self._context.dispatcher.quiesce()
            store, ingest, maintenance = self.store, self._ingest, self._maintenance
            if not at_rest or not self._follows or store is None or ingest is None or maintenance is None:
                self.abandon()
                return False
            here = store.next_offsets().keys()
            if here <= names:
                self.abandon()
                return True
            gone = names & here
            self._joins += 1  # what has not come yet is planned anew
            if gone:
                store.assignment.give_up(gone, self._context.clock.now_ms())
                ingest.give_up(gone)
                maintenance.ask(store.assignment.settle)
            self._owned = frozenset(here - names)
            self._member = replace(self._member, revocations=revocations)
            self._context.dispatcher.go_on_without(gone, revocations)
        log.info("partitions-given-up", partitions=_names(gone), owned=len(self._owned))
        return True

    def abandon(self) -> None:
        """It follows no more: another is to be made."""
        with self._changing:
            self._follows = False
            self.cancel()

    def _take_on(self, come: frozenset[SourceName], member: Membership) -> bool:
        """Begin to take on partitions; False where the pipeline must be made anew."""
        store, ingest, maintenance = self.store, self._ingest, self._maintenance
        if store is None or ingest is None or maintenance is None:
            return False
        index = recovery.Found(
            directory=store.state.directory, descriptor=-1, identity=store.state.identity,
            checkpoint=store.state.checkpoint,
        )  # fmt: skip
        plan = self._plan(index, come, member)
        if plan is None:
            return True  # the group says something else now
        progress, frozen, cuts = plan.progress, plan.frozen, plan.cuts
        resume = store.assignment.resume_offsets(progress, frozen, plan.log_starts, cuts)
        if resume is None or plan.gives_up_index or not self._spans(plan.windows):
            return False
        now_ms = self._context.clock.now_ms()
        start = ingest_start(self._context.cluster, plan, resume, store.held_below(resume), now_ms)
        if self.retention is not None:
            self.retention.expect(plan.states)
        with self._changing:
            if member.revocations < self._member.revocations:
                return True
            self._owned |= come
            turn = self._joins

        def join() -> bool:
            arrival = store.assignment.arrival(progress, frozen, cuts)

            def add() -> bool:
                with self._changing:
                    if turn != self._joins or not self._follows:
                        return False
                    if store.assignment.resume_offsets(progress, frozen, plan.log_starts, cuts) != resume:
                        self.abandon()
                        self._context.on_rebuild()
                        return False
                    self._epochs.update({name: state.epochs for name, state in plan.states.items()})
                    ends = _ends(plan)
                    self._context.on_plan(plan)
                    self._context.dispatcher.expect(plan.states, ends)
                    store.assignment.join(arrival, plan.log_starts, start, ends, self._context.clock.now_ms())
                behind = sum(max(0, offset - start[name]) for name, offset in plan.committed.items())
                log.info("partitions-come", partitions=_names(come), read_again=behind)
                return True

            return ingest.join(plan.committed, add, JOIN_S) is not None

        maintenance.ask(join)
        return True

    def _spans(self, windows: Mapping[str, Windows]) -> bool:
        """Whether the store keeps cancels for as long as these roll windows need."""
        longest_ms = max(window.largest_ms for window in self._windows.values())
        return all(name in self._windows and each.largest_ms <= longest_ms for name, each in windows.items())

    @property
    def owned(self) -> frozenset[SourceName]:
        """The partitions that it delivers."""
        return self._owned

    def is_reading(self) -> bool:
        """Whether a record that is sent now is read at once."""
        return self._ingest is not None and self._ingest.is_reading()

    @property
    def reader(self) -> str:
        """`spark` or `plain`."""
        return "plain" if self._ingest is None else self._ingest.reader

    def blocked_by(self) -> frozenset[SourceName]:
        """Partitions that take nothing, and for which no room is left for all others."""
        return frozenset() if self.store is None else self.store.blocked_by()

    def problems(self) -> list[str]:
        """What has ended that should run, in words."""
        maintenance = self._maintenance
        if maintenance is None or maintenance.is_alive or self._cancelled.is_set():
            return []
        return ["maintenance has ended"]

    def corrupt_batches(self) -> Mapping[SourceName, int]:
        """Where each of them begins, by the partition that it holds up."""
        held = {} if self._suspects is None else self._suspects.held()
        return {name: batch.offset for name, batch in held.items()}

    def impediments(self) -> tuple[str, ...]:
        """Why ingest or delivery waits although the pipeline runs."""
        if self._maintenance is not None and self._maintenance.disk_is_full:
            return ("the disk is full: ingest waits, delivery goes on",)
        return ()

    def look_at_identity(self, lag: Lag, *, is_told: bool = False) -> Change:
        """Look, where it is time to or a reader has told of something (`is_told`), how far the logs reach, and whether
        they are still the same."""
        context, store = self._context, self.store
        if store is None:
            return Change.NONE
        looked = lag.refresh(context.cluster, store, at_once=is_told)
        change = context.identity.look(
            context.ownership, context.cluster, store, self.topic_ids, looked, is_told=is_told
        )
        if looked is not None:
            context.dispatcher.notes.note_read(context.identity.read_under)
        return change

    def look_at_retention(self, lag: Lag) -> None:
        """Look, from time to time, whether the topic keeps what is pending."""
        if self.retention is not None and self.store is not None:
            ingested = self.store.next_offsets()
            if self._ingest is not None:
                self._ingest.note_log_ends({name: mark.end for name, mark in lag.marks(ingested).items()})
            self.retention.refresh(self._context.cluster, self.store, lag.marks(ingested), lag.behind_s(ingested))
            self._context.dispatcher.notes.note_gone(self.retention.gone)
            if self.retention.must_flush and self._maintenance is not None:
                self._maintenance.flush_now(0)

    def alarms(self) -> tuple[str, ...]:
        """What an operator should know although delivery continues."""
        joining = [] if self.store is None else self.store.assignment.joining()
        unread = () if self._suspects is None else self._suspects.alarms()
        come = (f"partitions that have come are being read up to their committed offsets: {_names(joining)}",)
        kept = () if self.retention is None else self.retention.alarms()
        return (*(come if joining else ()), *unread, *kept, *self._context.dispatcher.doubts.alarms())

    # ---- parts of start

    def _must_be_at_rest(self) -> None:
        """A transaction that were committed after its states have been read would be delivered again."""
        dispatcher, wait_s = self._context.dispatcher, self._context.settings.budgets.step_s
        dispatcher.quiesce(wait_s)
        if dispatcher.state not in AT_REST:
            raise EnvironmentFailure(
                f"the open transaction did not end within {wait_s:.0f} s",
                hint="Check the brokers. Restart the bridge: it continues where it was.",
                code="DB-3034",
            )

    def _plan(self, found: recovery.Found, owned: frozenset[SourceName], member: Membership) -> StartPlan | None:
        context = self._context
        limits = limits_of(context.cluster, sorted({topic for topic, _ in owned}))
        parameters = {topic: decode_parameters(context.settings, topic, limit) for topic, limit in limits.items()}
        for topic, each in parameters.items():
            log.info("roll-window", topic=topic, window_ms=each.roll_window_ms, retention_ms=limits[topic].retention_ms)

        def facts() -> StartFacts | None:
            with as_bridge_errors():
                facts = gather(
                    context.ownership, context.cluster, owned, parameters=parameters, limits=limits, found=found,
                    taken_back=context.dispatcher.doubts.torn.taken_back,
                )  # fmt: skip
            if context.identity.holds_cut(context.cluster, facts):
                context.on_rebuild()
                return None
            return facts

        plan = plan_start(context.ownership, member.partitions, facts, context.clock)
        if plan is not None:
            context.dispatcher.notes.note_read(context.identity.read_under)
            self.topic_ids = {**self.topic_ids, **{name[0]: state.topic_id for name, state in plan.states.items()}}
        return plan

    def _open(self, found: recovery.Found, plan: StartPlan) -> TimerStore:
        context = self._context
        topics = context.cluster.topics(sorted(context.settings.delay_topics))
        partitions = [(name, partition) for name, topic in topics.items() for partition in range(topic.partitions)]
        now_ms = context.clock.now_ms()
        if plan.gives_up_index:
            with as_bridge_errors():
                found = recovery.give_up(found, now_ms)
        self._found = None  # from here on the lock is the store's, opened or not
        work = LongWork(context.health, context.clock, "recovering", "segments opened")
        return open_index(found, plan, context.settings, partitions, now_ms, work.report)

    def _make_maintenance(self, store: TimerStore) -> MaintenanceThread:
        context = self._context
        return MaintenanceThread(
            store=store, clock=context.clock, metrics=context.metrics,
            on_corrupt=context.on_rebuild, on_fatal=context.on_fatal, beat=context.hearts.watch(MAINTENANCE, SPARK_S),
        )  # fmt: skip

    def _make_ingest(self, store: TimerStore, plan: StartPlan) -> Ingest:
        context, settings = self._context, self._context.settings
        all_epochs = self._epochs = {name: state.epochs for name, state in plan.states.items()}

        def make_query(session: SparkSession, receiver: FrameReceiver) -> Query:
            prefix = f"{settings.group_id}-spark"
            session = intact(session, context.make_session)
            return Query(session, java(settings), prefix, dict(all_epochs), receiver.address, receiver.token)

        suspects = self._suspects = make_suspects(settings, all_epochs, connector.jars, context.clock)
        return Ingest(
            session=context.spark,
            make_query=make_query,
            make_reader=lambda: PlainReader(librdkafka(settings, "reader"), settings.group_id, all_epochs),
            store=store,
            committed=plan.committed,
            log_starts=lambda names: {
                name: mark.start for name, mark in context.cluster.watermarks(sorted(names)).items()
            },
            all_epochs=all_epochs,
            executor_host=settings.spark.executor_host,
            suspects=suspects,
            clock=context.clock,
            metrics=context.metrics,
            on_corrupt=context.on_rebuild,
            on_fatal=context.on_fatal,
            end_jvm=end_jvm,
            beat=context.hearts.watch(INGEST, CALLS_S),
            beat_query=context.hearts.watch(QUERY, SPARK_S),
        )


def _ends(plan: StartPlan) -> dict[SourceName, int]:
    """Where the logs ended when the plan was made."""
    return {name: mark.end for name, mark in plan.log_marks.items()}


def _names(partitions: Collection[SourceName]) -> str:
    return ", ".join(f"{topic}/{partition}" for topic, partition in sorted(partitions))
