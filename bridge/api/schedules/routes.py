"""The route of recurring messages."""

from __future__ import annotations

from typing import Annotated

from fastapi import FastAPI, Query

from bridge.api import cursor as cursors
from bridge.api.models import PageFilters
from bridge.api.routing import PREFIX, Asked
from bridge.api.schedules import models


def add(app: FastAPI, asked: Asked) -> None:
    """The route."""

    @app.get(f"{PREFIX}/schedules", operation_id="schedules", response_model_exclude_unset=True)
    async def schedules(filters: Annotated[PageFilters, Query()]) -> models.RecurringMessages:
        """Messages that come again, with their next ticks; filters and pages as those of messages."""
        page = await asked.page(filters, recurring=True)
        following = None if page.next is None else cursors.encode(page.next)
        return models.RecurringMessages(
            schedules=[models.RecurringMessage.of_tick(row) for row in page.rows], next=following
        )
