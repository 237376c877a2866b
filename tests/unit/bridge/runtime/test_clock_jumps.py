"""bridge.runtime.clock_jumps: a clock that was set is told of, once."""

from __future__ import annotations

import pytest

from bridge.runtime.clock_jumps import ClockJumps
from dev.harness.waiting import wait_until
from tests.manual_clock import ManualClock

HOUR_MS = 3_600_000


@pytest.mark.parametrize("jump_ms", [HOUR_MS, -HOUR_MS])
def test_a_jump_is_told_once(monkeypatch: pytest.MonkeyPatch, jump_ms: int) -> None:
    """Time that only passes is none."""
    monkeypatch.setattr("bridge.runtime.clock_jumps.LOOK_S", 0.01)
    clock, jumps, looks = ManualClock(), list[int](), list[None]()
    with ClockJumps(clock, jumps.append, lambda _=None: looks.append(None)):
        clock.advance(HOUR_MS)
        wait_until(lambda: len(looks) > 2, 10, "it has looked")
        clock.step_wall(jump_ms)
        wait_until(lambda: jumps, 10, "it is told")
        seen = len(looks)
        wait_until(lambda: len(looks) > seen + 2, 10, "it looks again")
    assert jumps == [jump_ms]
