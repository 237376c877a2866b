"""What an action is told, and what it answers, as the OpenAPI document shows it."""

from __future__ import annotations

from typing import Annotated, Self

from fastapi import Body
from pydantic import BaseModel, ConfigDict, Field

from bridge.api import cursor as cursors
from bridge.api.models import INCOMPLETE, Filters, Text, parsed
from bridge.wire.answers import Answer, Outcome
from bridge.wire.committed_state import WHY_CHARS_MAX
from bridge.wire.headers import AS_DUE_MS, origin_text, parse_duration, parse_until
from timerstore.rows.sources import NamedPosition


class EmptyBody(BaseModel):
    """Nothing has to be said."""

    model_config = ConfigDict(extra="forbid")


Nothing = Annotated[EmptyBody | None, Body()]
"""No body, or an empty one."""


class When(BaseModel):
    """When a message is to be due: one of the two."""

    model_config = ConfigDict(extra="forbid", coerce_numbers_to_str=True)

    due: Text | None = Field(default=None, description="That moment: RFC 3339 with a zone, or epoch ms.")
    after: Text | None = Field(default=None, description="So long from now: 90s, 1h30m, 7d, PT15M.")

    def due_ms(self, now_ms: int) -> int:
        """Epoch milliseconds. Raises ValueError that says what is wrong."""
        if (self.due is None) == (self.after is None):
            raise ValueError("give one of due and after.")
        if self.due is not None:
            due_ms = max(now_ms, int(parsed("due", parse_until, self.due)))
        else:
            due_ms = now_ms + int(parsed("after", parse_duration, self.after or ""))
        if due_ms >= AS_DUE_MS:
            raise ValueError("that lies beyond the year 9999.")
        return due_ms


class Acted(BaseModel):
    """What has come of an action."""

    outcome: Outcome
    count: int = Field(description="Messages that the outcome is about.")
    origin: str = Field(description="topic/partition/offset of the record that was sent.")
    command: str = Field(description="topic/partition/offset of the command in the delay topic.")

    @classmethod
    def of(cls, done: Answer, origin: str) -> Self:
        return cls(outcome=done.outcome, count=done.count, origin=origin, command=origin_text(*done.command))


class Many(Filters):
    """Which messages: those that fit all that is given, of what was sent before the action began."""

    model_config = ConfigDict(extra="forbid", coerce_numbers_to_str=True)

    all: bool = Field(default=False, description="true: without any filter, all of them.")
    dry_run: bool = Field(default=False, description="true: only count.")
    cursor: Text | None = Field(default=None, description="Where an action that was broken off goes on.")

    def after_position(self) -> NamedPosition | None:
        """Where it goes on. Raises ValueError for what is no cursor."""
        return None if self.cursor is None else cursors.read(self.cursor)


class ManyMoved(Many, When):
    """Which messages, and when they are to be due."""


class Progress(BaseModel):
    """A line of the answer: how far the action has come. The last one is `complete`, or says in `error` why not."""

    done: int = Field(description="Messages of which something is known.")
    outcomes: dict[Outcome, int]
    cursor: str | None = Field(description="Everything before it is done; null: everything.")
    complete: bool
    error: str | None = None
    incomplete: list[str] = Field(default=[], description=INCOMPLETE)


class PauseWanted(BaseModel):
    """Until when a target is paused (neither: until it is resumed), and why."""

    model_config = ConfigDict(extra="forbid", coerce_numbers_to_str=True)

    until: Text | None = Field(default=None, description="That moment: RFC 3339 with a zone, or epoch ms.")
    after: Text | None = Field(default=None, description="So long from now: 90s, 1h30m, 7d, PT15M.")
    reason: Annotated[str, Field(max_length=WHY_CHARS_MAX, description="For people.")] = ""

    def until_ms(self, now_ms: int) -> int | None:
        """Epoch milliseconds. Raises ValueError that says what is wrong."""
        if self.until is None and self.after is None:
            return None
        until_ms = When(due=self.until, after=self.after).due_ms(now_ms)
        if until_ms <= now_ms:
            raise ValueError("that is over already.")
        return until_ms


class TargetPause(BaseModel):
    """A target after the action."""

    name: str
    paused: bool
    changed: bool = Field(description="false: it was so before.")
