"""Reads the dead-letter topics of some delay topics, between two offsets of each partition."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from bridge.errors import EnvironmentFailure
from bridge.kafka.admin import Cluster, Topic, Watermarks
from bridge.kafka.construction import CLIENT_LOG, made
from bridge.settings.clients import librdkafka
from bridge.settings.model import Settings
from bridge.wire.letters import Letter, Range, read_letter, read_redriven
from bridge.wire.received import headers_of, message_bytes, record_place
from timerstore.clock import Clock

POLL_S: Final = 1.0
WAIT_MS: Final = 20
"""The longest wait of the broker for records: until its answer, the client asks it for no other range."""
BATCH_ROWS: Final = 2_000
BATCH_BYTES: Final = 8 << 20
READ_TIMEOUT_S: Final = 30.0
"""The longest time without a record or the end of a partition, before an error."""

Place = tuple[str, int]
Marks = Mapping[Place, Watermarks]


class LetterTopics:
    """The existing dead-letter topics, and the delay topics that their letters may come from."""

    def __init__(self, settings: Settings, cluster: Cluster, delay_topics: Sequence[str] = ()) -> None:
        """The topics of these delay topics, or of all. Raises EnvironmentFailure if none exists, or without an answer
        of the brokers."""
        chosen = [topic for topic in delay_topics if topic in settings.delay_topics] or settings.delay_topics
        names = {settings.dead_letter_topic(topic) for topic in chosen}
        self.topics: Mapping[str, Topic] = cluster.topics(names)
        if not self.topics:
            raise EnvironmentFailure(
                "no dead-letter topic exists",
                hint="Set bridge.create_topics; then `delay-bridge run` creates it.",
                code="DB-1010",
            )
        self._into: dict[str, dict[str, int]] = {topic: {} for topic in self.topics}
        """By dead-letter topic: the delay topics that its letters may come from, with their partitions."""
        for name, topic in cluster.topics(settings.delay_topics).items():
            self._into.setdefault(settings.dead_letter_topic(name), {})[name] = topic.partitions

    def places(self) -> list[Place]:
        return [(name, partition) for name, topic in self.topics.items() for partition in range(topic.partitions)]

    def letter(self, message: Message) -> Letter | None:
        """The dead letter in a record; None if the record is not a dead letter of these topics."""
        letter = read_letter(headers_of(message))
        if letter is None or not 0 <= letter.partition < self._into[partition_of(message)[0]].get(letter.topic, 0):
            return None
        return letter

    def redriven(self, message: Message) -> list[Range]:
        """The letters that a redriven record names. Raises StateError."""
        return read_redriven(self.topics[message.topic() or ""].topic_id, message.value(), record_place(message))


def make_consumer(settings: Settings, isolation: str = "read_committed") -> Consumer:
    """A consumer of records, of committed ones by default. It does not join its group, the bridge's, which every user
    of the configuration may name."""
    reading = librdkafka(settings, "consumer") | {
        "isolation.level": isolation,
        "auto.offset.reset": "earliest",
        "enable.partition.eof": True,
        "queued.max.messages.kbytes": "16384",
        "fetch.wait.max.ms": WAIT_MS,
        "logger": CLIENT_LOG,
    }
    reading.pop("group.instance.id", None)
    return made("consumer", lambda: Consumer(reading))


def record_batches(consumer: Consumer, marks: Marks, clock: Clock, *, visible: bool = False) -> Iterator[list[Message]]:
    """All records between the marks, in batches. With `visible` it does not wait for the end of open transactions, and
    leaves out their records.

    Raises KafkaException.
    """
    ends = {place: mark.end for place, mark in marks.items() if mark.start < mark.end}
    consumer.assign([TopicPartition(*place, marks[place].start) for place in ends])
    batch: list[Message] = []
    size, heard_s = 0, clock.monotonic_s()
    while ends:
        # One at a time: a few that are all headers may take more than a batch may have.
        if (message := consumer.poll(POLL_S)) is not None:
            heard_s = clock.monotonic_s()
            place, offset, error = partition_of(message), message.offset() or 0, message.error()
            if error is not None and error.code() != KafkaError._PARTITION_EOF:
                raise KafkaException(error)
            if error is None and offset < ends.get(place, 0):
                batch.append(message)
                size += message_bytes(message)
            # Before an open transaction the partition ends early: the mark is not reached.
            if offset + (error is None) >= ends.get(place, 0) or (visible and error is not None):
                ends.pop(place, None)
        if clock.monotonic_s() - heard_s > READ_TIMEOUT_S:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "reading the dead-letter topics has stalled"))
        if len(batch) >= BATCH_ROWS or size >= BATCH_BYTES:
            yield batch
            batch, size, heard_s = [], 0, clock.monotonic_s()
    if batch:
        yield batch


def partition_of(message: Message) -> Place:
    return message.topic() or "", message.partition() or 0
