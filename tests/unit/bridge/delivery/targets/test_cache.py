"""The cache of targets. (tests/system/test_targets.py has what a broker does on demand.)"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from bridge.delivery.targets import cache, liveness
from bridge.delivery.targets.breakers import EVERY
from bridge.delivery.targets.cache import Targets
from bridge.delivery.targets.look_up import TargetLookUp
from bridge.delivery.targets.target import Leader
from bridge.wire.reasons import RejectReason
from dev.broker.embedded import free_ports
from dev.harness.waiting import wait_until
from tests.broker.brokers import MISSING, ON_ONE, ON_TWO, ONE, SILENT, WELL, Brokers
from tests.manual_clock import ManualClock


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def brokers() -> Brokers:
    return Brokers()


@pytest.fixture
def targets(brokers: Brokers, clock: ManualClock) -> Targets:
    return Targets(brokers, clock)


def test_a_target_that_is_well_is_looked_up_once_by_delivery(
    brokers: Brokers, clock: ManualClock, targets: Targets
) -> None:
    """The thread asks again after a minute, delivery never does."""
    brokers.topics["t"] = WELL
    for _ in range(5):
        assert targets.resolve(["t"]) == {"t": WELL}
        clock.advance(100_000)
    assert len(brokers.asked) == 1
    targets.refresh()
    targets.refresh()
    assert len(brokers.asked) == 2


def test_what_fails_is_looked_at_every_two_seconds_while_it_is_used(
    brokers: Brokers, clock: ManualClock, targets: Targets
) -> None:
    """So that it is used again soon, and made-up names are not looked up for ever."""
    assert targets.resolve(["t"]) == {"t": MISSING}
    for _ in range(100):
        clock.advance(1_000)
        targets.refresh()
    assert 10 <= len(brokers.asked) <= 17
    brokers.topics["t"] = WELL
    assert targets.resolve(["t"]) == {"t": WELL}, "delivery looks it up itself after a long time"


def test_made_up_names_have_one_label_and_are_not_looked_up_in_turns(
    brokers: Brokers, clock: ManualClock, targets: Targets
) -> None:
    """Ten thousand of them: one label value for all. The thread looks them up no more, what exists is looked at as
    often as without them, and delivery looks one of them up itself when it needs it again."""
    down = replace(WELL, down={0: "has no leader"})
    brokers.topics["real"] = down
    made_up = [f"made-up-{i}" for i in range(10_000)]
    targets.resolve(["real", *made_up])
    assert targets.failing() == {
        ("real", "target-unavailable"): 1,
        ("(unknown)", "unknown-target"): 10_000,
    }
    brokers.asked.clear()
    for _ in range(40):
        clock.advance(500)
        targets.refresh()
    assert [names for names in brokers.asked if names != ["real"]] == []
    assert len(brokers.asked) >= 9
    brokers.topics["made-up-7"] = WELL
    assert targets.resolve(["made-up-7"]) == {"made-up-7": WELL}


def test_of_targets_that_fail_a_hundred_are_named(brokers: Brokers, targets: Targets) -> None:
    """A label value is a series for ever: a topic that exists is worth one, but not any number of them."""
    names = [f"t{i}" for i in range(150)]
    brokers.topics = dict.fromkeys(names, replace(WELL, down={0: "has no leader", 1: "has no leader"}))
    targets.resolve(names)
    failing = targets.failing()
    assert len(failing) == 101
    assert failing["(other)", "target-unavailable"] == 100
    assert sum(failing.values()) == 300


def test_a_topic_of_our_own_is_named_even_when_it_is_missing(targets: Targets) -> None:
    """Its name is in the configuration, not in a header."""
    targets.start(own=["delay.dlt"])
    try:
        wait_until(lambda: targets.failing() == {("delay.dlt", "unknown-target"): 1}, 10, targets.failing)
    finally:
        targets.stop()


@pytest.mark.fault("a refresh of the targets that always fails")
def test_a_thread_that_can_only_fail_does_not_beat(
    brokers: Brokers, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the state of the targets cannot be refreshed again and again, the liveness probe fails, as for a thread that
    hangs: open breakers would stay open."""
    monkeypatch.setattr(cache, "LOOK_INTERVAL_S", 0)
    beats, tries = list[float | None](), list[int]()
    targets = Targets(brokers, clock, lambda within_s=None: beats.append(within_s))

    def refresh() -> None:
        tries.append(len(beats))
        if len(tries) < 3:
            raise RuntimeError("a bug")
        targets.stop()

    monkeypatch.setattr(targets, "refresh", refresh)
    targets._run()
    assert tries == [1, 1, 1] and len(beats) == 2


def test_what_caused_trouble_is_asked_about_once_more_and_kept_without_an_answer(
    brokers: Brokers, targets: Targets
) -> None:
    """Nothing is put off for want of an answer: an outage of all brokers says nothing of a target."""
    brokers.topics["t"] = WELL
    targets.resolve(["t"])
    brokers.is_silent = True
    targets.expire("t")
    targets.expire("never heard of")
    for _ in range(3):
        assert targets.resolve(["t"]) == {"t": WELL}
    assert brokers.asked == [["t"], ["t"]]
    brokers.is_silent = False
    targets.expire("t")
    del brokers.topics["t"]
    assert targets.resolve(["t"]) == {"t": MISSING}


def test_without_an_answer_what_was_known_stays(brokers: Brokers, clock: ManualClock, targets: Targets) -> None:
    """A target that was well is used; one of which nothing is known takes nothing for now."""
    brokers.topics["t"] = WELL
    targets.resolve(["t"])
    brokers.is_silent = True
    clock.advance(70_000)
    targets.refresh()
    found = targets.resolve(["t", "u"])
    assert found["t"] == WELL
    assert found["u"].is_unanswered
    assert found["u"].refusal is not None
    assert found["u"].refusal.reason is RejectReason.TARGET_UNAVAILABLE


def test_a_breaker_stays_open_until_its_leader_answers_and_longer_each_time(
    brokers: Brokers, clock: ManualClock, targets: Targets
) -> None:
    """Five seconds, then twice as long if it fails again soon; other partitions are not concerned."""
    brokers.topics["t"] = WELL
    targets.resolve(["t"])
    for open_s in (5, 10, 20):
        targets.trip("t", 1, SILENT)
        assert targets.resolve(["t"])["t"].down == {1: "no answer"}
        assert targets.failing() == {("t", "target-unavailable"): 1}
        brokers.dead = {("t", 1)}
        clock.advance(open_s * 1_000 - 1)
        targets.refresh()
        assert brokers.probed == []
        clock.advance(1)
        targets.refresh()
        assert brokers.probed == [("t", 1)]
        assert not targets.resolve(["t"])["t"].is_well
        brokers.dead.clear()
        clock.advance(2_000)
        targets.refresh()
        assert targets.resolve(["t"])["t"] == WELL
        brokers.probed.clear()
    assert targets.failing() == {}
    clock.advance(700_000)
    targets.trip("t", 1, SILENT)
    clock.advance(5_000)
    targets.refresh()
    assert targets.resolve(["t"])["t"].is_well, "long ago is forgotten"


def test_reports_name_trouble_first_and_when_it_is_looked_at_again(
    brokers: Brokers, clock: ManualClock, targets: Targets
) -> None:
    """An open breaker with its error and its time, a target that nobody knows, and those that are well behind them."""
    brokers.topics.update(a=WELL, z=WELL)
    targets.resolve(["a", "unknown", "z"])
    targets.trip("z", 1, SILENT)
    clock.advance(2_000)
    missing, silent, well = sorted(targets.reports(3), key=lambda each: (each.name == "a", each.name))
    assert [each.name for each in targets.reports(3)] == ["unknown", "z", "a"]
    assert MISSING.refusal is not None
    assert (missing.reason, missing.detail) == (MISSING.refusal.reason, MISSING.refusal.detail)
    assert (silent.failing_partitions, silent.open_breakers, silent.retry_s) == (1, 1, 3.0)
    assert (silent.reason, silent.detail) == (RejectReason.TARGET_UNAVAILABLE, "no answer")
    assert (well.failing_partitions, well.reason, well.retry_s) == (0, None, None)
    assert [each.name for each in targets.reports(1)] == ["unknown"]


def test_a_breaker_for_a_whole_target_probes_all_of_it(brokers: Brokers, clock: ManualClock, targets: Targets) -> None:
    """Where the partition is not known."""
    brokers.topics["t"] = WELL
    targets.resolve(["t"])
    targets.trip("t", EVERY, SILENT)
    assert targets.resolve(["t"])["t"].refusal == SILENT
    clock.advance(5_000)
    targets.refresh()
    assert brokers.probed == [("t", 0), ("t", 1), ("t", 2)]
    assert targets.resolve(["t"])["t"] == WELL


def test_one_silent_leader_does_not_keep_a_whole_target_out(
    brokers: Brokers, clock: ManualClock, targets: Targets
) -> None:
    """The breaker of all partitions is closed when some leaders answer; those of the others are opened."""
    brokers.topics["t"] = WELL
    targets.resolve(["t"])
    targets.trip("t", EVERY, SILENT)
    brokers.dead = {("t", 1)}
    clock.advance(5_000)
    targets.refresh()
    assert (targets.resolve(["t"])["t"].refusal, set(targets.resolve(["t"])["t"].down)) == (None, {1})
    brokers.dead = {("t", 0), ("t", 1), ("t", 2)}
    targets.trip("t", EVERY, SILENT)
    clock.advance(10_000)
    targets.refresh()
    assert targets.resolve(["t"])["t"].refusal == SILENT, "without any answer it stays"
    brokers.dead = set()
    clock.advance(10_000)
    targets.refresh()
    assert targets.resolve(["t"])["t"].is_well


def test_looking_again_tells_what_has_become_worse(brokers: Brokers, targets: Targets) -> None:
    """Not what was known to fail, and not what is well again."""
    brokers.topics = {"a": WELL, "b": WELL, "d": replace(WELL, down={1: "has no leader"})}
    targets.resolve(["a", "b", "c", "d"])
    brokers.topics = {"a": replace(WELL, down={0: "has no leader"}), "b": WELL, "d": WELL}
    assert targets.look_again(["a", "b", "c", "d"]) == frozenset({"a"})


def test_what_is_requested_is_looked_up_by_the_thread(brokers: Brokers, targets: Targets) -> None:
    """Delivery only compares what it believed with what is known: less is worse; more, and the same, is not."""
    brokers.topics = {"a": WELL, "b": replace(WELL, down={1: "has no leader"})}
    believed = targets.resolve(["a", "b"])
    brokers.topics["b"] = replace(WELL, down={1: "has 1 replica in sync"})
    targets.request_refresh(["a", "b"])
    assert len(brokers.asked) == 1
    targets.refresh()
    targets.refresh()
    assert brokers.asked[1:] == [["a", "b"]]
    assert not targets.are_worse_than(believed)
    brokers.topics["b"] = replace(WELL, down={0: "has no leader"})
    targets.request_refresh(["b"])
    targets.refresh()
    assert targets.are_worse_than(believed)
    assert not targets.are_worse_than({"a": believed["a"], "never seen": WELL})
    targets.trip("a", 2, SILENT)
    assert targets.are_worse_than({"a": believed["a"]}), "a breaker counts, whatever opened it"


def test_all_that_is_requested_is_looked_up(brokers: Brokers, targets: Targets) -> None:
    """However many: it may be the last one."""
    names = [f"t{number}" for number in range(150)]
    brokers.topics.update(dict.fromkeys(names, WELL))
    believed = targets.resolve(names)
    brokers.topics[names[-1]] = replace(WELL, down={0: "has no leader"})
    targets.request_refresh(names)
    targets.refresh()
    assert targets.are_worse_than(believed)


def test_the_connections_to_all_leaders_are_kept_warm(brokers: Brokers, clock: ManualClock, targets: Targets) -> None:
    """Else the first question would measure how long it takes to connect. A leader that did not answer is doubtful the
    next time."""
    brokers.topics.update(t=ON_TWO)
    targets.resolve(["t"])
    brokers.dead = {("t", 1)}
    for _ in range(2):
        clock.advance(5_000)
        targets.refresh()
    brokers.dead.clear()
    for _ in range(2):
        clock.advance(5_000)
        targets.refresh()
    assert brokers.probed == [("t", 0), ("t", 1)] * 4
    assert brokers.doubtful == [False, True, True, False]


def test_an_open_breaker_is_closed_by_the_present_leader(
    brokers: Brokers, clock: ManualClock, targets: Targets
) -> None:
    """The old leader stays dead: the partition has moved on, and so must the question."""
    brokers.topics.update(t=ON_TWO)
    targets.resolve(["t"])
    targets.trip("t", 1, SILENT)
    brokers.topics.update(t=ON_ONE)
    clock.advance(5_000)
    targets.refresh()
    assert brokers.asked == [["t"]]
    assert targets.resolve(["t"])["t"].leaders[1] == ONE


def test_a_leader_that_takes_no_connection_is_not_asked_anything() -> None:
    """The client would go on trying to connect, without a pause, for as long as it is asked."""
    (port,) = free_ports(1)
    look_up = TargetLookUp({"bootstrap.servers": f"127.0.0.1:{port}"})
    dead = Leader(1, "127.0.0.1", port)
    answers = look_up.ask({("t", 0): dead, ("t", 1): dead}, doubtful=True)
    for answer in answers.values():
        assert isinstance(answer.exception(5), ConnectionRefusedError)
        assert liveness.is_answered(answer) is False


@pytest.mark.parametrize(
    ("told", "is_answered"),
    [
        (None, False),
        (SimpleNamespace(offset=0), True),
        (SimpleNamespace(offset=-1001), False),
        (KafkaException(KafkaError(KafkaError._TIMED_OUT)), False),
        (KafkaException(KafkaError(KafkaError._TRANSPORT)), False),
        (KafkaException(KafkaError(KafkaError.LEADER_NOT_AVAILABLE)), False),
        (KafkaException(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART)), None),
    ],
)
def test_only_an_offset_is_an_answer_of_a_leader(told: object, is_answered: bool | None) -> None:
    """A missing topic is no leader's answer, but no silence either."""
    answer: Future[Any] = Future()
    if isinstance(told, Exception):
        answer.set_exception(told)
    elif told is not None:
        answer.set_result(told)
    assert liveness.is_answered(answer) is is_answered
