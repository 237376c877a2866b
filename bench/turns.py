"""Turns: the bridge and the relay under the same load, one after the other.

A message is late from its due time, or, at the relay, from its append to the relay's topic. (The bridge counts
`delay-for` from the append, so a due time is never before it.) Both ends are the broker's timestamps. The producer's
wait for that append is a figure of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, Self

import psutil

from bench.bridge import TIMED_TARGETS, Bridge, pause, run_program, tell_process
from bench.processor import ThreadTimes
from dev.harness.bridge import ROOT, Usage, usage_of

DELAY_MS: Final = (1_000, 5_000)
STARTED_S: Final = 3
"""The start of load and reader."""
REST_S: Final = 120
"""The longest delivery of the rest, after the end of the load."""
STOP_S_MAX: Final = 30

Window = tuple[str, int, int]
"""Name, first and last second of a load."""


class Contender(Protocol):
    """A program under measurement."""

    def processes(self) -> list[psutil.Process]:
        """Its running processes."""
        ...

    def usage(self) -> Usage:
        """Their CPU seconds and memory."""
        ...

    def check(self) -> None:
        """Raises AssertionError if it has ended."""
        ...


class Relay:
    """The relay's process; started and stopped as a context. It reads `TOPIC` of bench/relay.py."""

    def __init__(self, bootstrap: str, interval_ms: int) -> None:
        self._command = [sys.executable, "-m", "bench.relay", "--bootstrap", bootstrap, "--interval", str(interval_ms)]
        self._process: subprocess.Popen[str] | None = None

    def launch(self) -> int:
        """Start it; returns the process id at once."""
        self._process = subprocess.Popen(self._command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        return self._process.pid

    def wait_ready(self) -> None:
        """Wait until it is at the end of its topic. Raises AssertionError if it ends."""
        assert self._process is not None and self._process.stdout is not None, "it is launched"
        assert self._process.stdout.readline() == "ready\n", "the relay has ended"

    def processes(self) -> list[psutil.Process]:
        """Its one process."""
        return [psutil.Process(self._process.pid)] if self._process is not None else []

    def usage(self) -> Usage:
        """CPU seconds and memory, measured as those of the bridge."""
        return usage_of(self.processes())

    def check(self) -> None:
        """Raises AssertionError if it has ended."""
        assert self._process is not None and self._process.poll() is None, "the relay has ended"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(STOP_S_MAX)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The figures of one turn, by window: percentiles (ms), and CPU seconds per second."""

    stamped_ms: Mapping[str, Mapping[str, float]]
    arrived_ms: Mapping[str, Mapping[str, float]]
    appended_ms: Mapping[str, Mapping[str, float]]
    cpu: Mapping[str, float]
    cpu_by_thread: Mapping[str, Mapping[str, float]]
    exact: str
    """Messages received, doubled and early, and sent."""


def measure(bridge: Bridge, contender: Contender, topic: str, rate: int, windows: Sequence[Window]) -> Turn:
    """Load on `topic` for the length of the windows, which may overlap. The contender must be ready. `bridge` names the
    broker, and runs only if it is the contender."""
    seconds = max(end for _, _, end in windows)
    count, targets = rate * seconds, ("--targets", *TIMED_TARGETS)
    limits = ("--messages", str(count), "--seconds", str(STARTED_S + seconds + REST_S))
    reader = run_program(bridge, "receive", *targets, *limits, "--from-end", "--wait")
    what = ("--messages", str(count), "--rate", str(rate), "--delay", *map(str, DELAY_MS), "--topic", topic)
    edges = [text for window in windows for text in map(str, window)]
    load = run_program(bridge, "load", *targets, *what, "--not-idempotent", "--wait", "--windows", *edges)
    pause(STARTED_S)
    begin_ms = bridge.clock.now_ms()
    tell_process(load, "begin")
    times = ThreadTimes(lambda: [process.pid for process in contender.processes()])
    marks: dict[int, tuple[float, float, dict[str, float]]] = {}
    with times.sampled():
        for second in sorted({edge for _, *edges_s in windows for edge in edges_s}):
            pause((begin_ms - bridge.clock.now_ms()) / 1000 + second)
            contender.check()
            marks[second] = bridge.clock.monotonic_s(), contender.usage().cpu_s, times.look()
    appended: dict[str, dict[str, float]] = json.loads(load.communicate()[0])
    texts = [text for name, *ends in windows for text in (name, *(str(begin_ms + 1000 * end) for end in ends))]
    tell_process(reader, json.dumps(texts))
    got: dict[str, Any] = json.loads(reader.communicate()[0])
    shares = {name: _shares(marks[start], marks[end]) for name, start, end in windows}
    return Turn(
        stamped_ms={name: late["stamped_ms"] for name, late in got["windows"].items()},
        arrived_ms={name: late["arrived_ms"] for name, late in got["windows"].items()},
        appended_ms=appended,
        cpu={name: cpu for name, (cpu, _) in shares.items()},
        cpu_by_thread={name: threads for name, (_, threads) in shares.items()},
        exact=f"{got['received']:,} / {got['doubled']} / {got['early']} of {count:,}",
    )


def _shares(
    start: tuple[float, float, dict[str, float]], end: tuple[float, float, dict[str, float]]
) -> tuple[float, dict[str, float]]:
    """CPU seconds per second between two marks: of all, and by thread."""
    seconds = end[0] - start[0]
    threads = {name: (cpu_s - start[2].get(name, 0.0)) / seconds for name, cpu_s in end[2].items()}
    return (end[1] - start[1]) / seconds, threads
