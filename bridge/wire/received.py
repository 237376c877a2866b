"""Records as the client returns them, including those with invalid headers. Pure."""

from __future__ import annotations

from operator import methodcaller
from typing import Final, NamedTuple

from confluent_kafka import Message

from bridge.wire.headers import Headers
from bridge.wire.reasons import RejectReason

_HEADERS: Final = methodcaller("headers")
FRAMING_BYTES: Final = 100
"""Estimated overhead of a record beside its contents."""
HEADER_BYTES: Final = 100
"""The same of a header: a record may have hundreds of thousands without names and values."""
UNREADABLE_BYTES: Final = 64 << 10
"""Estimated size of unreadable headers: the default limit for producers."""


class Record(NamedTuple):
    """A record from a consumer; `by_broker`: its timestamp `ts` (epoch ms) is the broker's."""

    topic: str
    partition: int
    offset: int
    ts: int
    by_broker: bool
    key: bytes | None
    value: bytes | None
    headers: Headers


class Unread(NamedTuple):
    """The substitute for unreadable records: their first offset, the reason, and a description of the omitted parts."""

    name: tuple[str, int]
    offset: int
    ts: int
    reason: RejectReason
    omitted: str


def headers_of(message: Message) -> Headers | None:
    """The record's headers. None if a name is not UTF-8; a second call then returns no headers.

    For such a name the client (2.16) creates a tuple with an unset slot, and leaves the exception pending. Any access
    to the slot kills the process with a signal. `methodcaller` raises the exception; a plain call does not, once the
    interpreter has specialised it (from 3.11 on, after some calls).
    """
    try:
        pairs = _HEADERS(message) or []
    except (SystemError, UnicodeDecodeError):
        message.set_headers([])
        return None
    return [(str(pair[0]), pair[1] if isinstance(pair[1], bytes | None) else None) for pair in pairs]


def record_place(message: Message) -> str:
    """`topic/partition/offset` of a record."""
    return f"{message.topic()}/{message.partition()}/{message.offset()}"


def message_bytes(message: Message) -> int:
    """The size of a record with its headers, which may be the larger part."""
    headers = headers_of(message)
    carried = UNREADABLE_BYTES if headers is None else carried_bytes(headers)
    return len(message.key() or b"") + len(message.value() or b"") + carried + FRAMING_BYTES


def carried_bytes(headers: Headers) -> int:
    """The size of headers in memory."""
    return HEADER_BYTES * len(headers) + sum(len(name) + len(value or b"") for name, value in headers)
