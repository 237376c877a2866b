"""The index on shared storage (`store.remote`): instances whose disks are lost."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

import pytest

from dev.harness.kafka import Topics
from dev.harness.ledger import Balance
from dev.harness.load import LEVELS_MS, Load
from dev.harness.waiting import wait_until
from tests.system.bridge import RunningBridge
from tests.system.broker import Broker

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(600)]

DELIVERED_S_MAX: Final = 90
COMMITTED_S_MAX: Final = 60
PENDING_MIN: Final = 50


def config(remote: Path | None) -> dict[str, dict[str, object]]:
    """Segments are written soon, and read back: the horizon ends before the load does."""
    return {
        "store": {"flush_interval": "500ms", "remote": None if remote is None else f"file://{remote}"},
        "ready_rows": {"horizon": "2s"},
        "delay": {"levels": " ".join(f"{ms}ms" for ms in LEVELS_MS)},
    }


def test_an_instance_with_an_empty_disk_goes_on(broker: Broker, topics: Topics, tmp_path: Path) -> None:
    """After a kill and the loss of its disk, a bridge adopts the index, and reads only the records behind it."""
    remote = tmp_path / "remote"
    remote.mkdir()
    delay = topics.delay(partitions=2)
    load = Load(broker.bootstrap, delay, [topics.create("orders", partitions=2)], seed=5, delay_ms_max=20_000)
    with RunningBridge(tmp_path, broker.bootstrap, delay, config=config(remote), spark=False) as bridge:
        bridge.start()
        load.send(600)
        wait_until(lambda: bridge.metrics()["pending_messages"] >= PENDING_MIN, COMMITTED_S_MAX, "pending messages")
        wait_until(
            lambda: bridge.metrics()["remote_manifest_age_seconds"] == 0 and bridge.metrics()["segments"] > 0,
            COMMITTED_S_MAX,
            lambda: f"a committed manifest; {bridge.tail()}",
        )
        bridge.kill()
        shutil.rmtree(bridge.data)
        bridge.start()
        [opened] = bridge.events("index-opened")
        print(opened, bridge.events("index-adopted"))
        assert opened["without_index"] == 0 and opened["read_again"] < 600
        assert {each["partition"] for each in bridge.events("index-adopted")} == {0, 1}
        records = load.wait_delivered(broker.bootstrap, DELIVERED_S_MAX)
        balance = load.balance(records)
        assert balance == Balance(), f"{balance}; log:\n{bridge.tail()}"
