"""Progress of long work: a bar on a terminal, a log line every few seconds elsewhere, and the phase that /readyz
tells."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Final, Self

import structlog
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from bridge.telemetry.health import Health
from timerstore.clock import Clock

LOG_INTERVAL_S: Final = 5.0

log = structlog.get_logger("bridge.wire.committed_state")


class LongWork:
    """One piece of long work, as a context; `report` may be called as often as one likes."""

    def __init__(self, phase: str, what: str, *, health: Health, clock: Clock) -> None:
        """`phase` is the name in /readyz, `what` what is counted."""
        self._phase = phase
        self._what = what
        self._health = health
        self._clock = clock
        self._logged_s = self._began_s = clock.monotonic_s()
        self._bar: Progress | None = None

    def __enter__(self) -> Self:
        self._health.enter(self._phase, reasons=(self._what,))
        if sys.stderr.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, transient=True)
            self._bar.start()
            self._task = self._bar.add_task(f"{self._phase}: {self._what}", total=None)
        return self

    def report(self, done: int, total: int) -> None:
        """`done` of `total` are through."""
        self._health.enter(self._phase, reasons=(self._what,), progress=done / total if total else 1.0)
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total)
            return
        now_s = self._clock.monotonic_s()
        if now_s - self._logged_s >= LOG_INTERVAL_S:
            self._logged_s = now_s
            log.info("progress", phase=self._phase, done=done, total=total, seconds=round(now_s - self._began_s, 1))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
