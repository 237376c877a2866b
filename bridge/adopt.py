"""`delay-bridge adopt`: an operator decides what a start must not guess.

Where committed offsets are missing, unreadable or out of range, going on would either repeat or lose messages
(standing.py). Adopting writes new committed states for every partition of the chosen topics:

    earliest   everything that the topic still holds is pending: what was delivered before is delivered again
    latest     nothing that the topic holds is pending: what was not delivered yet is given up

Order, and what a crash right after each step costs: 1. the index's checkpoint is set aside (the index is rebuilt at the
next start, which would end in the same error as before); 2. one commit for all partitions (none: adopting is done).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from bridge.clienterrors import kafka_error
from bridge.decode import DecodeParameters
from bridge.errors import EnvironmentFailure
from bridge.ownership import FORCED
from bridge.progress import CommittedState, initial_state
from bridge.standing import TopicFacts
from timerstore import files
from timerstore.sources import SourceName


def adopt(
    *,
    consumer: Mapping[str, Any],
    group_id: str,
    topics: Mapping[str, TopicFacts],
    parameters: Callable[[str], DecodeParameters],
    start: Literal["earliest", "latest"],
    directory: Path,
    now_ms: int,
) -> dict[SourceName, CommittedState]:
    """Write new committed states for all partitions of `topics`, and return them.

    `consumer` are librdkafka properties of a consumer, `parameters` gives a topic's decode parameters, `directory` is
    the store's. Every instance of the bridge must be down: raises EnvironmentFailure when the group has members, or
    does not take the commit.
    """
    states = {
        (topic, partition): _state(facts, partition, start, parameters(topic))
        for topic, facts in topics.items()
        for partition in range(facts.partitions)
    }
    if (directory / files.CHECKPOINT).exists():
        files.set_aside(directory / files.CHECKPOINT, now_ms)
    _commit({**consumer, "group.id": group_id, **FORCED}, states)
    return states


def _state(
    facts: TopicFacts, partition: int, start: Literal["earliest", "latest"], parameters: DecodeParameters
) -> CommittedState:
    offset = facts.log_start[partition] if start == "earliest" else facts.log_end[partition]
    return initial_state(
        offset=offset,
        topic_id=facts.topic_id,
        partitions=facts.partitions,
        parameters=parameters,
        first_offset=offset,
    )


def _commit(config: dict[str, Any], states: Mapping[SourceName, CommittedState]) -> None:
    config.pop("group.instance.id", None)  # not a member: the group takes such a commit only while it has none
    client = Consumer({**config, "logger": logging.getLogger("bridge.librdkafka")})
    try:
        offsets = [TopicPartition(*name, state.offset, state.metadata()) for name, state in states.items()]
        answers = client.commit(offsets=offsets, asynchronous=False)
        error = next((answer.error for answer in answers if answer.error is not None), None)
    except KafkaException as exception:
        error = kafka_error(exception)
    finally:
        client.close()
    if error is None:
        return
    running = error.code() in (
        KafkaError.UNKNOWN_MEMBER_ID,
        KafkaError.ILLEGAL_GENERATION,
        KafkaError.REBALANCE_IN_PROGRESS,
    )
    raise EnvironmentFailure(
        "the group does not take new offsets"
        if not running
        else "an instance of this bridge is, or was just now, running",
        hint="Stop every instance, wait for delivery.session_timeout, and try again.",
        reason=error.str(),
    )
