"""The start plan: for each partition a first use, a continuation, or a refusal to guess.

    commits of the topic   log start   checkpoint   partition                    decision
    none                   0           no           any                          first use: commit (0, minus infinity)
    none                   > 0         -            any                          StateError: records are gone
    none                   -           yes          any                          StateError: the commits were deleted
    some, this one too     -           -            O within log start..end      go on from (O, P)
    some, this one too     -           -            O outside                    StateError
    some, not this one     0           no           index >= every committed n   added: commit (0, minus infinity)
    some, not this one     -           -            otherwise                    StateError: the commit was deleted

An unknown partition is never delivered from its beginning: that could repeat all its messages. A first use concerns all
partitions of a topic; the other lines concern only the owner of the partition.

Pure: `decide` derives a `StartPlan` from `StartFacts`. `facts.py` gathers the facts, and `runtime/pipeline.py` executes
the plan. The coverage of the index is known only after it is opened: see `StartPlan.ingest_start`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from bridge.errors import EnvironmentFailure, StateError
from bridge.kafka.admin import Watermarks
from bridge.start.roll_window import ROLL_WINDOW_MS_MAX, TopicLimits, Windows
from bridge.stores.names import SourceName
from bridge.wire.committed_state import RESET, CommittedState, Said, initial_state, merged
from bridge.wire.decode_epochs import (
    DecodeParameters,
    amend_epochs,
    largest_roll_window_ms,
    widest_deleted_ms,
    without_deleted,
)

ANOTHER_TOPIC: Final = "DB-4014"
"""The code of `another_topic`."""
NO_TOPIC: Final = "DB-4016"
"""The code for a delay topic that does not exist."""


GONE: Final = "DB-4012"
"""The code for records of pending messages that are gone from the log, and from the index."""


class SilentLogs(EnvironmentFailure):
    """The leaders of these partitions do not answer; a start can go on with all others."""

    def __init__(self, partitions: frozenset[SourceName]) -> None:
        hint = "Bring back the brokers of these partitions."
        super().__init__("delay topics without a leader", hint=hint, code="DB-3002", partitions=sorted(partitions))
        self.partitions = partitions


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicFacts:
    """The broker's facts about a delay topic: its id, and the marks of its logs by partition index (zeros for another
    instance's partition whose leader does not answer)."""

    topic_id: str
    logs: tuple[Watermarks, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFacts:
    """The facts from Kafka, the directory and the configuration at the beginning of a start.

    `owned` are this instance's partitions. For each delay topic with owned partitions: `topics`, the configured decode
    `parameters`, and `limits`. `committed` has the state of every partition of these topics with a commit, for any
    owner; `unreadable` are other instances' partitions with an unreadable commit. `covered` is O_c of each partition's
    index; `known` are partitions without a commit that have an index, whoever owns them now. `holds_given_up`:
    partitions whose index has rows below an offset that an operator has given up, and ends just there.
    """

    owned: frozenset[SourceName]
    topics: Mapping[str, TopicFacts]
    parameters: Mapping[str, DecodeParameters]
    committed: Mapping[SourceName, CommittedState]
    limits: Mapping[str, TopicLimits] = field(default_factory=dict)
    covered: Mapping[SourceName, int] = field(default_factory=dict)
    known: frozenset[SourceName] = frozenset()
    unreadable: frozenset[SourceName] = frozenset()
    holds_given_up: frozenset[SourceName] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstCommits:
    """The commits that must precede everything else, by partition.

    At a topic's first use, only the owner of partition 0 commits, for all partitions and in one request. The broker
    stores it as a whole, so two instances that start together cannot overwrite each other's progress. The others wait.
    For a partition that is added later, its owner commits: the owner of partition 0 may not notice it. No committed
    count n ever covers a partition without a commit.
    """

    states: Mapping[SourceName, CommittedState]

    def of_owner(self, owned: Collection[SourceName]) -> list[Mapping[SourceName, CommittedState]]:
        """The commits of the owner of these partitions: one request for each topic."""
        requests: list[Mapping[SourceName, CommittedState]] = []
        for topic in sorted({topic for topic, _ in self.states}):
            states = {name: state for name, state in self.states.items() if name[0] == topic}
            if (topic, 0) in owned if (topic, 0) in states else states.keys() <= set(owned):
                requests.append(states)
        return requests


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPlan:
    """The plan of a start.

    By owned partition: `states` are the committed states with the decode epochs from now on; `log_marks` are the start
    and end of the log; `log_starts` are the offsets from which the log counts for the index. `widest_ms` is the largest
    W of its deleted records (0: none is deleted), and `spare_ms` the longest downtime before unfinished records are
    deleted: 0 or less, if the topic's retention does not explain their deletion; absent, if it is unlimited. By delay
    topic: `windows`. `gives_up_index`: partitions with messages in the index, perhaps, that an operator has given up
    (`delay-bridge reset-offsets`). `changed`: partitions with other decode epochs than the committed ones.
    """

    states: Mapping[SourceName, CommittedState]
    log_marks: Mapping[SourceName, Watermarks]
    log_starts: Mapping[SourceName, int]
    windows: Mapping[str, Windows]
    widest_ms: Mapping[SourceName, int]
    spare_ms: Mapping[SourceName, int]
    gives_up_index: frozenset[SourceName]
    changed: frozenset[SourceName] = frozenset()
    pauses: Said = ()
    """The pauses of targets, merged from all partitions."""

    def log_ends(self) -> dict[SourceName, int]:
        """The ends of the logs at the time of the plan."""
        return {name: mark.end for name, mark in self.log_marks.items()}

    def ingest_start(
        self, covered: Mapping[SourceName, int | None], held: Mapping[SourceName, int]
    ) -> tuple[dict[SourceName, int], dict[SourceName, int]]:
        """The first offsets of ingest: the end of the index's coverage, else the start of the log or of the bridge's
        part of the topic; and O of partitions with deleted records that the index does not cover. `covered` is the end
        of the open index by partition (None: read the partition again); below `held` the index has the deleted
        records."""
        offsets, unheld = {}, {}
        for name, end in covered.items():
            first, log_start = self.states[name].first_offset, self.log_marks[name].start
            offsets[name] = max(log_start, first) if end is None else end
            if end is None and log_start > max(first, held[name]):
                unheld[name] = self.states[name].offset
        return offsets, unheld


StartDecision = StartPlan | FirstCommits


def decide(facts: StartFacts) -> StartDecision:
    """Apply the table above to all topics. Raises StateError with the remedy."""
    missing: dict[SourceName, CommittedState] = {}
    states: dict[SourceName, CommittedState] = {}
    marks: dict[SourceName, Watermarks] = {}
    for topic, topic_facts in sorted(facts.topics.items()):
        parameters = facts.parameters[topic]
        committed = {partition: state for (name, partition), state in facts.committed.items() if name == topic}
        _must_be_this_topic(topic, topic_facts, committed)
        absent = _absent(facts, topic, committed)
        due = {partition for partition in absent if not committed or (topic, partition) in facts.owned}
        counted = min(set(absent) - due, default=len(topic_facts.logs))
        if due:
            first = initial_state(offset=0, topic_id=topic_facts.topic_id, partitions=counted, parameters=parameters)
            missing |= {(topic, partition): first for partition in due}
            continue
        for partition in sorted(partition for name, partition in facts.owned if name == topic):
            state, log = committed[partition], topic_facts.logs[partition]
            _must_be_in_range(topic, partition, state.offset, log)
            epochs = amend_epochs(state.epochs, state.offset, log.start, parameters)
            state = replace(state, epochs=epochs, partitions=max(state.partitions, counted))
            state.must_fit((topic, partition))
            states[topic, partition] = state
            marks[topic, partition] = log
    return FirstCommits(states=missing) if missing else _plan(facts, states, marks)


def _plan(
    facts: StartFacts, states: Mapping[SourceName, CommittedState], marks: Mapping[SourceName, Watermarks]
) -> StartPlan:
    windows = {}
    in_log = {name: without_deleted(state.epochs, marks[name].start + 1) for name, state in states.items()}
    for topic, parameters in facts.parameters.items():
        largest_ms = largest_roll_window_ms(epochs for (name, _), epochs in in_log.items() if name == topic)
        windows[topic] = Windows(current_ms=parameters.roll_window_ms, largest_ms=largest_ms)
    covered = facts.covered
    gives_up = {
        name
        for name, state in states.items()
        if name in facts.holds_given_up or (name in covered and covered[name] < state.first_offset)
    }
    # For a partition that was once given up, records outside the index do not count, wherever its log begins.
    kept = covered.keys() - gives_up
    given_up = {name for name, state in states.items() if state.first_offset and name not in kept}
    widest_ms = {name: widest_deleted_ms(facts.committed[name].epochs, mark.start) for name, mark in marks.items()}
    spare_ms = {
        name: spare
        for name, widest in widest_ms.items()
        if name[0] in facts.limits and (spare := _spare_ms(facts.limits[name[0]], widest)) is not None
    }
    return StartPlan(
        states=states,
        log_marks=marks,
        log_starts={name: 0 if name in given_up else mark.start for name, mark in marks.items()},
        windows=windows,
        widest_ms=widest_ms,
        spare_ms=spare_ms,
        gives_up_index=frozenset(gives_up),
        changed=frozenset(name for name, state in states.items() if state.epochs != facts.committed[name].epochs),
        pauses=merged(pause for state in facts.committed.values() for pause in state.pauses),
    )


def _spare_ms(limits: TopicLimits, widest_ms: int) -> int | None:
    """See `StartPlan.spare_ms`. An unlimited retention does not explain deleted records with a W above a week, the W of
    long retention: the retention was lower for a time. A limit in bytes deletes records of any age."""
    if limits.retention_bytes >= 0 and widest_ms:
        return 0
    if limits.retention_ms < 0:
        return 0 if widest_ms > ROLL_WINDOW_MS_MAX else None
    return limits.retention_ms - widest_ms


def _must_be_this_topic(topic: str, facts: TopicFacts, committed: Mapping[int, CommittedState]) -> None:
    for partition, state in committed.items():
        if state.topic_id != facts.topic_id:
            ids = {"committed_topic_id": state.topic_id, "topic_id": facts.topic_id}
            raise another_topic(topic=topic, partition=partition, **ids)


def another_topic(**fields: object) -> StateError:
    """The error for a delay topic that is not the topic of the committed offsets."""
    return StateError(
        "the delay topic was deleted and created again: the committed offsets belong to the old one",
        hint=f"Messages of the old topic are gone. {RESET}.",
        code="DB-4014",
        **fields,
    )


def _absent(facts: StartFacts, topic: str, committed: Mapping[int, CommittedState]) -> list[int]:
    """The partitions of a topic without a first commit. Raises StateError if an owned one lacks its commit for another
    reason; instances that do not own it go on."""
    checkpointed = {partition for name, partition in facts.known.union(facts.covered) if name == topic}
    counted = max((state.partitions for state in committed.values()), default=0)
    absent = []
    for partition, log in enumerate(facts.topics[topic].logs):
        if partition in committed or (topic, partition) in facts.unreadable:
            continue
        error = _not_new(topic, partition, log.start, was_known=partition in checkpointed or partition < counted)
        if error is None:
            absent.append(partition)
        elif not committed or (topic, partition) in facts.owned:
            raise error
    return absent


def _not_new(topic: str, partition: int, log_start: int, *, was_known: bool) -> StateError | None:
    """The error of a partition without a commit that must not start from its beginning; None: it may."""
    if was_known:
        return StateError(
            "the committed offset of a partition is missing, though the bridge has delivered from it before",
            hint=f"It was deleted, or expired while the bridge was down (offsets.retention.minutes). {RESET}.",
            topic=topic,
            partition=partition,
            code="DB-4001",
        )
    if log_start > 0:
        return StateError(
            "a partition has no committed offset, and its oldest records are gone",
            hint=f"Either the bridge's id was changed, or the topic was used without the bridge. {RESET}.",
            topic=topic,
            partition=partition,
            log_start=log_start,
            code="DB-4002",
        )
    return None


def _must_be_in_range(topic: str, partition: int, offset: int, log: Watermarks) -> None:
    if offset < log.start:
        raise StateError(
            "records were deleted from the delay topic before the bridge read them",
            hint=f"Raise the topic's retention. {RESET}.",
            topic=topic,
            partition=partition,
            committed=offset,
            log_start=log.start,
            code="DB-4011",
        )
    if offset > log.end:
        raise StateError(
            "the committed offset lies beyond the end of the delay topic: it was truncated, or is of another cluster",
            hint=f"Check bootstrap.servers. {RESET}.",
            topic=topic,
            partition=partition,
            committed=offset,
            log_end=log.end,
            code="DB-4013",
        )
