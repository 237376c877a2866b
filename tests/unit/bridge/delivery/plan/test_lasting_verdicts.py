"""Lasting verdicts about messages, with brokers that say something else than before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.delivery.plan.backoff import RetryPolicy
from bridge.delivery.plan.planner import Plan, Planner
from bridge.delivery.plan.record_size import SizeLimits
from bridge.delivery.targets.cache import Targets
from bridge.delivery.targets.target import Target
from bridge.kafka.errors import Refusal
from bridge.stores.names import Sources
from bridge.wire.reasons import RejectReason
from tests.broker.brokers import MISSING, WELL, Brokers
from tests.entries import rows_of, timer
from tests.manual_clock import ManualClock

SOURCES: Final = Sources([("delay", 0)])
ROOMY: Final = replace(WELL, bytes_max=100_000)
DENIED: Final = replace(WELL, refusal=Refusal(RejectReason.TARGET_DENIED, "denied"))
DOWN: Final = replace(WELL, down=dict.fromkeys(range(3), "has no leader"))
LAST: Final = {"attempt": 2}
"""Of three."""

CHANGES: Final[dict[str, tuple[Target, Target, dict[str, Any]]]] = {
    "partition-out-of-range": (WELL, replace(WELL, partitions=6), {"target_partition": 4}),
    "too-large": (WELL, ROOMY, {"value": b"v" * 5_000}),
    "no-key": (replace(WELL, needs_key=True), WELL, {}),
    "unknown-target": (MISSING, WELL, LAST),
    "target-denied": (DENIED, WELL, LAST),
    "target-unavailable": (DOWN, WELL, LAST),
}
"""By the reason of a dead letter: what the target was like, what it is like now, and a message that this concerns."""


class Rig:
    """A planner, and brokers that it asks."""

    def __init__(self) -> None:
        self.clock, self.brokers = ManualClock(), Brokers()
        self.brokers.topics |= {"delay": ROOMY, "delay.dlt": ROOMY}
        self.targets = Targets(self.brokers, self.clock)
        self.planner = Planner(
            targets=self.targets,
            permitted=lambda _: True,
            default_targets={"delay": None},
            dead_letter_topics={"delay": "delay.dlt"},
            retry=RetryPolicy(attempts=3),
            limits=SizeLimits(record_bytes_max=1_000_000),
        )

    def plan(self, offset: int = 1, *, waited_ms: int = 0, target: str = "orders", **more: Any) -> Plan:
        """Of one message, which was due so long ago."""
        due_ms = self.clock.now_ms() - waited_ms
        entry = timer("delay", 0, offset, due_ms, target, **more)
        return self.planner.plan(rows_of([(entry["at"], 0, offset, entry)]), SOURCES, self.clock.now_ms())

    def asked(self, name: str = "orders") -> int:
        return sum(name in names for names in self.brokers.asked)


@pytest.mark.fault("verdicts on stale knowledge of a topic")
@pytest.mark.parametrize("reason", CHANGES)
@given(data=st.data())
def test_no_dead_letter_rests_on_knowledge_from_before_its_message(reason: str, data: st.DataObject) -> None:
    """Before a property of a topic makes a dead letter, the brokers are asked again if the last answer is older than
    the message: a change in time counts."""
    before, after, more = CHANGES[reason]
    rig = Rig()
    rig.brokers.topics["orders"] = before
    rig.targets.resolve(["orders"])
    rig.clock.advance(data.draw(st.integers(1, 100_000)))
    rig.brokers.topics["orders"] = after
    waited_ms = data.draw(st.integers(0, 100_000))
    ts = rig.clock.now_ms() - (0 if waited_ms else data.draw(st.integers(0, 100_000)))
    plan = rig.plan(waited_ms=waited_ms, ts=ts, **more)
    assert plan.counts.rejected == {} and plan.counts.delivered == {"orders": 1}


@pytest.mark.parametrize("reason", CHANGES)
def test_a_verdict_that_stands_is_given_once_the_brokers_confirm_it(reason: str) -> None:
    """And so it is when the answer is younger than the message, without another question."""
    before, _, more = CHANGES[reason]
    rig = Rig()
    rig.brokers.topics["orders"] = before
    rig.targets.resolve(["orders"])
    rig.clock.advance(10)
    assert rig.plan(**more).counts.rejected == {reason: 1}
    asked = rig.asked()
    assert rig.plan(2, waited_ms=5, **more).counts.rejected == {reason: 1}
    assert rig.asked() == asked


@pytest.mark.parametrize("reason", CHANGES)
def test_a_topic_is_asked_about_once_a_second_for_any_number_of_verdicts(reason: str) -> None:
    """Messages in between are put off until it may be asked about again, and no attempt is counted."""
    before, after, more = CHANGES[reason]
    rig = Rig()
    rig.brokers.topics["orders"] = before
    rig.targets.resolve(["orders"])
    rig.clock.advance(10)
    first, asked = rig.plan(**more), rig.asked()
    assert first.counts.rejected == {reason: 1}
    rig.brokers.topics["orders"] = after
    for offset in range(2, 20):
        rig.clock.advance(50)
        plan = rig.plan(offset, **more)
        assert plan.counts.retried == {"target-in-doubt": 1} and plan.counts.rejected == {}
        (batch,) = plan.batches()
        assert batch.headers is not None
        assert ("delay-copy-attempt", str(more.get("attempt", 0)).encode()) in batch.headers[0]
    assert rig.asked() == asked
    rig.clock.advance(1_000)
    assert rig.plan(99, waited_ms=1_000, **more).counts.delivered == {"orders": 1}


def test_without_an_answer_there_is_no_verdict() -> None:
    """The message waits until the brokers say something."""
    rig = Rig()
    rig.brokers.topics["orders"] = WELL
    rig.targets.resolve(["orders", "delay", "delay.dlt"])
    rig.brokers.is_silent = True
    rig.clock.advance(1)
    assert rig.plan(target_partition=4).counts.retried == {"target-in-doubt": 1}


def _roll(rig: Rig) -> Plan:
    now_ms = rig.clock.now_ms()
    entry = {**timer("delay", 0, 1, now_ms + 100_000, "orders", value=b"v" * 5_000), "at": now_ms}
    return rig.planner.plan(rows_of([(now_ms, 0, 1, entry)]), SOURCES, now_ms)


def _retry(rig: Rig) -> Plan:
    return rig.plan(target="missing", value=b"v" * 5_000)


@pytest.mark.parametrize("planned", [_roll, _retry])
def test_what_a_delay_topic_takes_is_looked_up_again_as_well(planned: Callable[[Rig], Plan]) -> None:
    """A roll or a retry that was too large for it becomes no dead letter once its limit is raised."""
    rig = Rig()
    rig.brokers.topics |= {"delay": WELL, "orders": ROOMY}
    rig.targets.resolve(["delay", "orders"])
    rig.clock.advance(10)
    assert planned(rig).counts.rejected != {}, "as long as it is too small"
    rig.clock.advance(2_000)
    rig.brokers.topics["delay"] = ROOMY
    assert planned(rig).counts.rejected == {}
