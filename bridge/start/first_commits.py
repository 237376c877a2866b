"""Where every partition stands before ingest: first use, going on, or a state that must not be guessed at.

    commits of the topic   log start   checkpoint   partition                    verdict
    none                   0           no           any                          first use: commit (0, minus infinity)
    none                   > 0         -            any                          StateError: records are gone
    none                   -           yes          any                          StateError: the commits were deleted
    some, this one too     -           -            O within log start..end      go on from (O, P)
    some, this one too     -           -            O outside                    StateError
    some, not this one     0           no           index >= every committed n   added: commit (0, minus infinity)
    some, not this one     -           -            otherwise                    StateError: the commit was deleted

A partition of which nothing is known is never delivered from its beginning on suspicion: that could repeat everything.

Only the owner of a topic's partition 0 makes first commits, for all partitions that lack one and in one request, which
the broker stores as a whole: two instances that start together cannot overwrite each other's progress, and no committed
count n ever covers a partition without a commit. The others wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from bridge.errors import EnvironmentFailure, StateError
from bridge.kafka.admin import Cluster
from bridge.wire.committed_state import ADOPT, CommittedState, amend_epochs, initial_state
from bridge.wire.decode_epochs import DecodeParameters
from timerstore.clock import Clock
from timerstore.rows.sources import SourceName


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicFacts:
    """What the broker says of a delay topic: its id, and log start and end (high watermark) by partition index."""

    topic_id: str
    log_start: tuple[int, ...]
    log_end: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.log_start or len(self.log_start) != len(self.log_end):
            raise ValueError(f"log starts and ends do not match: {self}")

    @property
    def partitions(self) -> int:
        """Partition count."""
        return len(self.log_start)


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """The verdict on one topic: `missing` are the first commits to make (by partition); without any, `states` are those
    of the owned partitions.
    """

    states: Mapping[int, CommittedState]
    missing: Mapping[int, CommittedState]


def judge(
    topic: str,
    facts: TopicFacts,
    committed: Mapping[int, CommittedState],
    *,
    owned: Collection[int],
    checkpointed: Collection[int],
    parameters: DecodeParameters,
) -> Standing:
    """Apply the table above to one topic. `committed` holds every partition that has a commit, whoever owns it.

    Raises StateError with the remedy.
    """
    for partition, state in committed.items():
        if state.topic_id != facts.topic_id:
            raise StateError(
                "the delay topic is not the one that the committed offsets belong to: it was deleted and made anew",
                hint=f"Messages of the old topic are gone. {ADOPT}.",
                topic=topic,
                partition=partition,
                committed_topic_id=state.topic_id,
                topic_id=facts.topic_id,
            )
    absent = [p for p in range(facts.partitions) if p not in committed]
    if absent:
        _must_be_new(topic, facts, committed, absent, checkpointed)
        first = initial_state(offset=0, topic_id=facts.topic_id, partitions=facts.partitions, parameters=parameters)
        return Standing(states={}, missing=dict.fromkeys(absent, first))
    states = {}
    for partition in owned:
        state = committed[partition]
        start, end = facts.log_start[partition], facts.log_end[partition]
        _must_be_in_range(topic, partition, state.offset, start, end)
        epochs = amend_epochs(state.epochs, state.offset, start, parameters)
        states[partition] = replace(state, epochs=epochs, partitions=facts.partitions)
    return Standing(states=states, missing={})


def _must_be_new(
    topic: str,
    facts: TopicFacts,
    committed: Mapping[int, CommittedState],
    absent: Collection[int],
    checkpointed: Collection[int],
) -> None:
    known = max((state.partitions for state in committed.values()), default=0)
    for partition in absent:
        if partition in checkpointed or partition < known:
            raise StateError(
                "the committed offset of a partition is missing, though the bridge has delivered from it before",
                hint=f"It was deleted, or expired while the bridge was down (offsets.retention.minutes). {ADOPT}.",
                topic=topic,
                partition=partition,
            )
        if facts.log_start[partition] > 0:
            raise StateError(
                "nothing is known of a partition whose oldest records are gone already",
                hint=f"Either the bridge has another id than before, or the topic was in use without it. {ADOPT}.",
                topic=topic,
                partition=partition,
                log_start=facts.log_start[partition],
            )


def _must_be_in_range(topic: str, partition: int, offset: int, start: int, end: int) -> None:
    if offset < start:
        raise StateError(
            "records were deleted from the delay topic before the bridge has read them",
            hint=f"Raise the topic's retention. {ADOPT}.",
            topic=topic,
            partition=partition,
            committed=offset,
            log_start=start,
        )
    if offset > end:
        raise StateError(
            "the committed offset lies beyond the end of the delay topic: it was truncated, or is another cluster's",
            hint=f"Check bootstrap.servers. {ADOPT}.",
            topic=topic,
            partition=partition,
            committed=offset,
            log_end=end,
        )


class CommittedOffsets(Protocol):
    """The part of `Ownership` that settling needs."""

    def assignment(self) -> frozenset[SourceName]:
        """Owned partitions."""
        ...

    def read_committed_states(
        self, partitions: Collection[SourceName], timeout_s: float | None = None
    ) -> dict[SourceName, CommittedState | None]:
        """Committed states, stable ones only."""
        ...

    def commit_states(self, states: Mapping[SourceName, CommittedState]) -> None:
        """Commit as a member of the group."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Pause, unless stopping."""
        ...


def settle(
    offsets: CommittedOffsets,
    *,
    owned: frozenset[SourceName],
    look_up: Callable[[str], TopicFacts],
    checkpointed: Collection[SourceName],
    parameters: Callable[[str], DecodeParameters],
    clock: Clock,
    timeout_s: float = 60.0,
) -> dict[SourceName, CommittedState] | None:
    """The states of the owned partitions, first commits made where they are due; None when the assignment changed
    meanwhile.

    `look_up` gives a topic's facts, `parameters` its configured decode parameters, `checkpointed` are the partitions
    that the local index knows. Raises StateError as in the table, EnvironmentFailure when another instance does not
    make the first commits in time.
    """
    deadline = clock.monotonic_s() + timeout_s
    settled: dict[SourceName, CommittedState] = {}
    for topic in sorted({topic for topic, _ in owned}):
        while True:
            if offsets.assignment() != owned:
                return None
            standing = _standing(offsets, topic, owned, look_up, checkpointed, parameters(topic))
            if not standing.missing:
                settled.update({(topic, p): state for p, state in standing.states.items()})
                break
            if (topic, 0) in owned:
                offsets.commit_states({(topic, p): state for p, state in standing.missing.items()})
            elif clock.monotonic_s() > deadline:
                raise EnvironmentFailure(
                    "the first commits of a delay topic were not made",
                    hint="They are made by the instance that owns the topic's partition 0: look into its log.",
                    topic=topic,
                    waited_s=timeout_s,
                )
            else:
                offsets.wait(0.2)
    return settled


def _standing(
    offsets: CommittedOffsets,
    topic: str,
    owned: Collection[SourceName],
    look_up: Callable[[str], TopicFacts],
    checkpointed: Collection[SourceName],
    parameters: DecodeParameters,
) -> Standing:
    count = look_up(topic).partitions
    read = offsets.read_committed_states([(topic, p) for p in range(count)])
    # The log's ends are looked up after the commits: a commit never lies beyond an end that was read later.
    facts = look_up(topic)
    return judge(
        topic,
        facts,
        {p: state for (_, p), state in read.items() if state is not None},
        owned=[p for t, p in owned if t == topic],
        checkpointed=[p for t, p in checkpointed if t == topic],
        parameters=parameters,
    )


def facts_of(cluster: Cluster, topic: str) -> TopicFacts:
    """A delay topic's facts from the cluster. Raises StateError when the topic does not exist, EnvironmentFailure
    without an answer.
    """
    found = cluster.topics([topic]).get(topic)
    if found is None:
        raise StateError(
            "a delay topic does not exist",
            hint="Create it (`delay-bridge check` says how it must be), or take it out of the configuration.",
            topic=topic,
        )
    marks = cluster.watermarks([(topic, partition) for partition in range(found.partitions)])
    return TopicFacts(
        topic_id=found.topic_id,
        log_start=tuple(marks[topic, p].start for p in range(found.partitions)),
        log_end=tuple(marks[topic, p].end for p in range(found.partitions)),
    )
