"""bridge.received on a broker: records that no client of ours would write can be read."""

from __future__ import annotations

import pytest
from confluent_kafka import Consumer, KafkaException, Message, TopicPartition

from bridge.wire.received import FRAMING_BYTES, HEADER_BYTES, UNREADABLE_BYTES, headers_of, message_bytes
from dev.harness.kafka import Topics
from tests.broker.rig import DEADLINE_S
from tests.paths import ROOT
from tests.system.broker import Broker
from tests.system.raw import RawRecord, produce_raw

RECORDS = [
    RawRecord(value=b"v", key=b"k", headers=[(b"a", None), (b"", b"12")]),
    RawRecord(value=None, headers=[(b"\xff\xfe", b"1")]),
    RawRecord(value=b"v", headers=[(b"\xed\xa0\x80", b"1")]),
]


def messages(broker: Broker, topic: str) -> list[Message]:
    consumer = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": "received"})
    consumer.assign([TopicPartition(topic, 0, 0)])
    try:
        found = consumer.consume(len(RECORDS), DEADLINE_S)
    finally:
        consumer.close()
    for message in found:
        if (error := message.error()) is not None:
            raise KafkaException(error)
    return found


@pytest.mark.system
def test_headers_that_are_no_utf_8_raise_nothing(broker: Broker, topics: Topics) -> None:
    """The client raises SystemError for them, and ends the process where it is asked again; they count as large as
    headers may be."""
    topic = topics.delay()
    produce_raw(broker.bootstrap, topic, 0, RECORDS)
    good, odd, surrogate = messages(broker, topic)
    assert (headers_of(good), headers_of(odd), headers_of(surrogate)) == ([("a", None), ("", b"12")], None, None)
    assert message_bytes(good) == 2 + 3 + 2 * HEADER_BYTES + FRAMING_BYTES
    assert (headers_of(odd), headers_of(surrogate)) == ([], [])
    assert message_bytes(messages(broker, topic)[1]) == UNREADABLE_BYTES + FRAMING_BYTES


def test_nothing_asks_the_client_for_headers_but_in_one_place() -> None:
    """Each other call may end the process."""
    sources = [path for package in ("bridge", "timerstore") for path in (ROOT / package).glob("**/*.py")]
    assert len(sources) > 100
    assert not [path for path in sources if ".headers()" in path.read_text(encoding="utf-8")]
