"""The reasons for which records are refused: the values of a dead letter's `delay-reason`, with explanations. Pure."""

from __future__ import annotations

from enum import StrEnum
from typing import Self


class RejectReason(StrEnum):
    """The reason why a record cannot be a timer. Several reasons: the first one in this order counts."""

    explanation: str

    def __new__(cls, code: str, explanation: str) -> Self:
        member = str.__new__(cls, code)
        member._value_ = code
        member.explanation = explanation
        return member

    CREATE_TIME = "create-time", "The record's timestamp is its producer's: the delay topic needs LogAppendTime."
    DUPLICATE_HEADER = "duplicate-header", "A control header occurs more than once."
    BAD_COPY = "bad-copy", "The record claims to be a copy by the bridge, but its delay-copy-* headers are not valid."
    NO_TIME = (
        "no-time",
        "Neither a time (delay-until, delay-for, delay-level), nor a schedule, nor a cancel is present.",
    )
    TWO_TIMES = (
        "two-times",
        "More than one time, schedule or command is present; only delay-until or delay-for may be beside a schedule.",
    )
    BAD_SCHEDULE = (
        "bad-schedule",
        "delay-cron, delay-every or a header beside them is not valid, or names no moment at which a message is due.",
    )
    BAD_UNTIL = (
        "bad-until",
        "delay-until is neither epoch milliseconds nor RFC 3339 with an offset, or lies more than ten years back.",
    )
    BAD_FOR = "bad-for", "delay-for is neither a duration such as 90s, 1h30m or PT15M, nor a number of milliseconds."
    BAD_LEVEL = "bad-level", "delay-level is not a whole number from 1."
    BEYOND_MAX = "beyond-max", "The due time is further away than the longest delay that is configured."
    NO_TARGET = "no-target", "delay-topic is absent, and the delay topic has no default target."
    BAD_TARGET = "bad-target", "delay-topic is not a legal name of a Kafka topic."
    BAD_PARTITION = "bad-partition", "delay-partition is not a whole number from 0 to 2147483647."
    BAD_ID = (
        "bad-id",
        "The id in delay-id, delay-cancel or delay-move is empty, longer than 256 characters, or not UTF-8.",
    )
    BAD_ORIGIN = (
        "bad-origin",
        "delay-cancel-origin or delay-move-origin does not name a record of a delay topic, or up to 100 or 20 of them.",
    )
    BAD_REPLY = (
        "bad-reply",
        "delay-reply-to is no legal name of a topic, or delay-correlation-id exceeds 256 characters or is not UTF-8.",
    )
    BAD_REPLACE = "bad-replace", "delay-replace is neither true nor false, or is true without a delay-id."
    TOO_MANY_HEADERS = "too-many-headers", "The record has more headers than limits.headers allows."
    PAYLOAD_TOO_LARGE = "payload-too-large", "Key and value are larger than limits.payload_bytes allows."
    TOO_LARGE_TO_ROLL = (
        "too-large-to-roll",
        "Due after the roll window, and too large for the copy that the bridge would have to write to the delay topic.",
    )
    HEADERS_TOO_LARGE = "headers-too-large", "The record's headers are larger than limits.header_bytes allows."
    # Found while reading: no record is available for inspection.
    TOO_LARGE_TO_READ = (
        "too-large-to-read",
        "The record is compressed and larger than the memory: this letter has only its place.",
    )
    CORRUPT = "corrupt", "The records were damaged on the brokers' disk, and an operator has skipped them."
    # Found at dispatch, where targets are known.
    FORBIDDEN_TARGET = "forbidden-target", "The target is not one that the configuration allows."
    UNKNOWN_TARGET = "unknown-target", "The target does not exist."
    TARGET_DENIED = "target-denied", "The brokers do not allow the bridge to write to the target."
    TARGET_UNAVAILABLE = "target-unavailable", "The target's partition has no leader, too few replicas, or no answer."
    TARGET_PAUSED = "target-paused", "An operator has paused the target."
    TARGET_IN_DOUBT = (
        "target-in-doubt",
        "The bridge's information about the target is older than the message's due time, and must be refreshed first.",
    )
    TOO_LARGE = "too-large", "The message is larger than its target accepts."
    PARTITION_OUT_OF_RANGE = "partition-out-of-range", "The target has no partition of this number."
    NO_KEY = "no-key", "The target is compacted, and accepts no message without a key."
    CLOCK_AHEAD = "clock-ahead", "The target refuses the timestamp: the bridge's clock is ahead of the brokers'."
    BAD_HEADER_NAME = (
        "bad-header-name",
        "The name of a header contains NUL, where the client would cut it off: the target would get another name.",
    )
    OVERDUE = "overdue", "The message has waited for the bridge for longer than overdue.older_than."
    PRODUCE_FAILED = "produce-failed", "The target did not accept the message, for a reason without a separate code."
    UNREADABLE = "unreadable", "The record could not be parsed: this letter holds the readable parts."
