"""Exactly once: records, offsets and position in one Kafka transaction."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

import structlog
from confluent_kafka import KafkaError, KafkaException, Producer, TopicPartition

from bridge.delivery.plan.due_rows import Batch
from bridge.delivery.producer.producer_pool import PooledProducer, ProducerPool, alone, in_thread, names_of
from bridge.delivery.producer.sender import STALLED_S, UNACKNOWLEDGED, Sender
from bridge.delivery.producer.transaction_markers import MarkerRepair
from bridge.delivery.producer.writer import (
    NO_ANSWER,
    NO_PRODUCER,
    TARGETS_WORSE,
    Aborted,
    Broken,
    Cause,
    Failure,
    Indefinite,
    NotReady,
    OnStall,
)
from bridge.errors import EnvironmentFailure
from bridge.kafka.calls import Unanswered
from bridge.kafka.errors import Fault, fault_of, fenced, is_denied, is_fatal, is_fenced, kafka_error
from bridge.settings.time_budgets import USUAL, TimeBudgets
from timerstore.clock import Clock

CONFLICT_S: Final = 0.05
"""Between two calls that are refused because an earlier one is still under way."""
SPARES_SERVED_S: Final = 1.0
HELD_UP: Final = Failure(NO_ANSWER, "every transactional id is held up")

log = structlog.get_logger("bridge.delivery.producer.transactional")


class TransactionalWriter(Sender):
    """See the module, and `Writer`."""

    def __init__(
        self,
        properties: Mapping[str, Any],
        clock: Clock,
        make_producer: Callable[[dict[str, Any]], Producer] = Producer,
        run: Callable[[Callable[[], None]], None] = in_thread,
        repair: MarkerRepair | None = None,
        budgets: TimeBudgets = USUAL,
    ) -> None:
        """`run` makes the spare producer ready, beside delivery; `repair` mends what the brokers have lost, if they may
        have.
        """
        super().__init__(properties, clock, make_producer, budgets)
        names = names_of(str(properties.get("transactional.id", "")))
        self._pool = ProducerPool(
            names, lambda name, faults: self._new(faults, **{"transactional.id": name}), run, repair
        )
        self._used: PooledProducer | None = None
        self._served_s = 0.0
        self._pause = threading.Event()  # never set: a wait for it is a pause

    def open(self) -> None:
        """Make a producer, fence every earlier one of the same name and end the transactions that they left open; the
        spare one follows in the background.
        """
        self._drop()
        pooled = self._pool.take()
        if pooled is None:
            raise NotReady(HELD_UP)
        if pooled.producer is None:
            self._init(pooled)
        self._use(pooled)
        self._pool.prepare()

    def close(self) -> None:
        """Drop all producers without waiting for anything."""
        self._drop()
        self._pool.close()

    def _init(self, pooled: PooledProducer) -> None:
        """Raises EnvironmentFailure, Broken, NotReady."""
        with alone(pooled.name, self._budgets.call_s) as is_alone:
            if not is_alone:
                self._pool.put_back(pooled)
                raise NotReady(Failure(NO_ANSWER, "an earlier producer is still being made"))
            error = self._pool.learn_owed(pooled)
            if error is not None:
                self._pool.put_back(pooled)
                raise NotReady(Failure.of(error))
            pooled.faults = []
            pooled.producer = producer = self._pool.make(pooled.name, pooled.faults)
            try:
                producer.init_transactions(self._budgets.call_s)
                error = self._pool.write_owed(pooled, producer)
            except KafkaException as exception:
                error = kafka_error(exception)
        if error is None:
            return
        if is_denied(error):
            self._pool.put_back(pooled)
            raise EnvironmentFailure(
                "the brokers refuse transactions",
                hint="Grant WRITE and DESCRIBE on the transactional id; check credentials, transaction.timeout.ms.",
                reason=error.str(),
                code="DB-3006",
            )
        if is_fatal(error) or is_fenced(error):
            self._pool.put_back(pooled)
            raise Broken(Failure.of(error))
        del producer  # it goes on by itself; the thread that recycles the id has the only reference
        self._pool.recycle(pooled)
        raise NotReady(Failure.of(error))

    def _use(self, pooled: PooledProducer) -> None:
        self._forget()
        self._used, self._producer, self._faults = pooled, pooled.producer, pooled.faults

    def _drop(self) -> None:
        """Without the producer there was."""
        super().close()
        pooled, self._used = self._used, None
        if pooled is not None:
            self._pool.put_back(pooled)

    def begin(self) -> None:
        """Start a transaction: local, the brokers hear of it with the first record. An id that was left is used again
        from here on, if it is ready. Raises Broken.
        """
        if self._used is not None:
            now_s = self._clock.monotonic_s()
            if now_s - self._served_s >= SPARES_SERVED_S:
                self._served_s = now_s
                self._pool.serve()
            self._serve(self._client().poll, 0)
            self._use(self._pool.resume(self._used))
        try:
            self._client().begin_transaction()
        except KafkaException as exception:
            raise Broken(Failure.of(kafka_error(exception))) from None

    def send(self, batch: Batch, *, first_id: int = 0, careful: bool = False) -> int:
        """Hand a batch to the client. Careful, and for one that is sent alone: with a report for every record, waited
        for. Raises Aborted, Broken.
        """
        is_awaited = careful or batch.alone
        accepted = self._produce(batch, first_id, reported=is_awaited)
        if is_awaited:
            self._await_reports(was_alone=len(batch) == 1)
        self._serve(self._client().poll, 0)
        return accepted

    def commit(self, offsets: Sequence[TopicPartition], group_metadata: object, on_stall: OnStall) -> None:
        """Commit. Raises Aborted before the point of no return, Indefinite after it, Broken, FencedError."""
        producer = self._client()
        began_s = self._clock.monotonic_s()
        deadline_s = began_s + self._budgets.step_s
        send = partial(producer.send_offsets_to_transaction, list(offsets), group_metadata, self._budgets.call_s)

        def send_offsets() -> None:
            def look() -> None:
                if on_stall(self._clock.monotonic_s() - began_s):
                    raise Aborted(Cause.TARGETS_WORSE, TARGETS_WORSE)

            self._calls.call(send, self._budgets.unanswered_s, meanwhile=look, every_s=STALLED_S)

        try:
            self._step(send_offsets, deadline_s)
        except Unanswered as unanswered:
            raise Broken(Failure(NO_ANSWER, f"sending offsets: {unanswered}")) from None
        # The commit would wait for the records, too, but without a word.
        if not self._wait(lambda: len(producer), on_stall):
            raise Aborted(Cause.UNACKNOWLEDGED, UNACKNOWLEDGED)
        asked = 0

        def ask() -> None:
            nonlocal asked
            asked += 1
            producer.commit_transaction(self._budgets.call_s)

        try:
            self._step(ask, deadline_s)
        except (Broken, Aborted) as failed:
            # An abort that is asked for at the first call is a definite no. A call before it may have been made.
            if isinstance(failed, Aborted) and asked == 1:
                raise
            raise Indefinite(failed.failure) from None
        with suppress(KafkaException):  # whatever it is: the commit has been made
            producer.poll(0)

    def abort(self) -> None:
        """Abort. Raises Broken when that cannot be done: a new producer will."""
        deadline_s = self._clock.monotonic_s() + self._budgets.step_s
        try:
            self._step(partial(self._client().abort_transaction, self._budgets.call_s), deadline_s)
        except Aborted as aborted:
            raise Broken(aborted.failure) from None
        self._serve(self._client().poll, 0)

    def leave(self) -> None:
        """Go on under another id while this one is aborted in the background: the brokers take nothing more under it
        before every partition has the transaction's end. Where no other one is ready yet (soon after a start), the one
        that is ready first goes on, be it this one. Raises Broken.
        """
        left = self._used
        if left is None:
            raise Broken(NO_PRODUCER)
        self._calls.close()  # its call may go on for a while
        self._used = self._producer = None
        self._pool.recycle(left, is_open=True)
        spare = self._pool.await_ready(self._budgets.step_s)
        if spare is None:
            raise Broken(HELD_UP)
        log.warning("transactional-id-left", id=left.name, for_id=spare.name)
        self._use(spare)

    def _step(self, call: Callable[[], None], deadline_s: float) -> None:
        """Repeat a call while the client says that it may be repeated, until the deadline."""
        while True:
            try:
                return call()
            except KafkaException as exception:
                error = kafka_error(exception)
            if error.code() == KafkaError.FENCED_INSTANCE_ID:
                raise fenced(error)
            if error.txn_requires_abort():
                raise Aborted.by(Failure.of(error), self._failed)
            if not error.retriable() or self._clock.monotonic_s() > deadline_s:
                raise Broken(Failure.of(error))
            if fault_of(error) is Fault.BUSY:  # said at once, for as long as the call that was left is under way
                self._pause.wait(CONFLICT_S)
