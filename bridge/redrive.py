"""`delay-bridge redrive`: dead letters go back into the delay topics that they came from, once what was wrong is right.

A dead letter is the original record followed by headers that say why and where from (headers.dead_letter_headers), so
what goes back is the record without those: into its old partition, where cancels of its id find it, due when it was.

Exactly once. Which letters have gone back is kept in Kafka under a consumer group of its own, and committed in the
transaction that puts them back. A crash, or a second run, goes on from there; two runs at once fence each other.

    committed offset   everything below has gone back
    metadata           "1 <topic id> <ranges>": what above it has gone back, too, because a filter chose it; as
                       distances in base 36, alternately left and gone
"""

from __future__ import annotations

import logging
import struct
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition

from bridge import headers as h
from bridge.clienterrors import kafka_error
from bridge.errors import ConfigurationError, EnvironmentFailure
from bridge.headers import Headers, RejectReason
from bridge.progress import METADATA_CHARS_MAX
from timerstore.clock import Clock

CALL_TIMEOUT_S: Final = 30.0
POLL_S: Final = 1.0
POLL_RECORDS: Final = 500
TRANSACTION_ROWS: Final = 2_000
TRANSACTION_BYTES: Final = 8 << 20
READ_TIMEOUT_S: Final = 30.0
"""Without a record or the end of a partition for so long: something is wrong."""
FULL_POLL_S: Final = 0.1

_R = RejectReason
BROKEN: Final = frozenset(
    {_R.DUPLICATE_HEADER, _R.BAD_COPY, _R.NO_TIME, _R.TWO_TIMES, _R.BAD_UNTIL, _R.BAD_FOR, _R.BAD_LEVEL}
    | {_R.BAD_TARGET, _R.BAD_PARTITION, _R.BAD_ID, _R.BAD_REPLACE}
)
"""What would be rejected again as it is: it goes back only with headers that are put right."""

Range = tuple[int, int]
Place = tuple[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Letter:
    """A dead letter taken apart: the record as it was, why it was refused, where it came from, where it was to go."""

    headers: Headers
    reason: str
    topic: str
    partition: int
    target: str
    is_cut: bool = False
    """Its value is not there: only the record in the delay topic has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Which letters go back (empty: all), and what is changed in their headers."""

    topics: Collection[str] = ()
    reasons: Collection[str] = ()
    targets: Collection[str] = ()
    due_now: bool = False
    set_headers: Sequence[tuple[str, bytes]] = ()

    def chooses(self, letter: Letter) -> bool:
        """Whether the filters let it pass."""
        pairs = ((self.topics, letter.topic), (self.reasons, letter.reason), (self.targets, letter.target))
        return all(not wanted or found in wanted for wanted, found in pairs)

    def mends(self, letter: Letter) -> bool:
        """Whether it can be understood when it goes back, as far as anybody can tell."""
        return not letter.is_cut and (letter.reason not in BROKEN or self.due_now or bool(self.set_headers))

    def headers(self, letter: Letter) -> Headers:
        """The headers with which it goes back."""
        gone = {name for name, _ in self.set_headers}
        if self.due_now:
            gone |= {h.UNTIL, h.FOR, h.LEVEL, *h.COPY}
        kept = [(name, value) for name, value in letter.headers if name not in gone]
        return [*kept, *([(h.FOR, b"0")] if self.due_now else []), *self.set_headers]


@dataclass(slots=True)
class Report:
    """How many letters, by (reason, target): `back` have gone or would go back, `broken` need other headers; `left`
    were not chosen, `foreign` are no dead letters of these delay topics, `before` have gone back in an earlier run.
    """

    back: Counter[tuple[str, str]] = field(default_factory=Counter)
    broken: Counter[tuple[str, str]] = field(default_factory=Counter)
    left: int = 0
    foreign: int = 0
    before: int = 0


def read_letter(headers: Headers | None) -> Letter | None:
    """Take a record's headers apart; None when the bridge did not write them."""
    names = [name for name, _ in headers or []]
    if headers is None or h.REASON not in names:
        return None
    cut = len(names) - 1 - names[::-1].index(h.REASON)
    why, record = dict(headers[cut:]), headers[:cut]
    try:
        return Letter(
            headers=record,
            reason=_text(why[h.REASON]),
            topic=_text(why[h.DLT_TOPIC]),
            partition=struct.unpack(">i", why[h.DLT_PARTITION] or b"")[0],
            target=_text(dict(record).get(h.TOPIC)),
            is_cut=h.OMITTED in why,
        )
    except (KeyError, struct.error):
        return None


def _text(value: bytes | None) -> str:
    return (value or b"").decode("utf-8", "replace").strip(h.WHITE_SPACE)


# -- what has gone back ------------------------------------------------------------------------------------------------


def encode_done(topic_id: str, offset: int, ranges: Iterable[Range]) -> str:
    """The metadata of a committed offset. Raises ConfigurationError when Kafka would not take it."""
    distances, at = [], offset
    for start, end in ranges:
        distances += [start - at, end - start]
        at = end
    text = f"1 {topic_id} {','.join(np.base_repr(distance, 36) for distance in distances)}"
    if len(text) > METADATA_CHARS_MAX:
        raise ConfigurationError(
            "what the filter chooses lies too scattered among what it does not",
            hint="Redrive with a broader filter, or without one.",
        )
    return text


def decode_done(topic_id: str, offset: int, metadata: str) -> list[Range]:
    """The ranges that have gone back: up to `offset`, and those in the metadata. Nothing counts for another topic."""
    version, _, rest = metadata.partition(" ")
    identity, _, encoded = rest.partition(" ")
    if version != "1" or identity != topic_id:
        return []
    distances = [int(text, 36) for text in encoded.split(",") if text]
    ranges, at = [(0, offset)] if offset > 0 else [], offset
    for skipped, length in zip(distances[::2], distances[1::2], strict=True):
        ranges.append((at + skipped, at + skipped + length))
        at += skipped + length
    return ranges


class Done:
    """What of one partition has gone back; told of every record in the order of offset."""

    def __init__(self, ranges: Sequence[Range]) -> None:
        self._before = list(ranges)
        self._runs: list[Range] = []
        self._at = 0
        self._is_running = True
        self._next = 0

    def contains(self, offset: int) -> bool:
        """Whether an earlier run put it back; asked in the order of offset."""
        while self._at < len(self._before) and self._before[self._at][1] <= offset:
            self._at += 1
        return self._at < len(self._before) and self._before[self._at][0] <= offset

    def note(self, offset: int, *, is_back: bool) -> None:
        """This record has gone back now (or before), or stays. Offsets in between hold none: they belong to the run."""
        if is_back:
            if self._is_running and self._runs:
                self._runs[-1] = (self._runs[-1][0], offset + 1)
            else:
                self._runs.append((0 if not self._next else offset, offset + 1))
        self._is_running = is_back
        self._next = offset + 1

    def committed(self) -> tuple[int, list[Range]]:
        """The offset and the ranges to commit: with what an earlier run put back beyond the last record noted."""
        beyond = [(max(start, self._next), end) for start, end in self._before if end > self._next]
        ranges = _merged([*self._runs, *beyond])
        if ranges and ranges[0][0] == 0:
            return ranges[0][1], ranges[1:]
        return 0, ranges


def _merged(ranges: Sequence[Range]) -> list[Range]:
    merged: list[Range] = []
    for start, end in ranges:
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


# -- the run -----------------------------------------------------------------------------------------------------------


class Redrive:
    """One run over dead-letter topics."""

    def __init__(
        self,
        *,
        consumer: Mapping[str, Any],
        producer: Mapping[str, Any],
        topic_ids: Mapping[str, str],
        partitions: Mapping[str, int],
        clock: Clock,
        make_producer: Callable[[dict[str, Any]], Producer] = Producer,
    ) -> None:
        """`consumer` and `producer` are properties, with the group and the transactional id; `topic_ids` are those of
        the dead-letter topics, `partitions` counts those of the delay topics.
        """
        logger = logging.getLogger("bridge.librdkafka")
        self._consumer = Consumer({**consumer, "enable.partition.eof": True, "logger": logger})
        self._producer_config = {**producer, "logger": logger}
        self._make_producer = make_producer
        self._topic_ids = topic_ids
        self._partitions = partitions
        self._clock = clock

    def run(self, choice: Choice, *, execute: bool) -> Report:
        """Go over all letters that were there at the start. Without `execute` nothing is written.

        Raises EnvironmentFailure, or ConfigurationError when what is chosen cannot be remembered.
        """
        report = Report()
        try:
            # First: it ends what an earlier run left open, so that its outcome is known when offsets are read.
            producer = self._open() if execute else None
            places = [
                (topic, partition)
                for topic in self._topic_ids
                for partition in self._consumer.list_topics(topic, timeout=CALL_TIMEOUT_S).topics[topic].partitions
            ]
            done = self._committed(places)
            for batch in self._batches(places):
                self._put_back(producer, batch, done, choice, report)
        except KafkaException as exception:
            raise EnvironmentFailure(
                "dead letters cannot be put back",
                hint="What is committed has gone back; run it again. It needs Read and Describe on the dead-letter "
                "topics and the group, Write on the delay topics and the transactional id.",
                reason=kafka_error(exception).str(),
            ) from exception
        finally:
            self._consumer.close()
        return report

    def _open(self) -> Producer:
        producer = self._make_producer(dict(self._producer_config))
        producer.init_transactions(CALL_TIMEOUT_S)
        return producer

    def _committed(self, places: Sequence[Place]) -> dict[Place, Done]:
        found = self._consumer.committed([TopicPartition(*place) for place in places], timeout=CALL_TIMEOUT_S)
        result = {}
        for each in found:
            if each.error is not None:
                raise KafkaException(each.error)
            ranges = (
                [] if each.offset < 0 else decode_done(self._topic_ids[each.topic], each.offset, each.metadata or "")
            )
            result[each.topic, each.partition] = Done(ranges)
        return result

    def _batches(self, places: Sequence[Place]) -> Iterator[list[Message]]:
        """All records up to the ends as they are now, some for each transaction."""
        ends = {}
        assigned = []
        for place in places:
            low, high = self._consumer.get_watermark_offsets(TopicPartition(*place), timeout=CALL_TIMEOUT_S)
            if low < high:
                ends[place] = high
                assigned.append(TopicPartition(*place, low))
        self._consumer.assign(assigned)
        batch: list[Message] = []
        size, heard_s = 0, self._clock.monotonic_s()
        while ends:
            for message in self._consumer.consume(POLL_RECORDS, POLL_S):
                heard_s = self._clock.monotonic_s()
                place = (message.topic() or "", message.partition() or 0)
                offset, error = message.offset() or 0, message.error()
                if error is not None and error.code() != KafkaError._PARTITION_EOF:
                    raise KafkaException(error)
                if place not in ends:
                    continue
                if error is None and offset < ends[place]:
                    batch.append(message)
                    size += len(message)
                if error is not None or offset + 1 >= ends[place]:
                    del ends[place]
            if self._clock.monotonic_s() - heard_s > READ_TIMEOUT_S:
                raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "the dead-letter topics are not read"))
            if len(batch) >= TRANSACTION_ROWS or size >= TRANSACTION_BYTES:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch

    def _put_back(
        self,
        producer: Producer | None,
        batch: Sequence[Message],
        done: Mapping[Place, Done],
        choice: Choice,
        report: Report,
    ) -> None:
        """One transaction: records, and what has gone back. A crash leaves both or neither."""
        back: list[tuple[Letter, Message]] = []
        counted = Report()
        for message in batch:
            place = (message.topic() or "", message.partition() or 0)
            letter = self._judge(message, done[place], choice, counted)
            if letter is not None:
                back.append((letter, message))
        places = {(message.topic() or "", message.partition() or 0) for message in batch}
        offsets = [self._offset(place, done[place]) for place in sorted(places)]
        if producer is not None and back:
            self._commit(producer, [(choice.headers(letter), letter, message) for letter, message in back], offsets)
        for name in ("back", "broken"):
            getattr(report, name).update(getattr(counted, name))
        report.left += counted.left
        report.foreign += counted.foreign
        report.before += counted.before

    def _judge(self, message: Message, done: Done, choice: Choice, report: Report) -> Letter | None:
        """The letter if it is to go back, and where it is counted if not."""
        offset = message.offset() or 0
        letter = read_letter(_headers(message))
        is_before = done.contains(offset)
        chosen = None
        if is_before:
            report.before += 1
        elif letter is None or not 0 <= letter.partition < self._partitions.get(letter.topic, 0):
            report.foreign += 1
        elif not choice.chooses(letter):
            report.left += 1
        elif not choice.mends(letter):
            report.broken[letter.reason, letter.target] += 1
        else:
            report.back[letter.reason, letter.target] += 1
            chosen = letter
        done.note(offset, is_back=is_before or chosen is not None)
        return chosen

    def _offset(self, place: Place, done: Done) -> TopicPartition:
        offset, ranges = done.committed()
        return TopicPartition(*place, offset, encode_done(self._topic_ids[place[0]], offset, ranges))

    def _commit(
        self,
        producer: Producer,
        back: Sequence[tuple[Headers, Letter, Message]],
        offsets: Sequence[TopicPartition],
    ) -> None:
        producer.begin_transaction()
        try:
            for headers, letter, message in back:
                _produce(producer, letter, message, headers)
            producer.send_offsets_to_transaction(
                list(offsets), self._consumer.consumer_group_metadata(), CALL_TIMEOUT_S
            )
            producer.commit_transaction(CALL_TIMEOUT_S)
        except KafkaException as exception:
            if kafka_error(exception).txn_requires_abort():
                producer.abort_transaction(CALL_TIMEOUT_S)
            raise


def _produce(producer: Producer, letter: Letter, message: Message, headers: Headers) -> None:
    while True:
        try:
            return producer.produce(
                letter.topic,
                value=message.value(),
                key=message.key(),
                partition=letter.partition,
                headers=list(headers),
            )
        except BufferError:
            producer.poll(FULL_POLL_S)


def _headers(message: Message) -> Headers:
    return [(str(pair[0]), pair[1] if isinstance(pair[1], bytes | None) else None) for pair in message.headers() or []]
