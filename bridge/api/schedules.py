"""Recurring messages: their route, and how the OpenAPI document shows them."""

from __future__ import annotations

from typing import Annotated, Final, Self

from fastapi import FastAPI, Query
from pydantic import BaseModel, Field

from bridge.api.models import INCOMPLETE, Message, PageFilters
from bridge.api.routing import PREFIX, Asked
from bridge.wire import headers as h
from bridge.wire.schedule import Schedule, schedule_of, unpacked
from timerstore.operations.find import PendingRow

TICKS_SHOWN: Final = 5


class RecurringMessage(Message):
    """A message that comes again; `due` is when its next tick is, or, of one that has not begun, not before."""

    schedule: dict[str, str] = Field(description="Its headers: delay-cron or delay-every, and those beside it.")
    tick: int = Field(description="The number of the next delivery; 0: it has not begun.")
    paused: bool = Field(description="true: nothing is due until it is resumed.")
    next: list[int] = Field(description="When the next ticks are due, five at most, if none is missed.")

    @classmethod
    def of_tick(cls, row: PendingRow) -> Self:
        texts, _ = unpacked(row.schedule or "{}")
        try:
            schedule, is_start_given = schedule_of(row.schedule or "{}")
        except ValueError:  # it becomes a dead letter when it comes up
            due: list[int] = []
        else:
            due = _next(schedule, row, is_start_given=is_start_given)
        is_paused = row.due_ms == h.NEVER_MS
        return cls(**cls._fields(row), schedule=dict(texts), tick=row.tick, paused=is_paused, next=due)


class RecurringMessages(BaseModel):
    """A page, what comes up first at its beginning."""

    schedules: list[RecurringMessage]
    next: str | None = Field(description="The cursor of the next page; null: there are no more.")
    incomplete: list[str] = Field(default=[], description=INCOMPLETE)


def add(app: FastAPI, asked: Asked) -> None:
    @app.get(f"{PREFIX}/schedules", operation_id="schedules", response_model_exclude_unset=True)
    async def schedules(filters: Annotated[PageFilters, Query()]) -> RecurringMessages:
        """Messages that come again, with their next ticks; filters and pages as those of messages."""
        found, following = await asked.page(filters, RecurringMessage.of_tick, recurring=True)
        return RecurringMessages(schedules=found, next=following)


def _next(schedule: Schedule, row: PendingRow, *, is_start_given: bool) -> list[int]:
    tick, due_ms = row.tick, row.due_ms
    if due_ms == h.NEVER_MS:
        return []
    if not tick:
        first_ms = schedule.first(row.ts_ms, due_ms if is_start_given else None)
        if first_ms is None:
            return []
        tick, due_ms = 1, first_ms
    found = [due_ms]
    while len(found) < min(TICKS_SHOWN, (schedule.times or h.UNTIL_MS_MAX) - tick + 1):
        following = schedule.next_after(found[-1])
        if following is None:
            break
        found.append(following)
    return found
