"""bridge.clockjumps: who stalls after the clock was set back is told of, once, and nobody else."""

from __future__ import annotations

from collections.abc import Sequence

from bridge.runtime.clock_jumps import STALL_S, ClockJumps, Signs
from tests.manual_clock import ManualClock

HOUR_MS = 3_600_000


class Process:
    """Two threads, of which one may be silent."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.silent: str = ""
        self.jumps: list[int] = []
        self.stalls: list[list[str]] = []
        self.watch = ClockJumps(self.clock, self._on_jump, self._on_stall)

    def look_for(self, seconds: float) -> None:
        """Once a second."""
        for _ in range(int(seconds)):
            self.clock.advance(1_000)
            self.watch.look()

    def _on_jump(self, jump_ms: int) -> Signs:
        self.jumps.append(jump_ms)
        return {"main": lambda: self.silent != "main", "dispatcher": lambda: self.silent != "dispatcher"}

    def _on_stall(self, who: Sequence[str]) -> None:
        self.stalls.append(list(who))


def test_who_stays_silent_after_a_jump_back_is_told_once() -> None:
    """When the time for that is over, and not before."""
    process = Process()
    process.silent = "dispatcher"
    process.clock.step_wall(-HOUR_MS)
    process.look_for(STALL_S)
    assert (process.jumps, process.stalls) == ([-HOUR_MS], [])
    process.look_for(10 * STALL_S)
    assert process.stalls == [["dispatcher"]]


def test_who_shows_life_once_has_got_over_it() -> None:
    """What it waits for later has nothing to do with that jump."""
    process = Process()
    process.silent = "main"
    process.clock.step_wall(-HOUR_MS)
    process.look_for(STALL_S / 2)
    process.silent = ""
    process.look_for(1)
    process.silent = "main"
    process.look_for(3 * STALL_S)
    assert not process.stalls


def test_no_wait_outlasts_a_jump_forward_or_a_small_one() -> None:
    """A wait is longer by what the clock was set back, no more; forward it is shorter."""
    process = Process()
    process.silent = "main"
    process.clock.step_wall(HOUR_MS)
    process.look_for(3 * STALL_S)
    process.clock.step_wall(-int(STALL_S * 1_000))
    process.look_for(3 * STALL_S)
    assert process.jumps == [HOUR_MS, -int(STALL_S * 1_000)]
    assert not process.stalls


def test_each_of_several_jumps_is_watched() -> None:
    """The first one is got over, the second is not; and time goes on from the second."""
    process = Process()
    process.clock.step_wall(-HOUR_MS)
    process.look_for(STALL_S / 2)
    process.silent = "dispatcher"
    process.clock.step_wall(-HOUR_MS)
    process.look_for(STALL_S)
    assert not process.stalls
    process.look_for(1)
    assert process.stalls == [["dispatcher"]]


def test_without_a_jump_nobody_is_asked() -> None:
    """Silence alone is none of its business."""
    process = Process()
    process.silent = "main"
    process.look_for(10 * STALL_S)
    assert not process.jumps
    assert not process.stalls
