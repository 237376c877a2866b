"""Failed logins at the ports of HTTP: each is counted, and the log tells of them at intervals."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Final

import structlog

from timerstore.clock import Clock, SystemClock

TOLD_S: Final = 60.0
"""Between two lines of the log: whoever tries passwords does not fill it."""

log = structlog.get_logger("bridge.telemetry.logins")


def uncounted() -> None:
    """For tests and programs without metrics."""


class Logins:
    """Wrong passwords and tokens of one process. Any thread."""

    def __init__(self, clock: Clock | None = None, count: Callable[[], None] = uncounted) -> None:
        self._clock, self._count = clock or SystemClock(), count
        self._lock = threading.Lock()
        self._untold, self._told_s = 0, -math.inf

    def failed(self, address: str, path: str) -> None:
        """A request came with a wrong password or token. One without any is not meant: browsers ask that way first."""
        self._count()
        with self._lock:
            self._untold += 1
            now_s = self._clock.monotonic_s()
            if now_s - self._told_s < TOLD_S:
                return
            failed, self._untold, self._told_s = self._untold, 0, now_s
        log.warning("login-failed", client=address, path=path[:200], failed=failed)
