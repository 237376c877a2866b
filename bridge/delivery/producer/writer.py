"""The producer behind delivery: transactions, what their errors mean, and a new producer when the old one is of no use.

Outcomes of a transaction, as exceptions, by what is known of it (facts that decide this: the client's documentation and
experiments):

    (none)      committed
    Aborted     nothing of it will be seen once `abort` has returned; the producer goes on
    Broken      the producer is of no use: fenced, or it cannot abort. Nothing was committed unless commit was asked for
    Indefinite  commit was asked for and no answer came: only the committed offsets can tell

`produce` that raises is never swallowed: the transaction would commit without the record.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, NoReturn, Protocol

import structlog
from confluent_kafka import KafkaError, KafkaException, Message, Producer, TopicPartition

from bridge.delivery.plan.due_rows import Batch
from bridge.delivery.producer.produce_loop import Stopped, produce_any, produce_plain
from bridge.delivery.producer.spare_id import Identities, Identity, alone, drop, in_thread, names_of
from bridge.delivery.producer.transaction_markers import Endings
from bridge.errors import EnvironmentFailure
from bridge.kafka.calls import Guard, Unanswered
from bridge.kafka.error_log import ErrorLog
from bridge.kafka.errors import Fault, fault_of, fenced, is_denied, is_fatal, is_fenced, kafka_error
from bridge.settings.time_budgets import USUAL, TimeBudgets
from timerstore.clock import Clock

STALLED_S: Final = 0.1
"""Nothing is acknowledged for so long: time to look at the targets, and again after as long. Usually it takes
milliseconds.
"""
FULL_POLL_S: Final = 0.05
CONFLICT_S: Final = 0.05
"""Between two calls that are refused because an earlier one is still under way."""
SPARES_SERVED_S: Final = 1.0

log = structlog.get_logger("bridge.delivery.producer.writer")

_PURGED: Final = frozenset({KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT})


class Aborted(Exception):
    """The transaction must be given up. `error` is the cause, `culprits` are rows that failed, by number within the
    transaction, with the error of each and the partition (-1: not known); `is_exact` says that the one culprit was sent
    alone, so that no other record can be to blame; `is_explained` that the targets turned out to be otherwise than
    planned for, so that the next plan differs; `is_slow` that it took too long, so that the next one has to be smaller.
    """

    def __init__(
        self,
        error: KafkaError,
        culprits: Mapping[int, tuple[KafkaError, int]] | None = None,
        *,
        is_exact: bool = False,
        is_explained: bool = False,
        is_slow: bool = False,
    ) -> None:
        super().__init__(error.str())
        self.error = error
        self.culprits = dict(culprits or {})
        self.is_exact = is_exact
        self.is_explained = is_explained
        self.is_slow = is_slow


class Broken(Exception):
    """The producer cannot go on; `is_fenced`: the broker says that another one of our name exists."""

    def __init__(self, error: KafkaError) -> None:
        super().__init__(error.str())
        self.error = error
        self.is_fenced = is_fenced(error)


class Indefinite(Broken):
    """No answer to a commit."""


OnStall = Callable[[float], None]
"""Called with the seconds for which nothing has moved; raises Aborted when it knows why."""


class Writer(Protocol):
    """What the dispatcher needs; `TransactionalWriter` and `AcknowledgedWriter`."""

    def open(self) -> None:
        """Make a producer, in place of the one there was, and end what that one left open.

        Raises EnvironmentFailure when it can never work, Aborted when it may work later.
        """
        ...

    def begin(self) -> None:
        """Start a transaction."""
        ...

    def send(self, batch: Batch, *, first_id: int = 0, careful: bool = False) -> int:
        """Hand a batch to the client; returns how many records it took. `careful`: wait until each record's fate is
        known.
        """
        ...

    def commit(self, offsets: Sequence[TopicPartition], group_metadata: object, on_stall: OnStall) -> None:
        """Commit everything sent, and the offsets, together. While nothing of it is acknowledged `on_stall` is called
        now and then; it raises Aborted when it knows why.
        """
        ...

    def abort(self) -> None:
        """Give up what was sent."""
        ...

    def leave(self) -> bool:
        """As `abort`, where a partition does not answer: without waiting for what may wait for that partition. Returns
        whether the producer is another one now.
        """
        ...

    def close(self) -> None:
        """Drop the producer."""
        ...


class _ProducerWriter:
    """What both modes share: one producer, and the loop around its produce."""

    def __init__(
        self,
        properties: Mapping[str, Any],
        clock: Clock,
        make_producer: Callable[[dict[str, Any]], Producer] = Producer,
        budgets: TimeBudgets = USUAL,
    ) -> None:
        """`properties` of a producer, complete; `make_producer` is there for tests of errors that no broker will give
        on demand.
        """
        self._properties = dict(properties)
        self._clock = clock
        self._budgets = budgets
        self._began_s = 0.0
        self._make_producer = make_producer
        self._producer: Producer | None = None
        self._trouble = ErrorLog("bridge.delivery.dispatcher", "producer-trouble", clock)
        self._faults: list[KafkaError] = []
        self._guard = Guard("producer-calls")
        self._failed: dict[int, tuple[KafkaError, int]] = {}
        self._is_overdue = False
        self._awaited = 0
        self._reported = 0

    def close(self) -> None:
        """Drop the producer without waiting for anything."""
        self._guard.close()
        producer, self._producer = self._producer, None
        self._awaited = self._reported = 0
        if producer is not None:
            drop(producer)

    def _new(self, faults: list[KafkaError], **more: str) -> Producer:
        """Another producer; its fatal errors are added to `faults`. Raises EnvironmentFailure."""
        own = {"error_cb": partial(self._on_error, faults), "logger": logging.getLogger("bridge.settings.librdkafka")}
        try:
            return self._make_producer({**self._properties, **more, **own})
        except KafkaException as exception:
            raise EnvironmentFailure(
                "the producer cannot be made",
                hint="Look at kafka.common and kafka.producer.",
                reason=kafka_error(exception).str(),
            ) from exception

    def _client(self) -> Producer:
        if self._producer is None:
            raise Broken(KafkaError(KafkaError._STATE, "there is no producer"))
        return self._producer

    def _on_error(self, faults: list[KafkaError], error: KafkaError) -> None:
        if is_fatal(error):
            faults.append(error)
        self._trouble.warn(error)

    def _serve(self, call: Callable[[float], object], timeout_s: float) -> None:
        """Let reports in. Raises Broken for a fatal error: the client raises it here, in place of `error_cb`."""
        try:
            call(timeout_s)
        except KafkaException as exception:
            raise Broken(kafka_error(exception)) from None
        if self._faults:
            raise Broken(self._faults[-1])

    def _since(self, began_s: float) -> float:
        return self._clock.monotonic_s() - began_s

    def _forget(self) -> None:
        self._failed = {}
        self._is_overdue = False
        self._awaited = self._reported = 0
        self._began_s = self._clock.monotonic_s()

    def _give_up(self, exception: Exception, row: int, partition: int) -> NoReturn:
        """What an exception out of produce means for the transaction; `partition` -1: the partitioner's choice."""
        if isinstance(exception, BufferError):
            error = KafkaError(KafkaError._QUEUE_FULL, "the client's queue stayed full", retriable=True)
            raise Aborted(error, is_slow=True) from None
        if not isinstance(exception, KafkaException):
            # Something in the record that this client cannot express (a NUL in a header's name). One record must not
            # stop the others.
            error = KafkaError(KafkaError.INVALID_RECORD, str(exception))
            raise Aborted(error, {row: (error, partition)}, is_exact=True) from None
        error = kafka_error(exception)
        if is_fatal(error) or is_fenced(error):
            raise Broken(error) from None
        if error.code() == KafkaError._STATE:
            raise Aborted(error, self._failed) from None  # another record has failed: nothing is taken any more
        raise Aborted(error, {row: (error, partition)}, is_exact=True) from None

    def _produce(self, batch: Batch, first_id: int, *, reported: bool) -> int:
        """The loop around produce; `reported`: `_report` is called with the number of every record, `first_id` + its
        id.
        """
        producer = self._client()
        ids = [first_id + row for row in batch.ids.tolist()] if reported else None
        done, deadline_s, is_up_to_date = 0, None, False
        while True:
            try:
                if ids is None and batch.headers is None and batch.own is None and batch.partitions is None:
                    done = produce_plain(producer.produce, batch, done)
                else:
                    done = produce_any(producer.produce, batch, self._report, ids, done)
                self._awaited += done if reported else 0
                return done
            except Stopped as stopped:
                done = stopped.done
                if _is_unknown_partition(stopped.cause) and not is_up_to_date:
                    # It may have been added since this client has looked, which it does every five minutes.
                    is_up_to_date = True
                    with suppress(KafkaException):  # without an answer the record is refused as it is
                        producer.list_topics(batch.topic, self._budgets.look_up_s)
                    continue
                now_s = self._clock.monotonic_s()
                if deadline_s is None or stopped.progress:
                    deadline_s = min(now_s + self._budgets.full_s, self._began_s + self._budgets.send_s)
                if not isinstance(stopped.cause, BufferError) or now_s > deadline_s:
                    partition = -1 if batch.partitions is None else batch.partitions[done]
                    self._give_up(stopped.cause, first_id + int(batch.ids[done]), partition)
                self._serve(producer.poll, FULL_POLL_S)

    def _report(self, row: int, error: KafkaError | None, message: Message) -> None:
        """Delivery report of one record, called from poll and flush."""
        self._reported += 1
        if error is None or (error.code() in _PURGED and not self._is_overdue):
            return
        if error.code() in _PURGED:
            error = KafkaError(KafkaError._MSG_TIMED_OUT, "not acknowledged in time")
        partition = message.partition()
        self._failed.setdefault(row, (error, -1 if partition is None else partition))

    def _settle(self, on_stall: OnStall = lambda _: None, *, is_exact: bool = False) -> None:
        """Wait until the fate of every reported record is known, for as long as there is progress, and time. Raises
        Aborted with the culprits, Broken.
        """
        producer = self._client()
        if self._reported < self._awaited and not self._wait(lambda: self._awaited - self._reported, on_stall):
            self._is_overdue = True
            producer.purge(blocking=False)
            self._serve(producer.flush, 1.0)  # reports what is purged: that is what was not acknowledged
        if self._failed:
            raise Aborted(next(iter(self._failed.values()))[0], self._failed, is_exact=is_exact)
        if self._reported < self._awaited:
            raise Aborted(
                KafkaError(KafkaError._MSG_TIMED_OUT, "records were not acknowledged in time", retriable=True)
            )

    def _wait(self, count_left: Callable[[], int], on_stall: OnStall) -> bool:
        """Flush until nothing is left; False when nothing has moved for too long. Raises Broken, and Aborted when the
        transaction would be open for too long.
        """
        producer = self._client()
        left, moved_s = count_left(), self._clock.monotonic_s()
        while left:
            self._serve(producer.flush, STALLED_S)
            before, left = left, count_left()
            now_s = self._clock.monotonic_s()
            if left < before:
                moved_s = now_s
            elif now_s - moved_s >= self._budgets.stalled_s:
                return False
            elif now_s - moved_s >= STALLED_S / 2:
                on_stall(now_s - moved_s)
            if left and self._since(self._began_s) >= self._budgets.acknowledge_s:
                error = KafkaError(KafkaError._MSG_TIMED_OUT, "the transaction took too long", retriable=True)
                raise Aborted(error, self._failed, is_slow=True)
        return True


def _is_unknown_partition(cause: Exception) -> bool:
    return isinstance(cause, KafkaException) and kafka_error(cause).code() == KafkaError._UNKNOWN_PARTITION


class TransactionalWriter(_ProducerWriter):
    """Exactly once: records, offsets and position in one Kafka transaction."""

    def __init__(
        self,
        properties: Mapping[str, Any],
        clock: Clock,
        make_producer: Callable[[dict[str, Any]], Producer] = Producer,
        run: Callable[[Callable[[], None]], None] = in_thread,
        endings: Endings | None = None,
        budgets: TimeBudgets = USUAL,
    ) -> None:
        """`run` makes the spare producer ready, beside delivery; `endings` mends what the brokers have lost, if they
        may have.
        """
        super().__init__(properties, clock, make_producer, budgets)
        names = names_of(str(properties.get("transactional.id", "")))
        self._identities = Identities(
            names, lambda name, faults: self._new(faults, **{"transactional.id": name}), run, endings
        )
        self._identity: Identity | None = None
        self._served_s = 0.0
        self._pause = threading.Event()  # never set: a wait for it is a pause

    def open(self) -> None:
        """Make a producer, fence every earlier one of the same name and end the transactions that they left open; the
        spare one follows in the background.
        """
        self._drop()
        identity = self._identities.take()
        if identity is None:
            raise Aborted(KafkaError(KafkaError._TIMED_OUT, "every transactional id is held up", retriable=True))
        if identity.producer is None:
            self._init(identity)
        self._use(identity)
        self._identities.prepare()

    def close(self) -> None:
        """Drop all producers without waiting for anything."""
        self._drop()
        self._identities.close()

    def _init(self, identity: Identity) -> None:
        """Raises EnvironmentFailure, Broken, Aborted."""
        with alone(identity.name, self._budgets.call_s) as is_alone:
            if not is_alone:
                self._identities.put_back(identity)
                raise Aborted(KafkaError(KafkaError._TIMED_OUT, "an earlier producer is still being made"))
            error = self._identities.ask(identity)
            if error is not None:
                self._identities.put_back(identity)
                raise Aborted(error)
            producer = identity.renew(self._identities.make)
            try:
                producer.init_transactions(self._budgets.call_s)
                error = self._identities.settle(identity, producer)
            except KafkaException as exception:
                error = kafka_error(exception)
        if error is None:
            return
        if is_denied(error):
            self._identities.put_back(identity)
            raise EnvironmentFailure(
                "the brokers refuse transactions",
                hint="Grant WRITE and DESCRIBE on the transactional id; check credentials, transaction.timeout.ms.",
                reason=error.str(),
            )
        if is_fatal(error) or is_fenced(error):
            self._identities.put_back(identity)
            raise Broken(error)
        del producer  # it goes on by itself; whoever makes the id ready has it
        self._identities.rest(identity)
        raise Aborted(error)

    def _use(self, identity: Identity) -> None:
        self._forget()
        self._identity, self._producer, self._faults = identity, identity.producer, identity.faults

    def _drop(self) -> None:
        """Without the producer there was."""
        super().close()
        identity, self._identity = self._identity, None
        if identity is not None:
            self._identities.put_back(identity)

    def begin(self) -> None:
        """Start a transaction: local, the brokers hear of it with the first record. Raises Broken."""
        self._resume()
        try:
            self._client().begin_transaction()
        except KafkaException as exception:
            raise Broken(kafka_error(exception)) from None

    def _resume(self) -> None:
        """Go back to the id that was left, if it is ready."""
        if self._identity is not None:
            now_s = self._clock.monotonic_s()
            if now_s - self._served_s >= SPARES_SERVED_S:
                self._served_s = now_s
                self._identities.serve()
            self._serve(self._client().poll, 0)
            self._use(self._identities.resume(self._identity))

    def send(self, batch: Batch, *, first_id: int = 0, careful: bool = False) -> int:
        """Hand a batch to the client. Careful: with a report for every record, waited for. Raises Aborted, Broken."""
        accepted = self._produce(batch, first_id, reported=careful)
        if careful:
            self._settle(is_exact=len(batch) == 1)
        elif batch.alone:
            self._serve(self._client().flush, self._budgets.full_s)
        self._serve(self._client().poll, 0)
        return accepted

    def commit(self, offsets: Sequence[TopicPartition], group_metadata: object, on_stall: OnStall) -> None:
        """Commit. Raises Aborted before the point of no return, Indefinite after it, Broken, FencedError."""
        producer = self._client()
        began_s = self._clock.monotonic_s()
        deadline_s = began_s + self._budgets.step_s
        send = partial(producer.send_offsets_to_transaction, list(offsets), group_metadata, self._budgets.call_s)
        try:
            looking = partial(self._guard.call, meanwhile=lambda: on_stall(self._since(began_s)), every_s=STALLED_S)
            self._step(partial(looking, send, self._budgets.unanswered_s), deadline_s)
        except Unanswered as unanswered:
            raise Broken(KafkaError(KafkaError._TIMED_OUT, f"sending offsets: {unanswered}")) from None
        # The commit would wait for the records, too, but without a word.
        if not self._wait(lambda: len(producer), on_stall):
            raise Aborted(KafkaError(KafkaError._MSG_TIMED_OUT, "records were not acknowledged in time"))
        asked = 0

        def ask() -> None:
            nonlocal asked
            asked += 1
            producer.commit_transaction(self._budgets.call_s)

        try:
            self._step(ask, deadline_s)
        except Broken as broken:
            raise Indefinite(broken.error) from None
        except Aborted as aborted:
            if asked > 1:  # a call before that got no answer: it may have been made
                raise Indefinite(aborted.error) from None
            raise
        with suppress(KafkaException):  # whatever it is: the commit has been made
            producer.poll(0)

    def abort(self) -> None:
        """Abort. Raises Broken when that cannot be done: a new producer will."""
        deadline_s = self._clock.monotonic_s() + self._budgets.step_s
        try:
            self._step(partial(self._client().abort_transaction, self._budgets.call_s), deadline_s)
        except Aborted as aborted:
            raise Broken(aborted.error) from None
        self._serve(self._client().poll, 0)

    def leave(self) -> bool:
        """Go on under another id while this one is aborted in the background: the brokers take nothing more under it
        before every partition has the transaction's end. Where no other one is ready yet (soon after a start), whoever
        is so first goes on, be it this one. Raises Broken.
        """
        left = self._identity
        if left is None:
            raise Broken(KafkaError(KafkaError._STATE, "there is no producer"))
        self._guard.close()  # its call may go on for a while
        self._identity = self._producer = None
        self._identities.rest(left, is_open=True)
        spare = self._identities.await_ready(self._budgets.step_s)
        if spare is None:
            raise Broken(KafkaError(KafkaError._TIMED_OUT, "every transactional id is held up"))
        log.warning("transactional-id-left", id=left.name, for_id=spare.name)
        self._use(spare)
        return True

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
                raise Aborted(error, self._failed)
            if not error.retriable() or self._clock.monotonic_s() > deadline_s:
                raise Broken(error)
            if fault_of(error) is Fault.BUSY:  # said at once, for as long as the call that was left is under way
                self._pause.wait(CONFLICT_S)


class AcknowledgedWriter(_ProducerWriter):
    """At least once: records are acknowledged, then offsets and position are committed. What a crash in between costs
    is repetition.
    """

    def __init__(
        self,
        properties: Mapping[str, Any],
        clock: Clock,
        commit_offsets: Callable[[Sequence[TopicPartition]], None],
        make_producer: Callable[[dict[str, Any]], Producer] = Producer,
        budgets: TimeBudgets = USUAL,
    ) -> None:
        """`commit_offsets` commits as the group's member; it raises EnvironmentFailure or FencedError."""
        super().__init__(properties, clock, make_producer, budgets)
        self._commit_offsets = commit_offsets

    def open(self) -> None:
        """Make the producer."""
        self.close()
        self._forget()
        self._faults = []
        self._producer = self._new(self._faults)

    def begin(self) -> None:
        """Start counting. What an earlier attempt left is gone: `abort` makes a new producer."""
        self._forget()

    def send(self, batch: Batch, *, first_id: int = 0, careful: bool = False) -> int:
        """Hand a batch to the client, a report for every record. Raises Aborted, Broken."""
        accepted = self._produce(batch, first_id, reported=True)
        self._serve(self._client().poll, 0)
        if careful or batch.alone:
            self._settle(is_exact=len(batch) == 1)
        return accepted

    def commit(
        self,
        offsets: Sequence[TopicPartition],
        group_metadata: object,  # noqa: ARG002 - for transactions
        on_stall: OnStall,
    ) -> None:
        """Wait for the acknowledgements, then commit. Raises Aborted, Broken, Indefinite, FencedError."""
        self._settle(on_stall)
        try:
            self._commit_offsets(offsets)
        except EnvironmentFailure as failure:
            raise Indefinite(KafkaError(KafkaError._FAIL, str(failure))) from failure

    def abort(self) -> None:
        """What was sent cannot be taken back; the client's queue can. A record may be repeated."""
        self.open()

    def leave(self) -> bool:
        """As `abort`, which waits for nobody."""
        self.open()
        return True
