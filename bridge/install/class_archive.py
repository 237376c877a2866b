"""An archive of Spark's classes (class data sharing, JEP 350). The JVM maps it and need not load and verify each class
at every start, which takes a quarter less time.

    python -m bridge.install.class_archive install    create it beside the connector's jars (`make install`, and images)

It is created by the steps of a start in Spark, without a broker. The JVM uses it only with the same Java and the same
jars in the same order, and logs a line otherwise. Without it a start takes longer; nothing else changes.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from pyspark import SparkContext
from pyspark.sql import SparkSession

from bridge.errors import EnvironmentFailure
from bridge.ingest.decode import decode
from bridge.ingest.frames import FrameReceiver
from bridge.ingest.query import SparkQuery
from bridge.install import connector
from bridge.settings.clients import java
from bridge.settings.model import Settings
from bridge.spark import session as spark
from bridge.start.roll_window import TopicLimits, decode_parameters
from bridge.wire.decode_epochs import DecodeEpoch, DecodeEpochs

RECORDS_MADE: Final = 10_000
QUERY_S: Final = 10.0
DEADLINE_S: Final = 120.0
NO_BROKER: Final = "127.0.0.1:1"
"""An address without a broker: Spark's Kafka source is loaded, tries to connect, and gives up."""
TOPIC: Final = "delay"
RECORDS: Final = (
    "CAST('k' AS BINARY) AS key",
    "CAST(CAST(id AS STRING) AS BINARY) AS value",
    f"'{TOPIC}' AS topic",
    "0 AS partition",
    "id AS offset",
    "current_timestamp() AS timestamp",
    "0 AS timestampType",
    "array(named_struct('key', 'delay-for', 'value', CAST('5s' AS BINARY))) AS headers",
)
"""Expressions that turn numbers into rows like those of the Kafka source."""


def install_archive(jars: Sequence[Path]) -> Path:
    """Replace the archive. Raises EnvironmentFailure if Java writes none."""
    archive = spark.archive(jars)
    archive.unlink(missing_ok=True)
    made = archive.with_name(f".{archive.name}.{os.getpid()}")
    tree = {
        "bridge": {"id": "classes"},
        "kafka": {"common": {"bootstrap.servers": NO_BROKER}},
        "delay_topics": {TOPIC: {}},
        "spark": {"conf": {"spark.driver.extraJavaOptions": f'"-XX:ArchiveClassesAtExit={made}" -Xlog:disable'}},
    }
    settings = Settings.of(tree)
    session = spark.start(settings, jars)
    session.sparkContext.setLogLevel("OFF")
    try:
        _exercise(session, settings)
    finally:
        _end(session)
    if not made.is_file():
        raise EnvironmentFailure(
            "Java did not write the class archive",
            hint="Without it, a start takes longer.",
            file=made,
            code="DB-3020",
        )
    made.rename(archive)
    return archive


def _exercise(session: SparkSession, settings: Settings) -> None:
    """The steps from a start to the first record: a job, and the query, which finds no broker."""
    epochs: DecodeEpochs = (DecodeEpoch(offset=0, parameters=decode_parameters(settings, TOPIC, TopicLimits())),)
    all_epochs, start = {(TOPIC, 0): epochs}, {(TOPIC, 0): 0}
    opened = threading.Event()
    options = java(settings) | {"kafka.default.api.timeout.ms": "300", "kafka.request.timeout.ms": "200"}
    with (
        FrameReceiver(lambda _: None, opened.set, lambda _: None) as receiver,
        tempfile.TemporaryDirectory() as directory,
    ):
        query = SparkQuery(session, options, "classes", all_epochs, receiver.address, receiver.token)
        query.send(decode(session.range(RECORDS_MADE).selectExpr(*RECORDS), all_epochs))
        with suppress(Exception):  # no broker answers
            query.warm_up(start)
        opened.clear()
        with suppress(Exception):
            streaming = query.start(start, Path(directory))
            opened.wait(QUERY_S)
            streaming.stop()
    _consume(session)


def _consume(session: SparkSession) -> None:
    """Load the consumer of Spark's tasks."""
    jvm: Any = session._jvm
    properties = jvm.java.util.Properties()
    deserializer = "org.apache.kafka.common.serialization.ByteArrayDeserializer"
    properties.put("bootstrap.servers", NO_BROKER)
    properties.put("key.deserializer", deserializer)
    properties.put("value.deserializer", deserializer)
    consumer = jvm.org.apache.kafka.clients.consumer.KafkaConsumer(properties)
    partitions = jvm.java.util.ArrayList()
    partitions.add(jvm.org.apache.kafka.common.TopicPartition(TOPIC, 0))
    consumer.assign(partitions)
    consumer.poll(jvm.java.time.Duration.ofMillis(300))
    consumer.close()


def _end(session: SparkSession) -> None:
    """End Spark and wait for its JVM, which writes the archive at its end."""
    gateway: Any = SparkContext._gateway
    session.stop()
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait(DEADLINE_S)


if __name__ == "__main__":
    sys.exit(connector.run_step(lambda _: [install_archive(connector.jars())]))
