"""Recurring messages: their route, and their models for the OpenAPI document."""

from __future__ import annotations

from typing import Annotated, Final, Self

from fastapi import FastAPI, Query
from pydantic import BaseModel, Field

from bridge.api.models import INCOMPLETE, Message, PageFilters
from bridge.api.routing import Asked
from bridge.api.source import PREFIX
from bridge.stores.search import PendingRow
from bridge.wire import headers as h
from bridge.wire.schedule import Schedule, schedule_of, unpacked

TICKS_SHOWN: Final = 5


class RecurringMessage(Message):
    """A recurring message. `due` is the time of its next tick, or the earliest time of the first."""

    schedule: dict[str, str] = Field(description="The headers of its schedule, such as delay-cron or delay-every.")
    tick: int = Field(description="The number of the next tick; 0: the schedule has not begun.")
    paused: bool = Field(description="true: no tick is due until it is resumed.")
    next: list[int] = Field(description="The times of the next ticks, at most five, if none is missed.")

    @classmethod
    def of_tick(cls, row: PendingRow) -> Self:
        texts, _ = unpacked(row.schedule or "{}")
        try:
            schedule, is_start_given = schedule_of(row.schedule or "{}")
        except ValueError:  # it becomes a dead letter when it comes up
            due: list[int] = []
        else:
            due = _next(schedule, row, is_start_given=is_start_given)
        return cls.of(row, schedule=dict(texts), paused=row.due_ms == h.NEVER_MS, next=due)


class RecurringMessages(BaseModel):
    """A page of recurring messages, ordered by `at`."""

    schedules: list[RecurringMessage]
    next: str | None = Field(description="The cursor of the next page; null: this is the last page.")
    incomplete: list[str] = Field(default=[], description=INCOMPLETE)


def add_schedules(app: FastAPI, asked: Asked) -> None:
    @app.get(f"{PREFIX}/schedules", operation_id="schedules", response_model_exclude_unset=True)
    async def schedules(filters: Annotated[PageFilters, Query()]) -> RecurringMessages:
        """A page of the recurring messages, with their next ticks. Filters and pages are those of messages."""
        page, following, incomplete = await asked.page(filters, RecurringMessage.of_tick, recurring=True)
        return RecurringMessages(schedules=page, next=following, **incomplete)


def _next(schedule: Schedule, row: PendingRow, *, is_start_given: bool) -> list[int]:
    tick, due_ms = row.tick, row.due_ms
    if due_ms == h.NEVER_MS:
        return []
    if not tick:
        first_ms = schedule.first(row.ts_ms, due_ms if is_start_given else None)
        if first_ms is None:
            return []
        tick, due_ms = 1, first_ms
    ticks_ms = [due_ms]
    while len(ticks_ms) < min(TICKS_SHOWN, (schedule.times or h.UNTIL_MS_MAX) - tick + 1):
        following = schedule.next_after(ticks_ms[-1])
        if following is None:
            break
        ticks_ms.append(following)
    return ticks_ms
