"""bridge.delivery.setbacks: what fails is known for as long as messages wait for it, and told once with its place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import pytest
from structlog.testing import capture_logs

from bridge.delivery.plan.backoff import RetryPolicy
from bridge.delivery.plan.planner import Planner
from bridge.delivery.setbacks import AGAIN_S, SetbackLog, setbacks
from bridge.delivery.targets.cache import KNOWN_FOR_S, Targets
from bridge.stores.names import Sources
from tests.broker.brokers import MISSING, WELL, Brokers
from tests.entries import reject, rows_of, timer
from tests.manual_clock import ManualClock

SOURCES: Final = Sources([("delay", 0)])
BACKOFF_MS: Final = 600_000
ROOMY: Final = replace(WELL, bytes_max=100_000)


class Bench:
    """A planner whose plans are committed at once."""

    def __init__(self) -> None:
        self.clock, self.brokers = ManualClock(), Brokers()
        self.brokers.topics |= {"delay": ROOMY, "delay.dlt": ROOMY, "bills": WELL}
        self.targets = Targets(self.brokers, self.clock)
        self.log = SetbackLog(self.targets, self.clock)
        self.planner = Planner(
            targets=self.targets,
            permitted=lambda _: True,
            default_targets={"delay": None},
            dead_letter_topics={"delay": "delay.dlt"},
            retry=RetryPolicy(attempts=3, backoff_ms=BACKOFF_MS, backoff_max_ms=BACKOFF_MS),
        )

    def commit(self, *entries: dict[str, Any]) -> list[tuple[str, str, str]]:
        """Returns what the log says: event, reason and record."""
        rows = rows_of([(each["at"], 0, each["offset"], each) for each in entries])
        with capture_logs() as logs:
            self.log.committed(setbacks(self.planner.plan(rows, SOURCES, self.clock.now_ms())))
        return [(line["event"], line["reason"], line["record"]) for line in logs]

    def timer(self, offset: int, target: str, **more: Any) -> dict[str, Any]:
        return timer("delay", 0, offset, self.clock.now_ms(), target, **more)

    def shown(self) -> tuple[dict[str, str], set[str]]:
        """The targets that fail, as the API and as the metric have them."""
        reports = {each.name: str(each.reason) for each in self.targets.reports(100) if each.failing_partitions}
        return reports, {name for name, _ in self.targets.failing()}


@pytest.mark.fault("a target without traffic that is retried every ten minutes")
def test_a_target_fails_for_as_long_as_messages_wait_for_it() -> None:
    """The target counts as failing while messages wait for it, at any rate of attempts, and for at most ten seconds
    after its recovery; API and metric agree."""
    bench = Bench()
    bench.commit(bench.timer(1, "orders"), bench.timer(2, "bills"))
    assert bench.shown() == ({"orders": "unknown-target"}, {"(unknown)"})
    for _ in range(7):
        bench.clock.advance(60_000)
        bench.targets.refresh()
        assert bench.shown() == ({"orders": "unknown-target"}, {"(unknown)"})
    bench.brokers.topics["orders"] = WELL
    bench.clock.advance(10_000)
    bench.targets.refresh()
    assert bench.shown() == ({}, set())
    bench.brokers.topics["orders"] = MISSING
    bench.targets.expire("orders")
    bench.targets.resolve(["orders"])
    bench.clock.advance(BACKOFF_MS)
    assert bench.shown() == ({}, set()), "nothing waits any more"


def test_each_new_cause_is_told_once_with_the_place_of_a_record() -> None:
    """The first failure of a target, until nothing waits for it; the first dead letter for a reason in ten minutes."""
    bench = Bench()
    assert bench.commit(bench.timer(1, "orders"), bench.timer(2, "orders")) == [
        ("target-failing", "unknown-target", "delay/0/1")
    ]
    assert bench.commit(bench.timer(3, "orders")) == []
    assert bench.commit(
        bench.timer(4, "bills", target_partition=9), reject("delay", 0, 5, bench.clock.now_ms(), "no-time")
    ) == [
        ("dead-letter-written", "no-time", "delay/0/5"),
        ("dead-letter-written", "partition-out-of-range", "delay/0/4"),
    ]
    bench.clock.advance(2_000)
    assert bench.commit(bench.timer(6, "bills", target_partition=9), bench.timer(7, "bills")) == []
    bench.clock.advance(int(1_000 * max(AGAIN_S, KNOWN_FOR_S)) + BACKOFF_MS)
    assert bench.commit(bench.timer(8, "bills", target_partition=9), bench.timer(9, "orders")) == [
        ("target-failing", "unknown-target", "delay/0/9"),
        ("dead-letter-written", "partition-out-of-range", "delay/0/8"),
    ]


def test_a_dead_letter_topic_that_fails_is_a_target_that_fails() -> None:
    """What waits for it names it."""
    bench = Bench()
    bench.brokers.topics["delay.dlt"] = MISSING
    told = bench.commit(reject("delay", 0, 5, bench.clock.now_ms(), "no-time"))
    assert told == [("target-failing", "dead-letter-topic", "delay/0/5")]
    assert bench.shown()[0] == {"delay.dlt": "unknown-target"}
