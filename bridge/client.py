"""For producers: send messages that are delivered later, cancel them, and move them to another time.

    client = DelayClient({"bootstrap.servers": "localhost:9092"})
    client.send("orders", b"...", key=b"42", after=timedelta(minutes=15), id="order-42-reminder")
    client.schedule("reports", b"...", cron="0 9 * * MON-FRI", time_zone="Europe/Berlin", id="daily-report")
    client.flush()

A thin layer over confluent-kafka's Producer: a message goes to the delay topic with headers that say where and when.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any, Final, Self, Unpack

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from bridge.errors import EnvironmentFailure
from bridge.kafka.construction import made
from bridge.wire.commands import AnswerTo, cancel_headers, cancel_origin_headers, move_headers, move_origin_headers
from bridge.wire.headers import NEVER_MS, NEXT_MS, origins_text, refuse_control, timer_headers
from bridge.wire.schedule import Schedule
from timerstore.clock import Clock, SystemClock

OnDelivery = Callable[[KafkaError | None, Message], None]
Header = tuple[str, bytes | str | None]
Headers = Mapping[str, bytes | str | None] | Iterable[Header]

METADATA_TIMEOUT_S: Final = 10.0
_POLL_S: Final = 0.1
_ANY_PARTITION: Final = -1  # the partitioner's choice
_BY_CLIENT: Final = "client"  # what a command says that its client has sent to every partition
_NOWHERE: Final = (KafkaError._UNKNOWN_PARTITION, KafkaError._UNKNOWN_TOPIC, KafkaError.UNKNOWN_TOPIC_OR_PART)

# Where the caller gives a plain configuration: safe against loss, and the partitioner that Java's clients use, so that
# a cancel meets its target even when another program sent it.
_DEFAULTS: Final[Mapping[str, Any]] = {"enable.idempotence": True, "partitioner": "murmur2_random"}


class DelayClient:
    """Sends to one delay topic. Safe to share between threads, as the Producer is.

    `producer`: a Producer of your own, or a configuration for one. With your own, records with a key must be
    partitioned alike by all that send and cancel the same ids.
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

        Give either `at`, an aware datetime or epoch milliseconds, or `after`, counted from when the broker takes the
        record. `topic` None: the delay topic's default target. `id` names the message for `cancel` and `replace`;
        `replace` cancels what was sent before under this id (with the same key). `partition`: of the real topic.

        Returns at once, waiting only where the producer's queue is full. Whether the delay topic has taken the record
        is told to `on_delivery`, or else by `flush`. Raises ValueError for what the bridge would reject.
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
        """Deliver `value` to `topic` again and again: `every` so long (with an `anchor`, at whole intervals from then),
        or when `cron` says in `time_zone`.

        Not before `at` or `after`, not after `end`, and `times` times at most. `missed` says what becomes of what was
        due several times while the bridge was down: the `last` one is delivered, `all` of them, or `none`. Cancel it,
        or replace it, by its `id`. The rest is as in `send`. Raises ValueError for what the bridge would reject.
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
        """Cancel the pending message that was sent with this `id`, and with this `key`.

        A message without a key may be in any partition, so without a key a cancel goes to all of them. So may one of a
        producer with another partitioner: `everywhere` sends a record to each partition, and each has an answer of its
        own. Cancelling what is delivered already, or unknown, does nothing. With `reply_to`, a topic, the bridge writes
        there what became of the message (`bridge.wire.answers`), and with it `correlation`, a text.
        """
        if everywhere:
            self._to_all(key, cancel_headers(id, forwarded=_BY_CLIENT, **answer), on_delivery)
            return
        if key is not None or any(text is not None for text in answer.values()):
            # One record, so that one answer names it; without a key the bridge sends it on.
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
        """Cancel the pending message whose record is there, as `on_delivery` was told when it was sent: one without an
        id, too. Or those of up to 100 offsets. The rest as for `cancel`.
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
        """Have the pending message that was sent with this `id`, and with this `key`, due at another time, earlier or
        later; after no time, it is delivered now. `at` and `after` as for `send`, the rest as for `cancel`.
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
        """Deliver no more ticks of the recurring message that was sent with this `id`, and with this `key`, until it is
        resumed. The rest as for `cancel`."""
        self.move(id, key, at=NEVER_MS, on_delivery=on_delivery, **answer)

    def resume(
        self,
        id: str,
        key: bytes | str | None = None,
        *,
        on_delivery: OnDelivery | None = None,
        **answer: Unpack[AnswerTo],
    ) -> None:
        """The opposite of `pause`: the first tick is the next regular one, and those in between are not made up for."""
        self.move(id, key, at=NEXT_MS, on_delivery=on_delivery, **answer)

    def move_origin(
        self,
        topic: str,
        partition: int,
        offset: int | Collection[int],
        *,
        at: datetime | int | None = None,
        after: timedelta | None = None,
        on_delivery: OnDelivery | None = None,
        **answer: Unpack[AnswerTo],
    ) -> None:
        """As `move`, for the messages whose records are there; as for `cancel_origin`."""
        origin = _origin_text(topic, partition, offset)
        headers = move_origin_headers(origin, at=at, after=after, now_ms=self._clock.now_ms(), **answer)
        self._to_origin(topic, partition, [*headers], on_delivery)

    def flush(self, timeout_s: float = 60.0) -> None:
        """Wait until the delay topic has taken everything that was sent.

        Raises EnvironmentFailure if a record without an `on_delivery` of its own was refused, or the time is up.
        """
        left = self.producer.flush(timeout_s)
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
                hint="Check that the brokers can be reached.",
                code="DB-1005",
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.flush()

    def _to_all(self, key: bytes | str | None, headers: Iterable[Header], on_delivery: OnDelivery | None) -> None:
        """A command to each partition, which the bridge need not send on."""
        for partition in range(self._partitions()):
            self._produce(None, key, [*headers], partition, on_delivery)

    def _to_origin(self, topic: str, partition: int, headers: list[Header], on_delivery: OnDelivery | None) -> None:
        is_own = topic == self.delay_topic  # else the bridge sends it on
        self._produce(None, None, headers, partition if is_own else _ANY_PARTITION, on_delivery)

    def _produce(
        self,
        value: bytes | str | None,
        key: bytes | str | None,
        headers: list[Header],
        partition: int,
        on_delivery: OnDelivery | None,
    ) -> None:
        done = on_delivery or self._remember
        while True:
            try:
                self.producer.produce(self.delay_topic, value, key, partition, done, headers=headers)
            except BufferError:
                self.producer.poll(_POLL_S)  # ends: a record leaves the queue by its message time-out at the latest
            else:
                self.producer.poll(0)
                return

    def _remember(self, error: KafkaError | None, _: Message) -> None:
        if error is not None:
            self._failures.append(error)

    def _partitions(self) -> int:
        hint = "Check that the brokers can be reached."
        try:
            found = self.producer.list_topics(self.delay_topic, timeout=METADATA_TIMEOUT_S).topics[self.delay_topic]
            if found.error is not None:
                hint = "Check its name, and the right to describe it."
                raise KafkaException(found.error)
        except KafkaException as failed:
            raise EnvironmentFailure(
                f"cannot look up {self.delay_topic}: {failed.args[0].str()}", hint=hint, code="DB-1006"
            ) from None
        return len(found.partitions)


def remedy_of(refusal: KafkaError) -> str:
    """What to do about a record that the delay topic has not taken."""
    if refusal.code() in _NOWHERE:
        return "Correct the topic or the partition: there is none of that name or number."
    return "Send it again: it is not in the delay topic."


def _origin_text(topic: str, partition: int, offset: int | Collection[int]) -> str:
    return origins_text(topic, partition, [offset] if isinstance(offset, int) else offset)


def _own(headers: Headers | None) -> list[Header]:
    own = list(headers.items() if isinstance(headers, Mapping) else headers or ())
    refuse_control(name for name, _ in own)
    return own
