"""The plain reader: a consumer in Python that reads the delay topics while Spark's query does not.

It bridges a start of Spark's JVM, and of a query; and it finds the real ends of partitions. Its contract is the
query's: `read_committed`, exact offsets, order within a partition, the same entries (decode_records.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from confluent_kafka import (
    OFFSET_END,
    TIMESTAMP_LOG_APPEND_TIME,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
)

from bridge.errors import EnvironmentFailure
from bridge.ingest.decode_records import decode_records
from bridge.kafka.construction import made
from bridge.kafka.errors import records_gone
from bridge.stores.names import Offsets, SourceName
from bridge.wire.decode_epochs import DecodeEpochs
from bridge.wire.received import Record, headers_of
from timerstore.clock import Clock

RECORDS_MAX: Final = 2_000
BYTES_MAX: Final = 1 << 20
POLL_S: Final = 0.2
WAKE_S: Final = 1.0
"""A shorter time-out would end the connection of a slower broker."""
GATHER_S: Final = 0.01
"""The wait after the first record: single records cost more in overhead than in work."""
WAIT_SHARE: Final = 4
LATEST_S: Final = 0.2
"""A record waits for others for this share (1 / 4) of the time until it is due, up to LATEST_S, as in the query's
frames (java/FrameWriter.java): a batch costs as much as a hundred records for each of its partitions."""

UNREADABLE: Final = (
    KafkaError._BAD_MSG,
    KafkaError._BAD_COMPRESSION,
    KafkaError._NOT_IMPLEMENTED,
    KafkaError.INVALID_MSG,
)
"""Codes of batches that the client cannot read, such as a wrong checksum. Behind a batch of an unknown version it goes
on (a flipped bit: no checksum covers that)."""

FORCED: Final[Mapping[str, Any]] = {
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "auto.offset.reset": "error",
    "isolation.level": "read_committed",
    "check.crcs": True,
    "enable.partition.eof": True,
    # The limit of unread records: librdkafka's queue, in place of its 64 MiB.
    "queued.max.messages.kbytes": 8 << 10,
    "queued.min.messages": 2_000,
    # With a full queue, librdkafka fetches again only a second later, and likewise after another `assign`.
    "fetch.queue.backoff.ms": 10,
    # The group's consumer logs the absence of brokers. This client is not polled while the query serves: its own log
    # would go to standard error, twenty lines a second, or wait here without a limit.
    "log_level": 0,
}


@dataclass(slots=True)
class Read:
    """Entries, their exclusive ends, the partitions that were read to their ends, and those that this client cannot
    read on, with the reasons."""

    entries: pa.Table
    ends: dict[SourceName, int] = field(default_factory=dict)
    at_end: set[SourceName] = field(default_factory=set)
    left: dict[SourceName, str] = field(default_factory=dict)


class PlainReader:
    """See the module. For one thread."""

    def __init__(
        self,
        properties: Mapping[str, Any],
        group: str,
        all_epochs: Mapping[SourceName, DecodeEpochs],
        clock: Clock,
    ) -> None:
        """`group` is one that the bridge has rights on; the reader neither joins it nor commits anything. Raises
        EnvironmentFailure."""
        self._all_epochs = all_epochs
        self._clock = clock
        self._consumer = made("for reading", lambda: Consumer({**properties, **FORCED, "group.id": group}))
        self._unreadable: set[SourceName] = set()
        self._assigned: set[SourceName] = set()

    def assign(self, offsets: Offsets) -> None:
        """Read on from these offsets; without any, read nothing."""
        had_paused_all = self._unreadable and self._unreadable == self._assigned
        self._unreadable.clear()
        self._assigned = set(offsets)
        partitions = [TopicPartition(*name, offset) for name, offset in sorted(offsets.items())]
        self._consumer.assign(partitions)
        if partitions:
            self._consumer.resume(partitions)  # an assignment ends no pause
            if had_paused_all:
                self._wake()

    def _wake(self) -> None:
        """Wake librdkafka's thread of a broker. If all its partitions were paused, an idle thread notices the end of a
        pause only a second later (seen in 2.16): it gets a request for an end offset. No fetch is in flight then, so
        the answer comes at once."""
        ends = [TopicPartition(*name, OFFSET_END) for name in sorted(self._assigned)]
        with suppress(KafkaException):  # the request alone wakes the thread
            self._consumer.offsets_for_times(ends, WAKE_S)

    def poll(self) -> Read:
        """The records that arrive within POLL_S, and those that follow while these may wait. Raises StateError for gone
        records, EnvironmentFailure for lasting errors."""
        read, parts, leave_s, wait_s = Read(entries=NOTHING), list[pa.Table](), inf, POLL_S
        while wait_s > 0:
            records = self._records(wait_s, read)
            if records:
                parts.append(decode_records(records, self._all_epochs))
                leave_s = min(leave_s, self._leave_s(parts[-1]))
            is_full = sum(map(len, parts)) >= RECORDS_MAX or sum(each.nbytes for each in parts) >= BYTES_MAX
            is_over = not parts or read.left or is_full
            wait_s = 0.0 if is_over else leave_s - self._clock.monotonic_s()
        if parts:
            read.entries = pa.concat_tables(parts).combine_chunks()
        return read

    def _leave_s(self, entries: pa.Table) -> float:
        """The latest time of the store for these; a replacement acts when it is read."""
        is_urgent = pc.any(entries.column("replace")).as_py()
        left_ms = 0 if is_urgent else max(0, pc.min(entries.column("at")).as_py() - self._clock.now_ms())
        return self._clock.monotonic_s() + min(left_ms / 1_000 / WAIT_SHARE, LATEST_S)

    def _records(self, wait_s: float, read: Read) -> list[Record]:
        """The records that arrive in this time; `read` gets their ends."""
        first = self._consumer.poll(wait_s)
        messages = [] if first is None else [first, *self._consumer.consume(RECORDS_MAX - 1, GATHER_S)]
        records: list[Record] = []
        for message in messages:
            name = (message.topic() or "", message.partition() or 0)
            error = message.error()
            if error is not None:
                self._judge(error, name, message, read)
            elif name not in self._unreadable:
                record = _record(message)
                if record is None:
                    self._leave(name, "the name of a header is not UTF-8", read)
                else:
                    records.append(record)
                    read.ends[name] = record.offset + 1
                    read.at_end.discard(name)
        return records

    def ask(
        self, at: Offsets, beat: Callable[[], None], is_over: Callable[[], bool]
    ) -> tuple[Offsets, set[SourceName]]:
        """The ends of those partitions without further records, and the other partitions; less when it `is_over`."""
        self.assign(at)
        ends: dict[SourceName, int] = {}
        filled: set[SourceName] = set()
        while len(ends.keys() | filled) < len(at) and not is_over():
            beat()
            read = self.poll()
            filled |= {name for name, _ in by_source(read.entries)} | read.left.keys()
            ends |= {name: read.ends[name] for name in read.at_end}
        self.assign({})
        return {name: end for name, end in ends.items() if name not in filled}, filled

    def close(self) -> None:
        self._consumer.close()

    def _judge(self, error: KafkaError, name: SourceName, message: Message, read: Read) -> None:
        code = error.code()
        if code == KafkaError._PARTITION_EOF:
            if name not in self._unreadable:
                read.ends[name] = message.offset() or 0
                read.at_end.add(name)
        elif code in UNREADABLE:
            self._leave(name, error.str(), read)
        elif code in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
            raise records_gone(topic=name[0], partition=name[1], reason=error.str())
        elif error.fatal():
            raise EnvironmentFailure(
                "the consumer of the delay topics has failed",
                hint="Check the brokers, and the log above.",
                reason=error.str(),
                code="DB-3031",
            )

    def _leave(self, name: SourceName, why: str, read: Read) -> None:
        """Leave a partition that this client cannot read on: the client would skip records, or ask for them without
        end. Another reader has them, and all that follow."""
        if name not in self._unreadable:  # fetched records still come, possibly thousands
            self._unreadable.add(name)
            read.left[name] = why
            self._consumer.pause([TopicPartition(*name)])


def by_source(entries: pa.Table) -> list[tuple[SourceName, np.ndarray[tuple[int], np.dtype[np.int64]]]]:
    """The offsets of each partition in these entries, in the order of its rows."""
    if not len(entries):
        return []
    topic = entries.column("topic").combine_chunks().dictionary_encode()
    names = topic.dictionary.to_pylist()
    keys = topic.indices.to_numpy().astype(np.int64) << 32 | entries.column("partition").to_numpy()
    order = np.argsort(keys, kind="stable")
    keys, offset = keys[order], entries.column("offset").to_numpy()[order]
    begins = np.flatnonzero(np.r_[True, keys[1:] != keys[:-1]])
    stretches = zip(keys[begins].tolist(), np.split(offset, begins[1:]), strict=True)
    return [((names[key >> 32], key & 0xFFFFFFFF), offsets) for key, offsets in stretches]


def new_records(entries: pa.Table, before: Offsets, after: Offsets) -> list[tuple[str, int]]:
    """The number of entries from one of these offsets to the other, by topic and partition; their topics."""
    counts = (
        (name[0], int(np.count_nonzero((offsets >= before[name]) & (offsets < after[name]))))
        for name, offsets in by_source(entries)
        if name in before and name in after
    )
    return [(topic, count) for topic, count in counts if count]


def _record(message: Message) -> Record | None:
    headers = headers_of(message)
    if headers is None:
        return None
    kind, ts = message.timestamp()
    return Record(
        topic=message.topic() or "",
        partition=message.partition() or 0,
        offset=message.offset() or 0,
        ts=ts,
        by_broker=kind == TIMESTAMP_LOG_APPEND_TIME,
        key=message.key(),
        value=message.value(),
        headers=headers,
    )


NOTHING: Final = decode_records([], {})
