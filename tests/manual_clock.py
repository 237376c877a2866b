"""The clock of the tests."""

from __future__ import annotations


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
