"""bridge.ingest.batches.reader on a broker: its findings in batches that end other readers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from confluent_kafka import Producer

from bridge.errors import EnvironmentFailure, StateError
from bridge.ingest.batches.reader import BatchReader, CorruptBatch, End, Found, Stretch, TooLargeRecord
from bridge.install import connector
from bridge.kafka.errors import RECORDS_GONE
from bridge.settings.clients import java_client
from bridge.stores.names import SourceName
from bridge.wire.received import Record
from dev.harness.kafka import Outgoing, Topics, produce
from tests.broker.rig import DEADLINE_S, settings_for
from tests.system.broker import Broker
from tests.system.damage import VERSION, flip_a_bit
from tests.system.raw import RawRecord, produce_raw

pytestmark = pytest.mark.system

FAR = 10**12
LARGE = 1 << 20


def found(broker: Broker, *places: tuple[SourceName, int, int]) -> list[tuple[SourceName, Found]]:
    settings = settings_for(broker.bootstrap, places[0][0][0])
    reader = BatchReader(lambda: java_client(settings), connector.jars)
    stretches = [Stretch(name=name, begin=begin, end=end) for name, begin, end in places]
    return list(reader.read(stretches, record_bytes_max=LARGE))


def offsets(read: Sequence[tuple[SourceName, Found]], name: SourceName) -> list[int]:
    return [each.offset for where, each in read if where == name and isinstance(each, Record)]


@pytest.mark.fault("a batch that holds a thousand times its size")
def test_a_record_that_cannot_be_held_is_told_and_those_around_it_are_read(broker: Broker, topics: Topics) -> None:
    """A record beyond the limit is reported with its place, for each codec, and the records around it are read; aborted
    records and markers are left out."""
    topic = topics.delay(partitions=4)
    for partition, codec in enumerate(("gzip", "zstd", "lz4", "snappy")):
        producer = Producer(
            {
                "bootstrap.servers": broker.bootstrap, "compression.type": codec, "linger.ms": 1_000,
                "message.max.bytes": 8 << 20, "batch.size": 8 << 20, "transactional.id": f"{topic}-{partition}",
            }
        )  # fmt: skip
        producer.init_transactions(DEADLINE_S)
        for is_kept in (True, False):
            producer.begin_transaction()
            for value in (b"a", b"b" * (2 * LARGE if codec != "snappy" else LARGE), b"c"):
                producer.produce(topic, value, b"key", partition, headers=[("delay-for", b"1h"), ("none", None)])
            producer.flush(DEADLINE_S)
            (producer.commit_transaction if is_kept else producer.abort_transaction)(DEADLINE_S)
    names = [(topic, partition) for partition in range(4)]
    read = found(broker, *((name, 0, FAR) for name in names))
    for name in names:
        mine = [each for where, each in read if where == name]
        assert [type(each) for each in mine] == [Record, TooLargeRecord, Record, End]
        first, large, last, end = mine
        assert isinstance(first, Record) and isinstance(large, TooLargeRecord) and isinstance(last, Record)
        assert (first.key, first.value, first.headers) == (b"key", b"a", [("delay-for", b"1h"), ("none", None)])
        assert (large.offset, last.offset, last.value) == (1, 2, b"c") and large.size > LARGE
        assert large.by_broker and large.ts == first.ts > 0 and isinstance(end, End) and end.offset == 8


@pytest.mark.fault("a record of headers that are empty, more than memory can hold")
def test_a_record_of_more_headers_than_can_be_held_is_told(broker: Broker, topics: Topics) -> None:
    """A record of more headers than memory can hold is reported with its size, and the records around it are read."""
    name = (topics.delay(), 0)
    empty = [(b"", None)] * (LARGE // 100)
    records = [RawRecord(headers=empty[:-1_000]), RawRecord(headers=empty), RawRecord(value=b"c")]
    produce_raw(broker.bootstrap, *name, records)
    first, large, last, end = (each for _, each in found(broker, (name, 0, FAR)))
    assert isinstance(first, Record) and len(first.headers) == len(empty) - 1_000
    assert isinstance(large, TooLargeRecord) and large.offset == 1 and large.size > LARGE
    assert isinstance(last, Record) and last.value == b"c" and end == End(offset=3)


@pytest.mark.fault("a bit that flips on a broker's disk")
def test_a_corrupt_batch_is_told_with_its_end_and_ends_its_partition_alone(broker: Broker, topics: Topics) -> None:
    """A corrupt batch is reported with its end, with and without a batch behind it, and holds its own partition alone.
    The batch's own end may be the damaged field."""
    topic = topics.delay(partitions=3)
    a, b, c = ((topic, partition) for partition in range(3))
    for partition in range(3):
        for _ in range(2):
            produce_raw(broker.bootstrap, topic, partition, [RawRecord(value=b"v")] * 3)
    flip_a_bit(broker, topic, 0, 1)
    flip_a_bit(broker, topic, 1, 4)
    read = found(broker, (a, 0, FAR), (b, 2, FAR), (c, 4, 5))
    told = {name: each for name, each in read if isinstance(each, CorruptBatch)}
    assert (told[a].offset, told[a].next) == (0, 3) and "crc" in told[a].reason
    assert (told[b].offset, told[b].next) == (3, 6)
    assert [offsets(read, name) for name in (a, b, c)] == [[], [2], [4, 5]], "a stretch ends where a batch does"
    assert read[-1] == (c, End(offset=6))
    assert offsets(found(broker, (a, 3, FAR)), a) == [3, 4, 5], "behind it"


def test_a_batch_of_a_version_that_nobody_writes_is_corrupt_and_no_failure(broker: Broker, topics: Topics) -> None:
    """So are batches without recognisable ends; earlier ones are read."""
    topic = topics.delay(partitions=2)
    a, b = (topic, 0), (topic, 1)
    for partition in range(2):
        for _ in range(3):
            produce_raw(broker.bootstrap, topic, partition, [RawRecord(value=b"v")] * 3)
    flip_a_bit(broker, topic, 0, 1, front=VERSION)
    flip_a_bit(broker, topic, 1, 4, front=VERSION)
    read = found(broker, (a, 0, FAR), (b, 0, FAR))
    told = {name: (each.offset, each.next) for name, each in read if isinstance(each, CorruptBatch)}
    assert told == {a: (0, 3), b: (3, 6)} and offsets(read, b) == [0, 1, 2]
    assert offsets(found(broker, (a, 3, FAR)), a) == [3, 4, 5, 6, 7, 8], "behind it"


def test_what_only_java_reads_is_read_as_java_reads_it(broker: Broker, topics: Topics) -> None:
    """A name that is no UTF-8, or holds NUL. Where nothing is, nothing is found."""
    topic = topics.delay(partitions=2)
    headers = [(b"\xff\xfe", b"1"), (b"a\0b", None)]
    produce_raw(broker.bootstrap, topic, 0, [RawRecord(value=None, key=b"k", headers=headers)])
    first, *rest = found(broker, ((topic, 0), 0, FAR), ((topic, 1), 0, FAR))
    record = first[1]
    assert isinstance(record, Record) and record.value is None and record.key == b"k"
    assert record.headers == [("\ufffd\ufffd", b"1"), ("a\0b", None)]
    assert [each for _, each in rest] == [End(offset=1), End(offset=0)]


def test_brokers_that_do_not_answer_are_a_failure_and_records_that_are_gone_another(
    broker: Broker, topics: Topics
) -> None:
    """Neither is damage. Nobody waits for an offset that the log does not have."""
    topic = topics.delay()
    produce(broker.bootstrap, [Outgoing(topic=topic, value=b"v")])
    with pytest.raises(StateError) as raised:
        found(broker, ((topic, 0), 7, FAR))
    assert raised.value.code == RECORDS_GONE and raised.value.fields["wanted"] == 7
    with pytest.raises(EnvironmentFailure) as failed:
        found(broker, (("no-such-topic", 0), 0, FAR))
    assert failed.value.code == "DB-3060"
