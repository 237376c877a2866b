"""Spark's classes in an archive that the JVM maps, in place of reading and checking each of them at every start (class
data sharing, JEP 350): a start takes a quarter less.

    python -m bridge.install.class_archive install    make it, beside the connector's jars (`make install`, and images)

It is made by running Spark on what a start needs, without a broker. The JVM uses it only with the same Java and the
same jars in the same order, and says so in a line where they are not; without it a start takes longer, and nothing else
is different.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from pyspark import SparkContext
from pyspark.sql import DataFrame, SparkSession

from bridge.errors import BridgeError, EnvironmentFailure
from bridge.ingest.decode import decode
from bridge.install import connector
from bridge.settings.model import Settings
from bridge.spark import session as spark
from bridge.start.roll_window import TopicLimits, decode_parameters
from bridge.wire.decode_epochs import DecodeEpoch, DecodeEpochs

BATCHES: Final = 4
"""Micro-batches until planning and running one loads nothing new."""
DEADLINE_S: Final = 120.0
NO_BROKER: Final = "127.0.0.1:1"
"""Where no broker listens: Spark's Kafka source is loaded, tries, and gives up."""
TOPIC: Final = "delay"
RECORDS: Final = (
    "CAST('k' AS BINARY) AS key",
    "CAST(CAST(value AS STRING) AS BINARY) AS value",
    f"'{TOPIC}' AS topic",
    "0 AS partition",
    "value AS offset",
    "timestamp",
    "0 AS timestampType",
    "array(named_struct('key', 'delay-for', 'value', CAST('5s' AS BINARY))) AS headers",
)
"""Of numbers and times, what the Kafka source would give."""


def install(jars: Sequence[Path]) -> Path:
    """Replace the archive. Raises EnvironmentFailure where Java writes none."""
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
    """What happens from a start to the first delivery."""
    epochs: DecodeEpochs = (DecodeEpoch(offset=0, parameters=decode_parameters(settings, TOPIC, TopicLimits())),)
    all_epochs = {(TOPIC, 0): epochs}
    numbers = session.readStream.format("rate").option("rowsPerSecond", 20).load()
    _stream(decode(numbers.selectExpr(*RECORDS), all_epochs))
    source = {
        "kafka.bootstrap.servers": NO_BROKER,
        "kafka.default.api.timeout.ms": "300",
        "kafka.request.timeout.ms": "200",
        "assign": f'{{"{TOPIC}":[0]}}',
        "startingOffsets": f'{{"{TOPIC}":{{"0":0}}}}',
        "includeHeaders": "true",
    }
    ends = {"endingOffsets": source["startingOffsets"]}
    with suppress(Exception):  # no broker answers
        decode(session.read.format("kafka").options(**source, **ends).load(), all_epochs).toArrow()
    with suppress(Exception):
        _stream(decode(session.readStream.format("kafka").options(**source).load(), all_epochs))
    _consume(session)


def _stream(frame: DataFrame) -> pa.Table:
    """Micro-batches of a query, as many as it takes; returns the last one. Raises what ends the query."""
    batches: list[pa.Table] = []
    enough = threading.Event()

    def each(batch: DataFrame, _number: int) -> None:
        batches.append(batch.toArrow())
        if len(batches) >= BATCHES and batches[-1].num_rows:
            enough.set()

    with tempfile.TemporaryDirectory() as directory:
        writer = frame.writeStream.foreachBatch(each).option("checkpointLocation", directory)
        query = writer.trigger(processingTime="300 milliseconds").start()
        try:
            for _ in range(int(DEADLINE_S)):
                if enough.is_set() or query.awaitTermination(1):
                    break
        finally:
            query.stop()
    return batches[-1]


def _consume(session: SparkSession) -> None:
    """The consumer that Spark's tasks read with."""
    java: Any = session._jvm
    properties = java.java.util.Properties()
    deserializer = "org.apache.kafka.common.serialization.ByteArrayDeserializer"
    properties.put("bootstrap.servers", NO_BROKER)
    properties.put("key.deserializer", deserializer)
    properties.put("value.deserializer", deserializer)
    consumer = java.org.apache.kafka.clients.consumer.KafkaConsumer(properties)
    partitions = java.java.util.ArrayList()
    partitions.add(java.org.apache.kafka.common.TopicPartition(TOPIC, 0))
    consumer.assign(partitions)
    consumer.poll(java.java.time.Duration.ofMillis(300))
    consumer.close()


def _end(session: SparkSession) -> None:
    """End Spark, and wait for its JVM: that is when it writes the archive."""
    gateway: Any = SparkContext._gateway
    session.stop()
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait(DEADLINE_S)


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m bridge.install.class_archive", description="an archive of Spark's classes"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("install", help="make it, beside the connector's jars")
    parser.parse_args()
    try:
        print(install(connector.jars()))
    except BridgeError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
