"""What a client says of a record that was read, whatever its producer has written. Pure."""

from __future__ import annotations

from operator import methodcaller
from typing import Final, NamedTuple

from confluent_kafka import Message

from bridge.wire.headers import Headers
from bridge.wire.reasons import RejectReason

_HEADERS: Final = methodcaller("headers")
FRAMING_BYTES: Final = 100
"""Of a record, roughly, beside what is in it."""
UNREADABLE_BYTES: Final = 64 << 10
"""Taken for headers that cannot be read: as many as a producer may write by default."""


class Record(NamedTuple):
    """A record as a consumer gives it; `by_broker`: its timestamp `ts` (epoch ms) is the broker's."""

    topic: str
    partition: int
    offset: int
    ts: int
    by_broker: bool
    key: bytes | None
    value: bytes | None
    headers: Headers


class Unread(NamedTuple):
    """What takes the place of records that cannot be read: where they begin, why, and in words what is left out."""

    name: tuple[str, int]
    offset: int
    ts: int
    reason: RejectReason
    omitted: str


def headers_of(message: Message) -> Headers | None:
    """The record's headers. None where a name is no UTF-8; if asked again, there are none.

    For such a name the client (2.16) makes a tuple with a hole, and leaves the exception pending. Whatever looks into
    the tuple ends the process with a signal. `methodcaller` finds the exception; a plain call does not, once the
    interpreter has specialised it (from 3.11 on, after some calls).
    """
    try:
        found = _HEADERS(message) or []
    except (SystemError, UnicodeDecodeError):
        message.set_headers([])
        return None
    return [(str(pair[0]), pair[1] if isinstance(pair[1], bytes | None) else None) for pair in found]


def record_bytes(message: Message) -> int:
    """What a record takes, its headers too: key and value may be the smaller part."""
    headers = headers_of(message)
    carried = UNREADABLE_BYTES if headers is None else sum(len(name) + len(value or b"") for name, value in headers)
    return len(message.key() or b"") + len(message.value() or b"") + carried + FRAMING_BYTES
