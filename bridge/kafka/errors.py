"""The meaning of each error code of the Kafka client: its fault, whether it passes, the reason for a dead letter.

`MEANINGS` is the only table; all other modules ask it. A code that is not in it has the fault UNKNOWN, which blames
nothing: attempts become narrower until the cause stands alone (narrowing.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from confluent_kafka import KafkaError, KafkaException

from bridge.errors import FencedError, StateError
from bridge.wire.reasons import RejectReason

RECORDS_GONE: Final = "DB-4011"
"""The code of `records_gone`."""


class Fault(Enum):
    """The cause of an error, which determines the remedy."""

    BROKERS = "brokers"
    """Brokers or coordinator are temporarily busy. The whole call is repeated."""
    GROUP = "group"
    """The membership has changed: the assignment must be refreshed."""
    TARGET = "target"
    """The topic accepts no records from the bridge: its records are put off, the others go on."""
    MISSING = "missing"
    """The topic does not exist, or the client does not know it yet: it is looked up again."""
    PARTITION = "partition"
    """One partition does not answer, or accepts no records now: as TARGET, for that partition."""
    RECORD = "record"
    """This record, or another one of its batch, is unacceptable: it is found and refused, the others go on."""
    BYSTANDER = "bystander"
    """Another record of the batch was refused; this one is good (KIP-467)."""
    CLOCK = "clock"
    """The topic refuses timestamps of the bridge's clock: as TARGET, but no attempt of a record is counted."""
    CREDENTIALS = "credentials"
    """The brokers do not know the bridge, or the bridge does not trust them."""
    FORBIDDEN = "forbidden"
    """The brokers refuse every such request: an operator has to grant a right or to change a setting."""
    BUSY = "busy"
    """An earlier call of this client is still in progress."""
    FENCED = "fenced"
    """Another client has the bridge's name, or its transaction was ended for its age."""
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Meaning:
    """`fault`, the `reason` for a record's dead letter, and whether a repetition of the same call may succeed."""

    fault: Fault
    reason: RejectReason = RejectReason.PRODUCE_FAILED
    passes: bool = False


_UNAVAILABLE: Final = RejectReason.TARGET_UNAVAILABLE
_PASSING: Final = Meaning(Fault.BROKERS, passes=True)
_GROUP: Final = Meaning(Fault.GROUP)
_TARGET: Final = Meaning(Fault.TARGET)
_MISSING: Final = Meaning(Fault.MISSING, _UNAVAILABLE)
_PARTITION: Final = Meaning(Fault.PARTITION, _UNAVAILABLE)
_RECORD: Final = Meaning(Fault.RECORD)
_TOO_LARGE: Final = Meaning(Fault.RECORD, RejectReason.TOO_LARGE)
_CREDENTIALS: Final = Meaning(Fault.CREDENTIALS)
_FORBIDDEN: Final = Meaning(Fault.FORBIDDEN)
_FENCED: Final = Meaning(Fault.FENCED)

MEANINGS: Final[Mapping[int, Meaning]] = {
    KafkaError._ALL_BROKERS_DOWN: _PASSING,
    KafkaError._QUEUE_FULL: _PASSING,
    KafkaError._TIMED_OUT: _PASSING,
    KafkaError._TRANSPORT: _PASSING,
    KafkaError._WAIT_COORD: _PASSING,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS: _PASSING,
    KafkaError.COORDINATOR_NOT_AVAILABLE: _PASSING,
    KafkaError.NOT_COORDINATOR: _PASSING,
    KafkaError.UNSTABLE_OFFSET_COMMIT: _PASSING,
    #
    KafkaError.FENCED_MEMBER_EPOCH: _GROUP,
    KafkaError.ILLEGAL_GENERATION: _GROUP,
    KafkaError.REBALANCE_IN_PROGRESS: _GROUP,
    KafkaError.STALE_MEMBER_EPOCH: _GROUP,
    KafkaError.UNKNOWN_MEMBER_ID: _GROUP,
    #
    KafkaError.INVALID_REQUIRED_ACKS: _TARGET,
    KafkaError.POLICY_VIOLATION: _TARGET,
    KafkaError.TOPIC_AUTHORIZATION_FAILED: Meaning(Fault.TARGET, RejectReason.TARGET_DENIED),
    KafkaError.TOPIC_EXCEPTION: _TARGET,
    #
    KafkaError._UNKNOWN_TOPIC: _MISSING,
    KafkaError.UNKNOWN_TOPIC_ID: _MISSING,
    KafkaError.UNKNOWN_TOPIC_OR_PART: _MISSING,
    #
    KafkaError._MSG_TIMED_OUT: _PARTITION,
    KafkaError._TIMED_OUT_QUEUE: _PARTITION,
    KafkaError.KAFKA_STORAGE_ERROR: _PARTITION,
    KafkaError.LEADER_NOT_AVAILABLE: _PARTITION,
    KafkaError.NOT_ENOUGH_REPLICAS: _PARTITION,
    KafkaError.NOT_ENOUGH_REPLICAS_AFTER_APPEND: _PARTITION,
    KafkaError.NOT_LEADER_FOR_PARTITION: _PARTITION,
    KafkaError.REQUEST_TIMED_OUT: Meaning(Fault.PARTITION, _UNAVAILABLE, passes=True),
    #
    KafkaError._BAD_MSG: _RECORD,
    KafkaError._INVALID_ARG: _RECORD,
    KafkaError._UNKNOWN_PARTITION: Meaning(Fault.RECORD, RejectReason.PARTITION_OUT_OF_RANGE),
    KafkaError.INVALID_MSG: _RECORD,
    KafkaError.INVALID_MSG_SIZE: _TOO_LARGE,
    KafkaError.INVALID_RECORD: _RECORD,
    KafkaError.MSG_SIZE_TOO_LARGE: _TOO_LARGE,
    KafkaError.RECORD_LIST_TOO_LARGE: _TOO_LARGE,
    KafkaError.UNSUPPORTED_FOR_MESSAGE_FORMAT: _RECORD,
    KafkaError._INVALID_DIFFERENT_RECORD: Meaning(Fault.BYSTANDER),
    #
    KafkaError.INVALID_TIMESTAMP: Meaning(Fault.CLOCK, RejectReason.CLOCK_AHEAD),
    #
    KafkaError._AUTHENTICATION: _CREDENTIALS,
    KafkaError.SASL_AUTHENTICATION_FAILED: _CREDENTIALS,
    #
    KafkaError.CLUSTER_AUTHORIZATION_FAILED: _FORBIDDEN,
    KafkaError.GROUP_AUTHORIZATION_FAILED: _FORBIDDEN,
    KafkaError.INVALID_TRANSACTION_TIMEOUT: _FORBIDDEN,
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: _FORBIDDEN,
    KafkaError.UNSUPPORTED_VERSION: _FORBIDDEN,
    #
    KafkaError._CONFLICT: Meaning(Fault.BUSY),
    KafkaError._PREV_IN_PROGRESS: Meaning(Fault.BUSY),
    #
    KafkaError._FENCED: _FENCED,
    KafkaError.FENCED_INSTANCE_ID: _FENCED,
    KafkaError.INVALID_PRODUCER_EPOCH: _FENCED,
    KafkaError.PRODUCER_FENCED: _FENCED,
    KafkaError.UNRELEASED_INSTANCE_ID: _FENCED,
}
_NOTHING: Final = Meaning(Fault.UNKNOWN)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A message's obstacle to delivery, passing or permanent: the reason, and a detailed description."""

    reason: RejectReason
    detail: str

    @property
    def counts(self) -> bool:
        """Whether a message that is put off for this counts a failed attempt: not for the bridge's own clock, nor
        without an attempt."""
        return self.reason not in (
            RejectReason.CLOCK_AHEAD,
            RejectReason.TARGET_PAUSED,
            RejectReason.TARGET_IN_DOUBT,
        )


def meaning_of(error: KafkaError) -> Meaning:
    return MEANINGS.get(error.code(), _NOTHING)


def fault_of(error: KafkaError) -> Fault:
    return meaning_of(error).fault


def is_denied(error: KafkaError) -> bool:
    """Whether the brokers refuse this client or all of its requests of this kind."""
    return fault_of(error) in (Fault.CREDENTIALS, Fault.FORBIDDEN)


def is_unreadable(error: KafkaError) -> bool:
    """Whether a topic is missing or forbidden. Such an answer also shows that the broker is well."""
    return error.code() in (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.TOPIC_AUTHORIZATION_FAILED)


def is_fatal(error: KafkaError) -> bool:
    """Whether the client is unusable after this error."""
    return error.fatal() or error.code() == KafkaError._FATAL


def is_fenced(error: KafkaError) -> bool:
    """Whether another client has the bridge's name now, or its transaction was ended for its age. A callback gets a
    wrapped error that names the cause in its text.
    """
    if error.code() == KafkaError._FATAL:
        return any(KafkaError(code).str() in error.str() for code, means in MEANINGS.items() if means is _FENCED)
    return fault_of(error) is Fault.FENCED


def is_unasked(error: KafkaError) -> bool:
    """Whether a transaction had ended before this client asked for its end. A callback gets a wrapped error that names
    the cause in its text.
    """
    if error.code() == KafkaError._FATAL:
        return KafkaError(KafkaError.INVALID_TXN_STATE).str() in error.str()
    return error.code() == KafkaError.INVALID_TXN_STATE


def may_pass(error: KafkaError) -> bool:
    """Whether a repetition may succeed. After a rebalance it may not: the assignment must be refreshed first."""
    return error.retriable() or meaning_of(error).passes


def fenced(error: KafkaError) -> FencedError:
    """The error for an instance whose name another instance has taken."""
    return FencedError(
        "another instance of the same name took over",
        hint="If that was unintended, give every instance its own bridge.instance.",
        reason=error.str(),
        code="DB-5001",
    )


def records_gone(**fields: object) -> StateError:
    """The error for a delay topic whose log begins after the last record that was read."""
    return StateError(
        "records of the delay topic were deleted before the bridge had read them",
        hint="Raise the delay topic's retention, then choose a new position with `delay-bridge reset-offsets`.",
        code="DB-4011",
        **fields,
    )


def kafka_error(exception: KafkaException) -> KafkaError:
    """The error inside a client's exception."""
    inner = exception.args[0] if exception.args else None
    return inner if isinstance(inner, KafkaError) else KafkaError(KafkaError._FAIL, str(exception))
