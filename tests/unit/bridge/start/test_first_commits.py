"""First use, going on, and the states that must not be guessed at, as a table."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import pytest

from bridge.errors import EnvironmentFailure, StateError
from bridge.start.first_commits import TopicFacts, judge, settle
from bridge.wire.committed_state import CommittedState, initial_state
from bridge.wire.decode_epochs import DecodeParameters
from timerstore.clock import ManualClock
from timerstore.rows.sources import SourceName

PARAMETERS = DecodeParameters(max_delay_ms=1_000, roll_window_ms=4_000, has_default_target=False)


def facts(*ranges: tuple[int, int], topic_id: str = "id") -> TopicFacts:
    return TopicFacts(topic_id=topic_id, log_start=tuple(a for a, _ in ranges), log_end=tuple(b for _, b in ranges))


def state(offset: int, partitions: int, topic_id: str = "id") -> CommittedState:
    return initial_state(offset=offset, topic_id=topic_id, partitions=partitions, parameters=PARAMETERS)


@pytest.mark.parametrize(
    ("topic", "committed", "checkpointed", "missing"),
    [
        pytest.param(facts((0, 9), (0, 0)), {}, (), {0, 1}, id="first use"),
        pytest.param(facts((0, 9), (0, 0)), {0: state(5, 1)}, (), {1}, id="a partition was added"),
        pytest.param(facts((0, 9), (0, 0), (0, 0)), {0: state(5, 1)}, (), {1, 2}, id="two were added"),
        pytest.param(facts((0, 9)), {0: state(9, 1)}, (0,), set(), id="at the end"),
        pytest.param(facts((5, 9)), {0: state(5, 1)}, (), set(), id="at the start"),
        pytest.param(facts((9, 9)), {0: state(9, 1)}, (), set(), id="everything expired after it was read"),
    ],
)
def test_what_may_go_on(
    topic: TopicFacts, committed: Mapping[int, CommittedState], checkpointed: Collection[int], missing: set[int]
) -> None:
    """Only partitions of which nobody can know anything get a first commit, at 0 and minus infinity."""
    standing = judge("d", topic, committed, owned=[0], checkpointed=checkpointed, parameters=PARAMETERS)
    assert set(standing.missing) == missing
    assert all(
        s.offset == 0 and s.position is None and s.partitions == topic.partitions for s in standing.missing.values()
    )
    assert set(standing.states) == (set() if missing else {0})


@pytest.mark.parametrize(
    ("topic", "committed", "checkpointed", "message"),
    [
        pytest.param(facts((1, 9)), {}, (), "oldest records are gone", id="none, log trimmed"),
        pytest.param(facts((0, 9)), {}, (0,), "is missing", id="none, but a checkpoint"),
        pytest.param(facts((0, 9), (0, 9)), {0: state(5, 2)}, (), "is missing", id="one of two deleted"),
        pytest.param(facts((0, 9), (3, 9)), {0: state(5, 1)}, (), "oldest records are gone", id="added, but trimmed"),
        pytest.param(facts((6, 9)), {0: state(5, 1)}, (), "deleted from the delay topic", id="below the start"),
        pytest.param(facts((0, 4)), {0: state(5, 1)}, (), "beyond the end", id="beyond the end"),
        pytest.param(facts((0, 9), topic_id="new"), {0: state(5, 1)}, (), "made anew", id="another topic"),
    ],
)
def test_what_must_not_be_guessed_at(
    topic: TopicFacts, committed: Mapping[int, CommittedState], checkpointed: Collection[int], message: str
) -> None:
    """Each stops the bridge and names the command that decides."""
    with pytest.raises(StateError, match=message) as refused:
        judge("d", topic, committed, owned=[0], checkpointed=checkpointed, parameters=PARAMETERS)
    assert "adopt" in refused.value.hint


class Group:
    """A consumer group's commits; `others` are made while somebody waits."""

    def __init__(self, owned: set[SourceName], others: Mapping[SourceName, CommittedState] | None = None) -> None:
        self.owned = frozenset(owned)
        self.commits: dict[SourceName, CommittedState] = {}
        self.requests: list[set[SourceName]] = []
        self.others = dict(others or {})
        self.clock = ManualClock()

    def assignment(self) -> frozenset[SourceName]:
        return self.owned

    def read_committed_states(
        self,
        partitions: Collection[SourceName],
        timeout_s: float | None = None,  # noqa: ARG002 - the seam's
    ) -> dict[SourceName, CommittedState | None]:
        return {name: self.commits.get(name) for name in partitions}

    def commit_states(self, states: Mapping[SourceName, CommittedState]) -> None:
        self.requests.append(set(states))
        self.commits.update(states)

    def wait(self, timeout_s: float) -> None:
        self.clock.advance(int(timeout_s * 1000))
        self.commits.update(self.others)

    def settle(
        self, topic: TopicFacts, owned: set[SourceName] | None = None
    ) -> dict[SourceName, CommittedState] | None:
        return settle(
            self,
            owned=self.owned if owned is None else frozenset(owned),
            look_up=lambda name: topic,
            checkpointed=(),
            parameters=lambda name: PARAMETERS,
            clock=self.clock,
        )


def test_first_use_commits_every_partition_in_one_request() -> None:
    """The owner of partition 0 commits for all, so that instances that start together cannot undo each other."""
    group = Group({("d", 0)})
    assert group.settle(facts((0, 5), (0, 0))) == {("d", 0): state(0, 2)}
    assert group.requests == [{("d", 0), ("d", 1)}]
    assert group.settle(facts((0, 5), (0, 0))) == {("d", 0): state(0, 2)}
    assert len(group.requests) == 1


def test_an_instance_without_partition_0_waits_for_the_first_commits() -> None:
    """It commits nothing itself, and goes on when they are there."""
    group = Group({("d", 1)}, others={("d", 0): state(3, 2), ("d", 1): state(0, 2)})
    assert group.settle(facts((0, 5), (0, 0))) == {("d", 1): state(0, 2)}
    assert group.requests == []


def test_waiting_for_the_first_commits_has_a_limit() -> None:
    """An owner of partition 0 that never commits is named, not waited for for ever."""
    with pytest.raises(EnvironmentFailure, match="first commits"):
        Group({("d", 1)}).settle(facts((0, 5), (0, 0)))


def test_a_change_of_assignment_ends_settling() -> None:
    """What was read for other partitions is of no use."""
    assert Group({("d", 1)}).settle(facts((0, 5), (0, 0)), owned={("d", 0)}) is None


def test_added_partitions_raise_the_committed_count_of_all() -> None:
    """The next transaction of an old partition says that the new ones have commits, so their loss would be noticed."""
    group = Group({("d", 0), ("d", 1)})
    group.commits = {("d", 0): replace(state(4, 1), position=(7, "d", 0, 3))}
    settled = group.settle(facts((0, 5), (0, 0)))
    assert settled is not None
    assert {s.partitions for s in settled.values()} == {2}
    assert settled["d", 0].position == (7, "d", 0, 3)
