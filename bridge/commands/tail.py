"""Reads topics from their present ends: the records that a command waits for come later."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Self

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from bridge.errors import EnvironmentFailure
from bridge.kafka.construction import made
from bridge.kafka.errors import kafka_error
from timerstore.clock import Clock

REQUEST_TIMEOUT_S: Final = 10.0
POLL_S: Final = 0.5


class Tail:
    """A reader of new records; make it before sending the cause of them. It joins no group and commits no offsets."""

    def __init__(self, properties: Mapping[str, Any], topics: Sequence[str], clock: Clock) -> None:
        """`properties` are a consumer's, with a group id. Raises EnvironmentFailure for an unreadable topic."""
        reading = {
            **properties,
            "isolation.level": "read_committed",
            "check.crcs": True,
            "enable.auto.commit": False,
            "auto.offset.reset": "error",
            "allow.auto.create.topics": False,
        }
        self._clock = clock
        self._consumer = made("for arrivals", lambda: Consumer(reading))
        try:
            self._consumer.assign([end for topic in topics for end in self._ends(topic)])
        except EnvironmentFailure:
            self._consumer.close()
            raise

    def records(self, timeout_s: float) -> Iterator[Message]:
        """The next records, until the end of the time. Raises EnvironmentFailure."""
        deadline_s = self._clock.monotonic_s() + timeout_s
        while (left_s := deadline_s - self._clock.monotonic_s()) > 0:
            message = self._consumer.poll(min(left_s, POLL_S))
            if message is None:
                continue
            if (error := message.error()) is None:
                yield message
            elif not error.retriable() and error.code() != KafkaError._ALL_BROKERS_DOWN:
                hint = "Check the brokers."
                raise EnvironmentFailure(f"cannot read new records: {error.str()}", hint=hint, code="DB-1007")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._consumer.close()

    def _ends(self, topic: str) -> list[TopicPartition]:
        try:
            metadata = self._consumer.list_topics(topic, timeout=REQUEST_TIMEOUT_S).topics[topic]
            if metadata.error is not None:
                raise KafkaException(metadata.error)
            places = [TopicPartition(topic, partition) for partition in metadata.partitions]
            for place in places:
                place.offset = self._consumer.get_watermark_offsets(place, timeout=REQUEST_TIMEOUT_S)[1]
        except KafkaException as failed:
            error = kafka_error(failed)
            if error.code() in (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC):
                raise EnvironmentFailure(
                    f"the topic {topic} does not exist", hint="Create it, or correct its name.", code="DB-1007"
                ) from None
            hint = f"Check that this user may describe and read {topic}"
            raise EnvironmentFailure(f"cannot wait on {topic}: {error.str()}", hint=hint, code="DB-1007") from None
        return places
