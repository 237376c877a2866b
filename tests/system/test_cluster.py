"""Ingest on a real Spark cluster: tasks on executors send their rows to the bridge, over TCP."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

import pytest
from confluent_kafka import Producer

from bridge.install import connector
from dev.broker.embedded import free_ports
from dev.harness.kafka import Outgoing, TopicReader, Topics, assert_each_once, send_all
from dev.harness.pace import scaled
from dev.harness.waiting import wait_until
from tests.java import SHORT_LIVED
from tests.paths import ROOT
from tests.system.bridge import RunningBridge
from tests.system.broker import Broker
from tests.system.sockets import connected, files, listening
from tests.system.spark_cluster import SparkCluster

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(600)]

DEADLINE_S: Final = 180
COUNT: Final = 100_000
BURST: Final = 5_000
PARTITIONS: Final = 4
NAME: Final = "delay-bridge.test"
"""The bridge for executors; its own machine does not know the name."""
ADDRESS: Final = "127.0.0.2"
"""The address of that name, where the bridge listens for executors alone."""


class Ports(NamedTuple):
    """The ports of docs/operations.md between the bridge and the cluster."""

    driver: int
    blocks: int
    frames: int
    executors: int


def only_documented_ports(bridge: RunningBridge, cluster: SparkCluster, ports: Ports) -> bool:
    """Nothing listens at or connects to any other port: a firewall between the bridge and the cluster may close it.
    Returns whether all of them are open."""
    host, port = bridge.bootstrap.split(":")
    kafka = {(host, int(port))}
    opened = {(ADDRESS, port) for port in (ports.driver, ports.blocks, ports.frames)}
    outside = {each for each in listening(bridge.processes()) if each[0] != "127.0.0.1"}
    assert outside <= opened, "the bridge listens"
    assert connected(bridge.processes()) <= {cluster.address, *kafka}, "the bridge connects"
    assert connected(cluster.processes()) <= {cluster.address}, "master and workers connect"
    workers, executors = listening(cluster.processes()), cluster.executors()
    for executor in executors:
        assert {each[1] for each in listening([executor])} <= {ports.executors}, "an executor listens"
        there = connected([executor]) - opened - kafka - workers
        assert {each[1] for each in there} <= {ports.executors}, "an executor connects"
    return outside == opened


@pytest.mark.fault("a killed worker of a Spark cluster")
def test_a_worker_that_is_killed_loses_nothing(broker: Broker, topics: Topics, tmp_path: Path) -> None:
    """100,000 messages are delivered once each, although a worker is killed meanwhile: the query starts anew on another
    worker, and the plain reader reads until then. The executors know the bridge by a name of their own, use the
    documented ports alone, and read no file of the bridge."""
    delay, target = topics.delay(partitions=PARTITIONS), topics.create("orders", partitions=2)
    producer = Producer({"bootstrap.servers": broker.bootstrap, "linger.ms": 5})
    headers = [("delay-for", b"1s"), ("delay-topic", target.encode())]
    is_killed = threading.Event()

    def send_from(first: int, end: int) -> None:
        values = (b"%d" % number for number in range(first, end))
        records = (Outgoing(topic=delay, value=value, key=value, headers=headers) for value in values)
        send_all(producer, records)

    def send_around_the_kill(begin: int, end: int) -> None:
        for first in range(begin, end, BURST):
            send_from(first, min(first + BURST, end))
            if (
                first >= (begin + end) // 2
            ):  # the worker dies among messages that are under way, and there are more to come
                assert is_killed.wait(scaled(DEADLINE_S)), "the worker is killed"

    ports = Ports(*free_ports(4))
    with SparkCluster(tmp_path / "cluster", workers=2, cores=PARTITIONS // 2, names={NAME: ADDRESS}) as cluster:
        conf: dict[str, object] = {"spark.executor.memory": "512m", "spark.executor.cores": PARTITIONS // 2}
        conf |= {"spark.executor.extraJavaOptions": SHORT_LIVED, "spark.driver.bindAddress": ADDRESS}
        conf |= {"spark.driver.port": ports.driver, "spark.driver.blockManager.port": ports.blocks}
        conf |= {"spark.blockManager.port": ports.executors}
        spark = {"master": cluster.master, "executor_host": NAME, "frames_port": ports.frames, "conf": conf}
        with (
            RunningBridge(tmp_path / "bridge", broker.bootstrap, delay, config={"spark": spark}) as bridge,
            TopicReader(broker.bootstrap, [target]) as reader,
            ThreadPoolExecutor(1) as sender,
        ):
            (tmp_path / "bridge" / "tmp").mkdir()
            bridge.environment["TMPDIR"] = str(tmp_path / "bridge" / "tmp")
            bridge.start()
            bridge.wait_spark(lambda: only_documented_ports(bridge, cluster, ports))
            assert len(cluster.executors()) == 2
            for executor in cluster.executors():
                its_own = [str(tmp_path / "bridge"), str(connector.jars()[0].parent), str(ROOT / "bridge")]
                assert not [path for path in files(executor) if any(place in path for place in its_own)]
            begin, serves = 0, 0
            # While the query serves the plain reader takes nothing in, so these come through executors. On a machine
            # that keeps executors waiting for seconds the plain reader helps out, and the next ones must come so.
            while serves != len(bridge.events("query-serves")) or bridge.reader() != "spark":
                wait_until(lambda: bridge.reader() == "spark", DEADLINE_S, bridge.tail)
                serves = len(bridge.events("query-serves"))
                send_from(begin, begin + COUNT // 4)
                begin += COUNT // 4
                reader.wait_for(begin, DEADLINE_S)
            assert only_documented_ports(bridge, cluster, ports)
            end = begin + 3 * COUNT // 4
            sent = sender.submit(send_around_the_kill, begin, end)
            reader.wait_for(begin + 1, DEADLINE_S)
            assert not sent.done()
            assert cluster.kill_worker(0), "its executor was there"
            is_killed.set()
            wait_until(lambda: bridge.reader() == "plain", DEADLINE_S, "the plain reader")
            cluster.add_worker()
            wait_until(
                lambda: len(bridge.events("query-serves")) > serves, DEADLINE_S, lambda: f"again; log:\n{bridge.tail()}"
            )
            sent.result(scaled(DEADLINE_S))
            reader.wait_for(end, DEADLINE_S)
            bridge.wait_idle(DEADLINE_S)
            assert_each_once((int(record.value or b"") for record in reader.to_end()), end)
            assert bridge.events("query-restarted") or bridge.events("query-failed")
            assert bridge.stop() == 0
