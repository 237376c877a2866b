"""The bridge killed at random moments: nothing lost, nothing doubled, nothing early."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Final

import pytest

from dev.harness.kafka import Topics
from dev.harness.ledger import Balance
from dev.harness.load import Load
from dev.harness.waiting import pause
from tests.profiles import IS_NIGHTLY, seed
from tests.system.bridge import RunningBridge
from tests.system.broker import Broker

pytestmark = [pytest.mark.system, pytest.mark.crash, pytest.mark.slow]

KILLS: Final = 20 if IS_NIGHTLY else 10
STARTING_KILLS: Final = 0.5
"""The share of kills that hit the bridge while it starts; the others come soon after it is ready."""
STARTING_S: Final = 10.0
RUNNING_S: Final = 3.0
PER_SECOND: Final = 150
DELAY_MS_MAX: Final = 15_000
DELIVERED_S_MAX: Final = 180

# Small bounds, so that segments, windows and reclaim take part: everything here is due within a quarter of a minute.
BUSY_DISK: Final = {"store": {"flush_interval": "1s"}, "ready_rows": {"horizon": "5s"}}


@pytest.mark.fault("kills at random moments, under load")
@pytest.mark.timeout(1800)
def test_no_kill_loses_or_doubles_anything(broker: Broker, topics: Topics, tmp_path: Path) -> None:
    """With any number of kills at any time, a read_committed consumer sees every message once, not early."""
    drawn = seed()
    chance = random.Random(drawn)
    delay = topics.delay(partitions=4)
    targets = [topics.create("orders", partitions=3), topics.create("bills")]
    load = Load(broker.bootstrap, delay, targets, seed=drawn, delay_ms_max=DELAY_MS_MAX)
    with RunningBridge(tmp_path, broker.bootstrap, delay, config=BUSY_DISK) as bridge:
        with load.running(PER_SECOND):
            for _ in range(KILLS):
                bridge.launch()
                if chance.random() < STARTING_KILLS:
                    pause(chance.uniform(0, STARTING_S))
                else:
                    bridge.wait_ready()
                    pause(chance.uniform(0, RUNNING_S))
                bridge.kill()
            bridge.start()
        records = load.wait_delivered(broker.bootstrap, DELIVERED_S_MAX)
        assert load.balance(records) == Balance(), f"seed {drawn}: {load.balance(records)}"
        metrics = bridge.wait_idle(30)
        assert metrics["early_deliveries_total"] == 0
        assert bridge.stop() == 0
        bridge.wait_no_orphans()
        records = load.wait_delivered(broker.bootstrap, 30)
        assert load.balance(records) == Balance(), f"seed {drawn}: {load.balance(records)}"
