"""Reads the records of some topics since the start of a transaction, as their consumers do.

A partition is read from the first record that is as old as the transaction up to its present end, including that of
open transactions. In a delay topic, the read begins at the committed O, which lies below all records of the
transaction. Elsewhere it begins at a time: the clock is that of the client that wrote the records, or of a broker,
which may be behind. Timestamps of other producers only make the read longer: it begins at the first record that is not
older.

An open transaction hides the rest of its partition from consumers. It may be one of the bridge's own, if the brokers
have lost its end: then only the next delivery ends it, and that may wait for this look-up. So the rest is read as well,
with aborted and open records, up to the end as of then: while the open transaction is of the id in doubt, brokers take
a late record without the question to the coordinator. Without a record of a row in doubt there, the partition is read.

The consumer unpacks whole batches in this process. Places in which two processes have ended are read batch by batch in
a process of their own (ingest/batches).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Final

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from bridge.delivery.doubt.records import IsSought, See
from bridge.errors import BridgeError, EnvironmentFailure
from bridge.ingest.batches.reader import CorruptBatch, End, Found, Stretch
from bridge.ingest.batches.reading_mark import ReadingMark
from bridge.kafka.admin import Cluster
from bridge.kafka.errors import kafka_error
from bridge.stores.names import SourceName
from bridge.wire.headers import Headers
from bridge.wire.received import Record, headers_of
from timerstore.clock import Clock

Place = tuple[str, int]
"""A partition of a delay topic, or all of another topic as (topic, WHOLE)."""
WHOLE: Final = -1

BEHIND_MS: Final = 60_000
"""The largest lag of a broker's clock behind the bridge's."""
QUIET_S: Final = 30.0
"""The longest silence: after it, a transaction is open, or a partition has no leader."""
MISSING: Final = "the topic is not there"
MISSING_S: Final = 60.0
"""A topic that is missing for this long is gone; a broker that has just started does not know all topics."""
NOT_READ: Final = "not read to its end: a transaction is open, a partition has no leader, or too much"
RECORDS_MAX: Final = 10_000_000
"""The limit of one look-up, which takes a share of the processor."""
POLL_RECORDS: Final = 1_000
POLL_S: Final = 0.1


class LookUp:
    """See the module. Each call has a thread of its own."""

    def __init__(
        self,
        cluster: Cluster,
        make_consumer: Callable[[str], Consumer],
        clock: Clock,
        mark: ReadingMark,
        read_batches: Callable[[Sequence[Stretch], Callable[[], bool]], Iterator[tuple[SourceName, Found]]],
    ) -> None:
        """`make_consumer` makes a consumer with that `isolation.level` which reports ends of partitions; `read_batches`
        is that of a `BatchReader`."""
        self._cluster = cluster
        self._make_consumer = make_consumer
        self._clock = clock
        self._mark, self._read_batches = mark, read_batches
        self._missing_s: dict[str, float] = {}
        """The beginning of each topic's absence."""

    def __call__(
        self, since: Mapping[Place, int], see: See, is_sought: IsSought, is_over: Callable[[], bool]
    ) -> Iterator[tuple[Place, str]]:
        """Have `see` look at all records of these places, from a time in ms if they are WHOLE, from an offset on
        otherwise; a record that an open transaction hides must not be one that `is_sought`. Yields each finished place
        at once, with the reason if it could not be read. Ends early if it `is_over`.
        """
        stretches: dict[Place, dict[Place, tuple[int, int]]] = {}
        for place, begin in since.items():
            if is_over():
                return
            try:
                stretches[place] = self._stretches(place, begin)
            except EnvironmentFailure as failure:
                yield place, failure.message
        yield from ((place, "") for place, pieces in stretches.items() if not pieces)
        left = {part: place for place, pieces in stretches.items() for part in pieces}
        parts = {part: stretches[place][part] for part, place in left.items()}
        for part, (start, end) in parts.items():
            if part in left and self._mark.is_suspect(part, start):
                yield from self._read_apart(Stretch(name=part, begin=start, end=end), left, see, is_over)
        try:
            reached = yield from self._read({part: parts[part] for part in left}, left, see, is_over)
            begins = {part: max(parts[part][0], reached.get(part, 0)) for part in left}
            ends = self._cluster.watermarks(list(left), of_all=False)
            rest = {part: (at, ends[part].end if part in ends else parts[part][1]) for part, at in begins.items()}
            yield from self._read_open(rest, left, is_sought, is_over)
        except (KafkaException, EnvironmentFailure) as error:
            reason = kafka_error(error).str() if isinstance(error, KafkaException) else error.message
            yield from ((place, reason) for place in dict.fromkeys(left.values()))
        finally:
            self._mark.clear()

    def _stretches(self, place: Place, begin: int) -> dict[Place, tuple[int, int]]:
        """Begin and end of each partition with new records."""
        starts: dict[Place, int | None] = {place: begin}
        if place[1] == WHOLE:
            topics = self._cluster.topics([place[0]])
            self._must_be_known(place[0], topics)
            parts = [(name, number) for name, topic in topics.items() for number in range(topic.partitions)]
            starts = dict(self._cluster.first_after(parts, begin - BEHIND_MS)) if parts else {}
        marks = self._cluster.watermarks(list(starts))
        return {
            part: (start, marks[part].end)
            for part, start in starts.items()
            if start is not None and start < marks[part].end
        }

    def _must_be_known(self, topic: str, existing: Collection[str]) -> None:
        """Accept the absence of a topic that is gone: it holds no record. Raises EnvironmentFailure for one that may
        exist."""
        if topic in existing:
            self._missing_s.pop(topic, None)
        elif self._clock.monotonic_s() - self._missing_s.setdefault(topic, self._clock.monotonic_s()) < MISSING_S:
            raise EnvironmentFailure(MISSING, hint="It is looked up again.", topic=topic, code="DB-3002")

    def _read_apart(
        self, stretch: Stretch, left: dict[Place, Place], see: See, is_over: Callable[[], bool]
    ) -> Iterator[tuple[Place, str]]:
        """Read a partition in another process; `left` as for `_read`."""
        reason = NOT_READ
        try:
            for part, item in self._read_batches([stretch], is_over):
                if isinstance(item, Record) and item.offset < stretch.end:
                    see(*part, item.offset, item.headers)
                elif isinstance(item, CorruptBatch):
                    reason = item.reason
                elif isinstance(item, End) and item.offset >= stretch.end:
                    reason = ""
        except BridgeError as failure:
            reason = failure.message
        yield from _given_up(left, [stretch.name], reason) if reason else _done(left, stretch.name)

    def _read(
        self,
        stretches: Mapping[Place, tuple[int, int]],
        left: dict[Place, Place],
        see: See,
        is_over: Callable[[], bool],
        isolation: str = "read_committed",
    ) -> Generator[tuple[Place, str], None, dict[Place, int]]:
        """`left`: the partitions to read, each with its place; a partition that is done leaves it. Returns the next
        offsets of the others, if any record was read."""
        reached: dict[Place, int] = {}
        if not left:
            return reached
        with closing(self._make_consumer(isolation)) as consumer:
            consumer.assign([TopicPartition(*part, start) for part, (start, _) in stretches.items()])
            heard_s, count, noted = self._clock.monotonic_s(), 0, 0
            while left and not is_over():
                if noted != len(left):
                    noted = len(left)
                    self._mark.note({part: stretches[part][0] for part in left})
                for message in consumer.consume(POLL_RECORDS, POLL_S):
                    part, offset = (message.topic() or "", message.partition() or 0), message.offset() or 0
                    error, place = message.error(), left.get(part)
                    if error is not None and error.code() != KafkaError._PARTITION_EOF:
                        if message.topic() is None:
                            raise KafkaException(error)
                        yield from _given_up(left, [each for each in left if each[0] == part[0]], error.str())
                    elif place is not None:
                        end = stretches[part][1]
                        if error is None and offset < end:
                            see(*part, offset, headers_of(message) or [])
                            heard_s, count = self._clock.monotonic_s(), count + 1
                        # An open transaction ends the readable part of a log before its end.
                        reached[part] = offset + (error is None)
                        if reached[part] >= end:
                            yield from _done(left, part)
                if count > RECORDS_MAX or self._clock.monotonic_s() - heard_s > QUIET_S:
                    break
        return reached

    def _read_open(
        self,
        stretches: Mapping[Place, tuple[int, int]],
        left: dict[Place, Place],
        is_sought: IsSought,
        is_over: Callable[[], bool],
    ) -> Iterator[tuple[Place, str]]:
        """Read what an open transaction hides; `left` as for `_read`. A place with a sought record is not read: that
        may be aborted, or committed."""
        undecided: set[Place] = set()

        def look(topic: str, partition: int, offset: int, headers: Headers) -> None:
            if is_sought(topic, partition, offset, headers):
                undecided.add(left[topic, partition])

        for place, reason in self._read(stretches, left, look, is_over, "read_uncommitted"):
            yield place, NOT_READ if place in undecided else reason
        if not is_over():
            yield from ((place, NOT_READ) for place in dict.fromkeys(left.values()))


def _done(left: dict[Place, Place], part: Place) -> Iterator[tuple[Place, str]]:
    """A partition is read to its end; yields its place with the last one."""
    if (place := left.pop(part)) not in left.values():
        yield place, ""


def _given_up(left: dict[Place, Place], parts: Collection[Place], reason: str) -> Iterator[tuple[Place, str]]:
    """Give up the places of these partitions."""
    places = {left[part]: None for part in parts}
    for part in [part for part, place in left.items() if place in places]:
        del left[part]
    yield from ((place, reason) for place in places)
