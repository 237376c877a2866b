"""Exactly once: records, offsets and position in one Kafka transaction."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import structlog
from confluent_kafka import KafkaError, KafkaException, Message, Producer, TopicPartition

from bridge.delivery.producer.outcomes import (
    NO_ANSWER,
    NO_PRODUCER,
    TARGETS_WORSE,
    Aborted,
    Broken,
    Cause,
    EndedUnasked,
    Failure,
    Incident,
    Indefinite,
    OnIncident,
    OnStall,
)
from bridge.delivery.producer.transaction_markers import MarkerRepair, Outcome
from bridge.delivery.producer.transactional_ids import (
    HELD_UP,
    TransactionalId,
    TransactionalIds,
    in_thread,
    let_in,
    names_of,
)
from bridge.delivery.producer.writer import SMALL_RECORDS, STALLED_S, UNACKNOWLEDGED, Writer
from bridge.kafka.calls import Call, Unanswered
from bridge.kafka.errors import Fault, fault_of, fenced, is_fenced, is_unasked, kafka_error
from bridge.kafka.repeats import Repeats
from bridge.settings.time_budgets import USUAL, TimeBudgets
from timerstore.clock import Clock

SENDING_S: Final = 0.001
"""Enough for the client's threads to start sending lingering records."""
CONFLICT_S: Final = 0.05
"""Pause before a call that is refused while an earlier one is running."""
HASTE_S: Final = 0.25
"""The longest wait for an abort if a broker does not answer: a healthy coordinator needs milliseconds."""
IN_DOUBT: Final = Failure(NO_ANSWER, "other offsets, which joined the transaction before, may arrive late")

log = structlog.get_logger("bridge.delivery.producer.transactional")


class TransactionalWriter(Writer):
    def __init__(
        self,
        properties: Mapping[str, Any],
        clock: Clock,
        make_producer: Callable[[dict[str, Any]], Producer] = Producer,
        run: Callable[[Callable[[], None]], None] = in_thread,
        repair: MarkerRepair | None = None,
        budgets: TimeBudgets = USUAL,
        on_incident: OnIncident = lambda _: None,
        renews: bool = True,
    ) -> None:
        """`run` makes the other producers ready, beside delivery; `repair` mends lost markers, if the brokers may lose
        any. Without `renews` messages may be doubled: a test shows that its injections are effective."""
        super().__init__(properties, clock, make_producer, budgets)
        names = names_of(str(properties.get("transactional.id", "")))
        self._ids = TransactionalIds(names, self._make, run, repair, budgets.call_s, on_incident)
        self._on_incident = on_incident
        self._renews = renews
        self._had_doubt = False
        self._id: TransactionalId | None = None
        """The id of the open transaction, or of the last one; None where that is renewed or lost."""
        self._unasked: KafkaError | None = None
        """The error that shows the end of the open transaction."""
        self._has_offsets = False
        """Whether it may have offsets."""
        self._joining: tuple[Sequence[TopicPartition], Call] | None = None
        """Offsets that join the open transaction beside its records."""
        self._pause = threading.Event()  # never set: its wait is a pause

    def open(self) -> None:
        """Make a producer, fence every earlier one of the same name and end their open transactions; the other ids
        follow in the background."""
        self._drop()
        self._use(self._ids.open())

    def close(self) -> None:
        self._drop()
        self._ids.close()

    def look_after(self) -> None:
        self._ids.look_after()

    def takes_doubt(self) -> bool:
        had_doubt, self._had_doubt = self._had_doubt, False
        return had_doubt

    def _make(self, name: str, faults: list[KafkaError], repeats: Repeats) -> Producer:
        return self._new(faults, **{"transactional.id": name}, **repeats.properties(self._properties))

    def _ended(self, outcome: Outcome | None, *, is_awaited: bool = False, is_left: bool = False) -> None:
        """The request for an end was answered, or not (None). The id gets a new epoch if it `is_left` because a broker
        does not answer, or if a copy of a request may arrive late (`is_awaited`: of committed offsets)."""
        one = self._in_use()
        one.outcome = outcome
        is_in_doubt = one.is_in_doubt()
        self._had_doubt |= is_in_doubt or is_left
        if is_in_doubt and self._renews:
            self._on_incident(Incident.END_IN_DOUBT)
            told = "not answered" if outcome is None else outcome.value
            log.warning("request-may-arrive-late", id=one.name, ended=told, all_wait=is_awaited)
        if is_left:
            log.warning("transactional-id-left", id=one.name)
            one.comes_back = True
        if is_left or (is_in_doubt and self._renews):
            self._id = self._producer = None
            self._ids.first = one if is_awaited else self._ids.first
            self._ids.renew(one)

    def _broken(self, failure: Failure) -> Broken:
        one, error = self._id, failure.error
        if one is None:
            return Broken(failure)
        # The answer is the same if the client asks to abort records that the coordinator has not taken, because it was
        # still writing the previous end (librdkafka issue 4849). So it counts, unless there was certainly nothing to
        # write.
        if error is not None and is_unasked(error) and (self._has_offsets or self._sent > self._unwritten):
            self._unasked = self._unasked or error
        if self._unasked is not None:
            if self._ids.first is not one:
                self._on_incident(Incident.ENDED_UNASKED)
            self._ids.first = one
            return EndedUnasked(Failure.of(self._unasked))
        fenced_itself = one.may_fence_itself and error is not None and is_fenced(error)
        one.may_fence_itself = one.may_fence_itself and not fenced_itself
        return Broken(failure, fenced_itself)

    def _report(self, row: int, error: KafkaError | None, message: Message) -> None:
        super()._report(row, error, message)
        if error is not None and is_unasked(error):
            self._unasked = error

    def _use(self, one: TransactionalId) -> None:
        self._forget()
        self._id, self._producer, self._faults = one, one.producer, one.faults
        self._joining = self._unasked = None
        self._has_offsets = False

    def _in_use(self) -> TransactionalId:
        if self._id is None:
            raise Broken(NO_PRODUCER)
        return self._id

    def _drop(self) -> None:
        super().close()
        one, self._id, self._joining = self._id, None, None
        if one is not None:
            self._ids.give_up(one)

    @property
    def is_to_stay_small(self) -> bool:
        return self._id is not None and self._ids.is_suspect(self._id)

    def await_turn(self, timeout_s: float) -> bool:
        return self._id is not None or self._ids.await_ready(timeout_s)

    def begin(self, records: int = 0) -> None:
        """Start a transaction. This is local: brokers learn of it with the first record. Another id may have its
        turn."""
        self.look_after()
        if self._producer is not None and self._faults:
            raise self._broken(Failure.of(self._faults[-1]))
        one = self._ids.next(self._id, is_small=records <= SMALL_RECORDS)
        if one is None:
            raise Broken(HELD_UP)
        self._use(one)
        one.repeats.forget()
        one.outcome = None
        try:
            self._client().begin_transaction()
        except KafkaException as exception:
            raise self._broken(Failure.of(kafka_error(exception))) from None

    def send_offsets(self, offsets: Sequence[TopicPartition], group_metadata: object) -> None:
        """The offsets join the transaction beside its records: that is the longest part of a commit."""
        self._joining = offsets, self._calls.begin(self._sending(offsets, group_metadata))

    def _explain(self) -> None:
        """Raise the failure of the joining offsets, if there is one: the client then takes and sends nothing, without a
        reason."""
        if self._joining is None or not self._joining[1].done.wait(CONFLICT_S):
            return
        (_, call), self._joining = self._joining, None
        try:
            call.wait(0)
        except KafkaException as failed:
            self._judge(kafka_error(failed), may_repeat=True)

    def _sending(self, offsets: Sequence[TopicPartition], group_metadata: object) -> Callable[[], object]:
        """The call by which they join. It may ignore its time-out (kafka/calls.py)."""
        self._has_offsets = True
        send = self._client().send_offsets_to_transaction
        return partial(send, list(offsets), group_metadata, self._budgets.call_s)

    def _join(self, offsets: Sequence[TopicPartition], group_metadata: object, look: Callable[[], None]) -> None:
        """Wait until the offsets have joined, so that no others can join after them."""
        (joined, call), self._joining = self._joining or (None, None), None
        if call is not None:
            try:
                self._calls.result(call, self._budgets.unanswered_s, look, STALLED_S)
            except KafkaException as failed:
                if joined is offsets:
                    raise
                # Brokers may still have the earlier offsets, and must not take them after these.
                self._judge(kafka_error(failed), may_repeat=True)
                raise Aborted(Cause.BROKERS_BUSY, Failure.of(kafka_error(failed)), dict(self._failed)) from None
        if joined is not offsets:
            if joined is not None and self._in_use().is_in_doubt():
                # A late copy of the earlier offsets would be taken after these: the transaction is still the same.
                raise Aborted(Cause.BROKERS_BUSY, IN_DOUBT, dict(self._failed))
            call = self._calls.begin(self._sending(offsets, group_metadata))
            self._calls.result(call, self._budgets.unanswered_s, look, STALLED_S)

    def commit(self, offsets: Sequence[TopicPartition], group_metadata: object, on_stall: OnStall) -> None:
        """The offsets join the transaction, unless they have; once all records are acknowledged, it is committed."""
        producer, one = self._client(), self._in_use()
        began_s = self._clock.monotonic_s()
        deadline_s = began_s + self._budgets.step_s

        def look() -> None:
            if on_stall(self._clock.monotonic_s() - began_s):
                raise Aborted(Cause.TARGETS_WORSE, TARGETS_WORSE)

        if len(producer):  # records leave beside offsets that are still in flight
            self._serve(producer.flush, SENDING_S)
        try:
            self._step(lambda: self._join(offsets, group_metadata, look), deadline_s)
        except Unanswered as unanswered:
            raise self._broken(Failure(NO_ANSWER, f"sending offsets: {unanswered}")) from None
        # The commit would wait for the records, too, but silently.
        if not self._wait(lambda: len(producer), on_stall):
            raise Aborted(Cause.UNACKNOWLEDGED, UNACKNOWLEDGED)
        asked, before, are_offsets_in_doubt = 0, one.committed, one.is_in_doubt()
        self._ids.asked_to_commit(one)  # before the answer, which can be lost

        def ask() -> None:
            nonlocal asked
            asked += 1
            producer.commit_transaction(self._budgets.call_s)

        try:
            self._step(ask, deadline_s)
        except EndedUnasked:
            raise
        except (Broken, Aborted) as failed:
            if isinstance(failed, Aborted) and asked == 1 and _is_refused(failed.failure, one):
                one.committed = before
                raise
            if self._unasked is not None:
                raise self._broken(failed.failure) from None
            self._had_doubt = True
            self._ids.first = one if are_offsets_in_doubt else self._ids.first
            raise Indefinite(failed.failure, isinstance(failed, Broken) and failed.fenced_itself) from None
        self._ids.is_well = True
        self._ended(Outcome.COMMITTED, is_awaited=are_offsets_in_doubt)

    def abort(self, *, in_haste: bool = False) -> None:
        """The coordinator is asked now, so that its answer, possibly that the transaction had ended, comes before the
        next plan. Without an answer, another id goes on: the new epoch of this one ends the transaction. In haste it
        goes on in any case: the brokers take nothing more under this id before every partition has the end."""
        self._ids.is_well = False
        is_aborted = self._is_aborted(HASTE_S if in_haste else self._budgets.step_s)
        let_in(self._client())
        if self._unasked is not None:  # the transaction had ended before
            raise self._broken(Failure.of(self._unasked))
        self._ended(Outcome.ABORTED if is_aborted else None, is_left=in_haste or not is_aborted)
        if in_haste:
            self._ids.renew_last()

    def _is_aborted(self, limit_s: float) -> bool:
        """Whether the abort was answered. Raises Broken."""
        deadline_s, (_, joining) = self._clock.monotonic_s() + limit_s, self._joining or (None, None)
        self._joining = None
        if joining is not None and not joining.give_up():  # in flight, they must not join the next transaction
            try:
                self._calls.result(joining, min(limit_s, self._budgets.unanswered_s))
            except Unanswered:
                return False
            except KafkaException as failed:  # the abort follows anyway
                error = kafka_error(failed)
                self._unasked = error if is_unasked(error) else self._unasked
        call = partial(self._client().abort_transaction, min(limit_s, self._budgets.call_s))
        try:
            self._step(call, deadline_s)
        except Aborted as aborted:
            raise self._broken(aborted.failure) from None
        except Broken as broken:
            reason = broken.failure.error
            if (
                isinstance(broken, EndedUnasked)
                or reason is None
                or not (reason.retriable() or fault_of(reason) is Fault.BUSY)
            ):
                raise
            return False
        self._serve(self._client().poll, 0)
        return True

    def _step(self, call: Callable[[], object], deadline_s: float) -> None:
        """Repeat a call, as long as the client allows it, until the deadline."""
        while True:
            try:
                call()
                return
            except KafkaException as exception:
                error = kafka_error(exception)
            self._judge(error, may_repeat=self._clock.monotonic_s() <= deadline_s)
            self._in_use().repeats.note()
            if fault_of(error) is Fault.BUSY:  # answered at once while an abandoned call is running
                self._pause.wait(CONFLICT_S)

    def _judge(self, error: KafkaError, *, may_repeat: bool) -> None:
        """Raise the meaning of a call's failure for the transaction; return if the call may be repeated."""
        if error.code() == KafkaError.FENCED_INSTANCE_ID:
            raise fenced(error)
        if error.txn_requires_abort():
            self._unasked = error if is_unasked(error) else self._unasked
            raise Aborted.by(Failure.of(error), self._failed)
        if not error.retriable() or not may_repeat:
            raise self._broken(Failure.of(error))


def _is_refused(failure: Failure, one: TransactionalId) -> bool:
    """Whether a failed commit was certainly not made: its end was not sent, or the coordinator has refused it and
    received it once. An error of a broken connection may come after the end was written."""
    if not failure.detail.startswith("EndTxn "):
        return True
    is_known = failure.error is not None and failure.error.code() == KafkaError.TRANSACTION_ABORTABLE
    return is_known and not one.is_in_doubt()
