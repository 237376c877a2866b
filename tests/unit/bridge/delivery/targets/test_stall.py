"""A transaction that is not acknowledged: which leaders are the cause, and what the brokers know of the targets."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from bridge.delivery.targets.cache import Targets
from bridge.delivery.targets.stall import StallWatch
from bridge.delivery.targets.target import Target
from dev.harness.waiting import wait_until
from tests.broker.brokers import ON_ONE, ON_TWO, TWO, WELL, Brokers
from tests.manual_clock import ManualClock
from timerstore.clock import SystemClock


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def brokers() -> Brokers:
    return Brokers()


@pytest.fixture
def targets(brokers: Brokers, clock: ManualClock) -> Targets:
    return Targets(brokers, clock)


def test_delivery_does_not_wait_for_what_it_requests() -> None:
    """While the thread waits for a node that hangs, delivery asks leaders, and goes on."""
    asked, answer = threading.Event(), threading.Event()

    class Hanging(Brokers):
        def __call__(self, names: Sequence[str]) -> Mapping[str, Target]:
            if self.is_hanging:
                asked.set()
                assert answer.wait(30)
            return super().__call__(names)

    brokers, clock = Hanging(), SystemClock()
    brokers.topics.update(t=ON_TWO)
    targets = Targets(brokers, clock)
    believed = targets.resolve(["t"])
    brokers.is_hanging, brokers.dead = True, {("t", 1)}
    targets.start()
    try:
        targets.request_refresh(["t"])
        assert asked.wait(30)
        began_s = clock.monotonic_s()
        watch = StallWatch(targets, clock)
        wait_until(lambda: watch.is_explained(clock.monotonic_s() - began_s, believed), 30, "it is found")
        assert targets.are_worse_than(believed)
        assert not answer.is_set()
    finally:
        answer.set()
        targets.stop()


def stall(targets: Targets, clock: ManualClock, tenths: int) -> list[bool]:
    """What is found at each look, a tenth of a second apart."""
    watch, found = StallWatch(targets, clock), []
    for i in range(1, tenths + 1):
        found.append(watch.is_explained(i / 10, {}))
        clock.advance(100)
    return found


@pytest.mark.parametrize("is_hanging", [True, False])
def test_a_leader_that_is_silent_while_others_answer_is_taken_out(
    brokers: Brokers, clock: ManualClock, targets: Targets, is_hanging: bool
) -> None:
    """With all that it leads, also what is not in this transaction."""
    brokers.topics.update(t=ON_TWO, u=replace(WELL, leaders={0: TWO}), well=ON_ONE)
    targets.resolve(["t", "u", "well"])
    brokers.is_hanging = is_hanging
    brokers.dead = {("t", 1)}
    assert stall(targets, clock, 4) == [False, False, False, True]
    found = targets.resolve(["t", "u", "well"])
    assert [sorted(found[name].down) for name in ("t", "u", "well")] == [[1], [0], []]
    assert brokers.probed == [("t", 0), ("t", 1)], "one question to each leader"
    assert not any(stall(targets, clock, 6)), "nothing new is found"


def test_a_leader_that_refuses_a_connection_is_taken_out_at_once(
    brokers: Brokers, clock: ManualClock, targets: Targets
) -> None:
    """There is no waiting for an answer that cannot come, unless the others are slow as well."""
    brokers.topics.update(t=ON_TWO)
    targets.resolve(["t"])
    brokers.dead, brokers.is_refusing = {("t", 1)}, True
    assert stall(targets, clock, 2) == [False, True]
    assert sorted(targets.resolve(["t"])["t"].down) == [1]


def test_a_short_silence_costs_a_second_and_another_one_more(
    brokers: Brokers, clock: ManualClock, targets: Targets
) -> None:
    """A leader that answers again gets its messages; one that was silent again is not trusted as soon."""
    brokers.topics.update(t=ON_TWO)
    targets.resolve(["t"])
    for open_s in (1, 5, 10):
        brokers.dead = {("t", 1)}
        assert any(stall(targets, clock, 5))
        brokers.dead.clear()
        clock.advance(open_s * 1_000 - 300)
        targets.refresh()
        assert not targets.resolve(["t"])["t"].is_well
        clock.advance(300)
        targets.refresh()
        assert targets.resolve(["t"])["t"].is_well


@pytest.mark.parametrize("dead", [set(), {("t", 0), ("t", 1)}, {("only", 0)}])
def test_a_leader_that_is_not_worse_than_the_others_is_left_alone(
    brokers: Brokers, clock: ManualClock, targets: Targets, dead: set[tuple[str, int]]
) -> None:
    """Nothing is acknowledged, and all leaders answer, or none does, or there is but one."""
    names = ["only"] if dead == {("only", 0)} else ["t"]
    brokers.topics.update(t=ON_TWO, only=ON_ONE)
    targets.resolve(names)
    brokers.dead = dead
    assert not any(stall(targets, clock, 10))
    assert all(target.is_well for target in targets.resolve(names).values())


def test_a_late_answer_of_others_is_evidence_too(brokers: Brokers, clock: ManualClock, targets: Targets) -> None:
    """They have to connect first; until then no leader is taken out. Another stall asks anew."""
    brokers.topics.update(t=ON_TWO)
    targets.resolve(["t"])
    brokers.dead, brokers.is_hanging = {("t", 0), ("t", 1)}, True
    assert not any(stall(targets, clock, 6))
    brokers.dead = set()
    assert not any(stall(targets, clock, 6))


def test_the_brokers_are_asked_again_every_half_second(brokers: Brokers, clock: ManualClock, targets: Targets) -> None:
    """Beside the stall; what they say of the targets explains it. Another transaction begins anew."""
    brokers.topics.update(t=WELL)
    believed, watch = targets.resolve(["t"]), StallWatch(targets, clock)
    for _ in range(2):
        watch.begin()
        asked = len(brokers.asked)
        for tenth in range(1, 12):
            assert not watch.is_explained(tenth / 10, believed)
            targets.refresh()
        assert len(brokers.asked) - asked == 2
    brokers.topics.update(t=replace(WELL, down={0: "has no leader"}))
    assert not watch.is_explained(1.6, believed)
    targets.refresh()
    assert watch.is_explained(1.7, believed)
