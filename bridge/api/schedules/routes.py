"""The route of recurring messages."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from fastapi import FastAPI, Query

from bridge.api import cursor as cursors
from bridge.api.models import PageFilters
from bridge.api.routing import PREFIX, Asked, checked
from bridge.api.schedules import models


def add(app: FastAPI, asked: Asked) -> None:
    """The route."""

    @app.get(f"{PREFIX}/schedules", operation_id="schedules", response_model_exclude_unset=True)
    async def schedules(filters: Annotated[PageFilters, Query()]) -> models.RecurringMessages:
        """Messages that come again, with their next ticks; filters and pages as those of messages."""
        query, after = checked(lambda: (asked.marked(replace(filters.query(), recurring=True)), filters.after()))
        now_ms = asked.source.now_ms()
        page = await asked.ask(lambda store: store.find(query, now_ms, after=after, limit=filters.limit, bulky=False))
        following = None if page.next is None else cursors.encode(page.next)
        return models.RecurringMessages(
            schedules=[models.RecurringMessage.of_tick(row) for row in page.rows], next=following
        )
