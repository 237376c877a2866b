"""timerstore.clock: the wall clock is rounded down, the manual clock does what it is told."""

from __future__ import annotations

import time

import pytest

from tests.manual_clock import ManualClock
from timerstore.clock import ClockWatch, SystemClock


def test_the_system_clock_never_runs_ahead_of_the_wall_clock() -> None:
    """Rounded up, a timer would fire up to a millisecond early."""
    clock = SystemClock()
    for _ in range(1000):
        assert clock.now_ms() <= time.time() * 1000 + 1e-3
        first = clock.monotonic_s()
        assert clock.monotonic_s() >= first


def test_the_manual_clock_advances_both_times_and_steps_only_the_wall() -> None:
    """A step of the wall clock must be told from time that passed."""
    clock = ManualClock(now_ms=1_000, monotonic_s=5.0)
    clock.advance(250)
    assert (clock.now_ms(), clock.monotonic_s()) == (1_250, 5.25)
    clock.step_wall(-1_000)
    assert (clock.now_ms(), clock.monotonic_s()) == (250, 5.25)
    with pytest.raises(ValueError, match="backwards"):
        clock.advance(-1)


def test_jumps_of_the_wall_clock_are_told_apart_from_time_that_passes() -> None:
    """By sign and size, once each; a slow drift is none, however far it goes."""
    clock = ManualClock()
    watch = ClockWatch(clock)
    clock.advance(10_000_000)
    assert watch.jump_ms() == 0
    clock.step_wall(-3_600_000)
    assert watch.jump_ms() == -3_600_000
    assert watch.jump_ms() == 0
    clock.step_wall(5_000)
    clock.advance(1_000)
    assert watch.jump_ms() == 5_000
    for _ in range(100):
        clock.advance(1_000)
        clock.step_wall(-500)
        assert watch.jump_ms() == 0
