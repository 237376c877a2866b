"""A real coordinator's answers about transactional ids."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition

from bridge.delivery.plan.due_rows import Batch
from bridge.delivery.producer.transaction_markers import (
    DECIDED,
    OPEN,
    SOON_S,
    MarkerRepair,
    Outcome,
    States,
    are_offsets_pending,
)
from bridge.delivery.producer.transactional import TransactionalWriter
from bridge.delivery.producer.transactional_ids import IdState, let_in, names_of
from bridge.errors import EnvironmentFailure
from bridge.install import connector
from bridge.kafka.errors import kafka_error
from bridge.kafka.repeats import Repeats
from bridge.settings.clients import librdkafka
from bridge.spark.transactions import coordinators
from dev.harness.kafka import Topics, read_committed
from dev.harness.waiting import wait_until
from dev.proxy import Proxy
from tests.broker.rig import settings_for
from tests.system.broker import Broker
from timerstore.clock import SystemClock


def coordinators_for(bootstrap: str, topic: str) -> States:
    return coordinators(settings_for(bootstrap, topic), connector.jars)


def test_the_states_of_a_transactional_id(broker: Broker, topics: Topics) -> None:
    """Each says how the last transaction ended, or will end when the id is initialised; or nothing at all."""
    topic, base = topics.create(), f"id-{uuid.uuid4()}"
    said: dict[str, str | None] = {f"{base}-unknown": None}

    def initialised(state: str) -> Producer:
        said[f"{base}-{state}"] = state
        producer = Producer({"bootstrap.servers": broker.bootstrap, "transactional.id": f"{base}-{state}"})
        producer.init_transactions(30)
        return producer

    def begun(state: str) -> Producer:
        producer = initialised(state)
        producer.begin_transaction()
        producer.produce(topic, b"")
        producer.flush(30)
        return producer

    initialised("Empty")
    begun(OPEN)
    begun("CompleteCommit").commit_transaction(30)
    begun("CompleteAbort").abort_transaction(30)
    ask = coordinators_for(broker.bootstrap, topic)
    wait_until(lambda: ask(list(said)) == said, 30, "the ends are written everywhere")
    outcomes = [DECIDED.get(str(state)) for state in said.values()]
    assert outcomes == [None, None, None, Outcome.COMMITTED, Outcome.ABORTED], "an open one is not decided"


@pytest.mark.fault("a kill in mid-transaction while Spark is still starting")
def test_what_a_kill_has_left_open_is_ended_first(broker: Broker, topics: Topics) -> None:
    """The open transaction of a killed process ends as soon as brokers and a small Java process answer: no start waits
    for Spark. It may have been any id's turn. Nothing else is written again for want of stable offsets."""
    delay = topics.create()
    settings = settings_for(broker.bootstrap, delay)
    names = names_of(settings.transactional_id)
    killed = Producer({"bootstrap.servers": broker.bootstrap, "transactional.id": names[1]})
    killed.init_transactions(30)
    killed.begin_transaction()
    with closing(Consumer(librdkafka(settings, "consumer") | {"group.instance.id": ""})) as consumer:
        killed.send_offsets_to_transaction([TopicPartition(delay, 0, 0)], consumer.consumer_group_metadata(), 30)
    repair = MarkerRepair(settings, coordinators_for(broker.bootstrap, delay))
    writer = TransactionalWriter(librdkafka(settings, "producer"), SystemClock(), run=lambda _: None, repair=repair)
    with closing(writer):
        writer.open()
        assert not are_offsets_pending(settings, SOON_S)
        assert writer._ids._all[1].state is IdState.USED
    assert read_committed(broker.bootstrap, delay) == []


@pytest.mark.parametrize("jars", [list[Path], mock.Mock(side_effect=EnvironmentFailure("none", hint=""))])
def test_without_an_answer_nothing_is_said(jars: Callable[[], Sequence[Path]]) -> None:
    """Not that the id is unknown: it is asked about again."""
    with pytest.raises(KafkaException) as unanswered:
        coordinators(settings_for("127.0.0.1:9", "delay"), jars)(["any"])
    assert kafka_error(unanswered.value).retriable()


def test_brokers_that_do_not_answer_are_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a restart of the coordinator, which must read its log first."""
    monkeypatch.setattr("bridge.spark.transactions.ANSWER_S", 1)
    with pytest.raises(KafkaException) as unanswered:
        coordinators_for("127.0.0.1:9", "delay")(["any"])
    assert kafka_error(unanswered.value).retriable() and "Timeout" in kafka_error(unanswered.value).str()


@pytest.mark.fault("connections that break again and again")
def test_every_disconnect_within_a_transaction_is_a_fact(broker: Broker, topics: Topics) -> None:
    """The client's log reports each broken connection, also the third of the same kind within seconds, before the
    answer to the end of the transaction; and none without a break."""
    topic, repeats = topics.create(), Repeats()
    with Proxy(broker.bootstrap) as proxy:
        config = {"bootstrap.servers": proxy.bootstrap, "transactional.id": f"id-{uuid.uuid4()}"}
        producer = Producer({**config, **repeats.properties(config)})
        producer.init_transactions(30)

        def is_told(act: Callable[[], object]) -> bool:
            let_in(producer)
            repeats.forget()
            producer.begin_transaction()
            producer.produce(topic, b"")
            act()
            producer.commit_transaction(30)
            let_in(producer)
            return repeats.are_possible

        assert [is_told(act) for act in (lambda: None, proxy.cut, proxy.cut, proxy.cut)] == [False, True, True, True]


def test_offsets_of_an_instance_that_is_busy_are_not_taken_for_pending(broker: Broker, topics: Topics) -> None:
    """They are pending most of the time, in one transaction after the other. Another instance that starts, or an id
    that is initialised again, must not look for one whose end was lost."""
    delay, target = topics.create(), topics.create()
    settings, committed, stopped = settings_for(broker.bootstrap, delay), threading.Event(), threading.Event()
    writer = TransactionalWriter(librdkafka(settings, "producer"), SystemClock())
    offsets = [TopicPartition(delay, 0, 0)]

    def be_busy() -> None:
        with closing(Consumer(librdkafka(settings, "consumer") | {"group.instance.id": ""})) as consumer:
            wait_until(lambda: has_coordinator(consumer, delay), 30, "the group has a coordinator")
            metadata = consumer.consumer_group_metadata()
        while not stopped.is_set():
            writer.begin()
            writer.send(batch_for(target))
            writer.send_offsets(offsets, metadata)
            stopped.wait(0.02)
            writer.commit(offsets, metadata, lambda _: False)
            committed.set()

    with closing(writer), ThreadPoolExecutor(1) as threads:
        writer.open()
        busy = threads.submit(be_busy)
        try:
            wait_until(lambda: committed.is_set() or busy.done(), 30, "the first commit")
            found = [are_offsets_pending(settings, SOON_S) for _ in range(10)]
        finally:
            stopped.set()
        busy.result(30)
    assert sum(found) <= 3, found


def has_coordinator(consumer: Consumer, topic: str) -> bool:
    try:
        return bool(consumer.committed([TopicPartition(topic, 0)], 5))
    except KafkaException:
        return False


def batch_for(topic: str) -> Batch:
    """One record."""
    return Batch(topic=topic, ids=np.arange(1), values=[b"v"], keys=[None], origins=["o"], dues=["0"], headers=None)
