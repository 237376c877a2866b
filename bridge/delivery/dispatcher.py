"""The thread that delivers: it waits for the next due time, and is the only one that writes to Kafka.

One transaction (invariant I1: output is exactly what becomes finished), and what a crash right after each step costs:

    1. take         rows leave the store, on loan                        nothing: they are pending
    2. plan         targets, sizes and permissions are looked at         nothing
    3. produce      records go out, each when it is due, invisible to    the successor's init_transactions aborts them
                    read_committed
    4. offsets      O, P and the group metadata join the transaction,    as 3
                    beside 3 where nothing more is likely to be taken
    5. commit       the brokers decide                                   the committed (O, P) tell which way
    6. acknowledge  the store forgets the rows                           a start drops what is finished under (O, P)

A transaction stays open for at most the commit interval while more falls due within it, since a commit costs several
times what one record does; a backlog is taken in large transactions (filling.py). Without anything due the thread
sleeps in the store; O follows ingest about once a second.

An abort puts all rows back, and the next attempt is narrower: without the record, the target or the source that caused
it, or with fewer rows, until something can be committed (narrowing.py). So whatever a broker answers, what can be
delivered is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import structlog

from bridge.delivery.clock_steps import ClockSteps
from bridge.delivery.commands_first import LOOK_S, CommandsFirst, Offsets
from bridge.delivery.filling import Filling
from bridge.delivery.held_sources import HeldSources
from bridge.delivery.log_notes import LogNotes, States
from bridge.delivery.narrowing import REMEDIES, Narrowing
from bridge.delivery.open_transaction import OpenTransaction, Stale, bug
from bridge.delivery.plan.fates import Unplannable, Unwritable
from bridge.delivery.plan.planner import Planner
from bridge.delivery.producer.outcomes import COMMIT_NOT_MADE, Aborted, Broken, Cause, Indefinite, NotReady
from bridge.delivery.producer.writer import Writer
from bridge.delivery.setbacks import SetbackLog
from bridge.delivery.states import AT_REST, Event, Lifecycle, Request, State
from bridge.delivery.targets.cache import Targets
from bridge.delivery.targets.pauses import Pauses
from bridge.delivery.targets.stall import StallWatch
from bridge.errors import BridgeError, EnvironmentFailure, InternalError, StateError
from bridge.kafka.errors import fenced
from bridge.kafka.membership import Membership
from bridge.settings.time_budgets import USUAL, TimeBudgets
from bridge.telemetry.metrics import Metrics
from bridge.wire.answers import Answer
from bridge.wire.committed_state import CommittedState, are_same_progress
from timerstore.clock import Clock
from timerstore.rows.position import AT_MIN
from timerstore.rows.sources import SourceName
from timerstore.store import TimerStore

NOTHING_S: Final = 0.01
IDLE_COMMIT_S: Final = 1.0
LOOK_AGAIN_S: Final = 1.0
"""The longest sleep: ingest of what is far away moves O without waking this thread, and a stepped wall clock must be
noticed."""
CATCH_UP_WAIT_S: Final = 0.25
FENCED_AGAIN_S: Final = 60.0

log = structlog.get_logger("bridge.delivery.dispatcher")


class Dispatcher:
    """See the module. It starts held: `resume` gives it a store to deliver from, `quiesce` takes it away again."""

    def __init__(
        self,
        *,
        writer: Writer,
        planner: Planner,
        targets: Targets,
        membership: Callable[[], Membership],
        read_committed: Callable[[Collection[SourceName]], Mapping[SourceName, CommittedState | None]],
        clock: Clock,
        metrics: Metrics,
        on_fatal: Callable[[BridgeError], None],
        commit_interval_ms: int = 20,
        transaction_rows: int = 20_000,
        budgets: TimeBudgets = USUAL,
        beat: Callable[[], None] = lambda: None,
        on_answers: Callable[[Sequence[Answer]], None] = lambda _: None,
        commands_first: CommandsFirst | None = None,
        pauses: Pauses | None = None,
    ) -> None:
        """`beat` is called by the thread again and again, while it waits for a due time too; `on_answers` once it is
        known that a transaction was committed, with what came of commands in it."""
        self._writer = writer
        self._planner = planner
        self._targets = targets
        self._membership = membership
        self._read_committed = read_committed
        self._clock = clock
        self._metrics = metrics
        self._on_fatal = on_fatal
        self._budgets = budgets
        self._beat = beat
        self._on_answers = on_answers
        self._pauses = Pauses(clock) if pauses is None else pauses
        self._pauses.wake = lambda: None if self._store is None else self._store.wake()
        self._pauses.has_room = lambda said: all(each.has_room_for(said) for each in list(self._states.values()))

        self._life = Lifecycle()
        self._thread: threading.Thread | None = None
        self._store: TimerStore | None = None

        # From here on: the thread's own, or changed while it is at rest.
        self._states: dict[SourceName, CommittedState] = {}
        self._coming: dict[SourceName, CommittedState] = {}
        """Of partitions that the store holds until they have caught up; nothing else commits for them meanwhile."""
        self.notes = LogNotes()
        self._revocations = 0
        self._unanswered: OpenTransaction | None = None
        """A transaction whose commit got no answer: RESOLVING asks what it came to."""
        self._narrowing = Narrowing(targets, planner.delay_topics, planner.dead_letter_topics, clock, transaction_rows)
        self._filling = Filling(
            writer=writer,
            planner=planner,
            narrowing=self._narrowing,
            clock=clock,
            budgets=budgets,
            commit_interval_ms=commit_interval_ms,
            is_to_end=lambda: self._life.is_asked(Request.HOLD, Request.STOP),
            on_taken=self._send_offsets,
            beat=beat,
        )
        self._held_sources = HeldSources(targets, clock)
        self._commands_first = commands_first or CommandsFirst(clock)
        self._clock_steps = ClockSteps(metrics)
        self._fenced_s: float | None = None
        self._committed_s = 0.0
        self._stall_watch = StallWatch(targets, clock)
        self._setbacks = SetbackLog(targets, clock)

    # -- control: any thread

    def start(self) -> None:
        """Start the thread, held; it opens the producer meanwhile."""
        self._targets.start(self._planner.delay_topics | self._planner.dead_letter_topics)
        self._thread = threading.Thread(target=self._run, name="dispatcher", daemon=True)
        self._thread.start()

    @property
    def state(self) -> State:
        return self._life.state

    @property
    def is_held(self) -> bool:
        """Whether it waits for `resume` or `go_on_without`."""
        with self._life.changed:
            return self._life.is_asked(Request.HOLD) and self.state in AT_REST

    @property
    def awaits_commands(self) -> bool:
        """Whether messages wait for commands that were written before the start."""
        return self._commands_first.is_closed

    def resume(
        self,
        store: TimerStore,
        states: States,
        revocations: int,
        log_ends: Offsets = MappingProxyType({}),
    ) -> None:
        """Deliver from `store`, which was opened on `states`, read when there had been `revocations` (of `Membership`).
        Commands below `log_ends` take effect first.

        Only while held. With the same store as before, a transaction whose outcome is unknown is resolved first.
        Raises InternalError for states from before the last commit, where no log was cut: that would deliver twice.
        """
        with self._life.changed:
            if self._thread is not None and not self.is_held:
                raise bug("the dispatcher is running", code="DB-7002")
            if store is not self._store:
                is_known = revocations == self._revocations and self._unanswered is None  # nothing else commits for us
                old = {n: state for n, state in self._states.items() if n in states and state.cuts == states[n].cuts}
                if is_known and not are_same_progress(old, states):
                    raise bug("the store lies behind the last commit", code="DB-7002")
                self._store, self._unanswered, self._states = store, None, dict(states)
                self._coming = {name: self._states.pop(name) for name in store.assignment.joining()}
                self._narrowing.clear()
                self._held_sources.clear()
                self._commands_first.begin(log_ends, self._coming)
            self._pauses.read(states.values())
            self._metrics.partitions_held(len(self._held_sources.now()))
            self._revocations = revocations
            self._life.resume()

    def expect(self, states: States, log_ends: Offsets = MappingProxyType({})) -> None:
        """Partitions have joined the store, on these states: deliver what is theirs too, once they have caught up, and
        commands below `log_ends` are read."""
        with self._life.changed:
            self._coming = {**self._coming, **states}
            self._commands_first.expect(log_ends)
            self._pauses.read(states.values())

    def go_on_without(self, gone: Collection[SourceName], revocations: int) -> None:
        """Deliver on from the same store, of which these partitions were given up; `revocations` counts that. Only
        after `quiesce` was in time."""
        with self._life.changed:
            store = self._store
            if store is None or self._unanswered is not None or self.state not in AT_REST:
                raise bug("the dispatcher is running", code="DB-7002")
            for states in (self._states, self._coming):
                for name in gone:
                    states.pop(name, None)
            self._commands_first.forget(gone)
            self._held_sources.forget({store.sources.index(*name) for name in gone})
            self._metrics.partitions_held(len(self._held_sources.now()))
            self._revocations = revocations
            self._life.resume()

    def quiesce(self, timeout_s: float = 30.0) -> bool:
        """Finish or abort the open transaction, and hold. Returns whether that was done in time.

        When it was not, brokers do not answer, and what the transaction came to is not known. The group's metadata then
        keeps it from being committed once the partitions belong to another instance, and require-stable keeps that
        instance waiting for its end.
        """
        self._ask(Request.HOLD)
        with self._life.changed:
            if self._thread is None or self._thread is threading.current_thread():
                return True
            is_at_rest = self._life.wait_for(AT_REST, timeout_s)
            self._metrics.partitions_held(0)  # until `resume`: they may be another instance's from here on
            return is_at_rest and self._unanswered is None

    def stop(self, timeout_s: float = 10.0) -> bool:
        """Quiesce and end the thread. Returns whether it ended in time."""
        self._ask(Request.STOP)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
            return not self._thread.is_alive()
        return True

    def wait_open(self, timeout_s: float) -> bool:
        """Wait until the producer is there (transactions initialised). Returns whether it is."""
        return self._life.wait_for(set(State) - {State.OPENING}, timeout_s) and self.state is not State.ENDED

    def _ask(self, request: Request) -> None:
        with self._life.changed:
            self._life.ask(request)
            if self._store is not None:
                self._store.wake()

    # -- the thread

    def _run(self) -> None:
        failure: BridgeError | None = None
        try:
            while self._life.obey(self._beat, self._writer.look_after):
                self._step()
        except BridgeError as error:
            failure = error
        except Exception as error:  # noqa: BLE001 - whatever it is, the application must know that delivery has ended
            failure = InternalError("delivery failed", hint="Please report this.", reason=repr(error), code="DB-7001")
            failure.__cause__ = error
        finally:
            self._targets.stop()
            self._writer.close()
            self._life.advance(Event.STOPPED)
        if failure is not None:
            self._on_fatal(failure)

    def _step(self) -> None:
        """What the thread does in its state; the event that this ends with, if any, leads to the next one."""
        event = {State.OPENING: self._open, State.RESOLVING: self._resolve}.get(self.state, self._deliver)()
        if event is not None:
            self._life.advance(event)

    def _open(self) -> Event | None:
        try:
            self._writer.open()
        except NotReady as waits:
            if self._life.failures:  # the first attempt of a start often finds the coordinator busy
                log.warning("producer-not-ready", code=waits.failure.code, reason=waits.failure.detail)
        except Broken as broken:
            self._after_break(broken)
        else:
            return Event.OPENED
        self._life.back_off()
        return None

    def _deliver(self) -> Event | None:
        store = self._store
        if store is None:
            raise bug("there is no store to deliver from", code="DB-7002")
        if not store.is_caught_up():
            store.wait(CATCH_UP_WAIT_S)
            return None
        joined = self._join(store)
        if self._held_sources.release(store.sources) or joined:
            self._hold_sources(store)
        self._clock_steps.look(store, [*self._states.values(), *self._coming.values()], self._clock.now_ms())
        wakeup_ms, now_ms = store.next_wakeup_ms(), self._clock.now_ms()
        waits = self._filling.is_for_commands = self._commands_first.is_to_wait(store)
        if waits and wakeup_ms != AT_MIN:
            wakeup_ms = None
        behind = store.offsets_behind()
        idle_s = self._clock.monotonic_s() - self._committed_s
        if (
            (wakeup_ms is not None and wakeup_ms <= now_ms)
            or (behind and (idle_s >= IDLE_COMMIT_S or store.needs_offset_commit()))
            or not self._pauses.are_in(self._states.values())
            or self.notes.is_news(self._states)
        ):
            return self._transact(store)
        sleep_s = LOOK_S if waits else LOOK_AGAIN_S
        if wakeup_ms is not None:
            sleep_s = min(sleep_s, (wakeup_ms - self._clock.now_ms()) / 1000)
        if behind:
            sleep_s = min(sleep_s, IDLE_COMMIT_S - idle_s)
        if sleep_s > 0:
            store.wait(sleep_s)
        return None

    def _join(self, store: TimerStore) -> list[SourceName]:
        """The partitions that have caught up with their committed O, and are delivered from now on."""
        with self._life.changed:
            arrived = store.assignment.arrived() if self._coming else []
            joined = store.assignment.joined(self._commands_first.ready(arrived, store)) if arrived else []
            self._states |= {name: self._coming.pop(name) for name in joined}
        if joined:
            self._commands_first.joined()
            names = ", ".join(f"{topic}/{number}" for topic, number in joined)
            log.info("partitions-joined", partitions=names, owned=len(self._states))
        return joined

    def _transact(self, store: TimerStore) -> Event | None:
        transaction = OpenTransaction(store.begin(only_output=self._narrowing.is_narrowest), self._clock.monotonic_s())
        self._planner.begin()
        self._stall_watch.begin()
        event = None
        try:
            self._filling.fill(store, transaction)
            self._commit(store, transaction)
        except Aborted as aborted:
            event = self._after_abort(transaction, aborted)
            self._hold_sources(store, self._narrowing.take_stuck())
        except Unplannable as unplannable:
            event = self._give_up(transaction)
            self._hold_sources(store, unplannable.unwritable)
        except Indefinite as indefinite:
            self._unanswered = transaction
            event = self._after_break(indefinite, transaction)
        except Broken as broken:
            transaction.rollback()  # commit was not asked for, and the next producer ends what this one left open
            event = self._after_break(broken, transaction)
            if not self._narrowing.narrow(transaction, Cause.PRODUCER_LOST, broken.failure):
                self._life.back_off()
        except Stale:
            log.info("transaction-outlived-its-assignment", rows=transaction.rows)
            self._life.ask(Request.HOLD)
            event = self._give_up(transaction)
        except BaseException:
            self._give_up(transaction)
            raise
        return event

    # -- ending a transaction

    def _commit(self, store: TimerStore, transaction: OpenTransaction) -> None:
        if transaction.accepted != transaction.planned:
            lost = transaction.planned - transaction.accepted
            raise bug("records were lost between plan and client", code="DB-7002", lost=lost)
        transaction.look_ahead(self._states, store.sources, self._pauses.to_write(), self.notes)
        if not transaction.states:
            if transaction.accepted:
                raise bug("a transaction has output, but moves no position", code="DB-7002")
            transaction.rollback()
            self._narrowing.committed(0)
            # Whatever the reason to look was, there is nothing to do: look again later, not at once.
            self._committed_s = self._clock.monotonic_s()
            self._life.pause(NOTHING_S)
            return
        member = self._member_for(transaction)
        if not transaction.begun:
            self._writer.begin()
            transaction.begun = True

        def is_explained(stalled_s: float) -> bool:
            self._beat()
            return self._stall_watch.is_explained(stalled_s, transaction.targets)

        self._writer.commit(transaction.offsets, member.metadata, is_explained)
        self._acknowledge(transaction)

    def _send_offsets(self, store: TimerStore, transaction: OpenTransaction) -> None:
        """All that the transaction is likely to have was taken: what it leads to may join it while records wait for
        their time, so that the commit does not have to wait for that."""
        transaction.look_ahead(self._states, store.sources, self._pauses.to_write(), self.notes)
        if transaction.states:
            self._writer.send_offsets(transaction.offsets, self._member_for(transaction).metadata)

    def _member_for(self, transaction: OpenTransaction) -> Membership:
        """Raises Stale where it may not commit what the transaction leads to."""
        member = self._membership()
        if member.revocations > self._revocations or not member.partitions >= transaction.states.keys():
            raise Stale
        return member

    def _acknowledge(self, transaction: OpenTransaction) -> None:
        transaction.acknowledge()
        self._planner.committed(transaction.traced, self._clock.now_ms())
        self._states.update(transaction.states)
        self._pauses.written(transaction.states.values())
        self._setbacks.committed(transaction.setbacks)
        self._narrowing.committed(transaction.rows)
        self._commands_first.committed(transaction.targets, self._planner.delay_topics)
        self._life.failures = 0
        self._committed_s = self._clock.monotonic_s()
        self._metrics.committed(transaction.counts, self._committed_s - transaction.opened_s)
        if transaction.answers:
            self._on_answers(transaction.answers)

    def _give_up(self, transaction: OpenTransaction, *, leave: bool = False) -> Event | None:
        """Abort, and put the rows back; `leave`: the abort may wait for a partition that does not answer."""
        try:
            if transaction.begun and not transaction.is_ended:
                (self._writer.leave if leave else self._writer.abort)()
        except Broken as broken:
            return self._after_break(broken, transaction)
        finally:
            transaction.rollback()
        return None

    def _after_abort(self, transaction: OpenTransaction, aborted: Aborted) -> Event | None:
        cause, failure = aborted.cause, aborted.failure
        event = self._give_up(transaction, leave=cause is Cause.TARGETS_WORSE)
        self._metrics.transaction_aborted()
        told = {"cause": cause.value, "code": failure.code, "reason": failure.detail}
        log.warning("transaction-aborted", **told, rows=transaction.rows)
        if not self._narrowing.after(transaction, aborted):
            self._life.back_off()
        return Event.PRODUCER_LOST if REMEDIES[cause].renews else event

    def _hold_sources(self, store: TimerStore, more: Mapping[int, Unwritable] = MappingProxyType({})) -> None:
        """Deliver nothing of the sources that cannot be written to, `more` of them from now on; all others go on."""
        self._held_sources.add(more, store.sources)
        held = self._held_sources.now()
        store.hold(held)
        self._metrics.partitions_held(len(held))

    def _after_break(self, broken: Broken, transaction: OpenTransaction | None = None) -> Event:
        """The producer is gone: the next step makes another. Raises FencedError when it was fenced twice within a
        minute, and the age of the transaction does not explain it."""
        failure, now_s, is_indefinite = broken.failure, self._clock.monotonic_s(), isinstance(broken, Indefinite)
        log.warning("producer-lost", code=failure.code, reason=failure.detail, is_indefinite=is_indefinite)
        self._metrics.producer_rebuilt()
        if broken.fenced_by is None:
            return Event.PRODUCER_LOST
        age_s, rows = (0.0, 0) if transaction is None else (now_s - transaction.opened_s, transaction.rows)
        if self._budgets.is_timed_out(age_s):
            log.warning("transaction-timed-out", open_s=round(age_s, 1), rows=rows)
        else:
            # A transaction that outlived its time-out looks the same as a rival. A rival does it again.
            if self._fenced_s is not None and now_s - self._fenced_s < FENCED_AGAIN_S:
                raise fenced(broken.fenced_by)
            self._fenced_s = now_s
        return Event.PRODUCER_LOST

    def _resolve(self) -> Event | None:
        """Find out whether an unanswered commit happened: the committed states are the new ones, or the old ones."""
        transaction = self._unanswered
        if transaction is None:
            return Event.RESOLVED
        try:
            found = self._read_committed(list(transaction.states))
        except EnvironmentFailure as failure:
            log.warning("commit-still-unanswered", reason=str(failure))
            self._life.back_off()
            return None
        committed = {name for name, state in transaction.states.items() if state.is_written_as(found[name])}
        unchanged = {name for name in transaction.states if self._states[name].is_written_as(found[name])}
        self._unanswered = None
        if committed == transaction.states.keys():
            log.info("commit-was-made", rows=transaction.rows)
            self._acknowledge(transaction)
        elif unchanged == transaction.states.keys():
            log.info("commit-was-not-made", rows=transaction.rows)
            transaction.rollback()
            if not self._narrowing.narrow(transaction, Cause.COMMIT_NOT_MADE, COMMIT_NOT_MADE):
                self._life.back_off()
        else:
            transaction.rollback()
            raise StateError(
                "the committed offsets are neither those before the last transaction nor those after it",
                hint="Something else commits under this bridge's id: stop it, then start again.",
                partitions=sorted(transaction.states.keys() - committed - unchanged),
                code="DB-4010",
            )
        return Event.RESOLVED
