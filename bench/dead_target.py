"""One dead target among ten: what the other nine feel of it.

The dead one is held by a second node alone, which is stopped. The lateness of the others is measured before, and from
one second after the stop; the bar is the growth of its p99.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]  # public, but not marked

from bench.bridge import Bridge
from embedded.broker import EmbeddedBroker

NINE = tuple(f"bench-{i}" for i in range(1, 10))
DEAD = "bench-dead"
RATE = 1_000
DELAY_MS = (1_000, 2_000)


def measure(bridge: Bridge, seconds: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Lateness percentiles (ms) of the nine before and after; the bridge runs and is warm."""
    with EmbeddedBroker(joins=bridge.broker) as second:
        bootstrap = bridge.broker.bootstrap
        admin = AdminClient({"bootstrap.servers": bootstrap})
        topics = [NewTopic(name, num_partitions=2, replica_assignment=[[1], [1]]) for name in NINE]
        topics.append(NewTopic(DEAD, num_partitions=2, replica_assignment=[[2], [2]]))
        for future in admin.create_topics(topics).values():
            future.result(30)
        before = _stretch(bridge, bootstrap, seconds, bridge.clock.now_ms() + 3_000)
        second.kill()
        after = _stretch(bridge, bootstrap, seconds, bridge.clock.now_ms() + 1_000)
    return before, after


def _stretch(bridge: Bridge, bootstrap: str, seconds: int, since_ms: int) -> dict[str, Any]:
    """Load on all ten for a while; what arrives in the nine that was due at `since_ms` or later."""
    common = ("--bootstrap", bootstrap, "--targets")
    until = ("--messages", str(10**9), "--seconds", str(seconds + 10))
    reader = _run("receive", *common, *NINE, *until, "--skip-due-before", str(since_ms))
    pace = ("--messages", str(RATE * seconds), "--rate", str(RATE), "--delay", *map(str, DELAY_MS))
    load = _run("load", *common, *NINE, DEAD, *pace)
    load.wait()
    bridge.wait(lambda: reader.poll() is not None, seconds + 60, "the reader")
    text, _ = reader.communicate()
    found: dict[str, Any] = json.loads(text)
    return found


def _run(module: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-m", f"bench.{module}", *arguments], stdout=subprocess.PIPE, text=True)
