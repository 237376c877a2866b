"""The composition root: the parts of the bridge, the order of its start, and its end.

    checks -> management port -> group membership -> pipeline -> ready -> SIGTERM, SIGINT, a fatal error -> stop
                                 Spark's JVM starts meanwhile          -> new credentials, clock set back -> restart

The main thread creates pipelines, lets them follow the assignment, and stops them. Other threads and signals reach it
through a queue.
"""

from __future__ import annotations

import gc
import os
import queue
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from enum import Enum
from typing import Final

import structlog

from bridge.checks.conditions import Conditions
from bridge.checks.run import log_warnings, require, run_checks
from bridge.dead_letters.listing import Letterbox
from bridge.delivery.dispatcher import Dispatcher
from bridge.delivery.plan.spans import OpenTelemetry
from bridge.delivery.targets.cache import Targets
from bridge.errors import BridgeError, EnvironmentFailure, InternalError
from bridge.kafka.admin import Cluster
from bridge.kafka.errors import RECORDS_GONE
from bridge.kafka.membership import Ownership
from bridge.runtime import credentials, wiring
from bridge.runtime.answers import Answers
from bridge.runtime.command_sender import CommandSender
from bridge.runtime.context import PipelineContext
from bridge.runtime.credentials import Credentials, connect
from bridge.runtime.gauges import Lag, snapshot
from bridge.runtime.pipeline import Pipeline
from bridge.runtime.restart import Restart, set_back_again
from bridge.runtime.stop_signals import stop_signals
from bridge.settings.clients import librdkafka
from bridge.settings.model import Settings
from bridge.settings.secrets import Redactor
from bridge.spark import session as spark
from bridge.start.cut_search import CutSearch
from bridge.start.identity_watch import IdentityWatch
from bridge.stores.names import SourceName
from bridge.telemetry.health import Health, Phase
from bridge.telemetry.heartbeats import CALLS_S, LOOK_S, START_S, Heartbeats, Repeating, dispatcher_s
from bridge.telemetry.metrics import Metrics, StoreSnapshot
from timerstore.clock import Clock, ClockWatch, SystemClock

LOOK_INTERVAL_S: Final = 1.0
STARTING_INTERVAL_S: Final = 0.05
STOP_S_MAX: Final = 9.0
"""The longest orderly stop; then the process ends at once, which is safe at any point."""
SET_BACK_MS: Final = 5_000
"""The largest step back of the clock without a restart: clients wait longer by as much."""
CLOCK: Final = "clock-set-back"
CREDENTIALS: Final = "credentials-replaced"
"""Reasons for a restart in place."""
SWITCH_INTERVAL_S: Final = 0.001
"""The longest time that a thread may keep the interpreter from the dispatcher."""

log = structlog.get_logger("bridge.runtime.app")


class Notice(Enum):
    """Messages of other threads to the main thread, beside errors."""

    STOP = "a signal came, or the process must restart in place"
    REBASE = "the assignment changed"
    REBUILD = "the index must be opened with other limits, or a topic takes larger copies"


def run_bridge(settings: Settings, read: Callable[[], Settings], redact: Redactor) -> None:
    """Run the bridge until a signal. Raises BridgeError when it cannot continue.

    `read` reads the settings again; `redact` learns their secrets before they are used.
    """
    clock = SystemClock()
    application = Application(settings, clock, read, redact, Restart(clock))
    with stop_signals(application.on_signal):
        application.run()


class Application:
    """Runs the bridge, as in the module docstring. As the membership's listener, it gets its `on_` calls on that
    thread."""

    def __init__(
        self, settings: Settings, clock: Clock, read: Callable[[], Settings], redact: Redactor, restart: Restart
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._redact = redact
        self._restart = restart
        self._clock_watch = ClockWatch(clock)
        self._hearts = Heartbeats(clock)
        self._beat = self._hearts.watch("main", CALLS_S)
        self._credentials = Credentials(
            settings,
            read=read,
            verify=lambda new: connect(new, redact),
            on_replaced=lambda: self._ask_for_restart(CREDENTIALS),
        )
        self._events: queue.SimpleQueue[Notice | BridgeError] = queue.SimpleQueue()
        self._stopping = False
        self._restarts_for: str | None = None
        self._failure: BridgeError | None = None
        self._watchdog: threading.Timer | None = None
        self._pipeline: Pipeline | None = None
        self._dispatcher: Dispatcher | None = None
        self._ownership: Ownership | None = None
        self._targets: Targets | None = None
        self._commands: CommandSender | None = None
        self._resuming: AbstractContextManager[object] = nullcontext()
        self._pauses = wiring.make_pauses(settings, clock)
        self._lag = Lag(clock)
        self._tracer = OpenTelemetry(settings) if settings.tracing.endpoint is not None else None
        self._health = Health(self._problems, lambda: self._beat(START_S))
        self._metrics = Metrics(self._snapshot)
        searches = CutSearch(self._beat, settings.store.directory)
        self._identity = IdentityWatch(clock, self._metrics.truncated, self._beat, searches)
        self._conditions = Conditions(settings, clock)

    # ---- from other threads, and signals

    def on_signal(self) -> None:
        """SIGTERM or SIGINT: stop in order if possible, but stop in any case."""
        self._restarts_for = None
        self._stop()

    def on_assigned(self, partitions: frozenset[SourceName]) -> None:  # noqa: ARG002 - a listener
        """The membership has new partitions."""
        self._events.put(Notice.REBASE)

    def on_revoked(self, partitions: frozenset[SourceName], *, lost: bool, revocations: int) -> None:
        """The membership loses partitions: return once no open transaction carries them."""
        pipeline = self._pipeline
        if pipeline is not None and lost:
            pipeline.abandon()
        goes_on = not lost and pipeline is not None and pipeline.give_up(partitions, revocations)
        if not (goes_on or self._dispatcher is None or self._dispatcher.quiesce()):
            log.warning("revoked-with-a-transaction-open", partitions=len(partitions), lost=lost)
        self._events.put(Notice.REBASE)

    def on_fatal(self, error: BridgeError) -> None:
        """A thread cannot continue."""
        if isinstance(error, InternalError):
            log.error("internal-error", code=error.code, exc_info=error)
        if not self._stopping and self._failure is None and error.code != RECORDS_GONE:
            self._failure = error
        self._cancel_start()
        self._events.put(error)

    def _look_at_clock(self) -> float:
        """Runs in a separate thread: the others may be waiting by the wall clock. The store needs no change after a
        jump, since the dispatcher compares the time with P."""
        if jump_ms := self._clock_watch.jump_ms():
            log.warning("clock-jumped", jump_ms=jump_ms)
            self._metrics.clock_jumped(jump_ms)
        if jump_ms < -SET_BACK_MS:
            self._ask_for_restart(CLOCK)
        return LOOK_INTERVAL_S

    def _ask_for_restart(self, reason: str) -> None:
        """Stop the process in order and execute it anew, unless it is stopping anyway."""
        if self._stopping or self._failure is not None:
            return
        if self._restart.wait_s() > 0:
            self.on_fatal(set_back_again())
            self._watch_the_end()  # the main thread may be waiting by that clock
            return
        self._restarts_for = reason
        self._stop()

    def _stop(self) -> None:
        self._stopping = True
        self._watch_the_end()
        self._events.put(Notice.STOP)
        self._cancel_start()

    def _cancel_start(self) -> None:
        pipeline = self._pipeline
        if pipeline is not None:
            pipeline.cancel()

    # ---- the main thread

    def run(self) -> None:
        """Start, wait, stop; return, or restart in place. Raises BridgeError for a fatal error."""
        self._restart.await_children()
        if self._restart.reason:
            log.info("restarted-in-place", reason=self._restart.reason)
        if self._restart.reason == CLOCK:
            self._metrics.clock_jumped(-SET_BACK_MS)  # the metrics of the process before are gone
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        gc.freeze()  # excludes modules: a full collection would scan them for 40 ms, and block all threads meanwhile
        settings = self._settings
        beat, rest_s = self._hearts.watch("credentials", CALLS_S), max(credentials.LOOK_S, self._restart.wait_s())
        self._health.enter(Phase("checking", reasons=("brokers, topics, Java",)))
        with (
            wiring.make_management(settings, self._health, self._metrics),
            self._api(),
            Repeating("clock-jumps", self._look_at_clock, self._hearts.watch("clock-jumps", LOOK_S), LOOK_INTERVAL_S),
        ):
            try:
                self._check()
                if not self._stopping:
                    with Repeating("credentials", self._credentials.look, beat, rest_s):
                        context = self._join()
                        with self._resuming:
                            self._serve(context)
            except BridgeError as error:
                if not self._stopping:
                    self._failure = error
                    raise
                log.warning("failed-while-stopping", reason=str(error))
            finally:
                self._shut_down()
        if self._restarts_for is not None:
            self._restart.execute(self._restarts_for)

    def _api(self) -> AbstractContextManager[object]:
        """The API's listener, if enabled."""
        answers = Answers(
            pipeline=lambda: self._pipeline, targets=lambda: self._targets, gauges=self._snapshot,
            lateness=self._metrics.lateness, health=self._health, lag=self._lag, clock=self._clock,
            letters=Letterbox(self._settings, self._clock), pauses=self._pauses, commands=lambda: self._commands,
            log_ends=lambda names: wiring.log_ends(Cluster(self._settings), names),
            assigned=lambda: frozenset() if self._ownership is None else self._ownership.assignment(),
        )  # fmt: skip
        return wiring.make_api(self._settings, answers, self._metrics, self._hearts)

    def _check(self) -> None:
        findings = run_checks(self._settings, create=True)
        log_warnings(findings)
        require(findings)

    def _join(self) -> PipelineContext:
        """Create the clients, and begin the start of Spark."""
        settings = self._settings
        repair = wiring.make_repair(settings)
        ownership = self._ownership = Ownership(
            config=librdkafka(settings, "consumer"),
            group_id=settings.group_id,
            instance_id=settings.group_instance_id,
            topics=list(settings.delay_topics),
            listener=self,
            clock=self._clock,
            beat=self._hearts.watch("ownership", CALLS_S),
            pending_s=settings.budgets.pending_s,
            explain=repair.explain,
        )
        targets = self._targets = wiring.make_targets(settings, self._clock, self._hearts, self._pauses)
        cluster = Cluster(settings)
        wiring.introduce(settings, cluster)
        commands = self._commands = wiring.make_sender(settings, ownership, self._clock)
        planner = wiring.make_planner(settings, targets, self._tracer)
        beat = self._hearts.watch("dispatcher", dispatcher_s(settings.budgets))
        dispatcher = self._dispatcher = Dispatcher(
            writer=wiring.make_writer(settings, ownership, self._clock, repair, self._metrics),
            planner=planner,
            targets=targets,
            membership=ownership.membership,
            read_committed=ownership.read_committed_states,
            doubts=wiring.make_doubts(settings, cluster, self._clock, self._metrics, self._hearts),
            clock=self._clock,
            metrics=self._metrics,
            on_fatal=self.on_fatal,
            commit_interval_ms=settings.delivery.commit_interval,
            transaction_rows=settings.delivery.transaction_rows,
            budgets=settings.budgets,
            beat=beat,
            on_answers=commands.on_answers,
            commands_first=wiring.make_commands_first(settings, cluster, self._clock),
            pauses=self._pauses,
        )
        # The producer, which fences a predecessor of this name, opens with the membership and not before: an instance
        # that cannot join must not fence.
        ownership.start()
        dispatcher.start()
        make_session = wiring.session_maker(settings, cluster)
        self._health.enter(Phase("joining", reasons=("waiting for partitions",)))
        context = PipelineContext(
            settings=settings,
            clock=self._clock,
            cluster=cluster,
            spark=spark.SessionStart(make_session, self.on_fatal, settings.spark.start_after / 1000).session,
            make_session=make_session,
            ownership=ownership,
            dispatcher=dispatcher,
            metrics=self._metrics,
            health=self._health,
            hearts=self._hearts,
            on_fatal=self.on_fatal,
            on_rebuild=lambda: self._events.put(Notice.REBUILD),
            on_held=lambda: self._events.put(Notice.REBASE),
            on_plan=wiring.plan_reader(self._pauses, planner),
            identity=self._identity,
            beat=self._beat,
            remote=wiring.make_remote(settings, self._clock, self._metrics),
        )
        self._resuming = wiring.make_resuming(context, self._pauses, commands, lambda: self._pipeline)
        return context

    def _serve(self, context: PipelineContext) -> None:
        """Handle events until the process must stop. Raises BridgeError for a fatal error."""
        while not self._stopping:
            event = self._next_event()
            if isinstance(event, BridgeError):
                self._hold_instead(context, event)
            if event in (Notice.REBASE, Notice.REBUILD):
                self._rebase(context, anew=event is Notice.REBUILD)
            elif event is None:
                self._look(context)

    def _next_event(self) -> Notice | BridgeError | None:
        """The next event, or None after a quiet interval. Consecutive changes become one event."""
        self._beat()
        is_starting = self._health.phase.name in ("catching-up", "connecting")
        try:
            event = self._events.get(timeout=STARTING_INTERVAL_S if is_starting else LOOK_INTERVAL_S)
        except queue.Empty:
            return None
        while event is Notice.REBASE and not self._events.empty():
            event = self._events.get()
        return event

    def _hold_instead(self, context: PipelineContext, error: BridgeError) -> None:
        """A reader misses the records at its position: hold the affected partitions. Raises the error if it is another
        one, or if no partition is affected."""
        pipeline = self._pipeline
        if error.code != RECORDS_GONE or pipeline is None:
            raise error
        change = pipeline.look_at_identity(self._lag, is_told=True)
        if not change and not self._identity.holds_any(pipeline.owned):
            raise error
        self._rebase(context, anew=True)

    def _rebase(self, context: PipelineContext, *, anew: bool) -> None:
        """As `_follow`. Partitions that a start would refuse are held while others are delivered."""
        while True:
            try:
                return self._follow(context, anew=anew)
            except BridgeError as error:
                delivered = frozenset() if self._pipeline is None else self._pipeline.owned
                if not self._identity.refuse(error, context.ownership.membership().partitions, delivered):
                    raise

    def _follow(self, context: PipelineContext, *, anew: bool) -> None:
        """Let the pipeline follow the assignment; if it cannot, stop it and start another."""
        self._beat(START_S)
        member = context.ownership.membership()
        owned = self._identity.without(member.partitions)
        if context.remote is not None:
            context.remote.adoption.keep(owned)
        if self._pipeline is not None:
            self._metrics.rebalances.inc()
            if not anew and owned and self._pipeline.follow(owned, member):
                return
            self._stop_pipeline()
            member = context.ownership.membership()
            owned = self._identity.without(member.partitions)
        if not owned:
            if member.partitions:
                self._health.enter(Phase("held", reasons=self._identity.alarms()))
                return
            self._health.enter(Phase("joining", reasons=("no partitions are assigned to this instance",), ready=True))
            log.info("no-partitions-assigned")
            return
        pipeline = self._pipeline = Pipeline(context, owned, member)
        if self._events.empty() and pipeline.start():  # otherwise the assignment is already out of date
            self._look(context)

    def _stop_pipeline(self) -> None:
        """Stop the pipeline before the next one. A slow disk has as long as a group member has between two polls."""
        patience_s = self._settings.budgets.poll_interval_s
        self._beat(START_S + patience_s)
        if self._pipeline is not None and not self._pipeline.stop(patience_s):
            raise EnvironmentFailure(
                f"cannot stop the pipeline of the previous assignment within {patience_s:.0f} s",
                hint="Spark or the disk does not answer. Restart the bridge: it continues from the same place.",
                code="DB-3019",
            )
        self._pipeline = None

    def _look(self, context: PipelineContext) -> None:
        """Update the lag and the warnings of /readyz, once a second."""
        pipeline = self._pipeline
        self._beat()
        if pipeline is not None:
            is_changed = pipeline.look_at_identity(self._lag)
        else:  # a transaction may still commit for held partitions until the dispatcher is held
            is_changed = context.dispatcher.is_held and self._identity.look(context.ownership, context.cluster)
        if is_changed:
            self._events.put(Notice.REBASE)
        self._conditions.look(context.cluster)
        if pipeline is None or pipeline.store is None:
            return
        self._metrics.lateness.note(self._clock.monotonic_s())
        self._beat()
        pipeline.look_at_retention(self._lag)
        if self._health.phase.name != "running":
            if pipeline.is_catching_up():
                return
            if not (context.dispatcher.wait_open(0) and pipeline.is_reading() and pipeline.is_delivering()):
                alarms = pipeline.alarms()
                self._health.enter(
                    Phase(
                        "connecting",
                        reasons=("waiting for the producer, all partitions and earlier commands", *alarms),
                    )
                )
                return
            pending = pipeline.store.stats().pending
            log.info("ready", partitions=len(pipeline.store.next_offsets()), pending=pending, reader=pipeline.reader)
        impediments = pipeline.impediments()
        parts = (self._identity, self._conditions, pipeline, self._credentials, self._pauses)
        reasons = (*impediments, *(alarm for part in parts for alarm in part.alarms()))
        self._health.enter(Phase("running", ready=not impediments, reasons=reasons, reader=pipeline.reader))

    def _shut_down(self) -> None:
        self._stopping = True
        self._health.enter(Phase("stopping", reasons=("stopping",)))
        log.info("stopping")
        self._watch_the_end()
        if self._pipeline is not None:
            self._pipeline.stop()
        if self._dispatcher is not None:
            self._dispatcher.stop(timeout_s=3.0)
        if self._ownership is not None:
            self._ownership.stop(timeout_s=2.0)
        if self._tracer is not None:
            self._tracer.stop()
        spark.stop()
        log.info("stopped")

    def _watch_the_end(self) -> None:
        """End the process `STOP_S_MAX` from now, even if it is waiting, or in the interpreter's own shutdown."""
        if self._watchdog is None:
            self._watchdog = threading.Timer(STOP_S_MAX, self._end_now)
            self._watchdog.daemon = True
            self._watchdog.start()

    def _end_now(self) -> None:
        """End at once after too long a stop: Spark is starting, or a broker does not answer. This loses nothing."""
        failure = self._failure
        log.warning("stopped-without-waiting", waited_s=STOP_S_MAX)
        if self._restarts_for is not None:
            try:
                self._restart.execute(self._restarts_for)
            except EnvironmentFailure as error:
                failure = error
        with suppress(OSError):
            if failure is not None:
                print(f"delay-bridge: {self._redact(str(failure))}", file=sys.stderr, flush=True)
            sys.stdout.flush()
        os._exit(0 if failure is None else failure.exit_code)

    # ---- reports

    def _snapshot(self) -> StoreSnapshot:
        pipeline = self._pipeline
        base = StoreSnapshot(
            heartbeats=self._hearts.ages(),
            in_doubt=self._identity.counts() | ({} if self._dispatcher is None else self._dispatcher.doubts.counts()),
            unmet=self._conditions.counts(),
            disk_full=pipeline is not None and bool(pipeline.impediments()),
            credentials_refused=bool(self._credentials.alarms()),
            failing={} if self._targets is None else self._targets.failing(),
            paused_s=self._pauses.ages_s(),
            corrupt_batches={} if pipeline is None else pipeline.corrupt_batches(),
            remote_age_s=None if pipeline is None or pipeline.uploads is None else pipeline.uploads.age_s(),
        )
        if pipeline is None or pipeline.store is None:
            return base
        now_ms = self._clock.now_ms()
        return snapshot(pipeline.store, self._settings, now_ms, self._lag, pipeline.retention, base)

    def _problems(self) -> list[str]:
        pipeline = self._pipeline
        return [*self._hearts.problems(), *([] if pipeline is None else pipeline.problems())]
