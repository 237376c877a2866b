"""The writer to Kafka: it takes records and collects reports. Both modes of delivery are based on it.

The loops around `produce` are the hottest code of delivery.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import repeat
from typing import Any, Final, NoReturn

from confluent_kafka import KafkaError, KafkaException, Message, Producer, TopicPartition

from bridge.delivery.plan.due_rows import Batch
from bridge.delivery.producer.outcomes import (
    INEXPRESSIBLE,
    NO_ANSWER,
    NO_PRODUCER,
    TARGETS_WORSE,
    UNANSWERED,
    Aborted,
    Broken,
    Cause,
    FailedRecord,
    Failure,
    OnStall,
)
from bridge.delivery.producer.transactional_ids import drop
from bridge.kafka.calls import AbandonableCalls
from bridge.kafka.construction import CLIENT_LOG, made
from bridge.kafka.error_log import ErrorLog
from bridge.kafka.errors import is_fatal, is_fenced, kafka_error
from bridge.settings.time_budgets import USUAL, TimeBudgets
from bridge.wire import headers as h
from timerstore.clock import Clock

STALLED_S: Final = 0.1
"""The time without an acknowledgement before each look at the targets. Usually an acknowledgement takes
milliseconds."""
FULL_POLL_S: Final = 0.05
SMALL_RECORDS: Final = 100
"""The largest transaction that is rarely aborted for lack of time."""

UNACKNOWLEDGED: Final = Failure(UNANSWERED, "not acknowledged in time")
_PURGED: Final = frozenset({KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT})


class Writer(ABC):
    """See the module. For one thread."""

    is_each_reported = False
    """Whether every record gets a report; otherwise only records with an immediate wait."""

    def __init__(
        self,
        properties: Mapping[str, Any],
        clock: Clock,
        make_producer: Callable[[dict[str, Any]], Producer] = Producer,
        budgets: TimeBudgets = USUAL,
    ) -> None:
        """`properties` of a producer, complete; `make_producer` is for errors that no broker gives on demand."""
        self._properties = dict(properties)
        self._clock = clock
        self._budgets = budgets
        self._make_producer = make_producer
        self._producer: Producer | None = None
        self._trouble = ErrorLog("bridge.delivery.dispatcher", "producer-trouble", clock)
        self._faults: list[KafkaError] = []
        self._calls = AbandonableCalls("producer-calls")
        self._forget()

    @abstractmethod
    def open(self) -> None:
        """Make a producer in place of the former one, and end the transactions that this has left open.

        Raises EnvironmentFailure if that can never work, NotReady if it may work later, Broken."""

    @property
    def is_to_stay_small(self) -> bool:
        """Whether the open transaction must end once it has SMALL_RECORDS or more."""
        return False

    def await_turn(self, timeout_s: float) -> bool:  # noqa: ARG002 - may be left out
        """Wait, with no rows on loan, for the permission to call `begin`. Returns whether it came in time."""
        return True

    @abstractmethod
    def begin(self, records: int = 0) -> None:
        """Start a transaction with at least this many records. Raises Broken."""

    def send(self, batch: Batch, *, first_id: int = 0, careful: bool = False) -> int:
        """Hand a batch to the client; returns the number of accepted records. If `careful`, or if the batch is sent
        alone, wait for the result of each record. Raises Aborted, Broken."""
        is_awaited = careful or batch.alone
        accepted = self._produce(batch, first_id, reported=is_awaited or self.is_each_reported)
        if is_awaited:
            self._await_reports(was_alone=len(batch) == 1)
        self._serve(self._client().poll, 0)
        return accepted

    def send_offsets(self, offsets: Sequence[TopicPartition], group_metadata: object) -> None:  # noqa: B027 - may be left out
        """Start adding these offsets to the transaction early, since `commit` probably gets the same object. `commit`
        reports failures."""

    @abstractmethod
    def commit(self, offsets: Sequence[TopicPartition], group_metadata: object, on_stall: OnStall) -> None:
        """Commit all sent records together with the offsets. Without acknowledgements, `on_stall` is called now and
        then. Raises Aborted before the point of no return, Indefinite after it, Broken, FencedError."""

    @abstractmethod
    def abort(self, *, in_haste: bool = False) -> None:
        """Give up the sent records; `in_haste`: a broker does not answer, and nothing waits for it. Raises Broken if
        the producer is useless from now on, EndedUnasked."""

    def close(self) -> None:
        """Drop the producer without waiting for anything."""
        self._calls.close()
        producer, self._producer = self._producer, None
        if producer is not None:
            drop(producer)

    def _new(self, faults: list[KafkaError], **more: object) -> Producer:
        """Another producer; its fatal errors are added to `faults`. Raises EnvironmentFailure."""
        own = {"error_cb": partial(self._on_error, faults), "logger": CLIENT_LOG}
        return made("for delivery", lambda: self._make_producer({**self._properties, **own, **more}))

    def look_after(self) -> None:  # noqa: B027 - may be left out
        """Let in the news of all clients. Called now and then without delivery."""

    def takes_doubt(self) -> bool:
        """Whether a request of a transaction may have been sent more than once since the last call."""
        return False

    def _broken(self, failure: Failure) -> Broken:
        """The outcome of a failure that ends a producer."""
        return Broken(failure)

    def _client(self) -> Producer:
        if self._producer is None:
            raise Broken(NO_PRODUCER)
        return self._producer

    def _on_error(self, faults: list[KafkaError], error: KafkaError) -> None:
        if is_fatal(error):
            faults.append(error)
        self._trouble.warn(error)

    def _serve(self, call: Callable[[float], object], timeout_s: float) -> None:
        """Let reports in. Raises Broken for a fatal error, which the client raises here rather than in `error_cb`."""
        try:
            call(timeout_s)
        except KafkaException as exception:
            raise self._broken(Failure.of(kafka_error(exception))) from None
        if self._faults:
            raise self._broken(Failure.of(self._faults[-1]))

    def _forget(self) -> None:
        self._failed: dict[int, FailedRecord] = {}
        self._is_overdue = False
        self._sent = self._awaited = self._reported = self._unwritten = 0
        self._began_s = self._clock.monotonic_s()

    def _produce(self, batch: Batch, first_id: int, *, reported: bool) -> int:
        """The loop around produce; `reported`: `_report` is called with every record's number, `first_id` + its id."""
        producer, sent = self._client(), self._sent
        ids = [first_id + row for row in batch.ids.tolist()] if reported else None
        done, deadline_s, is_up_to_date = 0, None, False
        while True:
            before = done
            if ids is None and batch.is_plain:
                done, cause = _produce_plain(producer.produce, batch, done)
            else:
                done, cause = _produce_any(producer.produce, batch, self._report, ids, done)
            self._sent = sent + done
            if cause is None:
                self._awaited += done if reported else 0
                return done
            is_unknown = (
                isinstance(cause, KafkaException) and kafka_error(cause).code() == KafkaError._UNKNOWN_PARTITION
            )
            if is_unknown and not is_up_to_date:
                # The partition may be newer than this client's last look, which it repeats every five minutes.
                is_up_to_date = True
                with suppress(KafkaException):  # without an answer the refusal stands
                    producer.list_topics(batch.topic, self._budgets.look_up_s)
                continue
            now_s = self._clock.monotonic_s()
            if deadline_s is None or done > before:
                deadline_s = min(now_s + self._budgets.full_s, self._began_s + self._budgets.send_s)
            if not isinstance(cause, BufferError) or now_s > deadline_s:
                partition = -1 if batch.partitions is None else batch.partitions[done]
                self._stop(cause, first_id + int(batch.ids[done]), batch.topic, partition)
            self._serve(producer.poll, FULL_POLL_S)

    def _stop(self, exception: Exception, row: int, topic: str, partition: int) -> NoReturn:
        """Raise the meaning of an exception out of produce for the transaction; `partition` -1: the partitioner's
        choice."""
        if isinstance(exception, BufferError):
            raise Aborted(Cause.QUEUE_FULL, Failure(NO_ANSWER, "the client's queue stayed full")) from None
        # Otherwise this client cannot express a part of the record (a NUL in a header's name). One record must not stop
        # the others.
        failure = Failure(INEXPRESSIBLE, str(exception))
        if isinstance(exception, KafkaException):
            error = kafka_error(exception)
            if is_fatal(error) or is_fenced(error):
                raise self._broken(Failure.of(error)) from None
            failure = Failure.of(error)
            if error.code() == KafkaError._STATE:
                self._explain()
                raise Aborted.by(failure, self._failed) from None  # after a failed record the client takes no more
        raise Aborted.by(failure, {row: FailedRecord(topic, partition, failure)}, was_alone=True) from None

    def _explain(self) -> None:  # noqa: B027 - may be left out
        """Raise another call's failure, if the client takes or sends nothing because of it."""

    def _report(self, row: int, error: KafkaError | None, message: Message) -> None:
        """Delivery report of one record, called from poll and flush."""
        self._reported += 1
        self._unwritten += error is not None and error.code() == KafkaError._PURGE_QUEUE
        is_purged = error is not None and error.code() in _PURGED
        if error is None or (is_purged and not self._is_overdue):
            return
        partition = message.partition()
        failure = UNACKNOWLEDGED if is_purged else Failure.of(error)
        failed = FailedRecord(str(message.topic()), -1 if partition is None else partition, failure)
        self._failed.setdefault(row, failed)

    def _await_reports(self, on_stall: OnStall = lambda _: False, *, was_alone: bool = False) -> None:
        """Wait for the result of every reported record, as long as there is progress, and time. Raises Aborted with the
        failed records, Broken."""
        producer = self._client()
        if self._reported < self._awaited and not self._wait(lambda: self._awaited - self._reported, on_stall):
            self._explain()
            self._is_overdue = True
            producer.purge(blocking=False)
            self._serve(producer.flush, 1.0)  # reports the purged, unacknowledged records
        if self._failed:
            raise Aborted.by(next(iter(self._failed.values())).failure, self._failed, was_alone=was_alone)
        if self._reported < self._awaited:
            raise Aborted(Cause.UNACKNOWLEDGED, UNACKNOWLEDGED)

    def _wait(self, count_left: Callable[[], int], on_stall: OnStall) -> bool:
        """Flush until nothing is left; False after a time without progress. Raises Broken, and Aborted if the
        transaction would be open for too long."""
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
            elif now_s - moved_s >= STALLED_S / 2 and on_stall(now_s - moved_s):
                raise Aborted(Cause.TARGETS_WORSE, TARGETS_WORSE)
            if left and now_s - self._began_s >= self._budgets.acknowledge_s:
                raise Aborted(Cause.TOO_SLOW, Failure(UNANSWERED, "the transaction took too long"), dict(self._failed))
        return True


def _produce_plain(produce: Callable[..., None], batch: Batch, start: int) -> tuple[int, Exception | None]:
    """The hot loop: nothing but produce. Arguments are positional because that is faster. Returns the number of the
    batch's accepted records, and the client's exception for the next one."""
    topic, origin_name, due_name = batch.topic, h.ORIGIN, h.DUE
    columns = (batch.values, batch.keys, batch.origins or [], batch.dues or [])
    rest = columns if start == 0 else tuple(column[start:] for column in columns)
    done = start
    try:
        for done, (value, key, origin, due) in enumerate(zip(*rest, strict=True), start):  # noqa: B007 - read when produce raised
            produce(topic, value, key, -1, None, None, 0, [(origin_name, origin), (due_name, due)])
    except (KafkaException, BufferError, ValueError) as cause:
        return done, cause
    return len(batch), None


def _produce_any(
    produce: Callable[..., None],
    batch: Batch,
    report: Callable[[int, KafkaError | None, Message], None],
    ids: Sequence[int] | None,
    start: int,
) -> tuple[int, Exception | None]:
    """As `_produce_plain`, with headers and partitions of each record's own, and reports that know the record where
    there are `ids`.
    """
    topic = batch.topic
    headers = batch.all_headers()
    partitions = repeat(-1, len(batch)) if batch.partitions is None else batch.partitions
    reports = repeat(None, len(batch)) if ids is None else [partial(report, i) for i in ids]
    done = start
    calls = zip(batch.values, batch.keys, partitions, reports, headers, strict=True)
    try:
        for done, (value, key, partition, callback, own) in enumerate(calls):
            if done >= start:
                produce(topic, value, key, partition, callback, None, 0, own)
    except (KafkaException, BufferError, ValueError) as cause:
        return done, cause
    return len(batch), None
