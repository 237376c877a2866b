"""Failed logins at the HTTP ports: each is counted, and the log reports them at intervals."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Final

import structlog

from timerstore.clock import Clock, SystemClock

TOLD_S: Final = 60.0
"""The interval of lines in the log: guesses of passwords cannot fill it."""

log = structlog.get_logger("bridge.http.logins")


def uncounted() -> None:
    """The counter of tests and of programs without metrics."""


class Logins:
    """The failed logins of one process. Any thread."""

    def __init__(self, clock: Clock | None = None, count: Callable[[], None] = uncounted) -> None:
        self._clock, self._count = clock or SystemClock(), count
        self._lock = threading.Lock()
        self._untold, self._told_s = 0, -math.inf

    def failed(self, address: str, path: str) -> None:
        """Count a request with a wrong password or token. A request without credentials is no failure: browsers begin
        with one."""
        self._count()
        with self._lock:
            self._untold += 1
            now_s = self._clock.monotonic_s()
            if now_s - self._told_s < TOLD_S:
                return
            failed, self._untold, self._told_s = self._untold, 0, now_s
        log.warning("login-failed", client=address, path=path[:200], failed=failed)
