"""What a start insists on, asked again while the bridge runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import structlog

from bridge.checks import conditions
from bridge.checks.conditions import LOOK_S, Conditions
from bridge.checks.finding import Context, Finding, failed, ok, warned
from bridge.errors import EnvironmentFailure
from bridge.settings.model import Settings
from tests.manual_clock import ManualClock

WELL = ok("topic delay", "4 partitions")
COMPACTED = failed("topic delay", "cleanup.policy is compact", "set it to delete")
DENIED = failed("topic delay.dlq", "Write is denied", "grant it")


class Bench:
    """Conditions over findings that a test chooses."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = ManualClock(now_ms=0)
        self.conditions = Conditions(Settings.of({}), self.clock)
        self.delay: list[Finding] | EnvironmentFailure = [WELL]
        self.letters: list[Finding] = []
        monkeypatch.setattr(conditions, "check_delay_topics", self._given(lambda: self.delay))
        monkeypatch.setattr(conditions, "check_dead_letter_topics", self._given(lambda: self.letters))

    @staticmethod
    def _given(found: Callable[[], list[Finding] | EnvironmentFailure]) -> Callable[[Context], Iterator[Finding]]:
        def check(_: Context) -> Iterator[Finding]:
            given = found()
            if isinstance(given, EnvironmentFailure):
                raise given
            yield from given

        return check

    def look(self) -> list[str]:
        """The events that a look after LOOK_S logs."""
        self.clock.advance(int(1_000 * LOOK_S))
        with structlog.testing.capture_logs() as lines:
            self.conditions.look(mock.Mock())
        return [line["event"] for line in lines]


@pytest.mark.fault("a delay topic's configuration changes under the bridge")
def test_a_condition_that_is_not_met_any_more_is_told_until_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A condition that a start would refuse is logged once, named in /readyz and counted until it is met again."""
    bench = Bench(monkeypatch)
    assert bench.look() == [] and bench.conditions.alarms() == ()
    bench.delay, bench.letters = [COMPACTED, warned("topic delay", "one replica", "more")], [DENIED]
    assert bench.look() == ["start-would-refuse"] * 2
    assert bench.look() == []
    assert bench.conditions.counts() == {"topic delay": 1, "topic delay.dlq": 1}
    assert "cleanup.policy is compact" in bench.conditions.alarms()[0]
    bench.delay = [WELL]
    assert bench.look() == ["start-would-refuse-no-more"]
    assert bench.conditions.counts() == {"topic delay.dlq": 1}


def test_brokers_that_do_not_answer_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was known stays, and the next look asks again."""
    bench = Bench(monkeypatch)
    bench.delay = [COMPACTED]
    bench.look()
    bench.delay = EnvironmentFailure("no answer", hint="Wait.", code="DB-3002")
    assert bench.look() == ["conditions-unknown"]
    assert bench.conditions.counts() == {"topic delay": 1}


def test_it_looks_at_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    """The look of each second asks the brokers every fifteenth time."""
    bench = Bench(monkeypatch)
    bench.delay = [COMPACTED]
    bench.clock.advance(int(1_000 * LOOK_S) - 1)
    bench.conditions.look(mock.Mock())
    assert bench.conditions.counts() == {}
    bench.clock.advance(1)
    bench.conditions.look(mock.Mock())
    assert bench.conditions.counts() == {"topic delay": 1}
