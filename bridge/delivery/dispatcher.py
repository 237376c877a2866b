"""The thread that delivers: it waits for the next due time, and is the only writer to Kafka.

One transaction (invariant I1: it outputs exactly the rows that it finishes), and the cost of a crash after each step:

    1. take         rows leave the store, on loan                        nothing: they are pending
    2. plan         targets, sizes and permissions are checked           nothing
    3. produce      records go out, each when it is due, invisible to    the successor's init_transactions aborts them
                    read_committed
    4. offsets      O, P and the group metadata join the transaction,    as 3
                    beside 3 if probably no more rows will be taken
    5. commit       the brokers decide; without an answer, a step in     the committed (O, P) tell the outcome
                    the state RESOLVING finds the outcome (`_resolve`)
    6. acknowledge  the store forgets the rows                           a start drops rows finished under (O, P)

A transaction stays open for up to the commit interval while more rows fall due within it, since a commit costs several
times as much as a record. A backlog is taken in large transactions (filling.py). Without due rows the thread sleeps in
the store; O follows ingest about once a second.

An abort puts all rows back, and the next attempt is narrower: without the record, the target or the source that caused
it, or with fewer rows, until a commit succeeds (narrowing.py). So every deliverable message is delivered, with any
answers from brokers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from functools import partial
from types import MappingProxyType
from typing import Final

import structlog

from bridge.delivery.clock_steps import ClockSteps
from bridge.delivery.commands_first import LOOK_S, CommandsFirst
from bridge.delivery.doubt.doubts import Doubts
from bridge.delivery.doubt.log_notes import States
from bridge.delivery.doubt.read_back import ReadBack, ReadCommitted
from bridge.delivery.doubt.verdict import was_committed
from bridge.delivery.filling import Filling
from bridge.delivery.held_sources import HeldSources
from bridge.delivery.narrowing import REMEDIES, Narrowing
from bridge.delivery.open_transaction import OpenTransaction, Stale, bug
from bridge.delivery.partitions import Partitions
from bridge.delivery.plan.fates import Unplannable, Unwritable
from bridge.delivery.plan.planner import Planner
from bridge.delivery.producer.outcomes import (
    COMMIT_NOT_MADE,
    UNANSWERED,
    Aborted,
    Broken,
    Cause,
    EndedUnasked,
    Indefinite,
    NotReady,
)
from bridge.delivery.producer.writer import Writer
from bridge.delivery.setbacks import Breaks, SetbackLog
from bridge.delivery.states import AT_REST, Event, Lifecycle, Request, State
from bridge.delivery.targets.cache import Targets
from bridge.delivery.targets.pauses import Pauses
from bridge.delivery.targets.stall import StallWatch
from bridge.errors import BridgeError, EnvironmentFailure, InternalError
from bridge.kafka.membership import Membership
from bridge.settings.time_budgets import USUAL, TimeBudgets
from bridge.stores.names import Offsets, SourceName
from bridge.stores.stores import Life, Stores
from bridge.telemetry.metrics import Metrics
from bridge.wire.answers import Answer
from bridge.wire.committed_state import Manifest
from timerstore.clock import Clock

NOTHING_S: Final = 0.01
IDLE_COMMIT_S: Final = 1.0
LOOK_AGAIN_S: Final = 1.0
"""The longest sleep: ingest of distant rows moves O without waking this thread, and a stepped wall clock must be
noticed."""
SLICE_S: Final = 0.25  # the longest wait for ingest or a producer before requests are checked

log = structlog.get_logger("bridge.delivery.dispatcher")


class Dispatcher:
    """See the module. It starts held: `resume` gives it a store to deliver from, and `quiesce` takes the store away."""

    def __init__(
        self,
        *,
        writer: Writer,
        planner: Planner,
        targets: Targets,
        membership: Callable[[], Membership],
        read_committed: ReadCommitted,
        doubts: Doubts,
        clock: Clock,
        metrics: Metrics,
        on_fatal: Callable[[BridgeError], None],
        commit_interval_ms: int,
        transaction_rows: int,
        budgets: TimeBudgets = USUAL,
        beat: Callable[[], None] = lambda: None,
        on_answers: Callable[[Sequence[Answer]], None] = lambda _: None,
        commands_first: CommandsFirst | None = None,
        pauses: Pauses | None = None,
    ) -> None:
        """The thread calls `beat` again and again, also during the wait for a due time; and `on_answers` after each
        certain commit, with the outcomes of its commands."""
        self._writer = writer
        self._planner = planner
        self._targets = targets
        self._read_committed = read_committed
        self.doubts = doubts
        self._read_back = ReadBack(read_committed, membership, clock, metrics)
        self._clock = clock
        self._metrics = metrics
        self._on_fatal = on_fatal
        self._budgets = budgets
        self._beat = beat
        self._on_answers = on_answers
        self._pauses = Pauses(clock) if pauses is None else pauses
        self._pauses.wake = lambda: None if self._store is None else self._store.wake()

        self._life = Lifecycle()
        self._thread: threading.Thread | None = None
        self._store: Stores | None = None

        # The thread's own from here on, or changed while it is at rest.
        self.commands_first = commands_first or CommandsFirst(clock)
        self._partitions = Partitions(membership, self.commands_first)
        self.notes = self._partitions.notes
        self._pauses.has_room = self._partitions.have_room_for
        self._unanswered: OpenTransaction | None = None
        """A transaction whose commit got no answer: RESOLVING finds its outcome."""
        self._narrowing = Narrowing(
            targets, planner.delay_topics, planner.dead_letter_topics, clock, transaction_rows, doubts.written
        )
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
        self._held_sources = HeldSources(targets, clock, doubts, metrics)
        self._clock_steps = ClockSteps(metrics)
        self._committed_s = 0.0
        self._stall_watch = StallWatch(targets, clock, beat)
        self._setbacks = SetbackLog(targets, clock)
        self._breaks = Breaks(budgets, clock, metrics)

    # -- control: any thread

    def start(self) -> None:
        """Start the thread, held; meanwhile it opens the producer."""
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

    def resume(
        self,
        store: Stores,
        states: States,
        revocations: int,
        log_ends: Offsets = MappingProxyType({}),
    ) -> None:
        """Deliver from `store`, which is opened on `states`, read after `revocations` (of `Membership`): see `expect`.

        Only while held. With the same store as before, a transaction with an unknown outcome is resolved first. Raises
        InternalError for states from before the last commit, unless the log was cut: they would cause double delivery.
        """
        with self._life.changed:
            if self._thread is not None and not self.is_held:
                raise bug("the dispatcher is running", code="DB-7002")
            if store is not self._store:
                is_known = revocations == self._partitions.revocations and self._unanswered is None
                self._partitions.begin(states, is_known=is_known)
                self._store, self._unanswered = store, None
                self._narrowing.clear()
                self._held_sources.begin(states, store.sources)
                self._read_back.begin()
            self.expect(states, log_ends)
            self._held_sources.tell()
            self._partitions.revocations = revocations
            self._life.resume()

    def expect(self, states: States, log_ends: Offsets = MappingProxyType({})) -> None:
        """Partitions join the store, on these states: deliver their messages, too, once the partitions have caught up,
        and commands below `log_ends` have taken effect."""
        with self._life.changed:
            self._partitions.expect(states, log_ends)
            self._pauses.read(states.values())

    def manifest_of(self, name: SourceName) -> Manifest | None:
        """The manifest that Kafka names for a partition, by the last commit. Any thread."""
        state = self._partitions.states.get(name) or self._partitions.coming.get(name)
        return None if state is None else state.written_manifest()

    def go_on_without(self, gone: Collection[SourceName], revocations: int) -> None:
        """Deliver on from the same store after these partitions were given up; `revocations` counts that. Only after
        `quiesce` was in time."""
        with self._life.changed:
            store = self._store
            if store is None or self._unanswered is not None or self.state not in AT_REST:
                raise bug("the dispatcher is running", code="DB-7002")
            self._partitions.forget(gone)
            self._held_sources.forget(gone, store.sources)
            self._read_back.forget(gone)
            self._partitions.revocations = revocations
            self._life.resume()

    def quiesce(self, timeout_s: float = 30.0) -> bool:
        """Finish or abort the open transaction, and hold. Returns whether that was done in time.

        Otherwise brokers do not answer, and the transaction's outcome is unknown. The group's metadata then prevents
        its commit once the partitions belong to another instance, and require-stable makes that instance wait for its
        end."""
        self._ask(Request.HOLD)
        with self._life.changed:
            if self._thread is None or self._thread is threading.current_thread():
                return True
            is_at_rest = self._life.wait_for(AT_REST, timeout_s)
            self._metrics.partitions_held.set(0)  # until `resume`: the partitions may now belong to another instance
            return is_at_rest and self._unanswered is None

    def stop(self, timeout_s: float = 10.0) -> bool:
        """Quiesce and end the thread. Returns whether it ended in time."""
        self._ask(Request.STOP)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
            return not self._thread.is_alive()
        return True

    def wait_open(self, timeout_s: float) -> bool:
        """Wait until the producer is open (transactions initialised). Returns whether it is."""
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
            while self._step():
                pass
        except BridgeError as error:
            failure = error
        except Exception as error:  # noqa: BLE001 - the application must know of every end of delivery
            failure = InternalError("delivery failed", hint="Please report this.", reason=repr(error), code="DB-7001")
            failure.__cause__ = error
        finally:
            self._targets.stop()
            self.doubts.close()
            self._writer.close()
            self._life.advance(Event.STOPPED)
        if failure is not None:
            self._on_fatal(failure)

    def _step(self) -> bool:
        """Obey requests, then do the work of the state; its event, if any, leads to the next state. Returns False if
        the thread must end."""
        if self.state is State.DELIVERING and self._life.is_asked(Request.HOLD, Request.STOP):
            self._before_rest()
        if not self._life.obey(self._beat, self._writer.look_after):
            return False
        event = {State.OPENING: self._open, State.RESOLVING: self._resolve}.get(self.state, self._deliver)()
        self._life.advance(event)
        return True

    def _before_rest(self) -> None:
        """Another instance may go on from the committed states: make sure that they are the last ones."""
        if self._read_back.is_new:
            self._read_back.look(self._partitions.states, self._partitions.revocations)
        if self._store is not None and self._read_back.again and self._writer.await_turn(self._budgets.call_s):
            self._life.advance(self._transact(self._store))

    def _open(self) -> Event | None:
        try:
            self._writer.open()
        except NotReady as waits:
            if self._life.failures:  # at a start the coordinator is often busy at first
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
        with self._life.changed:
            arrived = self._partitions.advance(store)
        if self._held_sources.release(store.sources, arrived):
            self._held_sources.hold(store)
        self._clock_steps.look(store, self._partitions.all(), self._clock.now_ms())
        wakeup_ms, now_ms = store.next_wakeup_ms(), self._clock.now_ms()
        behind = store.offsets_behind()
        idle_s = self._clock.monotonic_s() - self._committed_s
        is_due = wakeup_ms is not None and wakeup_ms <= now_ms
        if self._read_back.is_due(0.0 if is_due else idle_s):
            self._read_back.look(self._partitions.states, self._partitions.revocations)
        if (
            is_due
            or (behind and (idle_s >= IDLE_COMMIT_S or store.needs_offset_commit()))
            or not self._pauses.are_in(self._partitions.states.values())
            or self.notes.is_news(self._partitions.states)
            or self._read_back.again
        ):
            return self._transact(store) if self._writer.await_turn(SLICE_S) else None
        sleep_s = LOOK_S if store.in_life(Life.COMMANDS_FIRST) else LOOK_AGAIN_S
        if wakeup_ms is not None:
            sleep_s = min(sleep_s, (wakeup_ms - self._clock.now_ms()) / 1000)
        if behind:
            sleep_s = min(sleep_s, IDLE_COMMIT_S - idle_s)
        if sleep_s > 0:
            store.wait(sleep_s)
        return None

    def _transact(self, store: Stores) -> Event | None:
        loan = store.begin(self._clock.now_ms(), only_output=self._narrowing.is_narrowest)
        transaction = OpenTransaction(loan, self._clock.monotonic_s(), self._clock.now_ms())
        self._planner.begin()
        self._stall_watch.begin()
        event, stuck = None, dict[int, Unwritable]()
        try:
            if self._partitions.states.keys().isdisjoint(self._read_back.again):  # else these alone, at once
                self._filling.fill(store, transaction)
            self._commit(store, transaction)
        except Aborted as aborted:
            event, stuck = self._after_abort(store, transaction, aborted), self._narrowing.take_stuck()
        except Unplannable as unplannable:
            event, stuck = self._give_up(store, transaction), dict(unplannable.unwritable)
        except EndedUnasked as ended:
            event = self._after_end(store, transaction, ended)
        except Indefinite as indefinite:
            self._unanswered = transaction
            event = self._after_break(indefinite, transaction)
        except Broken as broken:
            transaction.rollback()  # no commit was requested, and the next producer ends this transaction
            event = self._after_break(broken, transaction)
            if not self._narrowing.narrow(transaction, Cause.PRODUCER_LOST, broken.failure):
                self._life.back_off()
        except Stale:
            log.info("transaction-outlived-its-assignment", rows=transaction.rows)
            self._life.ask(Request.HOLD)
            event = self._give_up(store, transaction)
        except BaseException:
            self._give_up(store, transaction)
            raise
        if stuck:
            self._held_sources.add(stuck, store.sources)
            if self._unanswered is None:
                self._held_sources.hold(store)
        return event

    # -- ending a transaction

    def _commit(self, store: Stores, transaction: OpenTransaction) -> None:
        if transaction.accepted != transaction.planned:
            lost = transaction.planned - transaction.accepted
            raise bug("records were lost between plan and client", code="DB-7002", lost=lost)
        self._look_ahead(store, transaction)
        if not transaction.states:
            if transaction.accepted:
                raise bug("a transaction has output, but moves no position", code="DB-7002")
            transaction.rollback()
            self._narrowing.committed(0, is_pending=self.doubts.is_under_way)
            # There was no work to do: look again later, not at once.
            self._committed_s = self._clock.monotonic_s()
            self._life.pause(NOTHING_S)
            return
        member = self._partitions.member_for(transaction.states)
        if not transaction.begun:
            self._writer.begin()
            transaction.begun = True
        is_explained = partial(self._stall_watch.is_explained, believed=transaction.targets)
        self._writer.commit(transaction.offsets, member.metadata, is_explained)
        self._acknowledge(store, transaction)

    def _send_offsets(self, store: Stores, transaction: OpenTransaction) -> None:
        """Start adding the offsets to the transaction while its records wait for their time, which saves the commit a
        wait. Probably no further row is taken."""
        self._look_ahead(store, transaction)
        if transaction.states:
            self._writer.send_offsets(transaction.offsets, self._partitions.member_for(transaction.states).metadata)

    def _look_ahead(self, store: Stores, transaction: OpenTransaction) -> None:
        said, again = self._pauses.to_write(), self._read_back.again
        transaction.look_ahead(self._partitions.states, store.sources, said, self.notes, again)

    def _acknowledge(self, store: Stores, transaction: OpenTransaction) -> None:
        self._life.failures, self._committed_s = 0, self._clock.monotonic_s()
        self._metrics.committed(transaction.counts, self._committed_s - transaction.opened_s)
        transaction.acknowledge()
        self._planner.committed(transaction.traced, self._clock.now_ms())
        self._partitions.states.update(transaction.states)
        self._read_back.committed(transaction.states, is_in_doubt=self._writer.takes_doubt())
        self.doubts.committed(transaction.states, store.sources)
        self._pauses.written(transaction.states.values())
        self._setbacks.committed(transaction.setbacks)
        self._narrowing.committed(transaction.rows, is_pending=self.doubts.is_under_way or not transaction.until_ms)
        if store.in_life(Life.COMMANDS_FIRST):
            self.commands_first.committed(transaction.written(self._planner.delay_topics, store.sources))
        if transaction.answers:
            self._on_answers(transaction.answers)

    def _give_up(self, store: Stores, transaction: OpenTransaction, *, in_haste: bool = False) -> Event | None:
        """Abort, and put the rows back."""
        try:
            if transaction.begun and not transaction.is_ended:
                self._writer.abort(in_haste=in_haste)
        except EndedUnasked as ended:
            return self._after_end(store, transaction, ended)
        except Broken as broken:
            return self._after_break(broken, transaction)
        finally:
            transaction.rollback()
        return None

    def _after_end(self, store: Stores, transaction: OpenTransaction, ended: EndedUnasked) -> Event:
        """A part of the transaction may be visible, and its offsets may count: neither its output nor the committed
        states are reliable. Its partitions are held until its topics are read, and the states are written again
        first."""
        failure = ended.failure
        log.error("transaction-ended-unasked", code="DB-4070", reason=failure.detail, rows=transaction.rows)
        names = self.doubts.note(transaction.output(), self._partitions.states, store.sources)
        self._read_back.doubt(names.union(transaction.states))
        transaction.rollback()
        self._held_sources.hold(store)
        event = self._after_break(ended, transaction)
        if not self._narrowing.narrow(transaction, Cause.COMMIT_NOT_MADE, failure):
            self._life.back_off()
        return event

    def _after_abort(self, store: Stores, transaction: OpenTransaction, aborted: Aborted) -> Event | None:
        cause, failure = aborted.cause, aborted.failure
        event = self._give_up(store, transaction, in_haste=failure.meaning is UNANSWERED)
        self._metrics.transactions_aborted.inc()
        told = {"cause": cause.value, "code": failure.code, "reason": failure.detail}
        log.warning("transaction-aborted", **told, rows=transaction.rows)
        if not self._narrowing.after(transaction, aborted):
            self._life.back_off()
        return Event.PRODUCER_LOST if REMEDIES[cause].renews else event

    def _after_break(self, broken: Broken, transaction: OpenTransaction | None = None) -> Event:
        """The producer is gone: the next step makes another. Raises FencedError if another instance took over."""
        opened_s, rows = (None, 0) if transaction is None else (transaction.opened_s, transaction.rows)
        self._breaks.note(broken, opened_s, rows)
        return Event.PRODUCER_LOST

    def _resolve(self) -> Event | None:
        """Find the outcome of an unanswered commit."""
        transaction, store = self._unanswered, self._store
        if transaction is None or store is None:
            if store is not None and self.doubts.held():
                self._held_sources.hold(store)
            return Event.RESOLVED
        try:
            committed = self._read_committed(list(transaction.states), None)
        except EnvironmentFailure as failure:
            log.warning("commit-still-unanswered", reason=str(failure))
            self._life.back_off()
            return None
        self._unanswered = None
        if was_committed(self._partitions.states, transaction.states, committed, self._read_back.again):
            log.info("commit-was-made", rows=transaction.rows)
            self._acknowledge(store, transaction)
            return Event.RESOLVED
        log.info("commit-was-not-made", rows=transaction.rows, reason=COMMIT_NOT_MADE.detail)
        transaction.rollback()
        self._held_sources.hold(store)
        if not self._narrowing.narrow(transaction, Cause.COMMIT_NOT_MADE, COMMIT_NOT_MADE):
            self._life.back_off()
        return Event.RESOLVED
