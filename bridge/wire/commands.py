"""The headers of commands: records that cancel or move messages, and ask for an answer. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Final, TypedDict, Unpack

from bridge.wire import headers as h
from bridge.wire.headers import Headers

CORRELATION_LENGTH_MAX: Final = 256
KEY_BYTES_MAX: Final = 4_096
"""A larger key is left out of a forwarded command and of the answer: with one more header, the record might exceed
every size limit."""


class AnswerTo(TypedDict, total=False):
    """The answer that a command asks for."""

    reply_to: str | None
    """The topic of the answer (`bridge.wire.answers`)."""
    correlation: str | None
    """The answer repeats this text."""


class Forwarded(AnswerTo, total=False):
    """The same, with the source of a forwarded command."""

    forwarded: str | None
    """The command that was forwarded to other partitions. The bridge does not forward this copy again."""


def cancel_headers(id: str, **about: Unpack[Forwarded]) -> list[tuple[str, bytes]]:
    """The headers of a record that cancels `id`; send it with the key of the message. Raises ValueError."""
    return h.encoded([(h.CANCEL, h.check_id(id)), *_command(**about)])


def cancel_origin_headers(origin: str, **about: Unpack[Forwarded]) -> list[tuple[str, bytes]]:
    """The headers of a record that cancels the message from `origin` (`topic/partition/offset`), or up to 100 messages
    of that partition (`topic/partition/offset,offset...`). The record works in any partition, and fastest in the
    partition of its messages. Raises ValueError."""
    return h.encoded([(h.CANCEL_ORIGIN, h.origins_text(*h.parse_origins(origin))), *_command(**about)])


def move_headers(
    id: str,
    *,
    at: datetime | int | None = None,
    after: timedelta | None = None,
    now_ms: int | None = None,
    **about: Unpack[Forwarded],
) -> list[tuple[str, bytes]]:
    """The headers of a record that gives the pending messages of `id` another due time; send it with their key. `at`,
    `after` and `now_ms` are those of `timer_headers`. Raises ValueError, TypeError."""
    return h.encoded([(h.MOVE, h.check_id(id)), h.time_header(at, after, now_ms), *_command(**about)])


def move_origin_headers(
    origin: str,
    *,
    at: datetime | int | None = None,
    after: timedelta | None = None,
    now_ms: int | None = None,
    **about: Unpack[Forwarded],
) -> list[tuple[str, bytes]]:
    """The headers of a record that moves the message from `origin` (`topic/partition/offset`). Times and exceptions are
    those of `move_headers`."""
    named = (h.MOVE_ORIGIN, h.origin_text(*h.parse_origin(origin)))
    return h.encoded([named, h.time_header(at, after, now_ms), *_command(**about)])


def check_correlation(text: str) -> str:
    """A correlation id without surrounding white space. Raises ValueError."""
    text = text.strip(h.WHITE_SPACE)
    if len(text) > CORRELATION_LENGTH_MAX:
        raise ValueError(f"a correlation id has at most {CORRELATION_LENGTH_MAX} characters, this one {len(text)}")
    return text


def sent_on(said: Mapping[str, bytes | None], *, until_ms: int | None, forwarded: str) -> Headers:
    """The headers for another record of the same command. The time is absolute, so the moment of writing does not
    matter. `forwarded` is the place of the client's record."""
    headers = [(name, said[name]) for name in (*h.COMMANDS, h.REPLY_TO, h.CORRELATION) if name in said]
    headers += [(h.UNTIL, str(max(until_ms, 0)).encode())] if until_ms is not None else []
    return [*headers, (h.COPY_FORWARDED, forwarded.encode())]


def key_sent_on(key: bytes | None) -> bytes | None:
    """The key of a command's answer, and of a forwarded command."""
    return None if key is None or len(key) > KEY_BYTES_MAX else key


def _command(
    reply_to: str | None = None, correlation: str | None = None, forwarded: str | None = None
) -> list[tuple[str, str]]:
    texts = [(h.REPLY_TO, h.check_topic(reply_to))] if reply_to is not None else []
    texts += [(h.CORRELATION, check_correlation(correlation))] if correlation is not None else []
    return texts + ([(h.COPY_FORWARDED, forwarded)] if forwarded is not None else [])
