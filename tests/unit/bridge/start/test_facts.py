"""bridge.start.facts: first commits are made or waited for, and what is gathered from Kafka and the directory."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from bridge.errors import EnvironmentFailure, StateError
from bridge.kafka.admin import Topic, Watermarks
from bridge.start.facts import _committed_again, gather, plan_start
from bridge.start.first_commits import SilentLogs, StartFacts, StartPlan, TopicFacts
from bridge.stores.names import SourceName
from bridge.wire.committed_state import CommittedState
from bridge.wire.decode_epochs import amend_epochs
from tests.manual_clock import ManualClock
from tests.unit.bridge.start.test_first_commits import PARAMETERS, state, topic


def states(plan: StartPlan | None) -> Mapping[SourceName, CommittedState]:
    assert plan is not None
    return plan.states


class Group:
    """A consumer group's commits; `others` are made while somebody waits."""

    def __init__(self, owned: set[SourceName], others: Mapping[SourceName, CommittedState] | None = None) -> None:
        self.owned = frozenset(owned)
        self.commits: dict[SourceName, CommittedState] = {}
        self.requests: list[set[SourceName]] = []
        self.others = dict(others or {})
        self.clock = ManualClock()
        self.revoked: frozenset[SourceName] | None = None
        """What is left when a revocation comes just before a commit."""

    def assignment(self) -> frozenset[SourceName]:
        return self.owned

    def read_committed_states(
        self,
        partitions: Collection[SourceName],
        timeout_s: float | None = None,  # noqa: ARG002 - the seam's
        strict: Collection[SourceName] | None = None,  # noqa: ARG002 - the seam's
    ) -> dict[SourceName, CommittedState | None]:
        return {name: self.commits.get(name) for name in partitions}

    def commit_states(self, states: Mapping[SourceName, CommittedState], owned: frozenset[SourceName]) -> bool:
        self.requests.append(set(states))
        if self.revoked is not None:
            self.owned = self.revoked
        if self.owned == owned:
            self.commits.update(states)
        return self.owned == owned

    def wait(self, timeout_s: float) -> None:
        self.clock.advance(int(timeout_s * 1000))
        self.commits.update(self.others)

    def plan(self, found: TopicFacts, owned: set[SourceName] | None = None) -> StartPlan | None:
        """As `plan_start` does it."""
        mine = self.owned if owned is None else frozenset(owned)
        return plan_start(self, mine, lambda: self.gather(found, mine), self.clock)  # type: ignore[arg-type]

    def gather(self, found: TopicFacts, owned: frozenset[SourceName]) -> StartFacts:
        return StartFacts(owned=owned, topics={"d": found}, parameters={"d": PARAMETERS}, committed=dict(self.commits))


def test_first_use_commits_every_partition_in_one_request() -> None:
    """The owner of partition 0 commits for all, so that instances that start together cannot undo each other."""
    group = Group({("d", 0)})
    assert states(group.plan(topic((0, 5), (0, 0)))) == {("d", 0): state(0, 2)}
    assert group.requests == [{("d", 0), ("d", 1)}]
    assert states(group.plan(topic((0, 5), (0, 0)))) == {("d", 0): state(0, 2)}
    assert len(group.requests) == 1


def test_an_instance_without_partition_0_waits_for_the_first_commits() -> None:
    """It commits nothing itself, and goes on when they are there."""
    group = Group({("d", 1)}, others={("d", 0): state(3, 2), ("d", 1): state(0, 2)})
    assert states(group.plan(topic((0, 5), (0, 0)))) == {("d", 1): state(0, 2)}
    assert group.requests == []


def test_waiting_for_the_first_commits_has_a_limit() -> None:
    """An owner of partition 0 that never commits is named, not waited for for ever."""
    with pytest.raises(EnvironmentFailure, match="first commits"):
        Group({("d", 1)}).plan(topic((0, 5), (0, 0)))


def test_a_change_of_assignment_ends_the_planning() -> None:
    """What was read for other partitions is of no use."""
    assert Group({("d", 1)}).plan(topic((0, 5), (0, 0)), owned={("d", 0)}) is None


def test_a_change_of_assignment_before_the_first_commits_leaves_them_to_the_new_owner() -> None:
    """It may have committed progress by now, which they would undo."""
    group = Group({("d", 0)})
    group.revoked = frozenset({("d", 1)})
    assert group.plan(topic((0, 5), (0, 0))) is None
    assert (len(group.requests), group.commits) == (1, {})


@pytest.mark.fault("instances with different decode parameters")
def test_a_return_to_earlier_parameters_is_in_the_log() -> None:
    """Instances with different settings are warned of when a partition goes back to earlier decode parameters, long
    before its committed metadata has no room."""
    changed = amend_epochs(state(5, 1).epochs, 3, 0, replace(PARAMETERS, max_delay_ms=2_000))
    group = Group({("d", 0)})
    group.commits = {("d", 0): state(5, 1)}
    with capture_logs() as logs:
        group.plan(topic((0, 9)))
        assert not logs
        group.commits = {("d", 0): replace(state(5, 1), epochs=changed)}
        group.plan(topic((0, 9)))
    ((event, partitions, epochs),) = ((each["event"], each["partitions"], each["epochs"]) for each in logs)
    assert (event, partitions, epochs) == ("decode-parameters-return", "d/0", 3)


def test_states_that_are_taken_back_are_committed_for_what_is_owned() -> None:
    """A revocation just before it leaves those of the other partitions."""
    again = {("delay", partition): state(5, 2) for partition in range(2)}
    group = Group({("delay", 0), ("delay", 1)})
    group.revoked = frozenset({("delay", 1)})
    assert _committed_again(group, again) == group.commits == {("delay", 1): again["delay", 1]}  # type: ignore[arg-type]
    assert group.requests == [set(again), {("delay", 1)}]
    assert _committed_again(group, {}) == {}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("owned", "committed", "silent", "held"),
    [
        pytest.param({0}, {0, 1}, {1}, set(), id="another instance's"),
        pytest.param({0, 1}, {0, 1}, {1}, {1}, id="one of two"),
        pytest.param({0}, {0}, {1}, set(), id="a new one of another instance"),
        pytest.param({0}, set(), {1}, {0}, id="first use, which commits for all"),
    ],
)
def test_a_start_names_the_partitions_whose_logs_are_silent(
    owned: set[int], committed: set[int], silent: set[int], held: set[int]
) -> None:
    """All others are planned."""
    group: Any = Group(mine := {("d", partition) for partition in owned})
    group.commits = {("d", partition): state(3, 2) for partition in committed}

    def watermarks(names: Collection[SourceName], *, of_all: bool) -> dict[SourceName, Watermarks]:
        assert not of_all
        return {name: Watermarks(start=2, end=9, epoch=4) for name in names if name[1] not in silent}

    topics = {"d": Topic(name="d", topic_id="id", partitions=2, replicas=1, leaderless=())}
    cluster: Any = SimpleNamespace(topics=lambda _: topics, watermarks=watermarks)

    def facts() -> StartFacts:
        return gather(group, cluster, frozenset(mine), parameters={"d": PARAMETERS}, limits={})

    if held:
        with pytest.raises(SilentLogs) as raised:
            facts()
        assert raised.value.partitions == {("d", partition) for partition in held}
    else:
        plan = plan_start(group, frozenset(mine), facts, group.clock)
        assert plan is not None and plan.log_marks == {("d", 0): Watermarks(start=2, end=9, epoch=4)}


@pytest.mark.fault("expired offsets, and an index of partitions that are another instance's now")
def test_a_topic_with_an_index_is_no_first_use() -> None:
    """A start without commits is refused where an index shows earlier deliveries, whoever owns its partition now. All
    messages would be delivered again."""
    group: Any = Group({("d", 0)})
    topics = {"d": Topic(name="d", topic_id="id", partitions=2, replicas=1, leaderless=())}
    cluster: Any = SimpleNamespace(
        topics=lambda _: topics, watermarks=lambda names, **_: dict.fromkeys(names, Watermarks(start=0, end=9))
    )

    def known(names: Collection[SourceName]) -> Collection[SourceName]:
        assert set(names) == {("d", 0), ("d", 1)}
        return {("d", 1)}

    def facts() -> StartFacts:
        return gather(group, cluster, group.owned, parameters={"d": PARAMETERS}, limits={}, known=known)

    with pytest.raises(StateError) as raised:
        plan_start(group, group.owned, facts, group.clock)
    assert raised.value.code == "DB-4001" and not group.requests
