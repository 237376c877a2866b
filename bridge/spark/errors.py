"""Spark's exceptions as errors of the bridge, which name the operation and its records."""

from __future__ import annotations

from typing import Final

from bridge.errors import BridgeError, EnvironmentFailure, InternalError
from bridge.kafka.errors import records_gone
from bridge.stores.names import Offsets

JAVA_ENDED: Final = "DB-3016"


def named_failure(what: str, error: Exception, records: str = "") -> BridgeError:
    """The bridge's error for an exception of Spark; a BridgeError stays unchanged. `records` describes the records that
    were being read."""
    if isinstance(error, BridgeError):
        return error
    text = str(error)
    lost = ("OffsetOutOfRange", "KAFKA_DATA_LOSS", "data may have been lost", "OFFSET_OUT_OF_RANGE")
    if any(sign in text for sign in lost):
        return records_gone(reason=_reason(text))
    if isinstance(error, ConnectionError) or any(sign in text for sign in _JVM_GONE):
        return EnvironmentFailure(
            "Spark's Java process has ended",
            hint="If a line above says that it ran out of memory, which is the most likely reason, raise "
            "spark.driver_memory. One of the unread records may be large, or highly compressed.",
            records=records or "none",
            code="DB-3016",
        )
    # By name: without a session PySpark must not be imported.
    if any("Py4J" in base.__name__ or base.__name__ == "PySparkException" for base in type(error).__mro__):
        return EnvironmentFailure(
            f"Spark cannot {what}",
            hint="Check the brokers and the log above; after a restart the bridge goes on from the same place.",
            reason=_reason(text),
            code="DB-3017",
        )
    return InternalError(f"cannot {what}: {error!r}", hint="Please report this with the log.", code="DB-7001")


def is_about_records(error: BridgeError) -> bool:
    """Whether the records may be the cause: damaged, or too large for the memory."""
    return any(sign in f"{error} {error.fields.get('reason', '')}" for sign in _OF_RECORDS)


_OF_RECORDS: Final = ("is invalid, cause", "OutOfMemory", "CorruptRecord", "InvalidRecord", "Java heap space")
_JVM_GONE: Final = ("Answer from Java side is empty", "while sending or receiving", "Py4JNetworkError")


def ranges(begins: Offsets, ends: Offsets) -> str:
    """The ranges between the offsets as text: `delay/0 from 17 to 30`."""
    parts = [(name, begin, ends.get(name, begin)) for name, begin in sorted(begins.items())]
    return ", ".join(f"{topic}/{p} from {begin} to {end - 1}" for (topic, p), begin, end in parts if end > begin)


def _reason(text: str) -> str:
    """The first line and the last cause of a Java stack trace."""
    lines = [line.strip() for line in text.splitlines()]
    said = [line.lstrip(": ") for line in lines if line and not line.startswith("An error occurred while calling")]
    causes = [line.removeprefix("Caused by: ") for line in lines if line.startswith("Caused by: ")]
    return "; ".join([*said[:1], *causes[-1:]])[:500]
