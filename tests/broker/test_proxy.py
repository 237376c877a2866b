"""The proxy that loses, delays and repeats requests, with plain clients: each fault has its effect."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import closing

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition

from dev.harness.kafka import Topics, read_committed
from dev.harness.waiting import wait_until
from dev.proxy import Api, Proxy, RequestFault
from tests.broker.rig import DEADLINE_S
from tests.system.broker import Broker

pytestmark = pytest.mark.system

FENCED = (KafkaError.INVALID_PRODUCER_EPOCH, KafkaError.PRODUCER_FENCED)


@pytest.fixture(scope="module")
def proxy(broker: Broker) -> Iterator[Proxy]:
    with Proxy(broker.bootstrap) as running:
        yield running


@pytest.fixture(autouse=True)
def _nothing_is_injected_any_more(proxy: Proxy) -> Iterator[None]:
    yield
    proxy.clear()


def producer_of(proxy: Proxy, name: str) -> Producer:
    """An initialised one."""
    settings = {
        "bootstrap.servers": proxy.bootstrap,
        "transactional.id": name,
        "retry.backoff.ms": 1,
        "reconnect.backoff.ms": 5,
    }
    producer = Producer(settings)
    producer.init_transactions(DEADLINE_S)
    return producer


def write(producer: Producer, topic: str, value: bytes) -> None:
    """One record, acknowledged."""
    producer.produce(topic, value)
    assert producer.flush(DEADLINE_S) == 0


@pytest.mark.parametrize("is_renewed", [False, True], ids=["same-epoch", "new-epoch"])
def test_a_late_end_ends_the_next_transaction_of_the_same_epoch(
    proxy: Proxy, broker: Broker, topics: Topics, *, is_renewed: bool
) -> None:
    """A record of an aborted transaction is seen as committed, unless the epoch is a new one."""
    topic, name = topics.create(), f"id-{uuid.uuid4()}"
    late = proxy.inject(RequestFault.LATE, Api.END_TXN, name)
    producer = producer_of(proxy, name)
    producer.begin_transaction()
    write(producer, topic, b"first")
    producer.commit_transaction(DEADLINE_S)
    if is_renewed:
        producer = producer_of(proxy, name)
    producer.begin_transaction()
    write(producer, topic, b"aborted")
    [hit] = late.hits
    assert hit.is_over and hit.was_open
    if is_renewed:
        producer.abort_transaction(DEADLINE_S)
        assert hit.answer in FENCED
    else:
        with pytest.raises(KafkaException, match="INVALID_TXN_STATE"):
            producer.abort_transaction(DEADLINE_S)
        assert hit.answer == 0
    seen = [record.value for record in read_committed(broker.bootstrap, topic)]
    assert seen == ([b"first"] if is_renewed else [b"first", b"aborted"])


@pytest.mark.parametrize("is_renewed", [False, True], ids=["same-epoch", "new-epoch"])
def test_late_offsets_replace_later_ones_of_the_same_epoch(
    proxy: Proxy, broker: Broker, topics: Topics, *, is_renewed: bool
) -> None:
    """Without any error, unless the epoch is a new one."""
    topic, name = topics.create(), f"id-{uuid.uuid4()}"
    late = proxy.inject(RequestFault.LATE, Api.TXN_OFFSET_COMMIT, name, arrives=Api.TXN_OFFSET_COMMIT)
    producer = producer_of(proxy, name)
    consumer = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": name})
    with closing(consumer):
        metadata = consumer.consumer_group_metadata()
        for offset in (10, 20):
            if offset == 20 and is_renewed:
                producer = producer_of(proxy, name)
            producer.begin_transaction()
            producer.send_offsets_to_transaction([TopicPartition(topic, 0, offset)], metadata, DEADLINE_S)
            producer.commit_transaction(DEADLINE_S)
        [committed] = consumer.committed([TopicPartition(topic, 0)], DEADLINE_S)
    [hit] = late.hits
    assert hit.is_over and hit.was_open
    assert (committed.offset == 20) is is_renewed
    assert (hit.answer in FENCED) is is_renewed


@pytest.mark.parametrize("fault", [RequestFault.HELD, RequestFault.ANSWER_HELD])
def test_what_is_held_goes_on_when_it_is_released(proxy: Proxy, topics: Topics, fault: RequestFault) -> None:
    """Until then the client waits."""
    topic, name = topics.create(), f"id-{uuid.uuid4()}"
    producer = producer_of(proxy, name)
    held = proxy.inject(fault, Api.PRODUCE, name)
    producer.begin_transaction()
    producer.produce(topic, b"")
    wait_until(
        lambda: held.hits,
        DEADLINE_S,
        "it is held",
    )
    assert producer.flush(0.05) == 1
    held.release()
    assert producer.flush(DEADLINE_S) == 0
    assert held.is_over
    producer.commit_transaction(DEADLINE_S)
