"""bridge.ingest.plain_reader on a broker: its records, and its ends of partitions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from confluent_kafka import Producer, TopicPartition

from bridge.errors import StateError
from bridge.ingest.plain_reader import NOTHING, PlainReader, Read, by_source
from bridge.settings.clients import librdkafka
from bridge.stores.names import SourceName
from bridge.wire.decode_epochs import DecodeEpoch, DecodeParameters
from dev.harness.kafka import Outgoing, Topics, produce
from dev.harness.waiting import wait_until
from tests.broker.rig import DEADLINE_S, settings_for
from tests.system.broker import Broker
from tests.system.damage import VERSION, flip_a_bit
from tests.system.raw import RawRecord, produce_raw
from timerstore.clock import SystemClock

pytestmark = pytest.mark.system

PARAMETERS = DecodeParameters(max_delay_ms=10**9, roll_window_ms=10**9, has_default_target=True)
HEADERS: list[tuple[str, bytes | None]] = [("delay-for", b"1h")]
SENT: Any = HEADERS
"""As the client takes them."""


class Reading:
    """A reader, and everything that it has handed out."""

    def __init__(self, broker: Broker, topic: str, partitions: int) -> None:
        self.names: list[SourceName] = [(topic, partition) for partition in range(partitions)]
        all_epochs = dict.fromkeys(self.names, (DecodeEpoch(offset=0, parameters=PARAMETERS),))
        settings = settings_for(broker.bootstrap, topic)
        self.reader = PlainReader(librdkafka(settings, "reader"), f"{topic}-reader", all_epochs, SystemClock())
        self.offsets: dict[SourceName, list[int]] = {name: [] for name in self.names}
        self.ends: dict[SourceName, int] = {}
        self.at_end: set[SourceName] = set()
        self.left: list[tuple[SourceName, str]] = []
        self.entries: list[dict[str, Any]] = []

    def until(self, condition: Callable[[], object]) -> None:
        """Poll until it is so."""

        def met() -> object:
            read = self.reader.poll()
            for name, offsets in by_source(read.entries):
                self.offsets[name] += offsets.tolist()
            self.entries += read.entries.to_pylist()
            self.ends |= read.ends
            self.at_end |= read.at_end
            self.left += read.left.items()
            return condition()

        wait_until(met, DEADLINE_S, lambda: f"{self.offsets} {self.ends}")


@pytest.fixture
def reading(broker: Broker) -> Iterator[Callable[..., Reading]]:
    made: list[Reading] = []

    def make(topic: str, partitions: int = 1) -> Reading:
        made.append(Reading(broker, topic, partitions))
        return made[-1]

    yield make
    for each in made:
        each.reader.close()


def test_committed_records_in_their_order_and_the_end_behind_markers(
    broker: Broker, topics: Topics, reading: Callable[..., Reading]
) -> None:
    """Aborted records are not there, the end lies behind the last marker, and an open transaction holds back what
    follows it."""
    topic = topics.delay()
    name = (topic, 0)
    producer = Producer({"bootstrap.servers": broker.bootstrap, "transactional.id": topic})
    producer.init_transactions(DEADLINE_S)
    for is_kept in (True, False):
        producer.begin_transaction()
        for _ in range(3):
            producer.produce(topic, b"v", headers=SENT)
        producer.flush(DEADLINE_S)
        (producer.commit_transaction if is_kept else producer.abort_transaction)(DEADLINE_S)
    mine = reading(topic)
    mine.reader.assign({name: 0})
    mine.until(lambda: name in mine.at_end)
    assert mine.offsets[name] == [0, 1, 2] and mine.ends[name] == 8, "three, a marker, three, a marker"
    producer.begin_transaction()
    producer.produce(topic, b"v", headers=SENT)
    producer.flush(DEADLINE_S)
    produce(broker.bootstrap, [Outgoing(topic=topic, value=b"v", headers=HEADERS)])
    mine.at_end.clear()
    mine.reader.assign({name: 8})
    mine.until(lambda: name in mine.at_end)
    assert mine.offsets[name] == [0, 1, 2] and mine.ends[name] == 8
    producer.commit_transaction(DEADLINE_S)
    mine.until(lambda: mine.ends[name] == 11)
    assert mine.offsets[name] == [0, 1, 2, 8, 9]


def test_a_client_whose_partitions_were_all_paused_is_woken(
    topics: Topics, reading: Callable[..., Reading], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread would look again a second later. One that still fetches from a partition needs no waking."""
    bench, woken = reading(topics.create(partitions=2), 2), list[int]()
    monkeypatch.setattr(PlainReader, "_wake", lambda _: woken.append(1))
    start = dict.fromkeys(bench.names, 0)
    for paused, wakes in ((0, 0), (2, 1), (0, 1), (1, 1), (2, 2)):
        for name in bench.names[:paused]:
            bench.reader._leave(name, "a test", Read(entries=NOTHING))
        bench.reader.assign(start)
        assert len(woken) == wakes


def test_records_that_are_gone_are_told(broker: Broker, topics: Topics, reading: Callable[..., Reading]) -> None:
    """Not passed over: they may have been messages."""
    topic = topics.delay()
    produce(broker.bootstrap, [Outgoing(topic=topic, value=b"v", headers=HEADERS) for _ in range(10)])
    for deleted in topics.admin.delete_records([TopicPartition(topic, 0, 5)]).values():
        deleted.result(DEADLINE_S)
    mine = reading(topic)
    mine.reader.assign({(topic, 0): 0})
    with pytest.raises(StateError, match="deleted before") as raised:
        mine.until(lambda: False)
    assert raised.value.code == "DB-4011"


def test_what_this_client_cannot_read_is_left_to_spark(
    broker: Broker, topics: Topics, reading: Callable[..., Reading]
) -> None:
    """A header's name that is no UTF-8: neither this record nor what follows in its partition is handed out, and no
    end is told beyond it."""
    topic = topics.delay(partitions=2)
    good = RawRecord(value=b"v", headers=[(b"delay-for", b"1h")])
    produce_raw(broker.bootstrap, topic, 0, [good, RawRecord(value=b"v", headers=[(b"\xff\xfe", b"1")]), good])
    produce_raw(broker.bootstrap, topic, 1, [good])
    mine = reading(topic, 2)
    a, b = mine.names
    mine.reader.assign({a: 0, b: 0})
    mine.until(lambda: mine.ends.get(a) == 1 and b in mine.at_end)
    for _ in range(3):
        mine.until(lambda: True)
    assert mine.offsets == {a: [0], b: [0]} and mine.ends == {a: 1, b: 1}
    assert [name for name, _ in mine.left] == [a]


@pytest.mark.fault("a bit that flips under the plain reader")
@pytest.mark.parametrize(("front", "reason"), [(None, "CRC"), (VERSION, "MagicByte")], ids=["checksum", "version"])
def test_a_corrupt_batch_is_left_and_nothing_of_its_partition_is_passed_over(
    broker: Broker, topics: Topics, reading: Callable[..., Reading], front: int | None, reason: str
) -> None:
    """The plain reader reports a corrupt batch once, with the reason, and takes no record behind it. Others are
    read."""
    topic = topics.delay(partitions=2)
    for partition, count in ((0, 3), (1, 1)):
        for _ in range(count):
            produce_raw(broker.bootstrap, topic, partition, [RawRecord(value=b"v", headers=[(b"delay-for", b"1h")])])
    flip_a_bit(broker, topic, 0, 1, front=front)
    mine = reading(topic, 2)
    a, b = mine.names
    mine.reader.assign({a: 0, b: 0})
    mine.until(lambda: mine.left and b in mine.at_end)
    for _ in range(3):
        mine.until(lambda: True)
    assert mine.offsets == {a: [0], b: [0]} and mine.ends == {a: 1, b: 1}
    [(left, why)] = mine.left
    assert left == a and reason in why


def test_a_record_without_a_timestamp_is_refused_with_the_one_that_spark_reads(
    broker: Broker, topics: Topics, reading: Callable[..., Reading]
) -> None:
    """-1, which only a topic takes that keeps its producers' timestamps."""
    topic = topics.delay(config={"message.timestamp.type": "CreateTime", "retention.ms": "-1"})
    produce_raw(broker.bootstrap, topic, 0, [RawRecord(value=b"v", headers=[(b"delay-for", b"1h")])], ts_ms=-1)
    mine = reading(topic)
    mine.reader.assign({(topic, 0): 0})
    mine.until(lambda: (topic, 0) in mine.at_end)
    (entry,) = mine.entries
    assert (entry["reason"], entry["ts"], entry["due"]) == ("create-time", -1, -1)
