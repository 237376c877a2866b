"""Reasons for which the bridge does not start: one clear line, the exit status of its kind, and nothing done."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any, Final

import pytest

from bridge.errors import BridgeError, ConfigurationError, EnvironmentFailure
from dev.harness.kafka import Topics
from dev.harness.waiting import wait_until
from tests.system.bridge import RunningBridge
from tests.system.broker import Broker

pytestmark = [pytest.mark.system]

REFUSED_S_MAX: Final = 90
NOBODY_LISTENS: Final = "127.0.0.1:1"


@pytest.mark.parametrize(
    ("changes", "error", "word"),
    [
        ({"store": {"flush_intervall": "1s"}}, ConfigurationError, "flush_interval"),
        ({"delay": {"max": "10 parsecs"}}, ConfigurationError, "delay.max"),
        ({"kafka": {"producer": {"enable.idempotence": False}}}, ConfigurationError, "enable.idempotence"),
        ({"kafka": {"common": {"bootstrap.servers": NOBODY_LISTENS}}}, EnvironmentFailure, NOBODY_LISTENS),
        ({"store": {"directory": "/proc/no-such-place"}}, EnvironmentFailure, "/proc/no-such-place"),
    ],
    ids=["unknown key", "bad value", "property that must not be set", "no broker", "no directory"],
)
def test_a_start_that_cannot_work_is_refused(
    broker: Broker, topics: Topics, tmp_path: Path, changes: dict[str, Any], error: type[BridgeError], word: str
) -> None:
    """A wrong configuration or surrounding ends the start with its status and one line that names the error."""
    with RunningBridge(tmp_path, broker.bootstrap, topics.delay(), config=changes, spark=False) as bridge:
        bridge.launch()
        assert bridge.wait_end(REFUSED_S_MAX) == error.exit_code, bridge.tail()
        assert word in bridge.last_words()


def test_a_topic_with_the_producers_timestamps_is_refused(broker: Broker, topics: Topics, tmp_path: Path) -> None:
    """A CreateTime topic cannot be a delay topic: delays would count from the producer's clock. The remedy is named."""
    delay = topics.create("create-time", config={"message.timestamp.type": "CreateTime"})
    with RunningBridge(tmp_path, broker.bootstrap, delay, spark=False) as bridge:
        bridge.launch()
        assert bridge.wait_end(REFUSED_S_MAX) == EnvironmentFailure.exit_code
        words = bridge.last_words()
        assert delay in words
        assert "message.timestamp.type=LogAppendTime" in words


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("management-port", signal.SIGTERM),
        ("partitions-assigned", signal.SIGINT),
        ("index-opened", signal.SIGTERM),
        ("ready", signal.SIGINT),
    ],
)
def test_a_bridge_can_be_stopped_at_any_time(
    broker: Broker, topics: Topics, tmp_path: Path, moment: str, number: signal.Signals
) -> None:
    """SIGTERM or SIGINT ends the bridge within 10 s with status 0, in any phase."""
    with RunningBridge(tmp_path, broker.bootstrap, topics.delay()) as bridge:
        bridge.launch()
        wait_until(lambda: bridge.events(moment), REFUSED_S_MAX, lambda: f"{moment}; log:\n{bridge.tail()}")
        assert bridge.stop(number=number) == 0, bridge.tail()
        assert "Traceback" not in bridge.logs, bridge.tail()
        bridge.wait_no_orphans()
