"""Topics, producing and reading, for demo, bench and tests."""

from __future__ import annotations

import itertools
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self, cast

from confluent_kafka import (
    OFFSET_BEGINNING,
    Consumer,
    IsolationLevel,
    KafkaError,
    KafkaException,
    Message,
    Producer,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # public, but not marked as exported
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    NewTopic,
    OffsetSpec,
    ResourcePatternType,
    ResourceType,
)

from dev.harness.pace import scaled
from dev.harness.waiting import wait_until
from timerstore.clock import SystemClock

Headers = Sequence[tuple[str, bytes | None]]

REQUEST_TIMEOUT_S: Final = scaled(30)
POLL_RECORDS: Final = 2_000
PACE_S: Final = 0.005
CALM: Final = {"enable.sparse.connections": "false"}
"""Of clients that ask particular nodes: else one that is dead is tried without a pause, for most of a core."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """A record to produce. `partition` None: the partitioner decides."""

    topic: str
    value: bytes | None = b""
    key: bytes | None = None
    headers: Headers = ()
    partition: int | None = None
    timestamp_ms: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRecord:
    """A record from a reader; `timestamp_ms` is the broker's or the producer's, as `timestamp_type` says."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    timestamp_type: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]

    def header(self, name: str) -> bytes | None:
        """The last header of that name. Raises KeyError without one."""
        return dict(self.headers)[name]


AUTHORIZER: Final = {
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    # All users have all rights, except for those that a test forbids.
    "allow.everyone.if.no.acl.found": "true",
}
"""Properties of a broker."""


class Topics:
    """Makes topics with names of their own, so that tests on one broker cannot meet."""

    def __init__(self, bootstrap: str, client: Mapping[str, Any] | None = None) -> None:
        """`client` are properties with which the broker lets an administrator in."""
        self.bootstrap = bootstrap
        # Otherwise a look-up of a deleted topic would make it again, on a broker that creates topics on request.
        own = {"bootstrap.servers": bootstrap, "allow.auto.create.topics": "false", **CALM}
        self.admin = AdminClient({**(client or {}), **own})

    def create(
        self,
        name: str = "topic",
        *,
        exactly: str | None = None,
        partitions: int = 1,
        config: Mapping[str, str] | None = None,
        on: int | None = None,
    ) -> str:
        """A new topic whose name begins with `name` (or is `exactly` that), all of it `on` that node if one is given;
        returns the name when clients can see the topic.
        """
        topic = exactly or f"{name}-{uuid.uuid4().hex[:8]}"
        where: dict[str, Any] = (
            {"replication_factor": -1} if on is None else {"replica_assignment": [[on]] * partitions}
        )
        new = NewTopic(topic, num_partitions=partitions, config=dict(config or {}), **where)
        self.admin.create_topics([new], operation_timeout=REQUEST_TIMEOUT_S)[topic].result(REQUEST_TIMEOUT_S)
        wait_until(lambda: self._partitions(topic) == partitions, REQUEST_TIMEOUT_S, f"topic {topic} in the metadata")
        return topic

    def delay(
        self,
        name: str = "delay",
        *,
        partitions: int = 1,
        config: Mapping[str, str] | None = None,
        on: int | None = None,
    ) -> str:
        """A delay topic as it must be: the broker's timestamps, nothing compacted."""
        must = {"message.timestamp.type": "LogAppendTime", "cleanup.policy": "delete"}
        return self.create(name, partitions=partitions, config={**must, **(config or {})}, on=on)

    def delete(self, *topics: str) -> None:
        """Delete topics and wait until they are gone."""
        for deleted in self.admin.delete_topics(list(topics)).values():
            deleted.result(REQUEST_TIMEOUT_S)
        wait_until(lambda: not any(self._partitions(topic) for topic in topics), REQUEST_TIMEOUT_S, "topics gone")

    def forbid(self, topic: str, operation: str = "WRITE") -> None:
        """Withdraw a right from all users (on brokers with the `AUTHORIZER`)."""
        self.admin.create_acls([_acl(topic, "ALL", "ALLOW"), _acl(topic, operation, "DENY")])
        wait_until(lambda: not self._may(topic, operation), REQUEST_TIMEOUT_S, f"{topic} is forbidden")

    def permit(self, topic: str, operation: str = "WRITE") -> None:
        """Undo `forbid`."""
        both = [_acl(topic, "ALL", "ALLOW", AclBindingFilter), _acl(topic, operation, "DENY", AclBindingFilter)]
        for gone in self.admin.delete_acls(both).values():
            assert gone.result(REQUEST_TIMEOUT_S)
        wait_until(lambda: self._may(topic, operation), REQUEST_TIMEOUT_S, f"{topic} is permitted")

    def _may(self, topic: str, operation: str) -> bool:
        described = self.admin.describe_topics(TopicCollection([topic]), include_authorized_operations=True)
        return AclOperation[operation] in described[topic].result(REQUEST_TIMEOUT_S).authorized_operations

    def _partitions(self, topic: str) -> int:
        found = self.admin.list_topics(timeout=REQUEST_TIMEOUT_S).topics.get(topic)
        return 0 if found is None or found.error is not None else len(found.partitions)


def _acl(topic: str, operation: str, permission: str, make: Any = AclBinding) -> Any:
    return make(
        ResourceType.TOPIC,
        topic,
        ResourcePatternType.LITERAL,
        "User:ANONYMOUS",
        "*",
        AclOperation[operation],
        AclPermissionType[permission],
    )


def produce(bootstrap: str, records: Iterable[Outgoing], **settings: str | int) -> list[ReadRecord]:
    """Produce and flush; returns the written records, with offsets, in the given order. Raises KafkaException."""
    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 1, "enable.idempotence": True, **settings})
    return produce_with(producer, records)


def produce_with(producer: Producer, records: Iterable[Outgoing]) -> list[ReadRecord]:
    """As `produce`, with a producer of the caller's: inside its transaction, if it has one."""
    numbers = itertools.count()
    written: dict[int, ReadRecord] = {}
    failed: list[KafkaError] = []

    def on_delivery(number: int) -> Callable[[KafkaError | None, Message], None]:
        def delivered(error: KafkaError | None, message: Message) -> None:
            if error is None:
                written[number] = _record(message)
            else:
                failed.append(error)

        return delivered

    send_all(producer, records, lambda: on_delivery(next(numbers)))
    if failed:
        raise KafkaException(failed[0])
    return [written[number] for number in sorted(written)]


def send_all(
    producer: Producer,
    records: Iterable[Outgoing],
    on_delivery: Callable[[], Callable[[KafkaError | None, Message], None]] | None = None,
    *,
    per_second: float | None = None,
) -> None:
    """Produce at a rate, or as fast as the producer's queue takes them, and flush; each record has a callback of its
    own, if any. Raises AssertionError when not all are acknowledged in time, and KafkaException.
    """
    clock = SystemClock()
    began_s = clock.monotonic_s()
    for number, record in enumerate(records, 1):
        given: dict[str, Any] = {"partition": record.partition, "timestamp": record.timestamp_ms}
        given = {name: value for name, value in given.items() if value is not None}
        if on_delivery is not None:
            given["on_delivery"] = on_delivery()
        headers = cast("list[tuple[str, str | bytes | None]]", list(record.headers))
        while True:
            try:
                producer.produce(record.topic, value=record.value, key=record.key, headers=headers, **given)
                break
            except BufferError:
                producer.poll(PACE_S)
        ahead_s = 0 if per_second is None else number / per_second - (clock.monotonic_s() - began_s)
        producer.poll(ahead_s if ahead_s > PACE_S else 0)
    left = producer.flush(REQUEST_TIMEOUT_S)
    assert left == 0, f"{left} records were not acknowledged in {REQUEST_TIMEOUT_S} s"


class TopicReader:
    """Reads topics from their beginning, without a group, into `records`.

    with TopicReader(broker.bootstrap, [topic]) as reader:
        reader.wait_for(10, deadline_s=5)
    """

    def __init__(
        self,
        bootstrap: str,
        topics: Sequence[str],
        *,
        isolation: str = "read_committed",
        client: Mapping[str, Any] | None = None,
    ) -> None:
        """`client` are properties with which the broker lets a reader in."""
        self.records: list[ReadRecord] = []
        self._consumer = Consumer(
            {
                **(client or {}),
                "bootstrap.servers": bootstrap,
                "group.id": f"reader-{uuid.uuid4().hex}",
                "isolation.level": isolation,
                "enable.auto.commit": False,
                "enable.partition.eof": True,
                "auto.offset.reset": "error",
                "fetch.wait.max.ms": 50,
                "allow.auto.create.topics": False,
            }
        )
        assigned = []
        for topic in topics:
            metadata = self._consumer.list_topics(topic, timeout=REQUEST_TIMEOUT_S).topics[topic]
            if metadata.error is not None:
                raise KafkaException(metadata.error)
            assigned += [TopicPartition(topic, partition, OFFSET_BEGINNING) for partition in metadata.partitions]
        self._partitions = frozenset((each.topic, each.partition) for each in assigned)
        self._at_end: set[tuple[str, int]] = set()
        self._until: dict[tuple[str, int], int] = {}
        self._admin = AdminClient({**(client or {}), "bootstrap.servers": bootstrap, **CALM})
        self._consumer.assign(assigned)

    def poll(self, timeout_s: float = 0.05) -> int:
        """Read the available records, waiting up to `timeout_s` for a first one; returns their number."""
        count = 0
        for message in self._consumer.consume(POLL_RECORDS, timeout_s):
            place = (message.topic() or "", message.partition() or 0)
            error = message.error()
            if error is None:
                self.records.append(_record(message))
                self._at_end.discard(place)
                count += 1
            elif error.code() == KafkaError._PARTITION_EOF:
                if (message.offset() or 0) >= self._until.get(place, 0):
                    self._at_end.add(place)
            elif not error.retriable():
                raise KafkaException(error)
        return count

    def to_end(self, deadline_s: float = REQUEST_TIMEOUT_S, *, open_too: bool = True) -> list[ReadRecord]:
        """Read all that has been written by now. A transaction's records become visible a moment after the answer to
        its commit: where there are open ones, their end is waited for, unless `open_too` is false.
        """
        self._at_end.clear()
        self._until = self._written() if open_too else {}
        # A reader reports the end of a partition only once: a seek to the present position makes it report the end
        # again.
        positions = self._consumer.position([TopicPartition(*place) for place in self._partitions])
        for position in positions:
            if position.offset < 0:
                position.offset = OFFSET_BEGINNING
        self._consumer.assign(positions)
        wait_until(lambda: self._advance() and self._at_end >= self._partitions, deadline_s, "the partitions' ends")
        return self.records

    def wait_for(self, count: int, deadline_s: float) -> list[ReadRecord]:
        """Read until there are at least `count` records. Raises AssertionError after `deadline_s`."""
        wait_until(
            lambda: self._advance() and len(self.records) >= count,
            deadline_s,
            lambda: f"{count} records, but {len(self.records)}",
        )
        return self.records

    def close(self) -> None:
        """Leave."""
        self._consumer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _advance(self) -> bool:
        self.poll()
        return True

    def _written(self) -> dict[tuple[str, int], int]:
        """The ends of the partitions, open transactions included."""
        asked = {TopicPartition(*place): OffsetSpec.latest() for place in self._partitions}  # type: ignore[no-untyped-call]
        answers = self._admin.list_offsets(
            asked, isolation_level=IsolationLevel.READ_UNCOMMITTED, request_timeout=REQUEST_TIMEOUT_S
        )
        return {(each.topic, each.partition): answer.result().offset for each, answer in answers.items()}


def read_committed(bootstrap: str, *topics: str) -> list[ReadRecord]:
    """All records that have been written by now and are not aborted, partition by partition in order of offset."""
    with TopicReader(bootstrap, topics) as reader:
        records = reader.to_end()
    return sorted(records, key=lambda record: (record.topic, record.partition, record.offset))


def assert_each_once(numbers: Iterable[int], count: int) -> None:
    """Each number below `count` is there once; a failure names some of the missing or repeated ones."""
    seen = Counter(numbers)
    missing = [number for number in range(count) if number not in seen]
    doubled = [number for number, times in seen.items() if times > 1]
    assert not missing, f"{len(missing)} of {count} are missing: {missing[0]} to {missing[-1]}"
    assert not doubled, f"{len(doubled)} of {count} came more than once: {min(doubled)} to {max(doubled)}"
    assert len(seen) == count, f"{len(seen) - count} were never sent"


def _record(message: Message) -> ReadRecord:
    timestamp_type, timestamp_ms = message.timestamp()
    topic, partition, offset = message.topic(), message.partition(), message.offset()
    assert topic is not None
    assert partition is not None
    assert offset is not None
    return ReadRecord(
        topic=topic,
        partition=partition,
        offset=offset,
        timestamp_ms=timestamp_ms,
        timestamp_type=timestamp_type,
        key=message.key(),
        value=message.value(),
        headers=tuple(cast("list[tuple[str, bytes | None]]", message.headers() or [])),
    )
