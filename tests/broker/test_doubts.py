"""Transactions that end unasked, and committed states that go back, on a real broker."""

from __future__ import annotations

from contextlib import closing

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition

from bridge.delivery.producer.outcomes import EndedUnasked, Failure
from bridge.kafka.errors import kafka_error
from bridge.wire import headers as h
from dev.harness.kafka import Topics, read_committed
from dev.harness.waiting import wait_until
from tests.broker.interfering import rig_with_interference
from tests.broker.rig import DEADLINE_S, Rig
from tests.broker.test_dispatcher import delay_topic
from tests.entries import timer
from tests.system.broker import Broker

pytestmark = pytest.mark.system


def test_records_that_are_visible_are_found_and_not_written_again(broker: Broker, topics: Topics) -> None:
    """Half of a transaction is committed behind the bridge's back. Its records are found in their topics, wherever
    the partitioner has put them, and the others are delivered."""
    delay, early, late = delay_topic(topics), topics.create(partitions=3), topics.create()
    rig, writer = rig_with_interference(broker, delay)

    def end() -> None:
        client = writer.writer._client()
        client.flush(DEADLINE_S)
        wait_until(lambda: is_committed(client), DEADLINE_S, "its offsets have joined")
        raise EndedUnasked(Failure.of(KafkaError(KafkaError.INVALID_TXN_STATE)))

    with rig:
        due_ms = rig.clock.now_ms() - 1_000
        rig.add([timer(delay, 0, i, due_ms, early if i < 6 else late, key=b"%d" % i) for i in range(9)])
        writer.on_send += [lambda: None, end]
        rig.start()
        rig.wait_delivered()
        found = [record for topic in (early, late) for record in read_committed(broker.bootstrap, topic)]
        origins = [(dict(record.headers)[h.ORIGIN] or b"").decode() for record in found]
        assert sorted(origins) == [f"{delay}/0/{offset}" for offset in range(9)] and rig.tally.found == 6
        states = list(rig.committed().values())
        assert [state is not None and state.offset for state in states] == [9]


def test_a_state_that_another_program_has_put_back_is_written_again(broker: Broker, topics: Topics) -> None:
    """It is found when the next busy period is over, although the transaction in between was of another partition."""
    delay, target = delay_topic(topics, 2), topics.create()
    with Rig(broker.bootstrap, delay) as rig:
        due_ms = rig.clock.now_ms() - 1_000
        before = rig.states[delay, 0]
        rig.add([timer(delay, 0, 0, due_ms, target)])
        rig.start()
        rig.wait_delivered()
        put_back(broker, rig, TopicPartition(delay, 0, before.offset, before.metadata()))
        rig.add([timer(delay, 1, 0, due_ms + 1, target)])
        rig.wait_delivered()
        wait_until(lambda: rig.tally.rewritten, DEADLINE_S, "it is written again")
        held = rig.committed()[delay, 0]
        assert rig.tally.rewritten == 1 and held is not None and held.offset == 1


def is_committed(client: Producer) -> bool:
    """Not while offsets are joining the transaction, by another thread."""
    try:
        client.commit_transaction(DEADLINE_S)
    except KafkaException as exception:
        if kafka_error(exception).code() != KafkaError._CONFLICT:
            raise
        return False
    return True


def put_back(broker: Broker, rig: Rig, offset: TopicPartition) -> None:
    """As a late request does: under a name that the group does not fence."""
    producer = Producer({"bootstrap.servers": broker.bootstrap, "transactional.id": f"{rig.delay_topic}-other"})
    producer.init_transactions(DEADLINE_S)
    with closing(Consumer({"bootstrap.servers": broker.bootstrap, "group.id": rig.settings.group_id})) as consumer:
        producer.begin_transaction()
        producer.send_offsets_to_transaction([offset], consumer.consumer_group_metadata(), DEADLINE_S)
        producer.commit_transaction(DEADLINE_S)
