"""Ingest on a real Spark cluster: tasks on executors send what they have read to the bridge, over TCP."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest
from confluent_kafka import Producer

from dev.harness.kafka import Reader, Topics, assert_each_once
from dev.harness.waiting import wait_until
from tests.system.bridge import RunningBridge
from tests.system.broker import Broker
from tests.system.spark_cluster import SparkCluster
from timerstore.clock import SystemClock

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(600)]

DEADLINE_S: Final = 180
COUNT: Final = 100_000
PARTITIONS: Final = 4


def test_a_worker_that_is_killed_loses_nothing(broker: Broker, topics: Topics, tmp_path: Path) -> None:
    """100,000 messages, each delivered once: the query needs both workers; it is started anew when another one has
    taken the place of the one that was killed, and the plain reader reads meanwhile."""
    delay, target, clock = topics.delay(partitions=PARTITIONS), topics.create("orders", partitions=2), SystemClock()
    producer = Producer({"bootstrap.servers": broker.bootstrap, "linger.ms": 5})

    def send(first: int, count: int) -> None:
        headers = [("delay-until", b"%d" % (clock.now_ms() + 5_000)), ("delay-topic", target.encode())]
        for number in range(first, first + count):
            producer.produce(delay, b"%d" % number, key=b"%d" % number, headers=headers)  # type: ignore[arg-type]
        assert producer.flush(DEADLINE_S) == 0

    with SparkCluster(tmp_path, workers=2, cores=PARTITIONS // 2) as cluster:
        conf = {"spark.executor.memory": "512m", "spark.executor.cores": PARTITIONS // 2}
        config = {"spark": {"master": cluster.master, "executor_host": "127.0.0.1", "conf": conf}}
        with (
            RunningBridge(tmp_path / "bridge", broker.bootstrap, delay, config=config) as bridge,
            Reader(broker.bootstrap, [target]) as reader,
        ):
            bridge.start()
            bridge.wait_spark()
            send(0, COUNT // 2)
            wait_until(lambda: reader.poll(0.2) and len(reader.records) > COUNT // 20, DEADLINE_S, "delivery begins")
            assert cluster.kill_worker(0), "its executor was there"
            send(COUNT // 2, COUNT // 2)
            reader.wait_for(COUNT, DEADLINE_S)
            cluster.add_worker()
            wait_until(
                lambda: len(bridge.events("query-serves")) == 2, DEADLINE_S, lambda: f"again; log:\n{bridge.tail()}"
            )
            bridge.wait_idle(DEADLINE_S)
            assert_each_once((int(record.value or b"") for record in reader.to_end()), COUNT)
            assert bridge.events("query-restarted") or bridge.events("query-failed")
            assert bridge.stop() == 0
