"""The facts that a start is decided from (first_commits.py): what Kafka and the directory hold."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Final

import structlog

from bridge.errors import EnvironmentFailure, StateError
from bridge.ingest.watch.waits import Wait
from bridge.kafka.admin import Cluster, Topic, Watermarks
from bridge.kafka.membership import Ownership
from bridge.start.first_commits import SilentLogs, StartFacts, StartPlan, TopicFacts, decide
from bridge.start.roll_window import TopicLimits
from bridge.stores.names import SourceName, texts_of
from bridge.wire.committed_state import CommittedState, decode_metadata
from bridge.wire.decode_epochs import DecodeParameters, goes_back
from timerstore.clock import Clock
from timerstore.operations import recovery
from timerstore.operations.recovery import Found

FIRST_COMMITS_S: Final = Wait.OTHERS_COMMITS.s
"""How long another instance has to make the first commits."""
LOOK_S: Final = 0.2
SILENT: Final = Watermarks(start=0, end=0)
"""Of a partition whose leader does not answer."""

Known = Callable[[Collection[SourceName]], Collection[SourceName]]
"""As `StoreDirectory.known`."""

TakenBack = Callable[[Mapping[SourceName, CommittedState | None]], Mapping[SourceName, CommittedState]]
"""As `TornStates.taken_back`."""

log = structlog.get_logger("bridge.start.facts")


def plan_start(
    group: Ownership,
    assigned: frozenset[SourceName],
    gather: Callable[[], StartFacts | None],
    clock: Clock,
) -> StartPlan | None:
    """Gather the facts and decide, again and again until no first commits are missing. This instance makes its own
    first commits, and waits for those of others. The facts may concern some of the `assigned` partitions only. Returns
    None without facts, or once the assignment is another one.

    Raises StateError as in the table, EnvironmentFailure when another instance does not make the first commits in time.
    """
    deadline_s = clock.monotonic_s() + FIRST_COMMITS_S
    while group.assignment() == assigned:
        facts = gather()
        if facts is None:
            return None
        decision = decide(facts)
        if isinstance(decision, StartPlan):
            _warn_of_returns(facts, decision)
            return decision
        made = [group.commit_states(states, assigned) for states in decision.of_owner(assigned)]
        if made and all(made):
            continue
        if not made and clock.monotonic_s() > deadline_s:
            raise EnvironmentFailure(
                "another instance did not make the first commits of a delay topic",
                hint="The instance that owns the topic's partition 0 makes them: look into its log.",
                topic=min(decision.states)[0],
                waited_s=FIRST_COMMITS_S,
                code="DB-3010",
            )
        group.wait(LOOK_S)
    return None


def _warn_of_returns(facts: StartFacts, plan: StartPlan) -> None:
    """Warn of partitions that go back to earlier decode parameters: each return takes room in the committed metadata,
    which is bounded (DB-4006)."""
    if back := [name for name, state in plan.states.items() if goes_back(facts.committed[name].epochs, state.epochs)]:
        log.warning(
            "decode-parameters-return",
            partitions=", ".join(texts_of(back)),
            epochs=max(len(plan.states[name].epochs) for name in back),
            hint="Give all instances the same delay.*, limits.*, roll.window and retention.headroom.",
        )


def gather(
    group: Ownership,
    cluster: Cluster,
    owned: frozenset[SourceName],
    *,
    parameters: Mapping[str, DecodeParameters],
    limits: Mapping[str, TopicLimits],
    indexes: Mapping[SourceName, Found] = MappingProxyType({}),
    known: Known = lambda _: (),
    taken_back: TakenBack = lambda _: {},
) -> StartFacts:
    """The facts of the delay topics in `parameters`; `indexes` are those of owned partitions, and other ones may be
    `known`. The states of owned partitions that are `taken_back` are committed first.

    Raises StateError when a topic does not exist, or the committed state of an owned partition cannot be read,
    SilentLogs where the leader of one does not answer, EnvironmentFailure without any answer, DiskFailure.
    """

    def read(names: Collection[SourceName]) -> Mapping[SourceName, CommittedState | None]:
        states = group.read_committed_states(names, strict=owned)
        return states | _committed_again(group, taken_back({name: states.get(name) for name in owned}))

    return facts_of(read, cluster, owned, parameters=parameters, limits=limits, indexes=indexes, known=known)


def facts_of(
    read_states: Callable[[Collection[SourceName]], Mapping[SourceName, CommittedState | None]],
    cluster: Cluster,
    owned: frozenset[SourceName],
    *,
    parameters: Mapping[str, DecodeParameters],
    limits: Mapping[str, TopicLimits],
    indexes: Mapping[SourceName, Found],
    known: Known,
) -> StartFacts:
    """As `gather`, with the committed states from `read_states`; None: without a commit."""
    topics = existing(cluster, parameters)
    names = _partitions(topics)
    read = read_states(names)
    committed = {name: state for name, state in read.items() if state is not None}
    lacking = set(names) & read.keys() - committed.keys()
    covered = {n: each.checkpoint.offset for n, each in indexes.items() if each.checkpoint is not None}
    just_covered = {
        name for name, state in committed.items() if state.first_offset and covered.get(name) == state.first_offset
    }
    # The logs' ends are looked up after the commits: a commit never lies beyond an end that was read later.
    marks = cluster.watermarks(names, of_all=False)
    _must_answer(owned, committed, set(names) - marks.keys())
    return StartFacts(
        owned=owned,
        topics=_with_log(topics, marks),
        parameters=parameters,
        committed=committed,
        limits=limits,
        covered={name: offset for name, offset in covered.items() if offset is not None},
        known=frozenset(known(lacking)) if lacking else frozenset(),
        unreadable=frozenset(names) - read.keys(),
        holds_given_up=frozenset(name for name in just_covered & owned if recovery.holds_rows(indexes[name])),
    )


def _committed_again(group: Ownership, states: Mapping[SourceName, CommittedState]) -> dict[SourceName, CommittedState]:
    while again := {name: state for name, state in states.items() if name in (owned := group.assignment())}:
        if group.commit_states(again, owned):
            log.warning("states-taken-back", partitions=", ".join(texts_of(again)))
            return again
    return {}


def topic_facts(cluster: Cluster, names: Iterable[str]) -> dict[str, TopicFacts]:
    """Facts of delay topics. Raises StateError when one does not exist, EnvironmentFailure without an answer."""
    topics = existing(cluster, names)
    return _with_log(topics, cluster.watermarks(_partitions(topics)))


def existing(cluster: Cluster, names: Iterable[str]) -> dict[str, Topic]:
    """The delay topics. Raises StateError when one does not exist, EnvironmentFailure without an answer."""
    wanted = sorted(names)
    topics = cluster.topics(wanted)
    for name in wanted:
        if name not in topics:
            raise StateError(
                "a delay topic does not exist",
                hint="Create it (`delay-bridge check` prints the command), or remove it from the configuration.",
                topic=name,
                code="DB-4016",
            )
    return topics


def _must_answer(
    owned: Collection[SourceName], committed: Mapping[SourceName, object], silent: Collection[SourceName]
) -> None:
    """Raises SilentLogs for the owned partitions that are `silent`. A topic's first use concerns every partition: if
    one is silent, for all owned ones of the topic."""
    new = {topic for topic, _ in silent} - {topic for topic, _ in committed}
    if held := frozenset(name for name in owned if name in silent or name[0] in new):
        raise SilentLogs(held)


def states_of_others(
    cluster: Cluster, group_id: str, partitions: Collection[SourceName]
) -> Iterator[tuple[SourceName, CommittedState]]:
    """The readable committed states of other instances' partitions. Raises EnvironmentFailure."""
    for name, (offset, metadata) in cluster.committed(group_id, partitions).items():
        try:
            yield name, decode_metadata(name, offset, metadata)
        except StateError:
            continue  # another instance owns the partition, and reports the error


def _partitions(topics: Mapping[str, Topic]) -> list[SourceName]:
    return [(name, partition) for name, topic in topics.items() for partition in range(topic.partitions)]


def _with_log(topics: Mapping[str, Topic], marks: Mapping[SourceName, Watermarks]) -> dict[str, TopicFacts]:
    return {
        name: TopicFacts(
            topic_id=topic.topic_id,
            logs=tuple(marks.get((name, partition), SILENT) for partition in range(topic.partitions)),
        )
        for name, topic in topics.items()
    }
