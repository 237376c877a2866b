"""Writes the API's commands to the delay topics, and returns the dispatcher's answers.

    1 write the command, with a unique correlation id   after a crash the command is still carried out
    2 the dispatcher finishes it in a transaction       the log has the outcome
    3 `on_answers` is called after the commit           the waiting future is settled

Commands outlive pipelines. If a partition moves to another instance, that instance carries the command out, and no
answer comes here.
"""

from __future__ import annotations

import queue
import threading
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from bridge.api.source import NotOwnedError, Order
from bridge.delivery.producer.transactional_ids import drop
from bridge.errors import EnvironmentFailure
from bridge.kafka.construction import made
from bridge.kafka.errors import is_fatal, kafka_error
from bridge.stores.names import SourceName
from bridge.wire.answers import Answer
from bridge.wire.commands import cancel_origin_headers, move_origin_headers
from bridge.wire.headers import AS_DUE_MS, NEXT_MS, origins_text
from timerstore.clock import Clock

IN_FLIGHT_MAX: Final = 8_000
"""Limit of commands without an answer."""
ROOM_S: Final = 30.0
POLL_S: Final = 0.05
IDLE_S: Final = 1.0


@dataclass(slots=True)
class _Waiting:
    """A command with its answers; `left` is the number of messages without an answer."""

    future: Future[Sequence[Answer]]
    left: int
    answers: list[Answer] = field(default_factory=list)

    def add(self, answer: Answer) -> bool:
        """Add an answer; returns whether it was the last one."""
        self.answers.append(answer)
        self.left -= answer.count
        return self.left <= 0


class CommandSender:
    """Sends commands, as in the module docstring. For any thread; `on_answers` returns at once."""

    def __init__(
        self,
        properties: Mapping[str, Any],
        *,
        owned: Callable[[], Collection[SourceName]],
        delay_max_ms: int,
        clock: Clock,
        make: Callable[[dict[str, Any]], Producer] = Producer,
    ) -> None:
        """`properties` are the producer's; `owned` are the partitions of this instance."""
        self._properties = {**properties, "enable.idempotence": True, "linger.ms": 2}
        for name in ("transactional.id", "transaction.timeout.ms"):
            self._properties.pop(name, None)
        self._owned, self._delay_max_ms, self._clock, self._make = owned, delay_max_ms, clock, make
        self._room = threading.BoundedSemaphore(IN_FLIGHT_MAX)
        self._lock = threading.Lock()
        self._waiting: dict[str, _Waiting] = {}
        self._answers: queue.SimpleQueue[Sequence[Answer]] = queue.SimpleQueue()
        self._producer: Producer | None = None
        self._thread = threading.Thread(target=self._settle, name="command-answers", daemon=True)
        self._run, self._numbers = uuid.uuid4().hex, count()

    def send(self, orders: Sequence[Order]) -> Sequence[Future[Sequence[Answer]]]:
        """See `bridge.api.source.Commands`. Raises NotOwnedError, ValueError for a time beyond delay.max, and
        EnvironmentFailure if there is no room; earlier commands of the call are already sent."""
        owned, latest_ms = self._owned(), self._clock.now_ms() + self._delay_max_ms
        for order in orders:
            if order.source not in owned:
                raise NotOwnedError(origins_text(*order.source, order.origins))
            if order.due_ms is not None and latest_ms < order.due_ms < NEXT_MS and order.due_ms != AS_DUE_MS:
                raise ValueError("the time is further away than delay.max allows.")
        producer, futures = self._open(), list[Future[Sequence[Answer]]]()
        try:
            for order in orders:
                futures.append(self._send(producer, order))
        except EnvironmentFailure:
            for future in futures:
                future.cancel()
            raise
        return futures

    def on_answers(self, answers: Sequence[Answer]) -> None:
        """Take committed answers from the dispatcher. Answers to other clients' commands are ignored."""
        if self._waiting:
            self._answers.put(answers)

    def _open(self) -> Producer:
        """The producer, created with its thread at the first command: most bridges never get one."""
        with self._lock:
            if self._producer is None:
                self._producer = made("producer", lambda: self._make(dict(self._properties)))
            if not self._thread.is_alive():
                self._thread.start()
            return self._producer

    def _send(self, producer: Producer, order: Order) -> Future[Sequence[Answer]]:
        if not self._room.acquire(timeout=ROOM_S):
            raise EnvironmentFailure(
                f"{IN_FLIGHT_MAX} commands are not answered yet",
                hint="Check /readyz for the reason why delivery waits.",
                code="DB-3040",
            )
        correlation, future = f"{self._run}-{next(self._numbers)}", Future[Sequence[Answer]]()
        with self._lock:
            self._waiting[correlation] = _Waiting(future, len(order.origins))
        future.add_done_callback(lambda _: self._forget(correlation))
        topic, partition = order.source
        name = origins_text(topic, partition, order.origins)
        headers = (
            cancel_origin_headers(name, correlation=correlation)
            if order.due_ms is None
            else move_origin_headers(name, at=order.due_ms, correlation=correlation)
        )

        def on_delivery(error: KafkaError | None, _: Message) -> None:
            if error is not None:
                _fail(future, error)

        while not future.done():
            try:
                producer.produce(topic, partition=partition, headers=list(headers), on_delivery=on_delivery)
            except BufferError:
                self._poll(producer, POLL_S)
            except KafkaException as exception:
                error = kafka_error(exception)
                if is_fatal(error):
                    self._drop(producer, error)
                _fail(future, error)
            else:
                break
        return future

    def _poll(self, producer: Producer, timeout_s: float) -> None:
        """Receive delivery reports. The client raises a fatal error here, once."""
        try:
            producer.poll(timeout_s)
        except KafkaException as exception:
            self._drop(producer, kafka_error(exception))

    def _drop(self, producer: Producer, error: KafkaError) -> None:
        """Drop an unusable producer: waiting commands fail, and the next command creates another producer."""
        with self._lock:
            if self._producer is not producer:
                return
            self._producer = None
            futures = [waiting.future for waiting in self._waiting.values()]
        for future in futures:
            _fail(future, error)
        drop(producer)

    def _forget(self, correlation: str) -> None:
        """Remove a settled or abandoned command."""
        with self._lock:
            self._waiting.pop(correlation, None)
        self._room.release()

    def _settle(self) -> None:
        """The loop of the thread, which polls the producer and settles futures in place of the dispatcher."""
        while True:
            try:
                answers = self._answers.get(timeout=POLL_S if self._waiting else IDLE_S)
            except queue.Empty:
                answers = []
            for answer in answers:
                with self._lock:
                    waiting = self._waiting.get(answer.correlation or "")
                if waiting is not None and waiting.add(answer):
                    with suppress(InvalidStateError):  # it was given up or failed meanwhile
                        waiting.future.set_result(waiting.answers)
            producer = self._producer
            if producer is not None:
                self._poll(producer, 0)


def _fail(future: Future[Sequence[Answer]], error: KafkaError) -> None:
    # The answer may have arrived without a delivery report: then the record is in the log.
    with suppress(InvalidStateError):
        future.set_exception(
            EnvironmentFailure(
                "a command could not be written to the delay topic",
                hint="Grant the bridge WRITE on the delay topic, then try again.",
                reason=error.str(),
                code="DB-3041",
            )
        )
