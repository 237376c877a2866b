"""First use, going on, and the states that must not be guessed at, as a table: `decide` on values."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import pytest

from bridge.errors import StateError
from bridge.kafka.admin import Watermarks
from bridge.start.first_commits import FirstCommits, StartFacts, StartPlan, TopicFacts, decide
from bridge.start.roll_window import TopicLimits, Windows
from bridge.wire.committed_state import CommittedState, initial_state
from bridge.wire.decode_epochs import DecodeEpoch, DecodeParameters
from timerstore.limits import DAY_MS

PARAMETERS = DecodeParameters(max_delay_ms=1_000, roll_window_ms=4_000, has_default_target=False)
SHORTER = replace(PARAMETERS, roll_window_ms=1_000)


def topic(*ranges: tuple[int, int], topic_id: str = "id") -> TopicFacts:
    """Log start and end by partition."""
    return TopicFacts(topic_id=topic_id, logs=tuple(Watermarks(start=start, end=end) for start, end in ranges))


def state(offset: int, partitions: int, topic_id: str = "id", first_offset: int = 0) -> CommittedState:
    return initial_state(
        offset=offset, topic_id=topic_id, partitions=partitions, parameters=PARAMETERS, first_offset=first_offset
    )


def facts(
    found: TopicFacts,
    committed: Mapping[int, CommittedState],
    *,
    checkpointed: Collection[int] = (),
    owned: Collection[int] = (0,),
    parameters: DecodeParameters = PARAMETERS,
    **others: Any,
) -> StartFacts:
    """Of the delay topic "d"."""
    return StartFacts(
        owned=frozenset(("d", partition) for partition in owned),
        topics={"d": found},
        parameters={"d": parameters},
        committed={("d", partition): each for partition, each in committed.items()},
        **{"covered": {("d", partition): 0 for partition in checkpointed}, **others},
    )


def plan(found: StartFacts) -> StartPlan:
    decision = decide(found)
    assert isinstance(decision, StartPlan)
    return decision


@pytest.mark.parametrize(
    ("found", "committed", "checkpointed", "missing"),
    [
        pytest.param(topic((0, 9), (0, 0)), {}, (), {0, 1}, id="first use"),
        pytest.param(topic((0, 9), (0, 0)), {0: state(5, 1)}, (), {1}, id="a partition was added"),
        pytest.param(topic((0, 9), (0, 0), (0, 0)), {0: state(5, 1)}, (), {1, 2}, id="two were added"),
        pytest.param(topic((0, 9)), {0: state(9, 1)}, (0,), set(), id="at the end"),
        pytest.param(topic((5, 9)), {0: state(5, 1)}, (), set(), id="at the start"),
        pytest.param(topic((9, 9)), {0: state(9, 1)}, (), set(), id="everything expired after it was read"),
    ],
)
def test_what_may_go_on(
    found: TopicFacts, committed: Mapping[int, CommittedState], checkpointed: Collection[int], missing: set[int]
) -> None:
    """Only partitions of which nobody can know anything get a first commit, at 0 and minus infinity."""
    decision = decide(facts(found, committed, checkpointed=checkpointed, owned=range(len(found.logs))))
    if not missing:
        assert isinstance(decision, StartPlan) and set(decision.states) == {("d", 0)}
        return
    assert isinstance(decision, FirstCommits)
    assert set(decision.states) == {("d", partition) for partition in missing}
    assert {(s.offset, s.position, s.partitions) for s in decision.states.values()} == {(0, None, len(found.logs))}


@pytest.mark.parametrize(
    ("found", "committed", "checkpointed", "message"),
    [
        pytest.param(topic((1, 9)), {}, (), "oldest records are gone", id="none, log trimmed"),
        pytest.param(topic((0, 9)), {}, (0,), "is missing", id="none, but a checkpoint"),
        pytest.param(topic((0, 9), (0, 9)), {0: state(5, 2)}, (), "is missing", id="one of two deleted"),
        pytest.param(topic((0, 9), (3, 9)), {0: state(5, 1)}, (), "oldest records are gone", id="added, but trimmed"),
        pytest.param(topic((6, 9)), {0: state(5, 1)}, (), "deleted from the delay topic", id="below the start"),
        pytest.param(topic((0, 4)), {0: state(5, 1)}, (), "beyond the end", id="beyond the end"),
        pytest.param(topic((0, 9), topic_id="new"), {0: state(5, 1)}, (), "created again", id="another topic"),
    ],
)
def test_what_must_not_be_guessed_at(
    found: TopicFacts, committed: Mapping[int, CommittedState], checkpointed: Collection[int], message: str
) -> None:
    """Each stops the bridge and names the command that decides."""
    with pytest.raises(StateError, match=message) as refused:
        decide(facts(found, committed, checkpointed=checkpointed, owned=range(len(found.logs))))
    assert "reset-offsets" in refused.value.hint


def test_first_commits_are_made_by_the_owner_of_partition_0_in_one_request_for_each_topic() -> None:
    """So that instances that start together cannot undo each other."""
    first = FirstCommits(states={(topic, partition): state(0, 2) for topic in "ab" for partition in range(2)})
    requests = [{("a", 0), ("a", 1)}, {("b", 0), ("b", 1)}]
    assert [set(request) for request in first.of_owner({("a", 0), ("b", 0)})] == requests
    assert first.of_owner({("a", 1), ("b", 1)}) == []


def test_nothing_is_planned_for_one_topic_before_the_first_commits_of_another() -> None:
    """And an error in one is found before anything is committed for the other."""
    both = StartFacts(
        owned=frozenset({("a", 0), ("b", 0)}),
        topics={"a": topic((0, 9)), "b": topic((0, 0))},
        parameters={"a": PARAMETERS, "b": PARAMETERS},
        committed={("a", 0): state(5, 1)},
    )
    assert decide(both) == FirstCommits(states={("b", 0): state(0, 1)})
    with pytest.raises(StateError, match="beyond the end"):
        decide(replace(both, topics={**both.topics, "a": topic((0, 4))}))


def test_added_partitions_raise_the_committed_count_of_all() -> None:
    """The next transaction of an old partition says that the new ones have commits, so their loss would be noticed."""
    before = replace(state(4, 1), position=(7, 3))
    states = plan(facts(topic((0, 5), (0, 0)), {0: before, 1: state(0, 2)}, owned=(0, 1))).states
    assert {each.partitions for each in states.values()} == {2}
    assert states["d", 0].position == (7, 3)


def test_changed_parameters_begin_a_decode_epoch_at_the_committed_offset() -> None:
    """The windows of the plan are of both: records below are read as before."""
    found = plan(facts(topic((0, 9)), {0: state(5, 1)}, parameters=SHORTER))
    assert found.states["d", 0].epochs == (
        DecodeEpoch(offset=0, parameters=PARAMETERS),
        DecodeEpoch(offset=5, parameters=SHORTER),
    )
    assert found.windows == {"d": Windows(current_ms=1_000, largest_ms=4_000)}


@pytest.mark.parametrize(
    ("retention", "windows_ms", "spare_ms"),
    [
        pytest.param((-1, -1), (4_000, 9_000), None, id="no limit"),
        pytest.param((10_000, -1), (4_000, 9_000), 6_000, id="of the deleted records"),
        pytest.param((10_000, -1), (9_000, 4_000), 1_000, id="of deleted records before a change"),
        pytest.param((3_000, -1), (4_000, 2_000), -1_000, id="the retention was lowered"),
        pytest.param((-1, -1), (30 * DAY_MS, 2_000), 0, id="the retention was lowered for a time"),
        pytest.param((-1, 1 << 20), (4_000, 9_000), 0, id="a limit in bytes"),
        pytest.param((10_000, 1 << 20), (4_000, 9_000), 0, id="limits in time and in bytes"),
    ],
)
def test_spare_time_is_counted_from_the_largest_window_of_a_deleted_record(
    retention: tuple[int, int], windows_ms: tuple[int, int], spare_ms: int | None
) -> None:
    """By the committed epochs, also when the next ones no longer have it."""
    epochs = tuple(
        DecodeEpoch(offset=offset, parameters=replace(PARAMETERS, roll_window_ms=window_ms))
        for offset, window_ms in zip((0, 5), windows_ms, strict=True)
    )
    for log, deleted in (((0, 9), 0), ((5, 9), windows_ms[0]), ((9, 9), max(windows_ms))):
        limits = {"d": TopicLimits(retention_ms=retention[0], retention_bytes=retention[1])}
        found = plan(facts(topic(log), {0: replace(state(9, 1), epochs=epochs)}, limits=limits))
        assert found.widest_ms == {("d", 0): deleted}
        in_log = windows_ms if log[0] < 5 else windows_ms[1:] if log[0] < 9 else ()
        assert found.windows["d"].largest_ms == max(PARAMETERS.roll_window_ms, *in_log, 0)
        if log[0] == 5:
            assert found.spare_ms == ({} if spare_ms is None else {("d", 0): spare_ms})


@pytest.mark.parametrize(
    ("log", "first_offset", "covered", "offset", "unheld"),
    [
        pytest.param((0, 9), 0, None, 0, {}, id="no index: from the beginning"),
        pytest.param((0, 9), 0, 4, 4, {}, id="where the index ends"),
        pytest.param((3, 9), 0, None, 3, {("d", 0): 7}, id="no index, and records are gone"),
        pytest.param((0, 9), 5, None, 5, {}, id="what lies below was given up"),
        pytest.param((5, 9), 5, None, 5, {}, id="what was given up is gone too"),
        pytest.param((6, 9), 5, None, 6, {("d", 0): 7}, id="more is gone than was given up"),
        pytest.param((6, 9), 0, 4, 4, {}, id="the index covers what is gone"),
    ],
)
def test_where_ingest_begins(
    log: tuple[int, int], first_offset: int, covered: int | None, offset: int, unheld: dict[tuple[str, int], int]
) -> None:
    """At the end of what the open index covers; else where the log, or the bridge's part of it, begins."""
    found = plan(facts(topic(log), {0: state(7, 1, first_offset=first_offset)}))
    assert found.ingest_start({("d", 0): covered}, {("d", 0): 0}) == ({("d", 0): offset}, unheld)
    assert {name: state.offset for name, state in found.states.items()} == {("d", 0): 7}
    assert found.log_marks == {("d", 0): Watermarks(start=log[0], end=log[1])}


@pytest.mark.parametrize(
    ("covered", "holds", "gives_up", "log_start"),
    [
        pytest.param({("d", 0): 4}, False, True, 0, id="the index may hold what lies below"),
        pytest.param({("d", 0): 5}, True, True, 0, id="its end is there, and it has rows of the partition"),
        pytest.param({("d", 0): 5}, False, False, 2, id="its end is there, and it has none"),
        pytest.param({("d", 0): 6}, False, False, 2, id="it was filled afterwards"),
        pytest.param({}, False, False, 0, id="it covers nothing of it"),
    ],
)
def test_an_index_that_may_hold_what_was_given_up_is_given_up(
    covered: dict[tuple[str, int], int], holds: bool, gives_up: bool, log_start: int
) -> None:
    """That of its partition. Of a partition that was given up once, nothing that the index does not cover counts."""
    partition, other = ("d", 0), ("d", 1)
    found = plan(
        facts(
            topic((2, 9), (0, 9)),
            {0: state(7, 2, first_offset=5), 1: state(7, 2)},
            owned=(0, 1),
            covered={**covered, other: 3},
            holds_given_up=frozenset({partition} if holds else ()),
        )
    )
    assert found.gives_up_index == ({partition} if gives_up else set())
    assert found.log_starts == {partition: log_start, other: 0}


@pytest.mark.parametrize(
    ("unreadable", "committed"),
    [
        pytest.param({1}, {0: state(5, 2)}, id="a commit that cannot be read"),
        pytest.param(set(), {0: state(5, 2)}, id="a commit that was deleted"),
    ],
)
def test_what_is_wrong_with_the_partition_of_another_stops_nobody_else(
    unreadable: Collection[int], committed: Mapping[int, CommittedState]
) -> None:
    """Its owner is refused; a partition that was added meanwhile gets its first commit."""
    marks, others = topic((0, 9), (0, 9), (0, 0)), frozenset(("d", partition) for partition in unreadable)
    found = facts(marks, committed, unreadable=others, owned=(0, 2))
    assert decide(found) == FirstCommits(states={("d", 2): state(0, 3)})
    found = facts(marks, {**committed, 2: state(0, 3)}, unreadable=others, owned=(0, 2))
    assert set(plan(found).states) == {("d", 0), ("d", 2)}


@pytest.mark.fault("a delay topic that gains partitions while several instances run")
def test_an_added_partition_is_begun_by_its_owner() -> None:
    """The first commit of an added partition waits for no other instance, and the counts of the topic's partitions are
    right for any order of first commits."""
    commits = {0: state(5, 2), 1: state(5, 2)}
    marks = topic((0, 9), (0, 9), (0, 0), (0, 0))
    for order in ((2, 3), (3, 2)):
        begun = dict(commits)
        for partition in order:
            decision = decide(facts(marks, begun, owned=(1, partition)))
            assert isinstance(decision, FirstCommits) and decision.states.keys() == {("d", partition)}
            [request] = decision.of_owner({("d", 1), ("d", partition)})
            begun |= {number: each for (_, number), each in request.items()}
            found = plan(facts(marks, begun, owned=(0, 1)))  # of another instance, which starts just then
            assert all(number in begun for each in found.states.values() for number in range(each.partitions))
        assert {each.partitions for each in plan(facts(marks, begun, owned=range(4))).states.values()} == {4}


def test_what_the_index_has_of_what_is_gone_is_not_missed() -> None:
    """Where a partition is read again after its log was cut, the index still has what lies below the log's start."""
    found = plan(facts(topic((3, 9)), {0: state(5, 1)}))
    assert found.ingest_start({("d", 0): None}, {("d", 0): 3}) == ({("d", 0): 3}, {})
    assert found.ingest_start({("d", 0): None}, {("d", 0): 2}) == ({("d", 0): 3}, {("d", 0): 5})
