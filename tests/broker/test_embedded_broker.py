"""The native broker: the same broker after a stop or a kill, and none left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # public, but not marked as exported
    AdminClient,
    ConfigResource,
    ResourceType,
)

from bridge.errors import EnvironmentFailure
from dev.broker import EmbeddedBroker
from dev.broker.embedded import free_ports, join
from dev.harness.kafka import Outgoing, Topics, produce, read_committed
from dev.harness.waiting import wait_until
from tests.java import SHORT_LIVED
from tests.paths import ROOT

pytestmark = [pytest.mark.system, pytest.mark.slow]


def test_a_stop_and_a_kill_keep_data_port_and_cluster() -> None:
    """Acknowledged records are there after an orderly stop; topics and address are there after a SIGKILL, too."""
    with EmbeddedBroker(tmpfs=True, properties={"message.max.bytes": 2_000_000}, jvm_options=[SHORT_LIVED]) as broker:
        bootstrap, cluster_id = broker.bootstrap, broker.cluster_id
        topic = Topics(bootstrap).create()
        produce(bootstrap, [Outgoing(topic=topic, value=b"1")])
        broker.stop()
        assert not broker.running
        broker.start()
        assert (broker.bootstrap, broker.cluster_id) == (bootstrap, cluster_id)
        produce(bootstrap, [Outgoing(topic=topic, value=b"2")])
        broker.kill()
        broker.start()
        # Without an fsync a SIGKILL costs nothing: written data are in the page cache.
        assert [record.value for record in read_committed(bootstrap, topic)] == [b"1", b"2"]
        assert _broker_config(bootstrap, "message.max.bytes") == "2000000"
        data = broker.data
    assert not data.exists()


def test_a_named_directory_is_taken_over(tmp_path: Path) -> None:
    """Another broker object on the same directory is the same broker; the directory outlives both."""
    with EmbeddedBroker(data=tmp_path, jvm_options=[SHORT_LIVED]) as first:
        topic = Topics(first.bootstrap).create()
        produce(first.bootstrap, [Outgoing(topic=topic, value=b"kept")])
    with EmbeddedBroker(data=tmp_path, jvm_options=[SHORT_LIVED]) as second:
        assert (second.port, second.cluster_id) == (first.port, first.cluster_id)
        assert [record.value for record in read_committed(second.bootstrap, topic)] == [b"kept"]


def test_a_broker_that_cannot_start_says_why() -> None:
    """A wrong property ends the start at once, with the broker's own words."""
    with pytest.raises(EnvironmentFailure, match=r"num\.network\.threads"):
        EmbeddedBroker(properties={"num.network.threads": "many"}).__enter__()


def test_killed_owners_leave_no_broker_behind() -> None:
    """A broker ends, and its temporary data go, with the last process that shares it, even by SIGKILL."""
    program = (
        "import signal\nfrom dev.broker import EmbeddedBroker\n"
        f"broker = EmbeddedBroker(jvm_options=['{SHORT_LIVED}']).start()\n"
        "print(broker.pid, broker.data, broker.bootstrap, broker.share(), flush=True)\nsignal.pause()"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT) as owner:
        assert owner.stdout is not None
        try:
            pid, data, bootstrap, held = owner.stdout.readline().split()
            broker = psutil.Process(int(pid))
            ours = join(owner.pid, int(held))
        finally:
            owner.kill()
    assert ours is not None and join(owner.pid, int(held)) is None
    Topics(bootstrap).create()
    os.close(ours)
    wait_until(lambda: not broker.is_running() or broker.status() == psutil.STATUS_ZOMBIE, 10, "the broker's end")
    wait_until(lambda: not Path(data).exists(), 10, "its data removed")


def test_free_ports_are_different_and_below_the_ephemeral_ones() -> None:
    """A client that tries an ephemeral port of a stopped broker again and again may connect to itself."""
    ports = free_ports(5)
    assert len(set(ports)) == 5
    assert max(ports) < 32_768


def _broker_config(bootstrap: str, name: str) -> str | None:
    resource = ConfigResource(ResourceType.BROKER, "1")
    admin = AdminClient({"bootstrap.servers": bootstrap})
    found = admin.describe_configs([resource])[resource].result(30)
    value: str | None = found[name].value
    return value
