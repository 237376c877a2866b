"""Makes the archive of the native broker's classes (JEP 350), unless it is there: by a broker that handles a few
typical requests of tests, and stops.

    python -m dev.broker.archive        (`make test`)

It fits the same Java and jars. Without it, or with another Java, a start only takes longer.
"""

from __future__ import annotations

import os
from typing import Any, Final

from confluent_kafka import Consumer, Producer, TopicPartition

from dev.broker import EmbeddedBroker
from dev.broker.embedded import class_archive
from dev.harness.kafka import REQUEST_TIMEOUT_S, Topics

NAME: Final = "classes"
WRITTEN_S_MAX: Final = 300


def make() -> None:
    """Raises EnvironmentFailure where no broker starts."""
    archive = class_archive()
    if archive.exists():
        return
    made = archive.with_name(f".{archive.name}.{os.getpid()}")
    options = ["-XX:TieredStopAtLevel=1", f"-XX:ArchiveClassesAtExit={made}", "-Xlog:disable"]
    with EmbeddedBroker(tmpfs=True, jvm_options=options) as broker:
        _use(broker.bootstrap)
        broker.stop(WRITTEN_S_MAX)
    if made.exists():
        made.replace(archive)


def _use(bootstrap: str) -> None:
    """A member of a group commits its offsets with a transaction."""
    topic, server = Topics(bootstrap).delay(), {"bootstrap.servers": bootstrap}
    reading: dict[str, Any] = {"group.id": NAME, "group.instance.id": NAME, "auto.offset.reset": "earliest"}
    producer, consumer = Producer({**server, "transactional.id": NAME}), Consumer({**server, **reading})
    producer.init_transactions(REQUEST_TIMEOUT_S)
    consumer.subscribe([topic])
    for offset in range(2):
        producer.begin_transaction()
        producer.produce(topic, b"")
        if offset:
            assert consumer.poll(REQUEST_TIMEOUT_S) is not None
            metadata = consumer.consumer_group_metadata()
            producer.send_offsets_to_transaction([TopicPartition(topic, 0, offset)], metadata)
        producer.commit_transaction(REQUEST_TIMEOUT_S)
    consumer.close()


if __name__ == "__main__":
    make()
