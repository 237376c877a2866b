"""Ingest on a real Spark cluster: tasks on executors send their rows to the bridge, over TCP."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import pytest
from confluent_kafka import Producer

from dev.harness.kafka import Outgoing, TopicReader, Topics, assert_each_once, send_all
from dev.harness.pace import scaled
from dev.harness.waiting import wait_until
from tests.java import SHORT_LIVED
from tests.system.bridge import RunningBridge
from tests.system.broker import Broker
from tests.system.spark_cluster import SparkCluster

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(600)]

DEADLINE_S: Final = 180
COUNT: Final = 100_000
BURST: Final = 5_000
PARTITIONS: Final = 4
HOST: Final = "localhost"
"""Of the bridge, for executors; another name for it than the usual one."""


@pytest.mark.fault("a killed worker of a Spark cluster")
def test_a_worker_that_is_killed_loses_nothing(broker: Broker, topics: Topics, tmp_path: Path) -> None:
    """100,000 messages are delivered once each, although a worker is killed meanwhile: the query starts anew on another
    worker, and the plain reader reads until then."""
    delay, target = topics.delay(partitions=PARTITIONS), topics.create("orders", partitions=2)
    producer = Producer({"bootstrap.servers": broker.bootstrap, "linger.ms": 5})
    headers = [("delay-for", b"1s"), ("delay-topic", target.encode())]
    is_killed = threading.Event()

    def send_from(first: int, end: int) -> None:
        values = (b"%d" % number for number in range(first, end))
        records = (Outgoing(topic=delay, value=value, key=value, headers=headers) for value in values)
        send_all(producer, records)

    def send_around_the_kill() -> None:
        for first in range(COUNT // 4, COUNT, BURST):
            send_from(first, min(first + BURST, COUNT))
            if first >= COUNT // 2:  # the worker dies among messages that are under way, and there are more to come
                assert is_killed.wait(scaled(DEADLINE_S)), "the worker is killed"

    with SparkCluster(tmp_path, workers=2, cores=PARTITIONS // 2) as cluster:
        conf = {"spark.executor.memory": "512m", "spark.executor.cores": PARTITIONS // 2}
        conf["spark.executor.extraJavaOptions"] = SHORT_LIVED
        config = {"spark": {"master": cluster.master, "executor_host": HOST, "conf": conf}}
        with (
            RunningBridge(tmp_path / "bridge", broker.bootstrap, delay, config=config) as bridge,
            TopicReader(broker.bootstrap, [target]) as reader,
            ThreadPoolExecutor(1) as sender,
        ):
            bridge.start()
            bridge.wait_spark()
            drivers = [each.partition("CoarseGrainedScheduler@")[2] for each in cluster.executor_commands()]
            assert len(drivers) == 2 and all(driver.startswith(f"{HOST}:") for driver in drivers)
            send_from(0, COUNT // 4)
            # While the query serves the plain reader takes nothing in: all of these came through executors.
            reader.wait_for(COUNT // 4, DEADLINE_S)
            assert bridge.reader() == "spark"
            sent = sender.submit(send_around_the_kill)
            reader.wait_for(COUNT // 4 + 1, DEADLINE_S)
            assert not sent.done()
            assert cluster.kill_worker(0), "its executor was there"
            is_killed.set()
            wait_until(lambda: bridge.reader() == "plain", DEADLINE_S, "the plain reader")
            cluster.add_worker()
            wait_until(
                lambda: len(bridge.events("query-serves")) == 2, DEADLINE_S, lambda: f"again; log:\n{bridge.tail()}"
            )
            sent.result(scaled(DEADLINE_S))
            reader.wait_for(COUNT, DEADLINE_S)
            bridge.wait_idle(DEADLINE_S)
            assert_each_once((int(record.value or b"") for record in reader.to_end()), COUNT)
            assert bridge.events("query-restarted") or bridge.events("query-failed")
            assert bridge.stop() == 0
