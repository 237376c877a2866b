"""The bridge's health: its phase, and the problems that need a restart. The parts of the bridge write it; the
management port (http.py) only reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Final

import structlog

from timerstore.clock import Clock

LOG_INTERVAL_S: Final = 5.0

log = structlog.get_logger("bridge.telemetry.health")


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase of the bridge: a stable name, whether the bridge delivers, and the reasons if it does not; its faults if
    it does."""

    name: str
    _: KW_ONLY
    ready: bool = False
    reasons: tuple[str, ...] = ()
    progress: float | None = None  # 0..1 of long work with a known end
    reader: str | None = None  # the present reader: `spark` or `plain`


class Health:
    """The state behind the probes; safe to use from any thread."""

    def __init__(self, problems: Callable[[], list[str]] = list, on_enter: Callable[[], None] = lambda: None) -> None:
        """`problems` returns the reasons for a restart in words: dead and hanging threads. `on_enter` is called with
        every phase and every report of progress."""
        self.phase = Phase("starting", reasons=("starting",))
        self.problems = problems
        self._on_enter = on_enter

    def enter(self, phase: Phase) -> None:
        """Enter a phase."""
        self._on_enter()
        self.phase = phase


class LongWork:
    """A phase with progress: in /readyz, and every few seconds in the log. `report` may be called at any rate."""

    def __init__(self, health: Health, clock: Clock, phase: str, what: str) -> None:
        """`what` names the counted work."""
        self._phase = phase
        self._what = what
        self._health = health
        self._clock = clock
        self._logged_s = self._began_s = clock.monotonic_s()
        health.enter(Phase(phase, reasons=(what,)))

    def report(self, done: int, total: int) -> None:
        """`done` of `total` units are done."""
        self._health.enter(Phase(self._phase, reasons=(self._what,), progress=done / total if total else 1.0))
        now_s = self._clock.monotonic_s()
        if now_s - self._logged_s >= LOG_INTERVAL_S:
            self._logged_s = now_s
            log.info("progress", phase=self._phase, done=done, total=total, seconds=round(now_s - self._began_s, 1))
