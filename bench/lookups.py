"""Searches over the API among many pending messages: their times, and their cost for delivery."""

from __future__ import annotations

import argparse
import json
import random
import threading
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np

from bench.bridge import Bridge, pause, run_program, tell_process
from bench.load import DELAY_TOPIC, TARGETS
from bench.report import Report, percentiles, tell

ASKED: Final = 100
"""The number of searches of each kind, one after the other."""
RATE: Final = 1_000
RATE_DELAY_MS: Final = ("1000", "2000")
WINDOW_S: Final = 60
LEAD_S: Final = 15
"""The time of load before the first window."""
PER_SECOND: Final = 20
FLUSHED_S: Final = 65
FAR_MS: Final = ("3600000", str(30 * 86_400_000))


def lookups(bridge: Bridge, arguments: argparse.Namespace, report: Report) -> None:
    """Ten times --messages due in an hour to thirty days: single searches, then delivery at 1,000/s without and with 20
    searches a second."""
    bridge.start()
    count, chance = 10 * arguments.messages, random.Random(2)
    ids = min(count, 100_000)
    run_program(bridge, "load", "--messages", str(count), "--delay", *FAR_MS, "--mixed", "--ids", str(ids)).wait()
    bridge.wait(lambda: bridge.metric("records_ingested_total") >= count, 900, "ingest")
    pause(FLUSHED_S)
    base = f"{bridge.api_url()}/api/v1/"

    def ask(path: str, **parameters: object) -> Any:
        with urllib.request.urlopen(f"{base}{path}?{urllib.parse.urlencode(parameters)}", timeout=30) as answer:
            return json.loads(answer.read())

    scenario = f"{count / 1_000_000:g}M pending"
    searches: dict[str, tuple[Callable[[], Any], str]] = {
        "by id": (lambda: ask("messages", id=f"id-{chance.randrange(ids)}"), "p99 <= 100 ms"),
        "by origin": (lambda: ask("messages", origin=_origin(chance, bridge.partitions, count)), "p99 <= 100 ms"),
        "by key, limit 100": (
            lambda: ask("messages", key=f"key-{chance.randrange(10_000)}", limit=100),
            "<= 1,000 ms",
        ),
        "by target, limit 100": (
            lambda: ask("messages", target=chance.choice(TARGETS), limit=100),
            "<= 1,000 ms",
        ),
        "summary": (lambda: ask("summary"), "<= 50 ms"),
        "count": (lambda: ask("count"), "<= 50 ms"),
    }
    for name, (search, bar) in searches.items():
        search()
        report.add(scenario, f"{name}: p50 / p99 / p99.9", tell(search_times(bridge, search)), bar)
    plain, beside = _lateness(bridge, scenario, report, searches["by id"][0], searches["by origin"][0])
    report.add(
        scenario, f"p99 of the lateness grows, at {PER_SECOND} searches/s, by", f"{beside - plain:.0f} ms", "< 20"
    )
    report.add(scenario, "RSS", f"{bridge.rss_bytes() >> 20} MiB")


def search_times(bridge: Bridge, search: Callable[[], Any]) -> dict[str, float]:
    """Percentiles of the times of `ASKED` searches, in ms."""
    taken_ms = []
    for _ in range(ASKED):
        began_s = bridge.clock.monotonic_s()
        search()
        taken_ms.append(1000 * (bridge.clock.monotonic_s() - began_s))
    return percentiles(np.array(taken_ms))


def _origin(chance: random.Random, partitions: int, count: int) -> str:
    return f"{DELAY_TOPIC}/{chance.randrange(partitions)}/{chance.randrange(int(0.9 * count / partitions))}"


def _lateness(bridge: Bridge, scenario: str, report: Report, *searches: Callable[[], Any]) -> tuple[float, float]:
    """The p99 lateness at 1,000/s, without and with searches."""
    sent = RATE * (LEAD_S + 2 * WINDOW_S + 3)
    reader = run_program(bridge, "receive", "--messages", str(sent), "--seconds", str(4 * WINDOW_S), "--wait")
    load = run_program(bridge, "load", "--messages", str(sent), "--rate", str(RATE), "--delay", *RATE_DELAY_MS)
    pause(LEAD_S)
    begin_ms = bridge.clock.now_ms()
    pause(WINDOW_S)
    middle_ms = bridge.clock.now_ms()
    with _asked_beside(*searches):
        pause(WINDOW_S)
    end_ms = bridge.clock.now_ms()
    load.wait()
    windows = ["without", str(begin_ms), str(middle_ms), "with", str(middle_ms), str(end_ms)]
    tell_process(reader, json.dumps(windows))
    got: dict[str, Any] = json.loads(reader.communicate()[0])
    for name, late in got["windows"].items():
        report.add(scenario, f"1,000/s, {name} searches: late p50 / p99 / p99.9", tell(late["stamped_ms"]))
    report.add(scenario, "received / doubled / early", f"{got['received']:,} / {got['doubled']} / {got['early']}")
    without, beside = (got["windows"][name]["stamped_ms"]["p99"] for name in ("without", "with"))
    return without, beside


@contextmanager
def _asked_beside(*searches: Callable[[], Any]) -> Iterator[None]:
    """Run these searches in turn, at a rate, inside the context."""
    closed = threading.Event()

    def ask() -> None:
        turn = 0
        while not closed.wait(1 / PER_SECOND):
            searches[turn % len(searches)]()
            turn += 1

    thread = threading.Thread(target=ask, name="searches")
    thread.start()
    try:
        yield
    finally:
        closed.set()
        thread.join()
