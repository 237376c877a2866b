"""The pipeline: stores that start from the committed states; the query fills them, and the dispatcher empties them.

A partition that comes, at a start or by a change of the assignment, takes these steps (`_take_on`):

    plan        the committed (O, P), the first commits if due, and decode epochs: start/first_commits.py
    adopt       with store.remote: fetch a better index than the local one, and plan anew: remote/adoption.py
    open        the index of its directory
    catch up    read from the end of the index up to O; no delivery before (invariant I6)
    go live     once commands from before its arrival are read: delivery/commands_first.py

A crash before its first commit leaves its committed state unchanged. One that goes (`give_up`):

    flush       for two seconds at most
    close       between two transactions, for which the dispatcher is held: some 40 ms. A crash is one before or after
                the revocation: only the flush is written

A partition with a damaged segment goes and comes again. The pipeline is stopped and replaced if it cannot follow (no
partition is left; the open transaction did not end; partitions were lost; the store must be opened with other limits).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

import structlog

from bridge.delivery.doubt.log_notes import States
from bridge.delivery.states import AT_REST
from bridge.errors import BridgeError, EnvironmentFailure, StateError
from bridge.ingest.batches.suspects import Suspects
from bridge.ingest.frames import FrameReceiver, FromElsewhere
from bridge.ingest.ingest import Ingest
from bridge.ingest.plain_reader import PlainReader
from bridge.ingest.query import SparkQuery
from bridge.ingest.watch.waits import Wait
from bridge.install import connector
from bridge.kafka.membership import Membership
from bridge.runtime.context import PipelineContext
from bridge.runtime.gauges import Lag
from bridge.runtime.maintenance_thread import MaintenanceThread
from bridge.settings.clients import java, librdkafka
from bridge.spark.session import end_jvm, intact
from bridge.start.facts import gather, plan_start
from bridge.start.first_commits import GONE, StartFacts, StartPlan
from bridge.start.index import Indexes, as_bridge_errors, drop_earlier, find_index, find_indexes, make_stores, openings
from bridge.start.oldest import OldestRecords
from bridge.start.retention import RetentionGuard, ingest_start, looked_into, note_gone
from bridge.start.roll_window import Windows, decode_parameters_of, limits_of
from bridge.stores.directory import StoreDirectory
from bridge.stores.names import Offsets, SourceName, texts_of
from bridge.stores.opening import Prepared
from bridge.stores.stores import DELIVERS, Life, Stores
from bridge.telemetry.health import LongWork, Phase
from bridge.telemetry.heartbeats import CALLS_S, SPARK_S, START_S
from bridge.wire.committed_state import Manifest
from bridge.wire.decode_epochs import DecodeEpochs
from timerstore.errors import TimerStoreError
from timerstore.store import TimerStore

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from bridge.remote.uploads import Uploads

INGEST, QUERY, MAINTENANCE = "ingest", "query", "maintenance"
"""Names of hearts."""

FLUSH_S: Final = Wait.FLUSH_OF_GONE.s
"""The longest wait of a revocation for a flush, which saves reading again if the partitions come back soon."""
STEP_S: Final = Wait.STEP_OF_MAINTENANCE.s
"""The longest wait of new partitions for the present step of maintenance, which may concern their directories."""
END_S_MAX: Final = 5.0
"""The time of maintenance at the end of the process, which must take less than `app.STOP_S_MAX`."""

log = structlog.get_logger("bridge.runtime.pipeline")


class Pipeline:
    """See the module docstring. One thread calls `start`, `follow` and `stop`; any may call the others."""

    def __init__(self, context: PipelineContext, owned: frozenset[SourceName], member: Membership) -> None:
        """`owned` are the partitions of `member` that are not held."""
        self._context = context
        self._owned = owned
        self._member = member
        self._changing = threading.RLock()
        """Guards the fields above and the two below: ownership changes in all parts together."""
        self._follows = False
        self._epochs: dict[SourceName, DecodeEpochs] = {}
        self._windows: Mapping[str, Windows] = {}
        self._work: LongWork | None = None
        self._to_read = 0
        self._silent: frozenset[SourceName] = frozenset()
        self._not_open: frozenset[SourceName] = frozenset()
        self.topic_ids: Mapping[str, str] = {}
        """The ids of the delay topics at the start."""
        self._cancelled = threading.Event()
        self._ingest: Ingest | None = None
        self._suspects: Suspects | None = None
        self._maintenance: MaintenanceThread | None = None
        self.uploads: Uploads | None = None
        self._directory: StoreDirectory | None = None
        self.store: Stores | None = None
        self.retention: RetentionGuard | None = None

    # ---- life

    def start(self) -> bool:
        """Start the pipeline; False if it was cancelled, or its assignment is already out of date.

        Raises StateError if going on would lose or repeat messages, EnvironmentFailure for missing answers."""
        context = self._context
        self._must_be_at_rest()
        context.health.enter(Phase("reading-offsets", reasons=("reading the committed offsets",)))
        without, assigned = context.identity.replaced, context.ownership.assignment
        directory = self._directory = find_index(context.settings, context.cluster, without=without, assigned=assigned)
        indexes = find_indexes(directory, self._owned, context.clock.now_ms())
        plan = self._plan(directory, indexes, self._owned, self._member)
        if plan is not None and context.remote is not None and context.remote.adopt(indexes, plan, context.on_held):
            context.health.enter(Phase("recovering", reasons=("waiting for an index from store.remote",)))
            windows, beat = plan.windows, partial(context.beat, START_S)
            self._not_open = context.remote.wait_for_one(self._owned, self._cancelled.is_set, beat)
            self._owned -= self._not_open
            indexes = find_indexes(directory, self._owned, context.clock.now_ms())
            plan = self._plan(directory, indexes, self._owned, self._member)
            plan = None if plan is None else replace(plan, windows=windows)
        if plan is None or self._cancelled.is_set():
            return False
        self._windows = plan.windows
        oldest = OldestRecords.of(context.settings, connector.jars, context.clock)
        self.retention = RetentionGuard(context.settings, plan.windows, context.clock, oldest, context.on_rebuild)
        store = self.store = make_stores(directory, context.cluster, context.settings, plan, context.on_held)
        self._maintenance = self._make_maintenance(store)
        self._maintenance.start()
        if context.remote is not None:
            self.uploads = context.remote.begin_uploads(
                store, context.dispatcher, context.ownership, self._announce, context.on_fatal
            )
        ingest = self._ingest = self._make_ingest(store)
        work = LongWork(context.health, context.clock, "recovering", "partitions opened")
        prepared = self._prepare(store, indexes, plan, work.report)
        log.info(
            "index-opened",
            partitions=len(self._owned),
            without_index=sum(covered is None for covered in prepared.resume_offsets().values()),
            read_again=prepared.behind(),
            segments=sum(each.stats().segments for each in prepared.stores.values()),
            reports=list(store.reports),
        )

        def resume(states: States, log_ends: Offsets) -> None:
            context.dispatcher.resume(store, states, self._member.revocations, log_ends)

        if not self._add(prepared, plan, self._member, resume):
            return False
        ingest.start()
        self._work = LongWork(context.health, context.clock, "catching-up", "records up to the committed offsets")
        return True

    def is_catching_up(self) -> bool:
        """Whether a partition that can be read is behind its committed O; reports the progress."""
        store, work = self.store, self._work
        behind = 0 if store is None else store.behind(self._unreadable())
        if work is None or not behind:
            self._work = None
            return False
        self._to_read = max(behind, self._to_read)
        work.report(self._to_read - behind, self._to_read)
        return True

    def is_delivering(self) -> bool:
        """Whether all readable partitions are delivered, and at least one is."""
        store = self.store
        waiting = [] if store is None else store.in_life(Life.CATCHING_UP, Life.COMMANDS_FIRST)
        is_open = store is not None and not self._not_open and bool(store.in_life(*DELIVERS))
        return is_open and self._unreadable().issuperset(waiting)

    def _unreadable(self) -> frozenset[SourceName]:
        """The partitions with a corrupt batch, or without a leader at the last look."""
        return self._silent.union(self.corrupt_batches())

    def cancel(self) -> None:
        """Let a running `start` return soon, and stop ingest."""
        self._cancelled.set()
        if self._ingest is not None:
            self._ingest.cancel()
        if self.store is not None:
            self.store.close_intake()

    def stop(self, patience_s: float = END_S_MAX) -> bool:
        """Stop the query, hold the dispatcher, flush, and unlock the directory. Maintenance has `patience_s` to end its
        current step on a slow disk. Otherwise returns False, and the directory stays locked until the process ends."""
        with self._changing:
            self._follows = False
        self.cancel()
        self._context.dispatcher.quiesce(timeout_s=3.0)
        if self._ingest is not None:
            self._ingest.stop(timeout_s=4.0)
            self._context.hearts.forget(INGEST, QUERY)
        if self._context.remote is not None and not self._context.remote.stop(self.uploads, patience_s):
            return False
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
        elif self._directory is not None:
            self._directory.release()
        self._directory = None
        return True

    # ---- partitions that come and go

    def follow(self, owned: frozenset[SourceName], member: Membership) -> bool:
        """Deliver `owned`, the partitions of `member` that are not held, from now on. False if the pipeline must be
        replaced. Raises as `start`."""
        with self._changing:
            damaged = frozenset() if self.store is None else self.store.damage.names
            if not self._follows or self._cancelled.is_set() or not self._owned & (owned - damaged):
                return False
            if member.revocations < self._member.revocations:
                return True  # sampled during a revocation: the group's next assignment is still to come
            self._member, gone = member, self._owned - (owned - damaged)
            dispatcher = self._context.dispatcher
            if not gone and self.store is not None and dispatcher.is_held:
                # It was held for an outdated assignment; this one is current.
                dispatcher.resume(self.store, {}, member.revocations)
        if gone and not self.give_up(gone, member.revocations):
            return False
        come = self._not_open = owned - self._owned
        return not come or self._take_on(come, member)

    def give_up(self, names: frozenset[SourceName], revocations: int) -> bool:
        """Give these partitions to another instance; `revocations` counts this revocation. Returns once no open
        transaction carries them; False if one still does, or if the pipeline must be replaced."""
        if self._follows and self._maintenance is not None:
            self._maintenance.flush_now(FLUSH_S, names)
        with self._changing:
            revocations = max(revocations, self._member.revocations)  # the flush may have outlasted another one
            at_rest = self._context.dispatcher.quiesce()
            store, ingest = self.store, self._ingest
            if not at_rest or not self._follows or store is None or ingest is None:
                self.abandon()
                return False
            here = store.next_offsets().keys()
            if here <= names:
                self.abandon()
                return True
            gone = names & here
            if gone:
                store.close_partitions(gone)
                ingest.begin_anew(gone)
            self._owned = frozenset(here - names)
            self._member = replace(self._member, revocations=revocations)
            self._context.dispatcher.go_on_without(gone, revocations)
        log.info("partitions-given-up", partitions=", ".join(texts_of(gone)), owned=len(self._owned))
        return True

    def abandon(self) -> None:
        """Stop following: another pipeline replaces this one."""
        with self._changing:
            self._follows = False
            self.cancel()

    def _take_on(self, come: frozenset[SourceName], member: Membership) -> bool:
        """Take on partitions; False if the pipeline must be replaced. Raises as `start`."""
        store, maintenance, directory, remote = self.store, self._maintenance, self._directory, self._context.remote
        if remote is not None and not (come := come - remote.adoption.under_way()):
            return True  # they come when their indexes are here
        if store is None or maintenance is None or directory is None or not come <= set(store.sources):
            return False
        if not maintenance.pass_step(STEP_S):
            self._context.on_held()
            return True
        store.damage.forget(come)
        indexes = find_indexes(directory, come, self._context.clock.now_ms())
        plan = self._plan(directory, indexes, come, member)
        if plan is None:
            return True  # the group says something else now
        if remote is not None and remote.adopt(indexes, plan, self._context.on_held):
            return self._take_on(come, member)
        if not self._spans(plan.windows):
            return False
        prepared = self._prepare(store, indexes, plan, lambda _done, _total: self._context.beat(START_S))
        if self._add(prepared, plan, member, self._context.dispatcher.expect):
            log.info("partitions-come", partitions=", ".join(texts_of(come)), read_again=prepared.behind())
        return True

    def _prepare(
        self,
        store: Stores,
        indexes: Indexes,
        plan: StartPlan,
        progress: Callable[[int, int], None],
    ) -> Prepared:
        """Open the stores of planned partitions. Raises StateError if messages may be lost, EnvironmentFailure."""
        now_ms = self._context.clock.now_ms()
        with as_bridge_errors():
            prepared = store.prepare(openings(indexes, plan, now_ms), now_ms, progress)
        try:
            resume, held = prepared.resume_offsets(), prepared.held_below()
            note = partial(note_gone, self._context.ownership, self._member.partitions, self._directory, plan)
            prepared.start_at(ingest_start(self._context.cluster, plan, resume, held, now_ms, note), plan.log_ends())
        except BridgeError as error:
            prepared.close()
            # Else this version has committed before.
            is_first = not self._follows and {*prepared.resume_offsets().values()} == {None}
            if error.code == GONE and is_first and self._directory and self._directory.has_index_of_earlier_version():
                hint = "Run the earlier version until the messages of this partition are delivered."
                raise StateError(error.message, hint=hint, code=error.code) from error  # of the whole start
            raise
        return prepared

    def _add(
        self, prepared: Prepared, plan: StartPlan, member: Membership, expect: Callable[[States, Offsets], None]
    ) -> bool:
        """Hand planned partitions to all parts; `expect` is the dispatcher's. Returns whether it did: partitions do not
        come if others were revoked meanwhile, and are planned anew."""
        context = self._context
        with self._changing:
            store, ingest, retention = self.store, self._ingest, self.retention
            is_late = self._cancelled.is_set() or member.revocations < self._member.revocations
            if is_late or store is None or ingest is None or retention is None:
                prepared.close()
                return False
            plan, gone = looked_into(plan, prepared)
            retention.expect(plan.states, plan.windows, gone)
            context.dispatcher.notes.note_plan(retention.gone, {name: plan.states[name] for name in plan.changed})
            self._epochs.update({name: state.epochs for name, state in plan.states.items()})
            has_remote = context.remote is not None
            manifests = {name: state.manifest if has_remote else None for name, state in plan.states.items()}
            context.dispatcher.notes.note_manifests(manifests)
            context.on_plan(plan)
            expect(plan.states, plan.log_ends())
            store.add(prepared)
            ingest.begin_anew()
            self._owned |= plan.states.keys()
            self._not_open -= plan.states.keys()
            self._follows = True
        return True

    def _announce(self, name: SourceName, of: TimerStore, manifest: Manifest) -> None:
        """Note a manifest for the next transaction, if its store is still open."""
        with self._changing:
            if self._follows and self.store is not None and self.store.by_name.get(name) is of:
                self._context.dispatcher.notes.note_manifests({name: manifest})
                self.store.wake()

    def _spans(self, windows: Mapping[str, Windows]) -> bool:
        """Whether the store keeps cancels long enough for these roll windows."""
        longest_ms = max(window.cancels_ms for window in self._windows.values())
        return all(name in self._windows and window.cancels_ms <= longest_ms for name, window in windows.items())

    @property
    def owned(self) -> frozenset[SourceName]:
        """The partitions that the pipeline delivers."""
        return self._owned

    def is_reading(self) -> bool:
        """Whether a new record is read at once."""
        return self._ingest is not None and self._ingest.is_reading()

    @property
    def reader(self) -> str:
        """`spark` or `plain`."""
        return "plain" if self._ingest is None else self._ingest.reader

    def problems(self) -> list[str]:
        """Sentences about parts that have ended unexpectedly."""
        is_over = self._maintenance is not None and not (self._maintenance.is_alive or self._cancelled.is_set())
        return ["maintenance has ended"] if is_over else []

    def corrupt_batches(self) -> Mapping[SourceName, int]:
        """The first offset of each corrupt batch, by the partition that it blocks."""
        held = {} if self._suspects is None else self._suspects.held()
        return {name: batch.offset for name, batch in held.items()}

    def without_commands(self) -> frozenset[SourceName]:
        """The partitions in which no command is finished now: they have a corrupt batch, or messages in doubt."""
        return self._context.dispatcher.doubts.held().union(self.corrupt_batches())

    def impediments(self) -> tuple[str, ...]:
        """The reasons why ingest or delivery waits while the pipeline runs."""
        is_full = self._maintenance is not None and self._maintenance.disk_is_full
        return ("the disk is full: ingest waits, delivery goes on",) if is_full else ()

    def look_at_identity(self, lag: Lag, *, is_told: bool = False) -> bool:
        """Check the ends and the identity of the logs, if that is due, or at once after a reader's report (`is_told`).
        Returns whether the partitions to deliver have changed."""
        context, identity, store = self._context, self._context.identity, self.store
        if store is None:
            return False
        looked = lag.refresh(context.cluster, store, at_once=is_told)
        if looked:
            silent = frozenset(name for name, at in looked.items() if at.marks is None)
            self._silent = silent if len(silent) < len(looked) else frozenset()  # without any answer nothing is known
        context.dispatcher.commands_first.unreadable = self._unreadable()
        change = identity.look(context.ownership, context.cluster, store, self.topic_ids, looked, is_told=is_told)
        if looked is not None:
            context.dispatcher.notes.note_read(identity.read_under)
        return change

    def look_at_retention(self, lag: Lag) -> None:
        """Check periodically that the topic keeps the records of pending messages."""
        if self.retention is not None and self.store is not None:
            ingested = self.store.next_offsets()
            if self._ingest is not None:
                self._ingest.note_log_ends({name: mark.end for name, mark in lag.marks(ingested).items()})
            self.retention.refresh(self._context.cluster, self.store, lag.marks(ingested), lag.behind_s(ingested))
            self._context.dispatcher.notes.note_gone(self.retention.gone)
            if self.retention.must_flush and self._maintenance is not None:
                self._maintenance.flush_now(0)
            if self._directory is not None and self._directory.has_index_of_earlier_version():
                drop_earlier(self._directory, self.store, self._member.partitions)

    def alarms(self) -> tuple[str, ...]:
        """Warnings for the operator while delivery continues."""
        joining = [] if self.store is None else self.store.in_life(Life.CATCHING_UP)
        unread = () if self._suspects is None else self._suspects.alarms()
        come = (f"partitions are being read up to their committed offsets: {', '.join(texts_of(joining))}",)
        kept = () if self.retention is None else self.retention.alarms()
        later = (f"partitions are not open yet: {', '.join(texts_of(self._not_open))}",) if self._not_open else ()
        return (*later, *(come if joining else ()), *unread, *kept, *self._context.dispatcher.doubts.alarms())

    # ---- parts of start

    def _must_be_at_rest(self) -> None:
        """Wait for the open transaction: one committed after the states are read would be delivered again."""
        dispatcher, wait_s = self._context.dispatcher, self._context.settings.budgets.step_s
        dispatcher.quiesce(wait_s)
        if dispatcher.state not in AT_REST:
            raise EnvironmentFailure(
                f"the open transaction did not end within {wait_s:.0f} s",
                hint="Check the brokers. Restart the bridge: it continues from the same place.",
                code="DB-3034",
            )

    def _plan(
        self, directory: StoreDirectory, indexes: Indexes, owned: frozenset[SourceName], member: Membership
    ) -> StartPlan | None:
        context = self._context
        limits = limits_of(context.cluster, sorted({topic for topic, _ in owned}))
        parameters = decode_parameters_of(context.settings, limits)

        def facts() -> StartFacts | None:
            with as_bridge_errors():
                facts = gather(
                    context.ownership, context.cluster, owned, parameters=parameters, limits=limits, indexes=indexes,
                    known=directory.known, taken_back=context.dispatcher.doubts.torn.taken_back,
                )  # fmt: skip
            if context.identity.holds_cut(context.cluster, facts):
                context.on_held()
                return None
            return facts

        plan = plan_start(context.ownership, member.partitions, facts, context.clock)
        if plan is not None:
            context.dispatcher.notes.note_read(context.identity.read_under)
            self.topic_ids = {**self.topic_ids, **{name[0]: state.topic_id for name, state in plan.states.items()}}
        return plan

    def _make_maintenance(self, store: Stores) -> MaintenanceThread:
        context = self._context
        return MaintenanceThread(
            store=store, clock=context.clock, metrics=context.metrics,
            on_fatal=context.on_fatal, beat=context.hearts.watch(MAINTENANCE, SPARK_S),
        )  # fmt: skip

    def _make_ingest(self, store: Stores) -> Ingest:
        context, settings, all_epochs, clock = self._context, self._context.settings, self._epochs, self._context.clock

        def make_query(session: SparkSession, receiver: FrameReceiver) -> SparkQuery:
            prefix = f"{settings.group_id}-spark"
            session = intact(session, context.make_session)
            return SparkQuery(session, java(settings), prefix, dict(all_epochs), receiver.address, receiver.token)

        suspects = self._suspects = Suspects.of(settings, connector.jars, lambda topic: self.topic_ids[topic], clock)

        def has_outgrown(refused: Mapping[str, int]) -> bool:
            return self.retention is not None and self.retention.has_outgrown(context.cluster, refused)

        return Ingest(
            session=context.spark, make_query=make_query,
            make_reader=lambda: PlainReader(librdkafka(settings, "reader"), settings.group_id, all_epochs, clock),
            store=store, all_epochs=all_epochs, way=FromElsewhere.of(settings.spark), suspects=suspects,
            log_starts=lambda names, of_all: {
                name: mark.start for name, mark in context.cluster.watermarks(sorted(names), of_all=of_all).items()
            },
            clock=clock, metrics=context.metrics, on_fatal=context.on_fatal, has_outgrown=has_outgrown, end_jvm=end_jvm,
            beat=context.hearts.watch(INGEST, CALLS_S), beat_query=context.hearts.watch(QUERY, SPARK_S),
        )  # fmt: skip
