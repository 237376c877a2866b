"""Punctuality from the first second: lateness from `ready` on, cold and warm separately, and the cost of a kill."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Final

import numpy as np

from bench.bridge import WARM_RATE, WARMED, Bridge, pause, run_program, tell_process, warm_up
from bench.calibration import ARRIVAL_P99, LATE_P99, RELAY_CPU, plain_consumer
from bench.load import DELAY_TOPIC
from bench.report import Report, percentiles, tell

WINDOWS_S: Final = ((0, 30), (0, 5), (5, 30), (30, 60), (60, 120), (120, 150), (5, 150))
"""Windows of due times, from `ready` on; the half minute before the end is warm."""
LOAD_S: Final = 150
CPU_S: Final = 30
"""The time before the end of the load for the measurement of CPU."""
BOUND_S: Final = 60, 115
"""The time in which a plain consumer reads the delay topic, too. It takes a fifth of a core, which the first minute and
the last half minute must keep."""
BROKER_STARTS: Final = 3
BROKER_WARM_S: Final = 30
"""The warm-up of the broker: starts of a bridge, and seconds of load after each, at the measured rate or twice it. The
broker's compiler takes a quarter of a core at first, less than 2 % after 90 s, and more again at a bridge's start."""
KILLS: Final = 20
KILLS_RATE: Final = 500
BETWEEN_KILLS_S: Final = 6
CYCLE_S: Final = 6
"""The longest start with its first delivery, which determines the length of the load."""
FAR_MS: Final = 600_000
ROLLING_RATE: Final = 500
SETTLED_S: Final = 45
AWAY_S: Final = 2
EDGE_S: Final = 1


def on_time(
    bridge: Bridge,
    _: argparse.Namespace,
    report: Report,
    *,
    delay_ms: tuple[int, int],
    rate: int,
    late: Mapping[tuple[int, int], str],
    cpu: str,
) -> None:
    """A new bridge under load from `ready` on, for one minute beside a plain consumer of the delay topic. The broker is
    warm, like the cluster of a real bridge. `late` has the bars of the windows, `cpu` that of the last half minute."""
    scenario = f"{rate:,}/s, delays of {delay_ms[0]} to {delay_ms[1]} ms"
    for _start in range(BROKER_STARTS):
        bridge.start()
        warm_up(bridge, max(rate, WARM_RATE), BROKER_WARM_S)
        bridge.stop()
    # Other processes start before the bridge, so that the measurement excludes their start.
    count, (low, high) = rate * LOAD_S, map(str, delay_ms)
    until = ("--messages", str(count), "--seconds", str(LOAD_S + 90))
    reader = run_program(bridge, "receive", *until, "--from-end", "--wait")
    what = ("--messages", str(count), "--rate", str(rate), "--delay", low, high)
    load = run_program(bridge, "load", *what, "--not-idempotent", "--wait")
    pause(SETTLED_S / 10)
    report.add(scenario, "process start to ready, after a stop", f"{bridge.timed_start():.1f} s")
    ready_ms = bridge.clock.now_ms()
    tell_process(load, "begin")
    begin_ms, end_ms, warm_ms, last_ms = (ready_ms + 1000 * s for s in (*BOUND_S, LOAD_S - CPU_S, LOAD_S))
    wait_until_ms(bridge, begin_ms)
    with plain_consumer(bridge, DELAY_TOPIC) as arrived_ms:
        wait_until_ms(bridge, end_ms)
    share = usage_between(bridge, warm_ms, last_ms)
    load.wait()
    windows: list[str] = []
    bars: dict[str, str] = {}
    for start_s, end_s in WINDOWS_S:
        name = f"{start_s}-{end_s} s"
        bars[name] = late.get((start_s, end_s), "")
        windows += [name, str(ready_ms + start_s * 1000), str(ready_ms + end_s * 1000)]
    tell_process(reader, json.dumps(windows))
    got: dict[str, Any] = json.loads(reader.communicate()[0])
    for window, late_ms in got["windows"].items():
        report.add(scenario, f"{window} after ready: late p50 / p99 / p99.9", tell(late_ms["stamped_ms"]), bars[window])
        report.against(scenario, f"{window} after ready: late p99", late_ms["stamped_ms"]["p99"], LATE_P99)
    for window, late_ms in got["windows"].items():
        report.add(scenario, f"{window} after ready: arrival - due p50 / p99 / p99.9", tell(late_ms["arrived_ms"]))
        report.against(scenario, f"{window} after ready: arrival - due p99", late_ms["arrived_ms"]["p99"], ARRIVAL_P99)
    exact = f"{got['received']:,} / {got['doubled']} / {got['early']}"
    report.add(scenario, "received / doubled / early", exact, f"{count:,} / 0 / 0")
    report.add(scenario, "CPU in the last half minute", f"{100 * share:.0f} % of a core", f"<= {cpu} %")
    report.against(scenario, "CPU in the last half minute", 100 * share, RELAY_CPU)
    report.add(scenario, "RSS", f"{bridge.rss_bytes() >> 20} MiB")
    bound = tell(percentiles(np.array(arrived_ms)))
    when = "{}-{} s".format(*BOUND_S)
    report.add(scenario, f"{when} after ready: append to a plain consumer of the delay topic p50 / p99 / p99.9", bound)
    for event in bridge.events("query-serves"):
        report.add(scenario, "Spark's query serves", f"{event['seconds']} s after its start")


def kills(bridge: Bridge, arguments: argparse.Namespace, report: Report) -> None:
    """SIGKILL some seconds after each start, under load, with a million messages in the index: the time to the next
    delivery of messages that were pending, and of messages sent after the kill and due in a second."""
    bridge.start()
    run_program(
        bridge, "load", "--messages", str(arguments.messages), "--due", str(bridge.clock.now_ms() + FAR_MS)
    ).wait()
    bridge.wait(lambda: bridge.metric("pending_messages") >= arguments.messages, 120, "ingest")
    pause(SETTLED_S)  # the index contains them then
    count = KILLS_RATE * KILLS * (BETWEEN_KILLS_S + CYCLE_S)
    reader = run_program(bridge, "receive", "--messages", str(count), "--seconds", str(FAR_MS // 1000 - 120), "--wait")
    load = run_program(bridge, "load", "--messages", str(count), "--rate", str(KILLS_RATE), "--delay", "999", "1001")
    pause(BETWEEN_KILLS_S)
    pending_s: list[float] = []
    killed_ms: list[int] = []
    for _ in range(KILLS):
        bridge.kill()
        killed_ms.append(bridge.clock.now_ms())
        began_s = bridge.clock.monotonic_s()
        bridge.start()
        bridge.wait(lambda: bridge.metric("records_delivered_total") >= 1, 60, "the first delivery")
        pending_s.append(bridge.clock.monotonic_s() - began_s)
        pause(BETWEEN_KILLS_S)
    load.wait()
    windows: list[str] = []
    for at_ms in killed_ms:
        windows += [str(at_ms), str(at_ms + 1_000), str(at_ms + 1_100)]
    tell_process(reader, json.dumps(windows))
    got: dict[str, Any] = json.loads(reader.communicate()[0])
    sent_s = [1 + late["stamped_ms"]["max"] / 1000 for late in got["windows"].values() if late["stamped_ms"]]
    for what, seconds, bar_s in (("pending messages", pending_s, 5), ("new messages, due in 1 s", sent_s, 6)):
        spread = " / ".join(f"{figure_s:.1f}" for figure_s in (min(seconds), np.median(seconds), max(seconds)))
        figure = f"{KILLS} SIGKILLs to the next delivery of {what}: best / median / worst"
        report.add("kills", figure, f"{spread} s", f"<= {bar_s} s")
    exact = f"{got['received']:,} / {got['doubled']} / {got['early']}"
    report.add("kills", "received / doubled / early", exact, f"{count:,} / 0 / 0")


def rolling(bridge: Bridge, _arguments: argparse.Namespace, report: Report) -> None:
    """Two instances under load: a second one joins, then each is restarted. The lateness of messages meanwhile, beside
    the same load before, and of the partitions that stay."""
    second = Bridge(bridge.broker, bridge.directory / "second", instance="b", partitions=bridge.partitions)
    low, high = "1000", "3000"
    marks: list[tuple[str, int]] = []

    def during(what: str) -> None:
        marks.append((what, bridge.clock.now_ms()))

    with second:
        bridge.start()
        warm_up(bridge)
        count = ROLLING_RATE * 4 * SETTLED_S
        load = run_program(bridge, "load", "--messages", str(count), "--rate", str(ROLLING_RATE), "--delay", low, high)
        during("one instance")
        pause(SETTLED_S)
        during("a second one joins")
        second.start()
        pause(SETTLED_S)
        moved = set(bridge.events("partitions-given-up")[-1]["partitions"].split(", "))
        for one, name in ((bridge, "the first"), (second, "the second")):
            during(f"{name} is restarted")
            pause(EDGE_S)  # messages due just before the stop and delivered after it count for the restart
            one.stop()
            pause(AWAY_S)
            one.start()
            pause(SETTLED_S)
        load.wait()
        for one in (bridge, second):
            one.wait(lambda: one.metric("pending_messages") == 0, 60, "the rest")  # noqa: B023
    windows: list[str] = []
    for (what, start_ms), (_, end_ms) in pairwise([*marks, ("", bridge.clock.now_ms())]):
        windows += [what, str(start_ms), str(end_ms)]
    sent = WARMED + count
    reader = run_program(bridge, "receive", "--messages", str(sent), "--seconds", "60", "--windows", *windows)
    got: dict[str, Any] = json.loads(reader.communicate()[0])
    for what, late in got["windows"].items():
        report.add("two instances", f"{what}: late p50 / p99 / p99.9", tell(late["stamped_ms"]), "max <= 8,000 ms")
        if what != "one instance":
            stays = what == "the first is restarted"  # then the partitions that have moved to the second stay
            late_ms = [one["max"] for name, one in late["by_partition_ms"].items() if (name in moved) == stays]
            figure = f"{what}: the latest of partitions that stay"
            report.add("two instances", figure, f"{max(late_ms):,.0f} ms", "<= 1,000 ms")
    exact = f"{got['received']:,} / {got['doubled']} / {got['early']}"
    report.add("two instances", "received / doubled / early", exact, f"{sent:,} / 0 / 0")


def wait_until_ms(bridge: Bridge, at_ms: int) -> None:
    """Wait for a time (epoch ms) while the bridge runs."""
    bridge.wait(lambda: bridge.clock.now_ms() >= at_ms, 1_000, "the load goes on")


def usage_between(bridge: Bridge, start_ms: int, end_ms: int) -> float:
    """The CPU seconds per second between two times (epoch ms)."""
    wait_until_ms(bridge, start_ms)
    before, began_s = bridge.usage(), bridge.clock.monotonic_s()
    wait_until_ms(bridge, end_ms)
    return (bridge.usage().cpu_s - before.cpu_s) / (bridge.clock.monotonic_s() - began_s)
