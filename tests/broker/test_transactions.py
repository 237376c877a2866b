"""What a real coordinator says of transactional ids."""

from __future__ import annotations

import uuid

import pytest
from confluent_kafka import KafkaException, Producer
from pyspark import SparkContext
from pyspark.sql import SparkSession

from bridge.delivery.producer.transaction_markers import DECIDED, OPEN, Outcome
from bridge.kafka.errors import kafka_error
from bridge.spark.transactions import coordinator
from dev.harness.kafka import Topics
from dev.harness.waiting import wait_until
from tests.broker.rig import settings_for
from tests.system.broker import Broker


def test_the_states_of_a_transactional_id(broker: Broker, topics: Topics, spark: SparkSession) -> None:  # noqa: ARG001 - its JVM
    """Each says how the last transaction ended, or will end when the id is initialised; or nothing at all."""
    topic, name = topics.create(), f"id-{uuid.uuid4()}"
    ask = coordinator(settings_for(broker.bootstrap, topic))
    said = [ask(name)]
    producer = Producer({"bootstrap.servers": broker.bootstrap, "transactional.id": name})
    producer.init_transactions(30)
    said.append(ask(name))
    for end in (producer.commit_transaction, producer.abort_transaction):
        producer.begin_transaction()
        producer.produce(topic, b"")
        producer.flush(30)
        said.append(ask(name))
        end(30)
        wait_until(lambda: not str(ask(name)).startswith("Prepare"), 30, "the end is written everywhere")
        said.append(ask(name))
    assert said == [None, "Empty", OPEN, "CompleteCommit", OPEN, "CompleteAbort"]
    outcomes = [DECIDED.get(str(state)) for state in said]
    assert outcomes == [None, None, None, Outcome.COMMITTED, None, Outcome.ABORTED], "an open one is not decided"


def test_without_an_answer_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that the id is unknown: Java may still be starting."""
    monkeypatch.setattr(SparkContext, "_active_spark_context", None)
    with pytest.raises(KafkaException) as unanswered:
        coordinator(settings_for("127.0.0.1:9", "delay"))("any")
    assert kafka_error(unanswered.value).retriable()


def test_brokers_that_do_not_answer_are_asked_again(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001 - its JVM
    """As after a restart of the coordinator, which has to read what it knows first."""
    monkeypatch.setattr("bridge.spark.transactions.ANSWER_S", 1)
    with pytest.raises(KafkaException) as unanswered:
        coordinator(settings_for("127.0.0.1:9", "delay"))("any")
    assert kafka_error(unanswered.value).retriable()
