"""The bodies of actions and of their answers, as the OpenAPI document shows them."""

from __future__ import annotations

from typing import Annotated

from fastapi import Body
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from bridge.api import cursor as cursors
from bridge.api.filters import Filters, Text, parsed_parameter
from bridge.api.models import INCOMPLETE, View
from bridge.stores.names import NamedPosition
from bridge.wire.answers import Outcome
from bridge.wire.committed_state import WHY_CHARS_MAX
from bridge.wire.headers import AS_DUE_MS, origin_text, parse_duration, parse_until


class EmptyBody(BaseModel):
    """No request body is required."""

    model_config = ConfigDict(extra="forbid")


OriginText = Annotated[str, BeforeValidator(lambda origin: origin_text(*origin))]
Nothing = Annotated[EmptyBody | None, Body()]
"""No body, or an empty one."""


class When(BaseModel):
    """The new due time: give exactly one of `due` and `after`."""

    model_config = ConfigDict(extra="forbid", coerce_numbers_to_str=True)

    due: Text | None = Field(default=None, description="A moment: RFC 3339 with a zone, or epoch ms.")
    after: Text | None = Field(default=None, description="A duration from now: 90s, 1h30m, 7d, PT15M.")

    def due_ms(self, now_ms: int) -> int:
        """Epoch milliseconds. Raises ValueError with the fault."""
        if (self.due is None) == (self.after is None):
            raise ValueError("give exactly one of due and after.")
        if self.due is not None:
            due_ms = max(now_ms, int(parsed_parameter("due", parse_until, self.due)))
        else:
            due_ms = now_ms + int(parsed_parameter("after", parse_duration, self.after or ""))
        if due_ms >= AS_DUE_MS:
            raise ValueError("the due time lies beyond the year 9999.")
        return due_ms


class Acted(View):
    """The outcome of an action."""

    outcome: Outcome
    count: int = Field(description="The number of messages with this outcome.")
    origin: str = Field(description="topic/partition/offset of the message's first record.")
    command: OriginText = Field(description="topic/partition/offset of the command in the delay topic.")


class Many(Filters):
    """The messages to act on: those that match all filters and were sent before the action began."""

    model_config = ConfigDict(extra="forbid", coerce_numbers_to_str=True)

    all: bool = Field(default=False, description="true: act on all messages, without a filter.")
    dry_run: bool = Field(default=False, description="true: only count.")
    cursor: Text | None = Field(default=None, description="The cursor of an interrupted action, to go on from there.")

    def after_position(self) -> NamedPosition | None:
        """The position of the cursor. Raises ValueError for an invalid one."""
        return None if self.cursor is None else cursors.decode_position(self.cursor)


class ManyMoved(Many, When):
    """The messages to move, and their new due time."""


class BulkProgress(BaseModel):
    """A line of the answer: the progress of the action. The last line is `complete`, or has the reason in `error`."""

    done: int = Field(description="The number of messages with a known outcome.")
    outcomes: dict[Outcome, int]
    cursor: str | None = Field(description="All messages before it are done; null: all messages.")
    complete: bool
    error: str | None = None
    incomplete: list[str] = Field(default=[], description=INCOMPLETE)


class PauseWanted(BaseModel):
    """The end of a target's pause, and its reason. Without `until` and `after` it lasts until the target is resumed."""

    model_config = ConfigDict(extra="forbid", coerce_numbers_to_str=True)

    until: Text | None = Field(default=None, description="A moment: RFC 3339 with a zone, or epoch ms.")
    after: Text | None = Field(default=None, description="A duration from now: 90s, 1h30m, 7d, PT15M.")
    reason: Annotated[str, Field(max_length=WHY_CHARS_MAX, description="For people.")] = ""

    def until_ms(self, now_ms: int) -> int | None:
        """Epoch milliseconds. Raises ValueError with the fault."""
        if self.until is None and self.after is None:
            return None
        until_ms = When(due=self.until, after=self.after).due_ms(now_ms)
        if until_ms <= now_ms:
            raise ValueError("the pause would end in the past.")
        return until_ms


class TargetPause(BaseModel):
    """A target after the action."""

    name: str
    paused: bool
    changed: bool = Field(description="false: the target was in this state already.")
