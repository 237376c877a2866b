"""The headers of commands: records that cancel or move messages, and ask for an answer. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Final, TypedDict, Unpack

from bridge.wire import headers as h
from bridge.wire.headers import Headers

CORRELATION_LENGTH_MAX: Final = 256
KEY_BYTES_MAX: Final = 4_096
"""A command's key that is larger stays behind when it is sent on, and is not that of its answer: with a header more the
record might fit nowhere."""


class AnswerTo(TypedDict, total=False):
    """What a command asks for."""

    reply_to: str | None
    """A topic in which the bridge says what became of the messages (`bridge.wire.answers`)."""
    correlation: str | None
    """Text that its answer carries."""


class Forwarded(AnswerTo, total=False):
    """And where it is from."""

    forwarded: str | None
    """The command that was sent on to other partitions: the bridge does not send this one on."""


def cancel_headers(id: str, **about: Unpack[Forwarded]) -> list[tuple[str, bytes]]:
    """The headers of a record that cancels `id`; send it with the key of what it cancels. Raises ValueError."""
    return h.encoded([(h.CANCEL, h.check_id(id)), *_command(**about)])


def cancel_origin_headers(origin: str, **about: Unpack[Forwarded]) -> list[tuple[str, bytes]]:
    """The headers of a record that cancels the message that came from `origin` (`topic/partition/offset`), or up to 100
    of that partition (`topic/partition/offset,offset...`). In any partition; the one of its messages is the quickest.
    Raises ValueError."""
    return h.encoded([(h.CANCEL_ORIGIN, h.origins_text(*h.parse_origins(origin))), *_command(**about)])


def move_headers(
    id: str,
    *,
    at: datetime | int | None = None,
    after: timedelta | None = None,
    now_ms: int | None = None,
    **about: Unpack[Forwarded],
) -> list[tuple[str, bytes]]:
    """The headers of a record that gives another due time to what is pending of `id`; send it with the key of that.
    `at`, `after` and `now_ms` as for `timer_headers`. Raises ValueError, or TypeError."""
    return h.encoded([(h.MOVE, h.check_id(id)), h.time_header(at, after, now_ms), *_command(**about)])


def move_origin_headers(
    origin: str,
    *,
    at: datetime | int | None = None,
    after: timedelta | None = None,
    now_ms: int | None = None,
    **about: Unpack[Forwarded],
) -> list[tuple[str, bytes]]:
    """As `move_headers`, for what came from `origin`, as `cancel_origin_headers` takes it, but for up to 20."""
    named = (h.MOVE_ORIGIN, h.origins_text(*h.parse_origins(origin, of_move=True)))
    return h.encoded([named, h.time_header(at, after, now_ms), *_command(**about)])


def check_correlation(text: str) -> str:
    """A correlation id, without the white space around it."""
    text = text.strip(h.WHITE_SPACE)
    if len(text) > CORRELATION_LENGTH_MAX:
        raise ValueError(f"a correlation id has at most {CORRELATION_LENGTH_MAX} characters, this one {len(text)}")
    return text


def sent_on(said: Mapping[str, bytes | None], *, until_ms: int | None, forwarded: str) -> Headers:
    """The headers of a command once more, for another record of it: with a time that does not depend on when that is
    written, and with the place of the record that its client wrote."""
    headers = [(name, said[name]) for name in (*h.COMMANDS, h.REPLY_TO, h.CORRELATION) if name in said]
    headers += [(h.UNTIL, str(max(until_ms, 0)).encode())] if until_ms is not None else []
    return [*headers, (h.COPY_FORWARDED, forwarded.encode())]


def key_sent_on(key: bytes | None) -> bytes | None:
    """The key of a command's answer, and of the command once more."""
    return None if key is None or len(key) > KEY_BYTES_MAX else key


def _command(
    reply_to: str | None = None, correlation: str | None = None, forwarded: str | None = None
) -> list[tuple[str, str]]:
    texts = [(h.REPLY_TO, h.check_topic(reply_to))] if reply_to is not None else []
    texts += [(h.CORRELATION, check_correlation(correlation))] if correlation is not None else []
    return texts + ([(h.COPY_FORWARDED, forwarded)] if forwarded is not None else [])
