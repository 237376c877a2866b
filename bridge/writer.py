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
import math
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, NoReturn, Protocol

import structlog
from confluent_kafka import KafkaError, KafkaException, Message, Producer, TopicPartition

from bridge.clienterrors import fenced, is_fatal, is_fenced, kafka_error
from bridge.endings import Endings
from bridge.errorlog import ErrorLog
from bridge.errors import EnvironmentFailure
from bridge.guard import Guard, Unanswered
from bridge.identities import CONFLICTING, DENIED_CODES, Identities, Identity, alone, drop, in_thread
from bridge.outgoing import Batch
from bridge.producing import Stopped, produce_any, produce_plain
from timerstore.clock import Clock

CALL_TIMEOUT_S: Final = 5.0
"""One call; a retriable time-out is repeated until the deadline of the whole step."""
UNANSWERED_S: Final = 6.0
"""When a call that ignores its time-out is left behind, with the producer (guard.py)."""
STEP_TIMEOUT_S: Final = 15.0
"""Sending offsets, committing, aborting: longer than the transaction time-out, after which the broker has decided
anyway.
"""
STALLED_S: Final = 0.1
"""Nothing is acknowledged for so long: time to look at the targets, and again after as long. Usually it takes
milliseconds.
"""
STALLED_S_MAX: Final = 4.0
"""And so long: whoever does not answer is to blame, though nobody knows why."""
FULL_TIMEOUT_S: Final = 8.0
"""How long the client's queue may stay full; below the transaction time-out."""
FULL_POLL_S: Final = 0.05
CONFLICT_S: Final = 0.05
"""Between two calls that are refused because an earlier one is still under way."""
SPARES: Final = 2
"""Transactional ids beside the first one; a node that dies holds up one, sometimes two. They take turns."""
SPARES_SERVED_S: Final = 1.0

log = structlog.get_logger("bridge.writer")

_PURGED: Final = frozenset({KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT})


class Aborted(Exception):
    """The transaction must be given up. `error` is the cause, `culprits` are rows that failed, by number within the
    transaction, with the error of each and the partition (-1: not known); `is_exact` says that the one culprit was sent
    alone, so that no other record can be to blame; `is_explained` that the targets turned out to be otherwise than
    planned for, so that the next plan differs.
    """

    def __init__(
        self,
        error: KafkaError,
        culprits: Mapping[int, tuple[KafkaError, int]] | None = None,
        *,
        is_exact: bool = False,
        is_explained: bool = False,
    ) -> None:
        super().__init__(error.str())
        self.error = error
        self.culprits = dict(culprits or {})
        self.is_exact = is_exact
        self.is_explained = is_explained


class Broken(Exception):
    """The producer cannot go on; `is_fenced`: the broker says that another one of our name exists."""

    def __init__(self, error: KafkaError) -> None:
        super().__init__(error.str())
        self.error = error
        self.is_fenced = is_fenced(error) or error.code() == KafkaError.INVALID_PRODUCER_EPOCH


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
    ) -> None:
        """`properties` of a producer, complete; `make_producer` is there for tests of errors that no broker will give
        on demand.
        """
        self._properties = dict(properties)
        self._clock = clock
        self._make_producer = make_producer
        self._producer: Producer | None = None
        self._trouble = ErrorLog("bridge.dispatcher", "producer-trouble", clock)
        self._troubled_s = -math.inf
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
        own = {"error_cb": partial(self._on_error, faults), "logger": logging.getLogger("bridge.librdkafka")}
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
        self._troubled_s = self._clock.monotonic_s()
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

    @staticmethod
    def _give_up(exception: Exception, row: int) -> NoReturn:
        """What an exception out of produce means for the transaction."""
        if isinstance(exception, BufferError):
            raise Aborted(
                KafkaError(KafkaError._QUEUE_FULL, "the client's queue stayed full", retriable=True)
            ) from None
        if not isinstance(exception, KafkaException):
            # Something in the record that this client cannot express (a NUL in a header's name). One record must not
            # stop the others.
            error = KafkaError(KafkaError.INVALID_RECORD, str(exception))
            raise Aborted(error, {row: (error, -1)}, is_exact=True) from None
        error = kafka_error(exception)
        if is_fatal(error) or is_fenced(error):
            raise Broken(error) from None
        raise Aborted(error, {row: (error, -1)}, is_exact=True) from None

    def _produce(self, batch: Batch, first_id: int, *, reported: bool) -> int:
        """The loop around produce; `reported`: `_report` is called with the number of every record, `first_id` + its
        id.
        """
        producer = self._client()
        ids = [first_id + row for row in batch.ids.tolist()] if reported else None
        done, deadline_s = 0, None
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
                now_s = self._clock.monotonic_s()
                deadline_s = now_s + FULL_TIMEOUT_S if deadline_s is None or stopped.progress else deadline_s
                if not isinstance(stopped.cause, BufferError) or now_s > deadline_s:
                    self._give_up(stopped.cause, first_id + int(batch.ids[done]))
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
        """Wait until the fate of every reported record is known, for as long as there is progress. Raises Aborted with
        the culprits, Broken.
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
        """Flush until nothing is left; False when nothing has moved for too long. Raises Broken."""
        producer = self._client()
        left, moved_s = count_left(), self._clock.monotonic_s()
        while left:
            self._serve(producer.flush, STALLED_S)
            before, left = left, count_left()
            now_s = self._clock.monotonic_s()
            if left < before:
                moved_s = now_s
            elif now_s - moved_s >= STALLED_S_MAX:
                return False
            elif now_s - moved_s >= STALLED_S / 2:
                on_stall(now_s - moved_s)
        return True


class TransactionalWriter(_ProducerWriter):
    """Exactly once: records, offsets and position in one Kafka transaction."""

    def __init__(
        self,
        properties: Mapping[str, Any],
        clock: Clock,
        make_producer: Callable[[dict[str, Any]], Producer] = Producer,
        run: Callable[[Callable[[], None]], None] = in_thread,
        in_use: Callable[[], Collection[str]] = tuple,
        endings: Endings | None = None,
    ) -> None:
        """`run` makes spare producers ready, beside delivery; `in_use` gives the topics that may be needed any time;
        `endings` mends what the brokers have lost, if they may have.
        """
        super().__init__(properties, clock, make_producer)
        name = str(properties.get("transactional.id", ""))
        names = [name, *(f"{name}.spare-{number}" for number in range(1, SPARES + 1))]
        self._identities = Identities(
            names, lambda name, faults: self._new(faults, **{"transactional.id": name}), run, in_use, endings
        )
        self._identity: Identity | None = None
        self._served_s = 0.0
        self._pause = threading.Event()  # never set: a wait for it is a pause

    def open(self) -> None:
        """Make a producer, fence every earlier one of the same name and end the transactions that they left open; the
        spare ones follow in the background.
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
        with alone(identity.name, CALL_TIMEOUT_S) as is_alone:
            if not is_alone:
                self._identities.put_back(identity)
                raise Aborted(KafkaError(KafkaError._TIMED_OUT, "an earlier producer is still being made"))
            error = self._identities.ask(identity)
            if error is not None:
                self._identities.put_back(identity)
                raise Aborted(error)
            producer = identity.renew(self._identities.make)
            try:
                producer.init_transactions(CALL_TIMEOUT_S)
                error = self._identities.settle(identity, producer)
            except KafkaException as exception:
                error = kafka_error(exception)
        if error is None:
            return
        if error.code() in DENIED_CODES:
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
        self._take_turns()
        try:
            self._client().begin_transaction()
        except KafkaException as exception:
            raise Broken(kafka_error(exception)) from None

    def _take_turns(self) -> None:
        """Go on under the id whose turn it is."""
        if self._identity is not None:
            now_s = self._clock.monotonic_s()
            if now_s - self._served_s >= SPARES_SERVED_S:
                self._served_s = now_s
                self._identities.serve()
            self._serve(self._client().poll, 0)
            self._use(self._identities.take_turn(self._identity, now_s, self._troubled_s))

    def send(self, batch: Batch, *, first_id: int = 0, careful: bool = False) -> int:
        """Hand a batch to the client. Careful: with a report for every record, waited for. Raises Aborted, Broken."""
        accepted = self._produce(batch, first_id, reported=careful)
        if careful:
            self._settle(is_exact=len(batch) == 1)
        elif batch.alone:
            self._serve(self._client().flush, FULL_TIMEOUT_S)
        self._serve(self._client().poll, 0)
        return accepted

    def commit(self, offsets: Sequence[TopicPartition], group_metadata: object, on_stall: OnStall) -> None:
        """Commit. Raises Aborted before the point of no return, Indefinite after it, Broken, FencedError."""
        producer = self._client()
        began_s = self._clock.monotonic_s()
        deadline_s = began_s + STEP_TIMEOUT_S
        send = partial(producer.send_offsets_to_transaction, list(offsets), group_metadata, CALL_TIMEOUT_S)
        try:
            wait = partial(self._guard.call, send, UNANSWERED_S, lambda: on_stall(self._since(began_s)), STALLED_S)
            self._step(wait, deadline_s)
        except Unanswered as unanswered:
            raise Broken(KafkaError(KafkaError._TIMED_OUT, f"sending offsets: {unanswered}")) from None
        # The commit would wait for the records, too, but without a word.
        if not self._wait(lambda: len(producer), on_stall):
            raise Aborted(KafkaError(KafkaError._MSG_TIMED_OUT, "records were not acknowledged in time"))
        try:
            self._step(partial(producer.commit_transaction, CALL_TIMEOUT_S), deadline_s)
        except Broken as broken:
            raise Indefinite(broken.error) from None
        with suppress(KafkaException):  # whatever it is: the commit has been made
            producer.poll(0)

    def abort(self) -> None:
        """Abort. Raises Broken when that cannot be done: a new producer will."""
        deadline_s = self._clock.monotonic_s() + STEP_TIMEOUT_S
        try:
            self._step(partial(self._client().abort_transaction, CALL_TIMEOUT_S), deadline_s)
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
        spare = self._identities.await_ready(STEP_TIMEOUT_S)
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
            if error.code() in CONFLICTING:  # said at once, for as long as the call that was left is under way
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
    ) -> None:
        """`commit_offsets` commits as the group's member; it raises EnvironmentFailure or FencedError."""
        super().__init__(properties, clock, make_producer)
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
