"""The one place that reads a clock.

Everything else gets the time as an argument (`now_ms`) or a `Clock`, so that tests own time and so that the two kinds
of time are never mixed up: `now_ms` is the wall clock, in which due times are written and which may step; `monotonic_s`
never steps and is for measuring how long something took.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Wall time and monotonic time. There is no `sleep`: waiting belongs to whoever can be woken."""

    def now_ms(self) -> int:
        """Wall clock, epoch milliseconds, rounded down: a timer that is due at t is never seen as due before t."""
        ...

    def monotonic_s(self) -> float:
        """Seconds since an arbitrary start; never goes back."""
        ...


class SystemClock:
    """The machine's clocks."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic_s(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that a test moves by hand. `step_wall` moves only the wall clock, as an administrator or NTP would."""

    def __init__(self, now_ms: int = 1_700_000_000_000, monotonic_s: float = 0.0) -> None:
        self._now_ms = now_ms
        self._monotonic_s = monotonic_s

    def now_ms(self) -> int:
        return self._now_ms

    def monotonic_s(self) -> float:
        return self._monotonic_s

    def advance(self, ms: int) -> None:
        """Let `ms` milliseconds pass on both clocks. Raises ValueError if negative: use `step_wall` for that."""
        if ms < 0:
            raise ValueError(f"time does not pass backwards: {ms} ms")
        self._now_ms += ms
        self._monotonic_s += ms / 1000

    def step_wall(self, ms: int) -> None:
        """Jump the wall clock by `ms` (either sign); the monotonic clock stays."""
        self._now_ms += ms
