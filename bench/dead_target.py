"""One dead target among ten: its effect on the other nine.

Only a second node holds the dead target. That node is stopped, or killed (SIGKILL), during the load. The lateness of
the others is measured before, in the second after the loss, and from then on; the bar is the growth of the p99 from
the first to the last.

After a kill, until the controller notices it, the other node tries without a pause to write the end of the aborted
transaction to the dead one. This takes most of a core: one of the two that the bridge has here as well.
"""

from __future__ import annotations

import json
import threading
from typing import Any

from bench.bridge import Bridge, run_program
from dev.broker import EmbeddedBroker
from dev.harness.kafka import Topics

NINE = tuple(f"bench-{i}" for i in range(1, 10))
DEAD = "bench-dead"
RATE = 1_000
DELAY_MS = (1_000, 2_000)
STEADY_MS = 5_000
"""The time from the start of the load until messages are due at its rate."""
GRACE_MS = 1_000


def measure(bridge: Bridge, seconds: int, *, killed: bool) -> dict[str, dict[str, Any]]:
    """Lateness percentiles (ms) of the nine: `before`, in the `first second`, and `after`. The bridge must be running
    and warm.
    """
    with EmbeddedBroker(joins=bridge.broker) as second:
        topics = Topics(bridge.bootstrap)
        for name in NINE:
            topics.create(exactly=name, partitions=2, on=1)
        topics.create(exactly=DEAD, partitions=2, on=2)
        start_ms = bridge.clock.now_ms() + STEADY_MS
        kill_ms = start_ms + seconds * 1_000
        end_ms = kill_ms + GRACE_MS + seconds * 1_000
        windows = (
            *("before", start_ms, kill_ms),
            *("first second", kill_ms, kill_ms + GRACE_MS),
            *("after", kill_ms + GRACE_MS, end_ms),
        )
        count = RATE * (end_ms - start_ms + STEADY_MS) // 1_000 // 10 * 10
        targets = ("--targets", *NINE)
        until = ("--messages", str(count // 10 * 9), "--seconds", str(3 * seconds + 60))
        reader = run_program(bridge, "receive", *targets, *until, "--windows", *map(str, windows))
        pace = ("--messages", str(count), "--rate", str(RATE), "--delay", *map(str, DELAY_MS))
        load = run_program(bridge, "load", *targets, DEAD, *pace)
        threading.Event().wait((kill_ms - bridge.clock.now_ms()) / 1_000)
        (second.kill if killed else second.stop)()
        load.wait()
        bridge.wait(lambda: reader.poll() is not None, 3 * seconds + 90, "the reader")
        text, _ = reader.communicate()
    got: dict[str, Any] = json.loads(text)
    if got["received"] != count // 10 * 9 or got["doubled"] or got["early"]:
        raise SystemExit(f"of {count // 10 * 9} messages for the nine: {got}")
    result: dict[str, dict[str, Any]] = got["windows"]
    return result
