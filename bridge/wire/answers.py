"""Answers to commands: the outcome for the messages of a cancel or a move, and its record. Pure.

A command with `delay-reply-to` is answered in that topic. The transaction that decides the command holds the answer
too, so the answer and its effect become visible together. Key and correlation id are the command's. Programs that route
answers read the headers; the value has the details:

    delay-outcome    cancelled                                    {"outcome": "cancelled", "count": 1,
    delay-command    delay/0/1207 (the record of the client)       "command": "delay/0/1207",
    delay-count      1                                             "origins": ["delay/0/1200"]}

A command for several messages gets one answer for each outcome, with the count and the first origins. For a command by
origin, the counts add up to the number of origins that it names. Messages in transit may be answered later, in a
separate record.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from bridge.wire import headers as h
from bridge.wire.headers import Headers, Origin, origin_text

ORIGINS_MAX: Final = h.NAMED_MAX
"""Origins that an answer names. Its count covers all messages."""


class Outcome(StrEnum):
    """The outcome of a command for the messages that it names."""

    CANCELLED = "cancelled"
    """The message was pending, and will not be delivered."""
    MOVED = "moved"
    """The message was pending, and is due at the new time."""
    DELIVERED = "delivered"
    """The message was pending when the command was read, but left (to its target or as a dead letter) before the
    command's turn."""
    NOT_PENDING = "not-pending"
    """No such message was pending: it was delivered or cancelled before, or never existed."""
    FORBIDDEN = "forbidden"
    """The command names a record outside the delay topics of this bridge."""
    TOO_MANY = "too-many"
    """The id has more messages than one command may act on. None was touched."""
    TOO_LARGE = "too-large"
    """The message is pending and keeps its due time: a move to a later time needs a copy, and the message is too large
    for one."""
    UNKNOWN = "unknown"
    """No message was touched: the delay topic refused a record that the command needs; or the command names an id, and
    the log could not be read up to its end at the start in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer to one command. `command` is the client's record. The outcome applies to `count` messages; `origins`
    are their origins, at most 100 for a command by id. `due_ms` is the new due time of moved messages."""

    command: Origin
    outcome: Outcome
    count: int = 0
    origins: tuple[Origin, ...] = ()
    due_ms: int | None = None
    correlation: str | None = None

    def __post_init__(self) -> None:
        if len(self.origins) > ORIGINS_MAX:
            raise ValueError(f"an answer names at most {ORIGINS_MAX} origins, not {len(self.origins)}")

    def with_more(self, other: Answer) -> Answer:
        """This answer extended by the messages of another answer with the same outcome."""
        return replace(
            self,
            count=self.count + other.count,
            origins=(*self.origins, *other.origins)[:ORIGINS_MAX],
            due_ms=self.due_ms if self.due_ms == other.due_ms else None,
        )

    def record_headers(self) -> Headers:
        correlation = [] if self.correlation is None else [(h.CORRELATION, self.correlation)]
        texts = [(h.OUTCOME, str(self.outcome)), (h.COMMAND, origin_text(*self.command)), (h.COUNT, str(self.count))]
        return [(name, text.encode()) for name, text in texts + correlation]

    def value(self) -> bytes:
        """The value of its record: compact JSON."""
        fields = {
            "outcome": str(self.outcome),
            "count": self.count,
            "command": origin_text(*self.command),
            "origins": [origin_text(*origin) for origin in self.origins],
            "due_ms": self.due_ms,
            "correlation_id": self.correlation,
        }
        present = {name: value for name, value in fields.items() if value is not None}
        return json.dumps(present, separators=(",", ":"), ensure_ascii=False).encode()
