"""`delay-bridge reset-offsets`: an operator makes a decision that a start must not guess.

With missing, unreadable or out-of-range committed offsets, a start would either repeat or lose messages
(first_commits.py). The command writes new committed states for every partition of the chosen topics:

    earliest   all records of the topic are pending: delivered messages are delivered again
    latest     no record of the topic is pending: undelivered messages are given up
    committed  the committed states stay; records that are gone from the topic are given up

The pauses of targets stay, as far as the old states are readable.

The steps, with the cost of a crash right after each: 1. the indexes' checkpoints are set aside (the next start ends in
the same error as before, and a later one rebuilds the indexes); 2. one commit for all partitions (none: the reset is
done).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from bridge.errors import EnvironmentFailure, StateError
from bridge.kafka.construction import CLIENT_LOG, made
from bridge.kafka.errors import Fault, fault_of, kafka_error
from bridge.kafka.membership import FORCED
from bridge.start.first_commits import TopicFacts
from bridge.start.index import as_bridge_errors
from bridge.stores.names import SourceName
from bridge.wire.committed_state import (
    RESET,
    CommittedState,
    Pause,
    Said,
    decode_metadata,
    initial_state,
    merged,
    with_cut,
)
from bridge.wire.decode_epochs import DecodeParameters
from timerstore.disk import files

Reset = Literal["earliest", "latest", "committed"]
READ_TIMEOUT_S: Final = 30.0


def reset_committed_states(
    *,
    consumer: Mapping[str, Any],
    group_id: str,
    topics: Mapping[str, TopicFacts],
    parameters: Callable[[str], DecodeParameters],
    to: Reset,
    directory: Path,
    now_ms: int,
) -> dict[SourceName, CommittedState]:
    """Write new committed states for all partitions of `topics`, and return them.

    `consumer` are librdkafka properties of a consumer, `parameters` returns a topic's decode parameters, `directory` is
    the store's directory. Every instance of the bridge must be down: raises EnvironmentFailure if the group has members
    or refuses the commit.
    """
    config = {**consumer, "group.id": group_id, **FORCED}
    committed = _committed(config, topics) if to == "committed" else {}
    said = () if committed else _said(config, topics)
    states = {
        (topic, partition): _state(facts, partition, to, parameters(topic), committed.get((topic, partition)), now_ms)
        for topic, facts in topics.items()
        for partition in range(len(facts.logs))
    }
    states = {name: state.saying(said) if said else state for name, state in states.items()}
    with as_bridge_errors():
        for topic in topics:  # made again, it may have fewer partitions
            for checkpoint in sorted((directory / topic).glob(f"*/{files.CHECKPOINT}")):
                files.set_aside(checkpoint, now_ms)
    _commit(config, states)
    return states


def _state(
    facts: TopicFacts,
    partition: int,
    to: Reset,
    parameters: DecodeParameters,
    committed: CommittedState | None,
    now_ms: int,
) -> CommittedState:
    if committed is not None:
        begin = facts.logs[partition].start
        first = max(committed.first_offset, begin)
        return replace(committed, offset=max(committed.offset, begin), first_offset=first, gone_below=0, manifest=None)
    offset = facts.logs[partition].start if to == "earliest" else facts.logs[partition].end
    return initial_state(
        offset=offset,
        topic_id=facts.topic_id,
        partitions=len(facts.logs),
        parameters=parameters,
        first_offset=offset,
        cuts=with_cut((), offset, now_ms),  # invalidates the indexes of other machines
    )


def _committed(config: Mapping[str, Any], topics: Mapping[str, TopicFacts]) -> dict[SourceName, CommittedState]:
    """The states of all partitions. Raises StateError if one is missing, or belongs to a deleted topic."""
    states = {}
    for place in committed_places(config, _partitions(topics)):
        name = (place.topic, place.partition)
        state = decode_metadata(name, place.offset, place.metadata) if place.offset >= 0 else None
        if state is None or state.topic_id != topics[place.topic].topic_id:
            raise StateError(
                "the group has no committed state of this topic to keep",
                hint=f"{RESET}.",
                topic=place.topic,
                partition=place.partition,
                code="DB-4017",
            )
        states[name] = state
    return states


def _said(config: Mapping[str, Any], topics: Mapping[str, TopicFacts]) -> Said:
    """The pauses in the old states. An open transaction is no reason to wait: it may be the reason for the reset."""
    told: list[Pause] = []
    for place in committed_places({**config, "isolation.level": "read_uncommitted"}, _partitions(topics)):
        with suppress(StateError):  # a missing or unreadable state is the reason for the reset
            told += decode_metadata((place.topic, place.partition), place.offset, place.metadata).pauses
    return merged(told)


def committed_places(config: Mapping[str, Any], names: Iterable[SourceName]) -> list[TopicPartition]:
    """The committed offsets of these partitions, undecoded, from beside the group. Raises EnvironmentFailure."""
    places = [TopicPartition(*name) for name in names]
    try:
        with closing(_consumer(config)) as client:
            return list(client.committed(places, timeout=READ_TIMEOUT_S))
    except KafkaException as exception:
        raise offsets_not_read(kafka_error(exception)) from None


def offsets_not_read(error: KafkaError) -> EnvironmentFailure:
    """The error for committed offsets, of all partitions or of one, that brokers do not tell."""
    return EnvironmentFailure(
        "cannot read the committed offsets",
        hint="Check that the brokers are reachable, and try again.",
        reason=error.str(),
        code="DB-3007",
    )


def _partitions(topics: Mapping[str, TopicFacts]) -> list[SourceName]:
    return [(topic, partition) for topic, facts in topics.items() for partition in range(len(facts.logs))]


def _consumer(config: Mapping[str, Any]) -> Consumer:
    """A consumer that does not join: the group accepts its commit only without members."""
    alone = {name: value for name, value in config.items() if name != "group.instance.id"}
    return made("consumer", lambda: Consumer({**alone, "logger": CLIENT_LOG}))


def _commit(config: dict[str, Any], states: Mapping[SourceName, CommittedState]) -> None:
    offsets = [TopicPartition(*name, state.offset, state.metadata()) for name, state in states.items()]
    try:
        with closing(_consumer(config)) as client:
            answers = client.commit(offsets=offsets, asynchronous=False)
        error = next((answer.error for answer in answers if answer.error is not None), None)
    except KafkaException as exception:
        error = kafka_error(exception)
    if error is None:
        return
    running = fault_of(error) is Fault.GROUP
    raise EnvironmentFailure(
        "the group refused the new offsets"
        if not running
        else "an instance of this bridge is still a member of its group",
        hint="Stop every instance, wait for delivery.session_timeout, and try again.",
        reason=error.str(),
        code="DB-1013",
    )
