"""A long run under load with three outages of the broker: charts of memory and lateness."""

from __future__ import annotations

import argparse
import json
import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Final

from bench.bridge import Bridge, pause, run_program, tell_process
from bench.report import Report

RATE: Final = 2_000
DELAY_MS: Final = ("1000", "30000")
AWAY_S: Final = (5, 20, 90)
"""The outages: two stops and a kill, after a quarter, half, and three quarters of the run."""
SAMPLE_S: Final = 15.0
WINDOWS: Final = 60
POINTS: Final = 20
"""The points of each chart: the largest value of each stretch."""
REST_S: Final = 120
MIB: Final = 1 << 20


def soak(bridge: Bridge, arguments: argparse.Namespace, report: Report) -> None:
    """`--minutes` at 2,000/s: every message must come once and none early, and memory must not grow."""
    seconds = 60 * arguments.minutes
    count = RATE * seconds
    bridge.start()
    until = ("--messages", str(count), "--seconds", str(seconds + sum(AWAY_S) + REST_S), "--wait")
    reader = run_program(bridge, "receive", *until)
    pause(SAMPLE_S)
    began_ms = bridge.clock.now_ms()
    load = run_program(bridge, "load", "--messages", str(count), "--rate", str(RATE), "--delay", *DELAY_MS)
    outages: list[tuple[float, float]] = []
    with resident(bridge) as samples:
        for number, away_s in enumerate(AWAY_S, 1):
            pause(began_ms / 1000 + seconds * number / 4 - bridge.clock.now_ms() / 1000)
            gone_ms = bridge.clock.now_ms()
            (bridge.broker.kill if away_s == max(AWAY_S) else bridge.broker.stop)()
            pause(away_s)
            bridge.broker.start()
            outages.append(((gone_ms - began_ms) / 60_000, (bridge.clock.now_ms() - began_ms) / 60_000))
            report.add("soak", f"broker away from minute {outages[-1][0]:.1f} to", f"{outages[-1][1]:.1f}")
        bridge.wait(lambda: load.poll() is not None, seconds, "the load")
        assert load.returncode == 0, "not all was sent"
        bridge.wait(lambda: bridge.metric("pending_messages") == 0, REST_S, "the rest")
    width_ms = seconds * 1000 // WINDOWS
    windows: list[str] = []
    for start_ms, end_ms in pairwise(range(began_ms, began_ms + (WINDOWS + 1) * width_ms, width_ms)):
        windows += [f"{(start_ms - began_ms) / 60_000:g}", str(start_ms), str(end_ms)]
    tell_process(reader, json.dumps(windows))
    got: dict[str, Any] = json.loads(reader.communicate()[0])
    exact = f"{got['received']:,} / {got['doubled']} / {got['early']}"
    report.add("soak", "received / doubled / early", exact, f"{count:,} / 0 / 0")
    late = [window["stamped_ms"] for window in got["windows"].values()]
    for name, key in (("p50", "p50"), ("p99", "p99"), ("the latest", "max")):
        draw(f"lateness, {name}", "ms, log10", [logarithm(late_ms.get(key, 0)) for late_ms in late], arguments.minutes)
        quiet = sorted(late_ms[key] for late_ms in late if late_ms)
        report.add("soak", f"lateness {name}, median over {WINDOWS} windows", f"{quiet[len(quiet) // 2]:.0f} ms")
    for name, column in (("Python", 0), ("JVM", 1)):
        sizes = [sample[column] for sample in samples]
        draw(f"resident memory, {name}", "MiB", sizes, arguments.minutes)
        quarter = len(sizes) // 4
        figures = " / ".join(
            f"{sum(part) / len(part):,.0f}" for part in (sizes[quarter // 2 : quarter], sizes[-quarter:])
        )
        report.add("soak", f"RSS of {name}, before the first outage / in the last quarter", f"{figures} MiB")


@contextmanager
def resident(bridge: Bridge) -> Iterator[list[tuple[float, float]]]:
    """Samples of the memory of Python and of the JVM, in MiB, taken inside the context."""
    samples: list[tuple[float, float]] = []
    closed = threading.Event()

    def sample() -> None:
        while not closed.wait(SAMPLE_S):
            whole, python = bridge.rss_bytes(), bridge.python_bytes()
            samples.append((python / MIB, (whole - python) / MIB))

    sampler = threading.Thread(target=sample, name="resident")
    sampler.start()
    try:
        yield samples
    finally:
        closed.set()
        sampler.join()


def draw(title: str, unit: str, values: Sequence[float], minutes: int) -> None:
    """Print a chart for Mermaid."""
    points = ", ".join(f"{value:.1f}" if value < 10 else f"{value:.0f}" for value in thinned(values))
    print(
        f'```mermaid\nxychart-beta\n  title "{title}"\n  x-axis "minute" 0 --> {minutes}\n'
        f'  y-axis "{unit}"\n  line [{points}]\n```\n'
    )


def thinned(values: Sequence[float]) -> list[float]:
    """The largest values of `POINTS` stretches, each with at least one value."""
    edges = [len(values) * point // POINTS for point in range(POINTS + 1)]
    return [max(values[start:end]) for start, end in pairwise(edges) if end > start]


def logarithm(value_ms: float) -> float:
    """The decimal logarithm of a lateness; 0 for 1 ms and less."""
    return math.log10(max(1.0, value_ms))
