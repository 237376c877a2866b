"""The Kafka client's errors: what they wrap, and which of them say that somebody else has our name."""

from __future__ import annotations

from typing import Final

from confluent_kafka import KafkaError, KafkaException

from bridge.errors import FencedError

FENCED_CODES: Final = frozenset(
    {
        KafkaError.FENCED_INSTANCE_ID,
        KafkaError.UNRELEASED_INSTANCE_ID,
        KafkaError.PRODUCER_FENCED,
        KafkaError._FENCED,
    }
)

_PASSING: Final = frozenset(
    {
        KafkaError._ALL_BROKERS_DOWN,
        KafkaError._TIMED_OUT,
        KafkaError._TRANSPORT,
        KafkaError._WAIT_COORD,
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        KafkaError.COORDINATOR_NOT_AVAILABLE,
        KafkaError.NOT_COORDINATOR,
        KafkaError.REQUEST_TIMED_OUT,
    }
)


def is_fatal(error: KafkaError) -> bool:
    """Whether the client is of no use after this error."""
    return error.fatal() or error.code() == KafkaError._FATAL


def is_fenced(error: KafkaError) -> bool:
    """Whether somebody else has our name now. A callback gets the error wrapped, with the cause in words."""
    if error.code() == KafkaError._FATAL:
        return any(KafkaError(code).str() in error.str() for code in FENCED_CODES)
    return error.code() in FENCED_CODES


def may_pass(error: KafkaError) -> bool:
    """Whether a repetition may succeed. A rebalance is none of these: the assignment must be looked at anew."""
    return error.retriable() or error.code() in _PASSING


def fenced(error: KafkaError) -> FencedError:
    """What to tell the operator when Kafka says that the name is somebody else's now."""
    return FencedError(
        "another instance of the same name took over",
        hint="If that was not meant: give every instance its own bridge.instance.",
        reason=error.str(),
    )


def kafka_error(exception: KafkaException) -> KafkaError:
    """The error inside of a client's exception."""
    inner = exception.args[0] if exception.args else None
    return inner if isinstance(inner, KafkaError) else KafkaError(KafkaError._FAIL, str(exception))
