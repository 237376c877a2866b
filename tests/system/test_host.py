"""A host that has its own Spark and Hadoop, and cleans its temporary directory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from confluent_kafka import Consumer

from bridge.spark.scratch import PREFIX
from dev.harness.kafka import Outgoing, TopicReader, Topics, produce
from dev.harness.waiting import wait_until
from tests.system.bridge import SPARK_SERVES_S_MAX, RunningBridge
from tests.system.broker import Broker

pytestmark = [pytest.mark.system, pytest.mark.slow]

DEADLINE_S = 60
CORE_SITE = """<?xml version="1.0"?>
<configuration><property><name>fs.defaultFS</name><value>hdfs://127.0.0.1:1</value></property></configuration>
"""


@pytest.mark.fault("a cleaner removes temporary files; a host's Spark and Hadoop leak in")
def test_spark_is_the_bridges_own(broker: Broker, topics: Topics, tmp_path: Path) -> None:
    """The query serves beside another Spark and another file system, again after its temporary files were removed, and
    every line of the log is JSON."""
    host, temporary = tmp_path / "host", tmp_path / "tmp"
    host.mkdir()
    temporary.mkdir()
    (host / "core-site.xml").write_text(CORE_SITE)
    (host / "spark-defaults.conf").write_text("spark.hadoop.fs.defaultFS hdfs://127.0.0.1:1\nspark.master yarn\n")
    delay, target = topics.delay(partitions=2), topics.create("orders")
    with (
        RunningBridge(tmp_path / "bridge", broker.bootstrap, delay) as bridge,
        TopicReader(broker.bootstrap, [target]) as reader,
    ):
        bridge.environment |= {
            "SPARK_HOME": str(host),
            "SPARK_CONF_DIR": str(host),
            "HADOOP_CONF_DIR": str(host),
            "PYSPARK_SUBMIT_ARGS": "--master yarn pyspark-shell",
            "TMPDIR": str(temporary),
        }
        bridge.start()
        bridge.wait_spark()
        assert bridge.events("introduction") and not bridge.events("producer-not-ready")
        (scratch,) = {path for path in temporary.iterdir() if list(path.glob("blockmgr-*"))}
        assert scratch.name.startswith(PREFIX)
        shutil.rmtree(scratch)
        other = Consumer(
            {
                "bootstrap.servers": broker.bootstrap,
                "group.id": bridge.id,
                "partition.assignment.strategy": "cooperative-sticky",
                "enable.auto.commit": False,
            }
        )
        try:
            other.subscribe([delay])
            wait_until(lambda: other.poll(0.2) is None and bool(other.assignment()), DEADLINE_S, "a partition moves")
        finally:
            other.close()
        wait_until(lambda: bridge.events("spark-files-gone"), SPARK_SERVES_S_MAX, lambda: bridge.tail())
        wait_until(lambda: len(bridge.events("query-serves")) >= 2, SPARK_SERVES_S_MAX, lambda: bridge.tail())
        headers = [("delay-for", b"1s"), ("delay-topic", target.encode())]
        produce(broker.bootstrap, [Outgoing(topic=delay, value=b"x", headers=headers)])
        reader.wait_for(1, DEADLINE_S)
        assert bridge.stop() == 0
    for line in bridge.log_file.read_text().splitlines():
        assert isinstance(json.loads(line), dict)
    assert not list(temporary.glob(f"{PREFIX}*"))
