"""What to do about a record that could not be produced: one decision, in one place."""

from __future__ import annotations

from enum import Enum
from typing import Final

from confluent_kafka import KafkaError

from bridge.headers import RejectReason


class Verdict(Enum):
    """Whose fault a failure is, hence who has to make way."""

    PASSING = "passing"
    """Nobody's: brokers or group are busy with something. All of it is tried again."""
    TARGET = "target"
    """The target takes nothing from us: its records are refused for a while, the others go on."""
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
"""The cache of targets is wrong: ask again. What is missing then is refused before it enters a transaction."""

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
    if error.code() in _TARGET:
        return Verdict.TARGET
    return Verdict.RECORD if error.code() in _RECORD else Verdict.PASSING


def may_be_a_record(error: KafkaError) -> bool:
    """Whether a transaction that was aborted with this error is worth a careful one that finds the culprits."""
    return error.code() not in _GROUP


def reason_of(error: KafkaError) -> RejectReason:
    """The reason given in the dead letter."""
    if error.code() in (KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE, KafkaError.INVALID_MSG_SIZE):
        return RejectReason.TOO_LARGE
    if error.code() == KafkaError._UNKNOWN_PARTITION:
        return RejectReason.PARTITION_OUT_OF_RANGE
    return RejectReason.PRODUCE_FAILED
