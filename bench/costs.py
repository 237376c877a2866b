"""Costs at rest and at two rates, in four minutes, for alternating turns of two commits on one machine."""

from __future__ import annotations

import argparse
import json
from typing import Final

from bench.bridge import Bridge, pause, run_program, tell_process, warm_up
from bench.calibration import LATE_P99, RELAY_CPU
from bench.on_time import usage_between
from bench.report import Report, mib, tell

SETTLED_S: Final = 30
REST_S: Final = 30
RATES: Final = (1_000, 10_000)
LOAD_S: Final = 40
MEASURED_S: Final = 25
"""The measured time before the end of each load."""
AFTER_S: Final = 3
"""The time for the delivery of the rest of a load."""
DELAY_MS: Final = (500, 1_500)
COMMITS: Final = "transaction_duration_seconds_count"


def costs(bridge: Bridge, _arguments: argparse.Namespace, report: Report) -> None:
    """CPU and memory at rest; CPU, commits a second and lateness at each rate. The figures only serve comparisons: the
    broker is cold, and its CPU is not included."""
    bridge.start()
    warm_up(bridge)
    pause(SETTLED_S)
    now_ms = bridge.clock.now_ms()
    share = usage_between(bridge, now_ms, now_ms + 1000 * REST_S)
    report.add("costs", "CPU at rest", f"{100 * share:.2f} % of a core")
    report.add("costs", "RSS at rest", mib(bridge.rss_bytes()))
    for rate in RATES:
        count, (low, high) = rate * LOAD_S, map(str, DELAY_MS)
        reader = run_program(bridge, "receive", "--messages", str(count), "--seconds", "120", "--from-end", "--wait")
        what = ("--messages", str(count), "--rate", str(rate), "--delay", low, high)
        load = run_program(bridge, "load", *what, "--not-idempotent", "--wait")
        pause(AFTER_S)
        begin_ms = bridge.clock.now_ms()
        tell_process(load, "begin")
        window_ms = begin_ms + 1000 * (LOAD_S - MEASURED_S), begin_ms + 1000 * LOAD_S
        before = bridge.metric(COMMITS)
        share = usage_between(bridge, *window_ms)
        commits = (bridge.metric(COMMITS) - before) / LOAD_S
        load.wait()
        tell_process(reader, json.dumps(["window", *map(str, window_ms)]))
        got = json.loads(reader.communicate()[0])
        scenario = f"costs at {rate:,}/s"
        report.add(scenario, "CPU", f"{100 * share:.1f} % of a core")
        report.add(scenario, "transactions a second", f"{commits:.1f}")
        report.against(scenario, "CPU", 100 * share, RELAY_CPU)
        late_ms = got["windows"]["window"]["stamped_ms"]
        report.add(scenario, "late p50 / p99 / p99.9", tell(late_ms))
        report.against(scenario, "late p99", late_ms["p99"], LATE_P99)
        exact = f"{got['received']:,} / {got['doubled']} / {got['early']}"
        report.add(scenario, "received / doubled / early", exact, f"{count:,} / 0 / 0")
        pause(AFTER_S)
