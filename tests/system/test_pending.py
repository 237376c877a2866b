"""Pending messages, over HTTP and on the command line while the bridge runs: found, cancelled, delivered, gone."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any, Final
from urllib.error import HTTPError

import pytest

from bridge.client import DelayClient
from dev.harness.kafka import TopicReader, Topics
from dev.harness.pace import scaled
from dev.harness.waiting import wait_until
from tests.system.bridge import RunningBridge
from tests.system.broker import Broker
from timerstore.clock import SystemClock

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

DEADLINE_S: Final = 60
SOON_MS: Final = 20_000
"""Long enough for all that is asked before."""
FAR: Final = timedelta(hours=1)
MESSAGES: Final = 12
CONFIG: Final = {"store": {"flush_interval": "500ms"}, "ready_rows": {"horizon": "1s"}, "http": {"show_payloads": True}}


def command(bridge: RunningBridge, *words: str) -> subprocess.CompletedProcess[str]:
    """`delay-bridge`, as an operator types it beside that bridge."""
    full = [sys.executable, "-m", "bridge", *words, "--url", bridge.api_url(), "--config", str(bridge.config_file)]
    return subprocess.run(full, capture_output=True, text=True, timeout=scaled(DEADLINE_S), check=False)


def test_what_is_pending_is_found_until_it_is_delivered_or_cancelled(
    broker: Broker, topics: Topics, tmp_path: Path
) -> None:
    """In memory and in segments, by each filter, on pages, over a restart; the command line says what HTTP says."""
    delay, clock = topics.delay(), SystemClock()
    orders, bills = topics.create("orders"), topics.create("bills")
    client = DelayClient({"bootstrap.servers": broker.bootstrap, "linger.ms": 0}, delay)
    with RunningBridge(tmp_path, broker.bootstrap, delay, spark=False) as bridge:
        bridge.configure(CONFIG)
        bridge.start()
        far_ms = clock.now_ms() + int(FAR / timedelta(milliseconds=1))
        for n in range(MESSAGES):
            client.send(orders if n % 3 else bills, f"value {n}", f"key-{n % 4}", at=far_ms + n, id=f"id-{n}")
        client.flush()
        soon_ms = clock.now_ms() + SOON_MS
        client.send(orders, "soon", "k", at=soon_ms, id="soon")
        client.flush()

        def found(**filters: Any) -> list[dict[str, Any]]:
            messages: list[dict[str, Any]] = bridge.ask("messages", **filters)["messages"]
            return messages

        wait_until(lambda: bridge.ask("summary")["pending"] == MESSAGES + 1, DEADLINE_S, lambda: bridge.tail())
        assert [message["id"] for message in found()] == ["soon", *(f"id-{n}" for n in range(MESSAGES))]
        (one,) = found(id="id-7")
        assert (one["due"], one["target"], one["key"], one["state"]) == (
            far_ms + 7, orders, {"text": "key-3"}, "waiting",
        )  # fmt: skip
        assert found(origin=one["origin"]) == [one]
        assert {message["id"] for message in found(key="key-3")} == {"id-3", "id-7", "id-11"}
        assert {message["id"] for message in found(target=bills)} == {"id-0", "id-3", "id-6", "id-9"}
        assert {message["id"] for message in found(due_from=far_ms + 2, due_until=far_ms + 4)} == {"id-2", "id-3"}
        assert bridge.ask("count", target=bills) == {"count": 4, "exact": True}
        assert bridge.ask("messages/" + one["origin"])["value"] == {"text": "value 7"}
        listed = command(bridge, "pending", "list", "--key", "key-3", "--output", "json")
        assert json.loads(listed.stdout)["messages"] == found(key="key-3"), listed.stderr

        client.cancel("id-3", "key-3")
        client.flush()
        wait_until(lambda: not found(id="id-3"), DEADLINE_S, "the cancel is read")
        assert [message["state"] for message in found(id="id-3", state="cancelled")] == ["cancelled"]
        wait_until(lambda: bridge.ask("summary")["disk"]["segments"] > 0, DEADLINE_S, "a flush")
        with TopicReader(broker.bootstrap, [orders]) as reader:
            (record,) = reader.wait_for(1, DEADLINE_S)
        assert record.value == b"soon"
        wait_until(lambda: not found(id="soon"), DEADLINE_S, "it is known to be delivered")

        assert bridge.stop() == 0
        bridge.start()
        pages, cursor = [], None
        while True:
            page = bridge.ask("messages", limit=4, **({} if cursor is None else {"cursor": cursor}))
            pages += page["messages"]
            cursor = page["next"]
            if cursor is None:
                break
        assert [message["id"] for message in pages] == [f"id-{n}" for n in range(MESSAGES) if n != 3]
        assert bridge.ask("count", due_from=far_ms) == {"count": MESSAGES - 1, "exact": True}
        assert command(bridge, "pending", "count").stdout.strip() == str(MESSAGES - 1)
        assert "value 7" in command(bridge, "pending", "get", one["origin"]).stdout
        assert command(bridge, "pending", "get", f"{delay}/0/999").returncode == 1
        assert command(bridge, "targets").returncode == 0
        with pytest.raises(HTTPError, match="404"):
            bridge.ask(f"messages/{delay}/0/999")
        assert bridge.stop() == 0
