"""The slowness of this machine: the factor by which waiting helpers and time-outs of tests wait longer.

It is measured at the start of a test session (`measured`), and handed to all its processes in a variable (`announce`).
A machine may become slower later: each process measures again between tests (`Follower`). Outside of a session, and on
a machine as fast as the one that deadlines were written on, it is 1.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Final

from timerstore.clock import Clock, SystemClock

VARIABLE: Final = "DELAY_BRIDGE_PACE"
CORES: Final = 2
"""The machine for which the deadlines were written."""
LOOP_S: Final = 0.05
"""A million turns of a loop there."""
START_S: Final = 0.25
"""A Java program that prints its version, there, and an interpreter."""
FACTOR_MAX: Final = 20.0
TURNS: Final = 1_000_000
TRIES: Final = 3
START_S_MAX: Final = 60
AGAIN_S: Final = 60.0


@cache
def factor() -> float:
    """Of this session; at least 1."""
    return float(os.environ.get(VARIABLE, "1"))


def scaled(seconds: float) -> float:
    """A deadline for this machine; `seconds` are generous on the machine for which deadlines were written."""
    return seconds * factor()


def announce(value: float) -> None:
    """Make `value` the factor of this process and of all that it starts from now on."""
    os.environ[VARIABLE] = f"{value:.2f}"
    factor.cache_clear()


class Follower:
    """Measures the machine's speed once a minute, in processor time: deadlines include the load of other processes."""

    def __init__(self, clock: Clock, loop_s: Callable[[], float]) -> None:
        """`loop_s` returns the processor time of the loop, in seconds."""
        self._clock, self._loop_s = clock, loop_s
        self._looked_s = clock.monotonic_s()

    def follow(self) -> None:
        """Raise the factor if a minute has passed and the machine is slower. It never falls within a session."""
        if self._clock.monotonic_s() - self._looked_s < AGAIN_S:
            return
        value = factor_of(self._loop_s() / LOOP_S, len(os.sched_getaffinity(0)))
        self._looked_s = self._clock.monotonic_s()
        if value > factor():
            announce(value)


def loop_processor_s() -> float:
    """The processor time of the loop, in seconds; the shortest of three."""
    taken_s = []
    for _ in range(TRIES):
        began_s = _processor_s()
        _loop()
        taken_s.append(_processor_s() - began_s)
    return min(taken_s)


def _processor_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_THREAD)
    return usage.ru_utime + usage.ru_stime


def measured() -> float:
    """The factor of this machine at this moment: the slower one of a loop and of two programs' starts, and for each
    core that is missing its share more. It takes a second."""
    slow = max(_shortest(_loop) / LOOP_S, _shortest(_start) / START_S)
    return factor_of(slow, len(os.sched_getaffinity(0)))


def factor_of(slow: float, cores: int) -> float:
    """The factor for cores that are `slow` times as slow, and for their number."""
    return min(max(1.0, slow) * max(1.0, CORES / cores), FACTOR_MAX)


def _shortest(run: Callable[[], None]) -> float:
    clock, taken_s = SystemClock(), []
    for _ in range(TRIES):
        began_s = clock.monotonic_s()
        run()
        taken_s.append(clock.monotonic_s() - began_s)
    return min(taken_s)


def _loop() -> None:
    total = 0
    for number in range(TURNS):
        total += number


def _start() -> None:
    java = str(Path(os.environ["JAVA_HOME"], "bin", "java")) if "JAVA_HOME" in os.environ else "java"
    for command in ([java, "-Xshare:auto", "-version"], [sys.executable, "-c", "import json"]):
        try:
            subprocess.run(command, capture_output=True, check=False, timeout=START_S_MAX)
        except (OSError, subprocess.TimeoutExpired):
            continue  # without Java no test that needs it begins
