"""The client for producers: it sends messages for later delivery, cancels them, and moves them to another time.

    client = DelayClient({"bootstrap.servers": "localhost:9092"})
    client.send("orders", b"...", key=b"42", after=timedelta(minutes=15), id="order-42-reminder")
    client.schedule("reports", b"...", cron="0 9 * * MON-FRI", time_zone="Europe/Berlin", id="daily-report")
    client.flush()

A thin layer over confluent-kafka's Producer: messages go to the delay topic, with target and time in their headers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import datetime, timedelta
from threading import Lock
from typing import Any, Final, Self, Unpack

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from bridge.errors import EnvironmentFailure
from bridge.kafka.construction import made
from bridge.wire.commands import AnswerTo, cancel_headers, cancel_origin_headers, move_headers, move_origin_headers
from bridge.wire.headers import NEVER_MS, NEXT_MS, origin_text, origins_text, refuse_control, timer_headers
from bridge.wire.schedule import Schedule
from timerstore.clock import Clock, SystemClock

OnDelivery = Callable[[KafkaError | None, Message], None]
Header = tuple[str, bytes | str | None]
Headers = Mapping[str, bytes | str | None] | Iterable[Header]

METADATA_TIMEOUT_S: Final = 10.0
_POLL_S: Final = 0.1
_ANY_PARTITION: Final = -1  # the partitioner's choice
_BY_CLIENT: Final = "client"  # marks a command that the client has sent to every partition
_NOWHERE: Final = (KafkaError._UNKNOWN_PARTITION, KafkaError._UNKNOWN_TOPIC, KafkaError.UNKNOWN_TOPIC_OR_PART)

# Defaults for a plain configuration: no loss, and the partitioner of Java's clients, so that a cancel reaches the
# partition of its message even if another program sent that.
_DEFAULTS: Final[Mapping[str, Any]] = {"enable.idempotence": True, "partitioner": "murmur2_random"}


class DelayClient:
    """Sends to one delay topic. Threads may share a client, like a Producer.

    `producer` is your Producer, or a configuration for one. With your own, all senders and cancellers of the same ids
    must use the same partitioner for records with a key.
    """

    def __init__(
        self, producer: Producer | Mapping[str, Any], delay_topic: str = "delay", *, clock: Clock | None = None
    ) -> None:
        if isinstance(producer, Mapping):
            config = {**_DEFAULTS, **producer}
            producer = made("producer", lambda: Producer(config))
        self.producer = producer
        self.delay_topic = delay_topic
        self._clock = clock or SystemClock()
        self._failures: list[KafkaError] = []
        self._of_failures = Lock()

    def send(
        self,
        topic: str | None,
        value: bytes | str | None,
        key: bytes | str | None = None,
        headers: Headers | None = None,
        *,
        at: datetime | int | None = None,
        after: timedelta | None = None,
        id: str | None = None,
        replace: bool = False,
        partition: int | None = None,
        on_delivery: OnDelivery | None = None,
    ) -> None:
        """Deliver `value` to `topic` at the given time.

        Give either `at`, an aware datetime or epoch milliseconds, or `after`, counted from the broker's timestamp of
        the record. `topic` None: the delay topic's default target. `id` names the message for `cancel` and `replace`;
        `replace` cancels earlier messages with this id (and the same key). `partition` is one of the target.

        Returns at once, and waits only for a full queue of the producer. `on_delivery` reports whether the delay topic
        has accepted the record; without it, `flush` does. Raises ValueError for a message that the bridge would reject,
        and EnvironmentFailure for a record that the producer refuses at once, for instance for its size.
        """
        own = _own(headers)
        control = timer_headers(
            topic, at=at, after=after, id=id, replace=replace, partition=partition, now_ms=self._clock.now_ms()
        )
        self._produce(value, key, [*own, *control], _ANY_PARTITION, on_delivery)

    def schedule(
        self,
        topic: str | None,
        value: bytes | str | None,
        key: bytes | str | None = None,
        headers: Headers | None = None,
        *,
        every: timedelta | None = None,
        anchor: datetime | int | None = None,
        cron: str | None = None,
        time_zone: str = "UTC",
        at: datetime | int | None = None,
        after: timedelta | None = None,
        end: datetime | int | None = None,
        times: int | None = None,
        missed: str = "last",
        id: str | None = None,
        replace: bool = False,
        partition: int | None = None,
        on_delivery: OnDelivery | None = None,
    ) -> None:
        """Deliver `value` to `topic` repeatedly: at the interval `every` (with an `anchor`, whole intervals from it)
        or at the moments of `cron` in `time_zone`.

        The first tick is not before `at` or `after`, none is after `end`, and there are at most `times`. `missed` is
        the policy for ticks that were due while the bridge was down: deliver the `last` one, `all` of them, or `none`.
        Cancel or replace the message by its `id`. The other arguments are those of `send`. Raises ValueError for a
        message that the bridge would reject.
        """
        schedule = Schedule.of(
            every=every, anchor=anchor, cron=cron, time_zone=time_zone, end=end, times=times, missed=missed
        )
        own = _own(headers)
        control = timer_headers(
            topic,
            at=at,
            after=after,
            id=id,
            replace=replace,
            partition=partition,
            now_ms=self._clock.now_ms(),
            schedule=schedule.texts(),
        )
        self._produce(value, key, [*own, *control], _ANY_PARTITION, on_delivery)

    def cancel(
        self,
        id: str,
        key: bytes | str | None = None,
        *,
        everywhere: bool = False,
        on_delivery: OnDelivery | None = None,
        **answer: Unpack[AnswerTo],
    ) -> None:
        """Cancel the pending message that was sent with this `id` and this `key`.

        A message without a key may be in any partition, so a cancel without a key goes to all of them. A message from a
        producer with another partitioner may be in any partition, too: `everywhere` sends a record to each partition,
        each with a separate answer. A cancel of a delivered or unknown message does nothing. The bridge writes the
        outcome to the topic `reply_to` (`bridge.wire.answers`), with the text `correlation`.
        """
        if everywhere:
            self._to_all(key, cancel_headers(id, forwarded=_BY_CLIENT, **answer), on_delivery)
            return
        if key is not None or any(text is not None for text in answer.values()):
            # One record, so that it gets one answer; without a key the bridge forwards it.
            headers: list[Header] = [*cancel_headers(id, **answer)]
            self._produce(None, key, headers, _ANY_PARTITION, on_delivery)
            return
        self._to_all(None, cancel_headers(id, forwarded=_BY_CLIENT), on_delivery)

    def cancel_origin(
        self,
        topic: str,
        partition: int,
        offset: int | Collection[int],
        *,
        on_delivery: OnDelivery | None = None,
        **answer: Unpack[AnswerTo],
    ) -> None:
        """Cancel the pending message with this record, even one without an id, or those of up to 100 offsets.
        `on_delivery` of `send` reported the offset. The other arguments are those of `cancel`.
        """
        headers = cancel_origin_headers(_origin_text(topic, partition, offset), **answer)
        self._to_origin(topic, partition, [*headers], on_delivery)

    def move(
        self,
        id: str,
        key: bytes | str | None = None,
        *,
        at: datetime | int | None = None,
        after: timedelta | None = None,
        everywhere: bool = False,
        on_delivery: OnDelivery | None = None,
        **answer: Unpack[AnswerTo],
    ) -> None:
        """Move the pending message that was sent with this `id` and this `key` to another due time, earlier or later.
        With `after` 0 it is delivered now. `at` and `after` are those of `send`, the others those of `cancel`.
        """
        now_ms = self._clock.now_ms()
        if everywhere:
            moving = move_headers(id, at=at, after=after, now_ms=now_ms, forwarded=_BY_CLIENT, **answer)
            self._to_all(key, moving, on_delivery)
            return
        headers = move_headers(id, at=at, after=after, now_ms=now_ms, **answer)
        self._produce(None, key, [*headers], _ANY_PARTITION, on_delivery)

    def pause(
        self,
        id: str,
        key: bytes | str | None = None,
        *,
        on_delivery: OnDelivery | None = None,
        **answer: Unpack[AnswerTo],
    ) -> None:
        """Pause the recurring message that was sent with this `id` and this `key`: no ticks until `resume`. The other
        arguments are those of `cancel`."""
        self.move(id, key, at=NEVER_MS, on_delivery=on_delivery, **answer)

    def resume(
        self,
        id: str,
        key: bytes | str | None = None,
        *,
        on_delivery: OnDelivery | None = None,
        **answer: Unpack[AnswerTo],
    ) -> None:
        """The opposite of `pause`. The first tick is the next regular one; those in between are skipped."""
        self.move(id, key, at=NEXT_MS, on_delivery=on_delivery, **answer)

    def move_origin(
        self,
        topic: str,
        partition: int,
        offset: int,
        *,
        at: datetime | int | None = None,
        after: timedelta | None = None,
        on_delivery: OnDelivery | None = None,
        **answer: Unpack[AnswerTo],
    ) -> None:
        """Move the pending message of this record. Arguments are those of `move` and `cancel_origin`."""
        origin = origin_text(topic, partition, offset)
        headers = move_origin_headers(origin, at=at, after=after, now_ms=self._clock.now_ms(), **answer)
        self._to_origin(topic, partition, [*headers], on_delivery)

    def flush(self, timeout_s: float = 60.0) -> None:
        """Wait until the delay topic has accepted all records, of all threads.

        Raises EnvironmentFailure if a record without an `on_delivery` was refused since the last call, or after
        `timeout_s`. Each refusal is reported once, by the first call of any thread: with several threads, let one of
        them flush, or give each record an `on_delivery`.
        """
        left = self.producer.flush(timeout_s)
        with self._of_failures:
            failures, self._failures = self._failures, []
        if failures:
            raise EnvironmentFailure(
                f"{self.delay_topic} did not take {len(failures)} of the records: {failures[0].str()}",
                hint=remedy_of(failures[0]),
                code="DB-1004",
            )
        if left:
            raise EnvironmentFailure(
                f"{left} records are not acknowledged after {timeout_s:g} s",
                hint="Check that the brokers are reachable.",
                code="DB-1005",
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.flush()

    def _to_all(self, key: bytes | str | None, headers: Iterable[Header], on_delivery: OnDelivery | None) -> None:
        """Send a command to each partition, so that the bridge need not forward it."""
        for partition in range(self._partitions()):
            self._produce(None, key, [*headers], partition, on_delivery)

    def _to_origin(self, topic: str, partition: int, headers: list[Header], on_delivery: OnDelivery | None) -> None:
        is_own = topic == self.delay_topic  # otherwise the bridge forwards it
        self._produce(None, None, headers, partition if is_own else _ANY_PARTITION, on_delivery)

    def _produce(
        self,
        value: bytes | str | None,
        key: bytes | str | None,
        headers: list[Header],
        partition: int,
        on_delivery: OnDelivery | None,
    ) -> None:
        done, was_empty = on_delivery or self._remember, False
        while True:
            try:
                self.producer.produce(self.delay_topic, value, key, partition, done, headers=headers)
            except BufferError:
                if was_empty and not len(self.producer):
                    raise EnvironmentFailure(
                        f"{self.delay_topic} did not take the record: the producer's queue has no room for it",
                        hint="Make it smaller, or raise queue.buffering.max.kbytes of the producer.",
                        code="DB-1004",
                    ) from None
                self.producer.poll(_POLL_S)  # this ends: every record leaves the queue after its message time-out
                was_empty = not len(self.producer)
            except KafkaException as refused:  # by the producer itself: too large, or for a partition that it lacks
                error = refused.args[0]
                raise EnvironmentFailure(
                    f"{self.delay_topic} did not take the record: {error.str()}", hint=remedy_of(error), code="DB-1004"
                ) from None
            else:
                self.producer.poll(0)
                return

    def _remember(self, error: KafkaError | None, _: Message) -> None:
        if error is not None:
            with self._of_failures:
                self._failures.append(error)

    def _partitions(self) -> int:
        hint = "Check that the brokers are reachable."
        try:
            metadata = self.producer.list_topics(self.delay_topic, timeout=METADATA_TIMEOUT_S).topics[self.delay_topic]
            if metadata.error is not None:
                hint = "Check its name, and the DESCRIBE right."
                raise KafkaException(metadata.error)
        except KafkaException as failed:
            raise EnvironmentFailure(
                f"cannot look up {self.delay_topic}: {failed.args[0].str()}", hint=hint, code="DB-1006"
            ) from None
        return len(metadata.partitions)


def remedy_of(refusal: KafkaError) -> str:
    """The remedy for a record that the delay topic has refused."""
    if refusal.code() in _NOWHERE:
        return "Correct the topic or the partition: it does not exist."
    if refusal.code() == KafkaError.MSG_SIZE_TOO_LARGE:
        return "Make it smaller, or raise message.max.bytes of the producer and max.message.bytes of the topic."
    return "Send it again: it is not in the delay topic."


def _origin_text(topic: str, partition: int, offset: int | Collection[int]) -> str:
    return origins_text(topic, partition, [offset] if isinstance(offset, int) else offset)


def _own(headers: Headers | None) -> list[Header]:
    own = list(headers.items() if isinstance(headers, Mapping) else headers or ())
    refuse_control(name for name, _ in own)
    return own
