"""Answers to commands: what became of the messages that a cancel or a move names, and the record that says so. Pure.

A command with `delay-reply-to` is answered in that topic, in the transaction that decides it, so the answer and its
effect are visible together. Key and correlation id are the command's. The headers are for programs that route, the
value is for those that want to know more:

    delay-outcome    cancelled                                    {"outcome": "cancelled", "count": 1,
    delay-command    delay/0/1207 (the record of the client)       "command": "delay/0/1207",
    delay-count      1                                             "origins": ["delay/0/1200"]}

A command that is about several messages gets an answer for each outcome, with their number and the first of them; those
by origin add up to as many as it names. (Where some of its messages were under way, these may be answered later, in a
record of their own.)
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from bridge.wire import headers as h
from bridge.wire.headers import Headers, Origin, origin_text

ORIGINS_MAX: Final = h.NAMED_MAX
"""Origins that an answer names; it counts all."""


class Outcome(StrEnum):
    """What became of what a command names."""

    CANCELLED = "cancelled"
    """It was pending, and will not be delivered."""
    MOVED = "moved"
    """It was pending, and is due at the new time."""
    DELIVERED = "delivered"
    """It was pending when the command was read, but had left (to its target or as a dead letter) before its turn."""
    NOT_PENDING = "not-pending"
    """Nothing of it was pending: delivered before, cancelled before, or never there."""
    FORBIDDEN = "forbidden"
    """It names a record that is in no delay topic of this bridge."""
    TOO_MANY = "too-many"
    """An id of more messages than one command may act on. None was touched."""
    TOO_LARGE = "too-large"
    """It is pending, and stays due when it was: a move to a later time would need a copy, for which it is too large."""
    UNKNOWN = "unknown"
    """The delay topic did not take what the command needs written there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What became of one command. `command` is the record that the client wrote; `origins` are those of the `count`
    messages that the outcome is about, up to 100 of a command by id; `due_ms`: where they were moved to."""

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
        """The same, of the messages of another answer with this outcome, too."""
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
        """Of its record: compact JSON."""
        told = {
            "outcome": str(self.outcome),
            "count": self.count,
            "command": origin_text(*self.command),
            "origins": [origin_text(*origin) for origin in self.origins],
            "due_ms": self.due_ms,
            "correlation_id": self.correlation,
        }
        kept = {name: each for name, each in told.items() if each is not None}
        return json.dumps(kept, separators=(",", ":"), ensure_ascii=False).encode()
