"""`delay-bridge redrive`: dead letters go back into the delay topics that they came from, once what was wrong is right.

A letter goes back into its old partition, where cancels of its id find it, due when it was; and only into a delay topic
whose dead letters are configured to be in the topic where it was found.

Exactly once: the transaction that puts letters back also writes, into their partition of the dead-letter topic, which
ones they are (bridge/wire/letters.py). A run begins by reading those records:

1. `init_transactions` ends what an earlier run left open, and fences one that is still running. (Nothing.)
2. The ends of the logs are looked up, those of open transactions included: what an earlier run committed lies below.
3. First pass: what has gone back. Second pass: the letters, a transaction for some of them. (A crash leaves a
   transaction whole or undone; the next run finds out by 1 to 3.)
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition

from bridge.errors import EnvironmentFailure, StateError
from bridge.kafka.admin import Cluster, Watermarks
from bridge.kafka.construction import made
from bridge.kafka.errors import kafka_error
from bridge.settings.clients import librdkafka
from bridge.settings.model import Settings
from bridge.wire.headers import Headers
from bridge.wire.letters import Choice, Gone, Letter, Range, Report, is_redriven, read_letter, read_redriven, redriven
from bridge.wire.received import headers_of, record_bytes
from timerstore.clock import Clock

CALL_TIMEOUT_S: Final = 30.0
POLL_S: Final = 1.0
POLL_RECORDS: Final = 500
TRANSACTION_ROWS: Final = 2_000
TRANSACTION_BYTES: Final = 8 << 20
READ_TIMEOUT_S: Final = 30.0
"""Without a record or the end of a partition for so long: something is wrong."""
FULL_POLL_S: Final = 0.1

Place = tuple[str, int]
Marks = Mapping[Place, Watermarks]


def redrive(settings: Settings, clock: Clock, choice: Choice, *, execute: bool) -> Report:
    """Go over the dead-letter topics of the chosen delay topics. Raises BridgeError."""
    return Redrive(settings, clock, choice).run(execute=execute)


def lines(report: Report, *, execute: bool) -> Iterator[str]:
    """The report for people, one line for each reason and target."""
    for (reason, target), count in sorted(report.back.items()):
        yield f"{'put back' if execute else 'goes back':12}{count:>8}  {reason}  {target}"
    for (reason, target), count in sorted(report.broken.items()):
        yield f"{'stays':12}{count:>8}  {reason}  {target}  (needs --due now or --set-header)"
    others = {"not chosen": report.left, "back before": report.before, "no letters": report.foreign}
    for name, count in others.items():
        if count:
            yield f"{name:12}{count:>8}"
    total = sum(report.back.values())
    letters = f"{total} dead letter{'s' * (total != 1)}"
    yield f"{letters} put back" if execute else f"{letters} would go back: --execute does it"


class Redrive:
    """One run over dead-letter topics."""

    def __init__(self, settings: Settings, clock: Clock, choice: Choice) -> None:
        """Raises BridgeError."""
        self._cluster, self._clock, self._choice = Cluster(settings), clock, choice
        letter_topics = {settings.dead_letter_topic(topic) for topic in choice.topics or settings.delay_topics}
        self._topics = self._cluster.topics(letter_topics)
        if not self._topics:
            raise EnvironmentFailure(
                "there is no dead-letter topic",
                hint="Set bridge.create_topics, and `delay-bridge run` creates it.",
                code="DB-1010",
            )
        self._into: dict[str, dict[str, int]] = {topic: {} for topic in self._topics}
        """By dead-letter topic: the delay topics that its letters may come from, with their partitions."""
        for topic, found in self._cluster.topics(settings.delay_topics).items():
            self._into.setdefault(settings.dead_letter_topic(topic), {})[topic] = found.partitions
        logger = logging.getLogger("bridge.settings.librdkafka")
        # The group is the bridge's, which every user of its configuration may name; it is not joined.
        reading = librdkafka(settings, "consumer") | {
            "auto.offset.reset": "earliest",
            "enable.partition.eof": True,
            "queued.max.messages.kbytes": "16384",
            "logger": logger,
        }
        reading.pop("group.instance.id", None)
        self._consumer = made("consumer", lambda: Consumer(reading))
        name = f"{settings.group_id}-redrive"
        self._producer_config = librdkafka(settings, "producer") | {"transactional.id": name, "logger": logger}

    def run(self, *, execute: bool) -> Report:
        """Go over all letters that were there at the start. Without `execute` nothing is written.

        Raises EnvironmentFailure; StateError where it cannot be known which letters have gone back.
        """
        report = Report()
        try:
            producer = None
            if execute:
                producer = Producer(self._producer_config)
                producer.init_transactions(CALL_TIMEOUT_S)
            # The ends include records of open transactions.
            marks = self._cluster.watermarks(
                [(topic, partition) for topic, found in self._topics.items() for partition in range(found.partitions)]
            )
            gone = self._gone(marks)
            for batch in batches(self._consumer, marks, self._clock):
                self._put_back(producer, batch, gone, report)
        except KafkaException as exception:
            raise EnvironmentFailure(
                "cannot put dead letters back",
                hint="What is committed has gone back; run it again. It needs Read, Describe and Write on the "
                "dead-letter topics, Write on the delay topics and the transactional id.",
                reason=kafka_error(exception).str(),
                code="DB-1011",
            ) from exception
        finally:
            self._consumer.close()
        return report

    def _gone(self, marks: Marks) -> dict[Place, Gone]:
        """What has gone back, as noted below the ends. With `since_ms`, notes that cannot be used are left out."""
        ranges: dict[Place, list[Range]] = {place: [] for place in marks}
        for message in (message for batch in batches(self._consumer, marks, self._clock) for message in batch):
            if not is_redriven(headers_of(message)):
                continue
            (topic, partition), where = _place(message), f"{message.topic()}/{message.partition()}/{message.offset()}"
            try:
                ranges[topic, partition] += read_redriven(self._topics[topic].topic_id, message.value(), where)
            except StateError:
                if self._choice.since_ms is None:
                    raise
        return {place: Gone(found) for place, found in ranges.items()}

    def _put_back(
        self, producer: Producer | None, batch: Sequence[Message], gone: Mapping[Place, Gone], report: Report
    ) -> None:
        """One transaction: records, and which letters they are. A crash leaves both or neither."""
        counted = Report()
        back = [
            (self._choice.headers(letter), letter, message)
            for message in batch
            if (letter := self._judge(message, gone[_place(message)], counted)) is not None
        ]
        if producer is not None and back:
            self._commit(producer, back)
        report.add(counted)

    def _judge(self, message: Message, gone: Gone, report: Report) -> Letter | None:
        """The letter if it is to go back, and where it is counted if not."""
        headers = headers_of(message)
        if is_redriven(headers):
            return None
        letter, topic = read_letter(headers), message.topic() or ""
        if (message.offset() or 0) in gone:
            report.before += 1
        elif letter is None or not 0 <= letter.partition < self._into[topic].get(letter.topic, 0):
            report.foreign += 1
        elif not self._choice.chooses(letter, message.timestamp()[1]):
            report.left += 1
        elif not self._choice.mends(letter):
            report.broken[letter.reason, letter.target] += 1
        else:
            report.back[letter.reason, letter.target] += 1
            return letter
        return None

    def _commit(self, producer: Producer, back: Sequence[tuple[Headers, Letter, Message]]) -> None:
        offsets: dict[Place, list[int]] = {}
        producer.begin_transaction()
        try:
            for headers, letter, message in back:
                offsets.setdefault(_place(message), []).append(message.offset() or 0)
                _produce(producer, letter.topic, letter.partition, message.key(), message.value(), headers)
            for (topic, partition), found in offsets.items():
                headers, value = redriven(self._topics[topic].topic_id, found)
                _produce(producer, topic, partition, None, value, headers)
            producer.commit_transaction(CALL_TIMEOUT_S)
        except KafkaException as exception:
            if kafka_error(exception).txn_requires_abort():
                producer.abort_transaction(CALL_TIMEOUT_S)
            raise


def batches(consumer: Consumer, marks: Marks, clock: Clock) -> Iterator[list[Message]]:
    """All records between the marks, some for each transaction."""
    ends = {place: mark.end for place, mark in marks.items() if mark.start < mark.end}
    consumer.assign([TopicPartition(*place, marks[place].start) for place in ends])
    batch: list[Message] = []
    size, heard_s = 0, clock.monotonic_s()
    while ends:
        for message in consumer.consume(POLL_RECORDS, POLL_S):
            heard_s = clock.monotonic_s()
            place, offset, error = _place(message), message.offset() or 0, message.error()
            if error is not None and error.code() != KafkaError._PARTITION_EOF:
                raise KafkaException(error)
            if error is None and offset < ends.get(place, 0):
                batch.append(message)
                size += record_bytes(message)
            # The end of what may be read is not yet the end where a transaction is open.
            if offset + (error is None) >= ends.get(place, 0):
                ends.pop(place, None)
        if clock.monotonic_s() - heard_s > READ_TIMEOUT_S:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "the dead-letter topics are not read"))
        if len(batch) >= TRANSACTION_ROWS or size >= TRANSACTION_BYTES:
            yield batch
            batch, size, heard_s = [], 0, clock.monotonic_s()
    if batch:
        yield batch


def _produce(
    producer: Producer, topic: str, partition: int, key: bytes | None, value: bytes | None, headers: Headers
) -> None:
    while True:
        try:
            return producer.produce(topic, value=value, key=key, partition=partition, headers=list(headers))
        except BufferError:
            producer.poll(FULL_POLL_S)


def _place(message: Message) -> Place:
    return message.topic() or "", message.partition() or 0
