"""The bridge against the relay, in turns: lateness, arrival at a consumer, CPU by thread.

`--cores 0` runs both on one core, `--quota 0.5` with half of one (a control group), `--beside 1` beside an endless loop
on the same cores. `--cold` gives each turn a fresh broker.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Final

from bench.bridge import Bridge, bridge_on_broker
from bench.load import DELAY_TOPIC
from bench.processor import beside, on_cores, quota, with_thread_names
from bench.relay import INTERVAL_MS, TOPIC
from bench.report import Comparison, Report
from bench.turns import DELAY_MS, Relay, Turn, Window, measure

READY_S_MAX: Final = 600
STOP_S_MAX: Final = 120
THREADS: Final = 8
"""The number of threads in the report, those with the most CPU first."""
START, SETTLED, HALF_MINUTE = "at the start", "settled", "in the first half minute"
"""The windows."""
HALF_MINUTE_S: Final = 30
WINDOWS: Final = f"{START} / {SETTLED}, after ready"
"""The figure that says which seconds these are."""
STAMPED, ARRIVED, APPENDED = "late", "late at the consumer", "the producer's wait for the append"
CPU: Final = "CPU"

Turns = Sequence[tuple[Turn, Turn]]
"""Bridge and relay of each turn."""


def against_relay(bridge: Bridge, arguments: argparse.Namespace, report: Report) -> None:
    """`--turns` turns of `--first` and `--after` seconds at `--rate`, from `ready` on."""
    first, last = arguments.first, arguments.first + arguments.after
    windows: list[Window] = [(START, 0, first), (SETTLED, first, last), (HALF_MINUTE, 0, min(HALF_MINUTE_S, last))]
    low, high = (delay_ms // 1000 for delay_ms in DELAY_MS)
    share = f"on cores {arguments.cores}" if arguments.cores else "on all cores"
    share += f", {arguments.quota:g} of a core" if arguments.quota else ""
    share += f", beside {arguments.beside} endless loops" if arguments.beside else ""
    broker = "a fresh broker for each turn" if arguments.cold else "one broker for all turns"
    scenario = f"relay, {arguments.rate:,}/s"
    report.add(scenario, "conditions", f"delays of {low} to {high} s, {share}, {broker}")
    report.add(scenario, WINDOWS, f"0 to {first} s / {first} to {last} s")
    turns: list[tuple[Turn, Turn]] = []
    for number in range(1, arguments.turns + 1):
        turns.append((_bridge_turn(bridge, arguments, windows), _relay_turn(bridge, arguments, windows)))
        for name, turn in zip(("bridge", "relay"), turns[-1], strict=True):
            report.add(scenario, f"turn {number}, {name}: received / doubled / early", turn.exact)
    for comparison in comparisons(scenario, windows, turns):
        report.compare(comparison)
    for name, _, _ in windows[:2]:
        for side, contender in enumerate(("bridge", "relay")):
            for thread, cpu in by_thread([both[side] for both in turns], name)[:THREADS]:
                report.add(scenario, f"CPU {name}, {contender}, {thread}", f"{100 * cpu:.1f} % of a core")


def comparisons(scenario: str, windows: Sequence[Window], turns: Turns) -> Iterator[Comparison]:
    """Each figure of each window. A window without messages has none."""
    for name, _, _ in windows:
        pairs = [(one.cpu[name], other.cpu[name]) for one, other in turns]
        yield _comparison(scenario, f"{CPU} {name}", "% of a core", [(100 * a, 100 * b) for a, b in pairs])
        for what, field in ((STAMPED, "stamped_ms"), (ARRIVED, "arrived_ms"), (APPENDED, "appended_ms")):
            found = [tuple(getattr(turn, field).get(name, {}) for turn in both) for both in turns]
            for key in ("p50", "p99"):
                values = [(one[key], other[key]) for one, other in found if one and other]
                if values:
                    yield _comparison(scenario, f"{what} {key} {name}", "ms", values)


def _comparison(scenario: str, figure: str, unit: str, values: Sequence[tuple[float, float]]) -> Comparison:
    bridge, relay = zip(*values, strict=True)
    return Comparison(scenario=scenario, figure=figure, unit=unit, bridge=bridge, peer=relay)


def by_thread(turns: Sequence[Turn], window: str) -> list[tuple[str, float]]:
    """Medians of the CPU seconds per second of each thread; the largest first. The rest belongs to threads that ended
    between two samples."""
    shares: list[Mapping[str, float]] = [turn.cpu_by_thread[window] for turn in turns]
    names = {name for share in shares for name in share}
    medians = {name: median(share.get(name, 0.0) for share in shares) for name in names}
    medians["other"] = median(turn.cpu[window] - sum(turn.cpu_by_thread[window].values()) for turn in turns)
    return sorted(medians.items(), key=lambda item: -item[1])


def _bridge_turn(bridge: Bridge, arguments: argparse.Namespace, windows: Sequence[Window]) -> Turn:
    with _own(bridge, arguments) as own, quota(arguments.quota) as limit:
        own.environment |= with_thread_names()
        with on_cores(arguments.cores):
            own.launch()
        limit(own.pid)
        own.wait_ready(READY_S_MAX)
        with beside(arguments.beside, arguments.cores):
            turn = measure(own, own, DELAY_TOPIC, arguments.rate, windows)
        own.stop(STOP_S_MAX)
        return turn


def _relay_turn(bridge: Bridge, arguments: argparse.Namespace, windows: Sequence[Window]) -> Turn:
    with _own(bridge, arguments) as own, quota(arguments.quota) as limit, Relay(own.bootstrap, INTERVAL_MS) as relay:
        with on_cores(arguments.cores):
            limit(relay.launch())
        relay.wait_ready()
        with beside(arguments.beside, arguments.cores):
            return measure(own, relay, TOPIC, arguments.rate, windows)


@contextmanager
def _own(bridge: Bridge, arguments: argparse.Namespace) -> Iterator[Bridge]:
    """The turn's bridge (not started) with its broker."""
    if not arguments.cold:
        yield bridge
        return
    with bridge_on_broker(arguments.partitions) as fresh:
        yield fresh
