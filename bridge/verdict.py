"""What to do about a record that could not be produced: one decision, in one place."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from confluent_kafka import KafkaError

from bridge.headers import RejectReason


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a message is not delivered, now or ever: the reason, and in words what exactly is wrong."""

    reason: RejectReason
    detail: str


class Verdict(Enum):
    """Whose fault a failure is, hence who has to make way."""

    PASSING = "passing"
    """Nobody's: brokers or group are busy with something. All of it is tried again."""
    TARGET = "target"
    """The target takes nothing from us: its records are put off, the others go on."""
    PARTITION = "partition"
    """One partition of it does not answer, or cannot take anything now: as TARGET, for that partition."""
    RECORD = "record"
    """This record (or one of its batch) is not acceptable: it is found out and refused, the others go on."""


_TARGET: Final = frozenset(
    {
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.INVALID_REQUIRED_ACKS,
        KafkaError.TOPIC_EXCEPTION,
        KafkaError.POLICY_VIOLATION,
    }
)
_PARTITION: Final = frozenset(
    {
        KafkaError._MSG_TIMED_OUT,
        KafkaError._TIMED_OUT_QUEUE,
        KafkaError.REQUEST_TIMED_OUT,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.NOT_ENOUGH_REPLICAS,
        KafkaError.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
        KafkaError.KAFKA_STORAGE_ERROR,
    }
)
_RECORD: Final = frozenset(
    {
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.RECORD_LIST_TOO_LARGE,
        KafkaError.INVALID_RECORD,
        KafkaError.INVALID_MSG,
        KafkaError.INVALID_MSG_SIZE,
        KafkaError.INVALID_TIMESTAMP,
        KafkaError.UNSUPPORTED_FOR_MESSAGE_FORMAT,
        KafkaError._BAD_MSG,
        KafkaError._INVALID_ARG,
        KafkaError._UNKNOWN_PARTITION,
    }
)
UNKNOWN_TARGET: Final = frozenset(
    {KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError.UNKNOWN_TOPIC_ID}
)
"""The cache of targets is wrong: ask again. What is missing then is put off before it enters a transaction."""

_GROUP: Final = frozenset(
    {
        KafkaError.ILLEGAL_GENERATION,
        KafkaError.UNKNOWN_MEMBER_ID,
        KafkaError.REBALANCE_IN_PROGRESS,
        KafkaError.FENCED_MEMBER_EPOCH,
        KafkaError.STALE_MEMBER_EPOCH,
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        KafkaError.COORDINATOR_NOT_AVAILABLE,
        KafkaError.NOT_COORDINATOR,
        KafkaError._QUEUE_FULL,
        KafkaError._TRANSPORT,
    }
)


def judge_failure(error: KafkaError) -> Verdict:
    """Who has to make way after this error of one record."""
    for codes, verdict in ((_TARGET, Verdict.TARGET), (_PARTITION, Verdict.PARTITION), (_RECORD, Verdict.RECORD)):
        if error.code() in codes:
            return verdict
    return Verdict.PASSING


def refusal_of(error: KafkaError) -> Refusal:
    """What is said of a record, or of its target, after this error."""
    return Refusal(reason_of(error), error.str())


def may_be_a_record(error: KafkaError) -> bool:
    """Whether a transaction that was aborted with this error is worth a careful one that finds the culprits."""
    return error.code() not in _GROUP


def reason_of(error: KafkaError) -> RejectReason:
    """The reason given in retry metrics and in the dead letter."""
    if error.code() in (KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE, KafkaError.INVALID_MSG_SIZE):
        return RejectReason.TOO_LARGE
    if error.code() == KafkaError._UNKNOWN_PARTITION:
        return RejectReason.PARTITION_OUT_OF_RANGE
    if error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
        return RejectReason.TARGET_DENIED
    if error.code() in _PARTITION or error.code() in UNKNOWN_TARGET:
        return RejectReason.TARGET_UNAVAILABLE
    return RejectReason.PRODUCE_FAILED


@dataclass(frozen=True, slots=True)
class Findings:
    """What aborts have taught of single records, by packed (source, offset): those whose target refuses them for good,
    those whose dead letter is refused, those whose copy is, and those of which no dead letter fits unless it is cut.
    """

    condemned: Mapping[int, Refusal] = field(default_factory=dict)
    no_letter: Collection[int] = ()
    no_copy: Collection[int] = ()
    cut: Collection[int] = ()
