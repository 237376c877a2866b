"""Changes of the assignment with many pending messages: the lateness on the partitions that stay."""

from __future__ import annotations

import argparse
import json
from itertools import pairwise
from typing import Any, Final

from bench.bridge import Bridge, pause, run_program, tell_process, warm_up
from bench.on_time import FAR_MS, SETTLED_S
from bench.report import Report, tell

RATE: Final = 1_000
DELAY_MS: Final = ("1000", "3000")
WINDOW_S: Final = 60
STEPS: Final = 5
AWAY: Final = {"delivery": {"session_timeout": "10s"}}
FAR_FACTOR: Final = 12
"""The pending messages are due in two hours, after the end of the scenario."""
P99_FACTOR: Final = 1.5
MAX_FACTOR: Final = 5


def assignment(bridge: Bridge, arguments: argparse.Namespace, report: Report) -> None:
    """Two instances share three times --messages pending messages. The second one is stopped, comes back, and is killed
    for good. For each of these minutes: the lateness on the partitions that stay with the first one, against the minute
    before it."""
    pending = 3 * arguments.messages
    second = Bridge(bridge.broker, bridge.directory / "second", instance="b", partitions=bridge.partitions)
    for one in (bridge, second):
        one.configure(AWAY)
    marks: list[tuple[str, int]] = []

    def minute(name: str) -> None:
        marks.append((name, bridge.clock.now_ms()))
        pause(WINDOW_S)

    with second:
        bridge.start()
        second.start()
        bridge.wait(lambda: bridge.owned == second.owned, 60, "two halves")
        gone = set(bridge.events("partitions-given-up")[-1]["partitions"].split(", "))
        warm_up(bridge, others=(second,))
        due_ms = bridge.clock.now_ms() + FAR_FACTOR * FAR_MS
        run_program(bridge, "load", "--messages", str(pending), "--due", str(due_ms)).wait()
        bridge.wait(lambda: sum(one.metric("pending_messages") for one in (bridge, second)) >= pending, 300, "ingest")
        pause(SETTLED_S)  # the indexes contain them then
        sent = RATE * (STEPS * WINDOW_S + 2 * WINDOW_S)
        limits = ("--messages", str(sent), "--seconds", "1200", "--from-end", "--wait")
        reader = run_program(bridge, "receive", *limits)
        what = ("--messages", str(sent), "--rate", str(RATE), "--delay", *DELAY_MS)
        load = run_program(bridge, "load", *what, "--not-idempotent")
        pause(WINDOW_S / 2)
        minute("before the stop")
        second.stop()
        minute("stopped")
        second.start()
        minute("back")
        minute("before the kill")
        second.kill()
        minute("killed")
        marks.append(("", bridge.clock.now_ms()))
        load.wait()
        bridge.wait(lambda: bridge.metric("pending_messages") <= pending, 120, "the rest")
    windows = [text for (name, at_ms), (_, end_ms) in pairwise(marks) for text in (name, str(at_ms), str(end_ms))]
    tell_process(reader, json.dumps(windows))
    got: dict[str, Any] = json.loads(reader.communicate()[0])
    exact = f"{got['received']:,} / {got['doubled']} / {got['early']}"
    scenario = f"assignment, {pending:,} pending"
    report.add(scenario, "received / doubled / early", exact, f"{sent:,} / 0 / 0")
    kept = {name: _kept(window, gone) for name, window in got["windows"].items()}
    for name, before in (("stopped", "before the stop"), ("back", "before the stop"), ("killed", "before the kill")):
        report.add(scenario, f"{before}: worst partition that stays p50 / p99 / p99.9", tell(kept[before]))
        bars = f"p99 <= {P99_FACTOR * kept[before]['p99']:.0f}, max <= {MAX_FACTOR * kept[before]['max']:.0f} ms"
        report.add(scenario, f"{name}: worst partition that stays p50 / p99 / p99.9", tell(kept[name]), bars)
        report.add(scenario, f"{name}: all partitions p50 / p99 / p99.9", tell(got["windows"][name]["stamped_ms"]))


def _kept(window: dict[str, Any], gone: set[str]) -> dict[str, float]:
    """The largest of each figure over the partitions that stay, ms."""
    figures = [late for name, late in window["by_partition_ms"].items() if name not in gone]
    return {name: max(late[name] for late in figures) for name in figures[0]}
