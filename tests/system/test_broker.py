"""The assumptions of the other system tests about their broker."""

from __future__ import annotations

import subprocess
import sys
from typing import Final

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from dev.harness.kafka import Outgoing, TopicReader, Topics, produce, produce_with, read_committed
from dev.harness.pace import scaled
from tests.paths import ROOT
from tests.system.broker import Broker, environment

pytestmark = pytest.mark.system

SPARK_PROGRAM: Final = """
import sys
from pyspark.sql import SparkSession
from bridge.install import connector
spark = (
    SparkSession.builder.master("local[1]")
    .config("spark.ui.enabled", "false")
    .config("spark.driver.extraJavaOptions", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
    .config("spark.driver.bindAddress", "127.0.0.1")
    .config("spark.driver.host", "127.0.0.1")
    .config("spark.jars", ",".join(map(str, connector.jars())))
    .getOrCreate()
)
source = spark.read.format("kafka").option("kafka.bootstrap.servers", sys.argv[1]).option("subscribe", sys.argv[2])
rows = source.option("includeHeaders", "true").load().collect()
print(sorted((int(row.value), row.headers[0].key, int(row.headers[0].value)) for row in rows))
"""


def test_a_record_comes_back_as_it_was_written(broker: Broker, topics: Topics) -> None:
    """Key, value, headers with duplicates and nulls, and the broker's timestamp arrive unchanged."""
    topic = topics.delay(partitions=2)
    headers = [("a", b"1"), ("a", b"2"), ("none", None), ("empty", b"")]
    (written,) = produce(broker.bootstrap, [Outgoing(topic=topic, value=None, key=b"k", headers=headers, partition=1)])
    (read,) = read_committed(broker.bootstrap, topic)
    assert (read.partition, read.offset, read.key, read.value) == (1, written.offset, b"k", None)
    assert list(read.headers) == headers
    assert read.timestamp_ms > 0


def test_transactions_carry_output_and_offsets_together(broker: Broker, topics: Topics) -> None:
    """A committed transaction shows its records and its offset with metadata; an aborted one shows neither."""
    source, target = topics.delay(), topics.create("target")
    group = f"group-{source}"
    consumer = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": group, "enable.auto.commit": False})
    producer = Producer({"bootstrap.servers": broker.bootstrap, "transactional.id": group, "retry.backoff.ms": 1})
    producer.init_transactions(30)
    try:
        for offset, commit in ((1, True), (2, False), (3, True)):
            producer.begin_transaction()
            produce_with(producer, [Outgoing(topic=target, value=str(offset).encode())])
            position = TopicPartition(source, 0, offset, metadata=f"at {offset}")
            producer.send_offsets_to_transaction([position], consumer.consumer_group_metadata(), 30)
            if commit:
                producer.commit_transaction(30)
            else:
                producer.abort_transaction(30)
        (committed,) = consumer.committed([TopicPartition(source, 0)], timeout=30)
    finally:
        consumer.close()
    assert [record.value for record in read_committed(broker.bootstrap, target)] == [b"1", b"3"]
    assert (committed.offset, committed.metadata) == (3, "at 3")


def test_an_open_transaction_hides_its_records(broker: Broker, topics: Topics) -> None:
    """`read_committed` reads up to the last stable offset only; the same reader goes on after the commit."""
    topic = topics.create()
    producer = Producer({"bootstrap.servers": broker.bootstrap, "transactional.id": topic})
    producer.init_transactions(30)
    producer.begin_transaction()
    produce_with(producer, [Outgoing(topic=topic, value=b"open")])
    with TopicReader(broker.bootstrap, [topic], isolation="read_uncommitted") as careless:
        assert len(careless.to_end()) == 1
    with TopicReader(broker.bootstrap, [topic]) as reader:
        assert reader.to_end(open_too=False) == []
        producer.commit_transaction(30)
        assert len(reader.wait_for(1, deadline_s=10)) == 1
        assert len(reader.to_end()) == 1


def test_spark_reads_a_topic_through_the_installed_connector(broker: Broker, topics: Topics) -> None:
    """The jars of `bridge.install.connector` are all that a PySpark session needs to read a topic with headers."""
    topic = topics.delay()
    produce(broker.bootstrap, [Outgoing(topic=topic, value=b"%d" % n, headers=[("n", b"%d" % n)]) for n in range(10)])
    # A process of its own: the jars must be named before the first session of a JVM starts.
    command = [sys.executable, "-c", SPARK_PROGRAM, broker.bootstrap, topic]
    run = subprocess.run(command, capture_output=True, text=True, timeout=scaled(120), check=False, cwd=ROOT)
    assert run.stdout.strip() == str([(n, "n", n) for n in range(10)]), run.stderr[-2000:]


def test_the_container_gets_the_settings_of_the_native_broker() -> None:
    """Properties reach the image as environment variables in its own spelling."""
    assert environment({"offsets.topic.num.partitions": 4, "node.id": 1}) == {
        "KAFKA_OFFSETS_TOPIC_NUM_PARTITIONS": "4",
        "KAFKA_NODE_ID": "1",
    }
