"""The one place that reads a clock.

Everything else gets the time as an argument (`now_ms`) or a `Clock`, so that tests own time and so that the two kinds
of time are never mixed up: `now_ms` is the wall clock, in which due times are written and which may step; `monotonic_s`
never steps and is for measuring how long something took.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Wall time and monotonic time. There is no `sleep`: waiting belongs to what can be woken."""

    def now_ms(self) -> int:
        """Wall clock, epoch milliseconds, rounded down: a timer that is due at t is never seen as due before t."""
        ...

    def monotonic_s(self) -> float:
        """Seconds since an arbitrary start; never goes back."""
        ...


class SystemClock:
    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic_s(self) -> float:
        return time.monotonic()


JUMP_MS_MIN = 1_000
"""Less between two looks is no jump: clocks are slewed, and a look takes time."""


class ClockWatch:
    """Tells when the wall clock has jumped against the monotonic one. (A machine that slept jumps forward, too.)"""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._difference_ms = self._measure_ms()

    def jump_ms(self) -> int:
        """How far the wall clock has jumped since the last look (negative: back), or 0."""
        before_ms, self._difference_ms = self._difference_ms, self._measure_ms()
        jump_ms = self._difference_ms - before_ms
        return jump_ms if abs(jump_ms) >= JUMP_MS_MIN else 0

    def _measure_ms(self) -> int:
        return self._clock.now_ms() - int(self._clock.monotonic_s() * 1_000)
