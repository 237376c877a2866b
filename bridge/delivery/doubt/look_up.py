"""Reads the records of some topics since the begin of a transaction, as their consumers do.

A partition is read from the first record that is as old as the transaction to the end that it has now, that of open
transactions included. In delay topics that begin is the committed O, which lies below all that the transaction has
written. Elsewhere it is a time: that of the client which wrote the records, or of a broker, whose clock may be behind.
A timestamp of another producer only makes more to read: the first record counts that is not older.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import closing
from typing import Final

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from bridge.delivery.doubt.records import See
from bridge.errors import EnvironmentFailure
from bridge.kafka.admin import Cluster
from bridge.kafka.errors import is_unreadable, kafka_error
from bridge.wire.received import headers_of
from timerstore.clock import Clock
from timerstore.rows.sources import SourceName

BEHIND_MS: Final = 60_000
"""By how much a broker's clock may be behind the bridge's."""
READ_S: Final = 60.0
NOT_READ: Final = "not read in time: much was written since, or a transaction of another producer is open"
RECORDS_MAX: Final = 2_000_000
"""Delivery waits meanwhile. Topics that were not read by then are told."""
POLL_RECORDS: Final = 1_000
POLL_S: Final = 0.1


class LookUp:
    """See the module. One thread."""

    def __init__(
        self, cluster: Cluster, make_consumer: Callable[[], Consumer], clock: Clock, beat: Callable[[], None]
    ) -> None:
        """`make_consumer` makes one that reads committed records, and tells of ends; `beat` is called now and then."""
        self._cluster = cluster
        self._make_consumer = make_consumer
        self._clock = clock
        self._beat = beat

    def __call__(
        self, topics: Collection[str], since: Mapping[SourceName, int], began_ms: int, see: See
    ) -> dict[str, str]:
        """Have `see` look at all that was written since into `topics`, and into the partitions of `since` from these
        offsets on. Returns the topics that could not be read, with the reason. Raises EnvironmentFailure without an
        answer.
        """
        starts, ends = self._stretches(topics, since, began_ms)
        unread: dict[str, str] = {}
        if not ends:
            return unread
        try:
            with closing(self._make_consumer()) as consumer:
                consumer.assign([TopicPartition(*place, starts[place]) for place in ends])
                self._read(consumer, ends, see, unread)
        except KafkaException as exception:
            raise _unanswered(kafka_error(exception).str()) from None
        return unread

    def _stretches(
        self, topics: Collection[str], since: Mapping[SourceName, int], began_ms: int
    ) -> tuple[dict[SourceName, int], dict[SourceName, int]]:
        """Begins and ends of the partitions with anything new."""
        found = self._cluster.topics(sorted(topics))  # a topic that is gone holds no record
        places = [(name, number) for name, topic in found.items() for number in range(topic.partitions)]
        marks = self._cluster.watermarks([*places, *since])
        first = self._cluster.first_after(places, began_ms - BEHIND_MS) if places else {}
        starts = {place: offset for place, offset in first.items() if offset is not None} | dict(since)
        ends = {place: marks[place].end for place, start in starts.items() if start < marks[place].end}
        return starts, ends

    def _read(self, consumer: Consumer, ends: dict[SourceName, int], see: See, unread: dict[str, str]) -> None:
        deadline_s, count = self._clock.monotonic_s() + READ_S, 0
        while ends:
            self._beat()
            for message in consumer.consume(POLL_RECORDS, POLL_S):
                place, offset = (message.topic() or "", message.partition() or 0), message.offset() or 0
                error = message.error()
                if error is None and offset < ends.get(place, 0):
                    see(*place, offset, headers_of(message) or [])
                    count += 1
                elif error is not None and is_unreadable(error):
                    unread |= self._left_out({place[0]}, ends, error.str())
                elif error is not None and error.code() != KafkaError._PARTITION_EOF:
                    raise KafkaException(error)
                # An open transaction ends the readable part of a log before its end.
                if offset + (error is None) >= ends.get(place, 0):
                    ends.pop(place, None)
            if count > RECORDS_MAX or self._clock.monotonic_s() > deadline_s:
                unread |= self._left_out(
                    {topic for topic, _ in ends},
                    ends,
                    NOT_READ,
                )

    @staticmethod
    def _left_out(topics: Iterable[str], ends: dict[SourceName, int], reason: str) -> dict[str, str]:
        for place in [place for place in ends if place[0] in set(topics)]:
            del ends[place]
        return dict.fromkeys(topics, reason)


def _unanswered(reason: str) -> EnvironmentFailure:
    return EnvironmentFailure(
        "cannot look up what a transaction has written",
        hint="Check that the brokers are reachable. Delivery waits for them.",
        reason=reason,
        code="DB-3090",
    )
