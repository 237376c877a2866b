"""On time from the first second: lateness from `ready` on, cold and warm apart, and what a kill costs."""

from __future__ import annotations

import argparse
import json
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Final

import numpy as np
from confluent_kafka import Consumer

from bench.bridge import WARM_RATE, WARMED, Bridge, pause, run, warm_up
from bench.load import DELAY_TOPIC
from bench.receive import percentiles
from bench.report import Report, tell

WINDOWS_S: Final = ((0, 30), (0, 5), (5, 30), (30, 60), (60, 120), (120, 150), (5, 150))
"""Of due times, from `ready` on; the half minute before the end is warm."""
LOAD_S: Final = 150
CPU_S: Final = 30
"""Before the end of the load, for the CPU that it takes."""
BOUND_S: Final = 60, 115
"""When a plain consumer of the delay topic reads, too. It takes a fifth of a core, which the first minute and the last
half minute shall not be without."""
BROKER_STARTS: Final = 3
BROKER_WARM_S: Final = 30
"""So often has the broker seen a bridge start, each time with so long a load at the rate that is measured, or twice it:
its compiler takes a quarter of a core at first, less than 2 % after 90 s, and more again when a bridge starts."""
KILLS: Final = 20
KILLS_RATE: Final = 500
BETWEEN_KILLS_S: Final = 6
CYCLE_S: Final = 6
"""A start, and the first delivery after it, at most: the load lasts for so long."""
FAR_MS: Final = 600_000
FETCHED: Final = 1_000
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
    """A bridge that has just started, under load from `ready` on; for a minute of it beside a plain consumer of the
    delay topic. The broker is warm, as the cluster that a bridge is started beside. `late` has the bars of windows,
    `cpu` that of the last half minute."""
    scenario = f"{rate:,}/s, delays of {delay_ms[0]} to {delay_ms[1]} ms"
    for _start in range(BROKER_STARTS):
        bridge.start()
        warm_up(bridge, max(rate, WARM_RATE), BROKER_WARM_S)
        bridge.stop()
    # Other processes start before the bridge does: their own start would be measured else.
    count, (low, high) = rate * LOAD_S, map(str, delay_ms)
    until = ("--messages", str(count), "--seconds", str(LOAD_S + 90))
    reader = run(bridge, "receive", *until, "--from-end", "--wait")
    what = ("--messages", str(count), "--rate", str(rate), "--delay", low, high)
    load = run(bridge, "load", *what, "--not-idempotent", "--wait")
    pause(SETTLED_S / 10)
    report.add(scenario, "process start to ready, after a stop", f"{bridge.timed_start():.1f} s")
    ready_ms = bridge.clock.now_ms()
    tell_process(load, "begin")
    begin_ms, end_ms, warm_ms, last_ms = (ready_ms + 1000 * s for s in (*BOUND_S, LOAD_S - CPU_S, LOAD_S))
    wait_until_ms(bridge, begin_ms)
    with plain_consumer(bridge) as arrived_ms:
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
    for window, found in got["windows"].items():
        report.add(scenario, f"{window} after ready: late p50 / p99 / p99.9", tell(found["stamped_ms"]), bars[window])
    for window, found in got["windows"].items():
        report.add(scenario, f"{window} after ready: arrival - due p50 / p99 / p99.9", tell(found["arrived_ms"]))
    exact = f"{got['received']:,} / {got['doubled']} / {got['early']}"
    report.add(scenario, "received / doubled / early", exact, f"{count:,} / 0 / 0")
    report.add(scenario, "CPU in the last half minute", f"{100 * share:.0f} % of a core", f"<= {cpu} %")
    report.add(scenario, "RSS", f"{bridge.rss_bytes() >> 20} MiB")
    bound = tell(percentiles(np.array(arrived_ms)))
    when = "{}-{} s".format(*BOUND_S)
    report.add(scenario, f"{when} after ready: append to a plain consumer of the delay topic p50 / p99 / p99.9", bound)
    for event in bridge.events("query-serves"):
        report.add(scenario, "Spark's query serves", f"{event['seconds']} s after its start")


def kills(bridge: Bridge, arguments: argparse.Namespace, report: Report) -> None:
    """SIGKILL some seconds after each start, under load, with a million in the index: to the next delivery of what was
    pending then, and of what is sent after it and due in a second."""
    bridge.start()
    run(bridge, "load", "--messages", str(arguments.messages), "--due", str(bridge.clock.now_ms() + FAR_MS)).wait()
    bridge.wait(lambda: bridge.metric("pending_messages") >= arguments.messages, 120, "ingest")
    pause(SETTLED_S)  # it is in the index then
    count = KILLS_RATE * KILLS * (BETWEEN_KILLS_S + CYCLE_S)
    reader = run(bridge, "receive", "--messages", str(count), "--seconds", str(FAR_MS // 1000 - 120), "--wait")
    load = run(bridge, "load", "--messages", str(count), "--rate", str(KILLS_RATE), "--delay", "999", "1001")
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
    sent_s = [1 + found["stamped_ms"]["max"] / 1000 for found in got["windows"].values() if found["stamped_ms"]]
    for what, seconds, bar_s in (("was pending", pending_s, 5), ("is sent then, due in 1 s", sent_s, 6)):
        spread = " / ".join(f"{each:.1f}" for each in (min(seconds), np.median(seconds), max(seconds)))
        figure = f"{KILLS} SIGKILLs to the next delivery of what {what}: best / median / worst"
        report.add("kills", figure, f"{spread} s", f"<= {bar_s} s")
    exact = f"{got['received']:,} / {got['doubled']} / {got['early']}"
    report.add("kills", "received / doubled / early", exact, f"{count:,} / 0 / 0")


def rolling(bridge: Bridge, _arguments: argparse.Namespace, report: Report) -> None:
    """Two instances under load: a second one joins, then each is restarted. How late messages are meanwhile, beside the
    same load before, and how late those of partitions that stay where they are."""
    second = Bridge(bridge.broker, bridge.directory / "second", instance="b")
    low, high = "1000", "3000"
    marks: list[tuple[str, int]] = []

    def during(what: str) -> None:
        marks.append((what, bridge.clock.now_ms()))

    with second:
        bridge.start()
        warm_up(bridge)
        count = ROLLING_RATE * 4 * SETTLED_S
        load = run(bridge, "load", "--messages", str(count), "--rate", str(ROLLING_RATE), "--delay", low, high)
        during("one instance")
        pause(SETTLED_S)
        during("a second one joins")
        second.start()
        pause(SETTLED_S)
        moved = set(bridge.events("partitions-given-up")[-1]["partitions"].split(", "))
        for one, name in ((bridge, "the first"), (second, "the second")):
            during(f"{name} is restarted")
            pause(EDGE_S)  # what is due just before it stops, and delivered after it is back, is of its restart
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
    reader = run(bridge, "receive", "--messages", str(sent), "--seconds", "60", "--windows", *windows)
    got: dict[str, Any] = json.loads(reader.communicate()[0])
    for what, found in got["windows"].items():
        report.add("two instances", f"{what}: late p50 / p99 / p99.9", tell(found["stamped_ms"]), "max <= 8,000 ms")
        if what != "one instance":
            stays = what == "the first is restarted"  # what has moved to the second
            late_ms = [ms for name, ms in found["worst_ms"].items() if (name in moved) == stays]
            report.add("two instances", f"{what}: the latest of what stays", f"{max(late_ms):,} ms", "<= 1,000 ms")
    exact = f"{got['received']:,} / {got['doubled']} / {got['early']}"
    report.add("two instances", "received / doubled / early", exact, f"{sent:,} / 0 / 0")


def tell_process(process: subprocess.Popen[str], line: str) -> None:
    """Give a process that waits for it the line."""
    assert process.stdin is not None
    print(line, file=process.stdin, flush=True)


def wait_until_ms(bridge: Bridge, at_ms: int) -> None:
    """Wait for a time (epoch ms), while the bridge runs."""
    bridge.wait(lambda: bridge.clock.now_ms() >= at_ms, 1_000, "the load goes on")


def usage_between(bridge: Bridge, start_ms: int, end_ms: int) -> float:
    """CPU seconds a second between two times (epoch ms)."""
    wait_until_ms(bridge, start_ms)
    before, began_s = bridge.usage(), bridge.clock.monotonic_s()
    wait_until_ms(bridge, end_ms)
    return (bridge.usage().cpu_s - before.cpu_s) / (bridge.clock.monotonic_s() - began_s)


@contextmanager
def plain_consumer(bridge: Bridge) -> Iterator[list[int]]:
    """Arrival minus the record's timestamp, ms, of a consumer in this process: the lower bound of what is possible."""
    group = f"bound-{bridge.clock.now_ms()}"
    consumer = Consumer({"bootstrap.servers": bridge.bootstrap, "group.id": group, "auto.offset.reset": "latest"})
    consumer.subscribe([DELAY_TOPIC])
    found: list[int] = []
    closed = threading.Event()

    def read() -> None:
        while not closed.is_set():
            messages = consumer.consume(FETCHED, 0.002)
            now_ms = bridge.clock.now_ms()
            found.extend(now_ms - each.timestamp()[1] for each in messages if each.error() is None)

    thread = threading.Thread(target=read, name="plain-consumer")
    thread.start()
    try:
        yield found
    finally:
        closed.set()
        thread.join()
        consumer.close()
