"""How long tests wait follows from how slow the machine is."""

from __future__ import annotations

import pytest

from dev.harness import pace
from dev.harness.waiting import wait_until
from tests.manual_clock import ManualClock


@pytest.mark.parametrize(
    ("slow", "cores", "factor"),
    [(0.5, 2, 1), (1, 8, 1), (3, 2, 3), (1, 1, 2), (3, 1, 6), (0.5, 1, 2), (100, 1, pace.FACTOR_MAX)],
)
def test_a_slow_core_and_a_missing_one_both_count(slow: float, cores: int, factor: float) -> None:
    """A fast machine makes no deadline shorter, and a slow one each of them longer, up to a bound."""
    assert pace.factor_of(slow, cores) == factor


def test_every_process_of_a_session_has_its_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process finds the announced factor, and so do its children in their environment."""
    monkeypatch.setenv(pace.VARIABLE, "1")
    try:
        pace.announce(2.5)
        assert pace.factor() == 2.5 and pace.scaled(4) == 10
    finally:
        monkeypatch.undo()
        pace.factor.cache_clear()


def test_a_late_change_of_the_machines_speed_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look a minute; the factor never falls within a session."""
    monkeypatch.setenv(pace.VARIABLE, "1")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    clock, loops_s = ManualClock(), iter([5 * pace.LOOP_S, pace.LOOP_S])
    follower = pace.Follower(clock, lambda: next(loops_s))
    try:
        pace.factor.cache_clear()
        factors = []
        for _ in range(3):
            follower.follow()
            factors.append(pace.factor())
            clock.advance(round(pace.AGAIN_S * 1000))
        assert factors == [1, 5, 5]
    finally:
        monkeypatch.undo()
        pace.factor.cache_clear()


def test_a_deadline_is_longer_on_a_slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting helpers scale it, and say how long they have waited."""
    monkeypatch.setattr("dev.harness.waiting.scaled", lambda seconds: seconds / 100)
    with pytest.raises(AssertionError, match=r"not within 0\.01 s: the end"):
        wait_until(lambda: False, 1, "the end")
