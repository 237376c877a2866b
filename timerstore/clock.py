"""The one place that reads a clock.

All other code gets the time as an argument (`now_ms`), or a `Clock`, so that tests own time. The two kinds of time have
different names: `now_ms` is the wall clock, which due times refer to, and which may step; `monotonic_s` never steps,
and measures durations.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Wall time and monotonic time. There is no `sleep`: code waits on objects that can wake it."""

    def now_ms(self) -> int:
        """Wall clock, epoch milliseconds, rounded down, so that no timer seems due before its time."""
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
"""The smallest jump. Smaller differences between two looks are slewing, or the time of the look itself."""


class ClockWatch:
    """Measures jumps of the wall clock against the monotonic one. (After a machine's sleep it jumps forward, too.)"""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._difference_ms = self._measure_ms()

    def jump_ms(self) -> int:
        """The jump of the wall clock since the last look, in ms; negative: back; 0: none."""
        before_ms, self._difference_ms = self._difference_ms, self._measure_ms()
        jump_ms = self._difference_ms - before_ms
        return jump_ms if abs(jump_ms) >= JUMP_MS_MIN else 0

    def _measure_ms(self) -> int:
        return self._clock.now_ms() - int(self._clock.monotonic_s() * 1_000)
