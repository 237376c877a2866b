"""The routes to cancel, move and deliver one message or all matching ones, and to pause and resume a schedule."""

from __future__ import annotations

import asyncio
import json
from http import HTTPStatus
from typing import Final

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from bridge.api import models
from bridge.api.actions.bodies import Acted, BulkProgress, Many, ManyMoved, Nothing, When
from bridge.api.actions.bulk import MEDIA_TYPE, Bulks, Job
from bridge.api.filters import Filters
from bridge.api.peers.bulk import everywhere
from bridge.api.problems import Problem, not_ready
from bridge.api.routing import (
    ACTION_REFUSALS,
    NOT_FOUND,
    PLACE,
    Asked,
    Place,
    Responses,
    checked,
    error_response,
    must_choose,
    note,
    unavailable,
)
from bridge.api.source import PREFIX, NotOwnedError, Order
from bridge.errors import BridgeError
from bridge.wire.headers import NEVER_MS, NEXT_MS, Origin, origin_text

ANSWER_S: Final = 10.0
"""The longest wait for an answer. It takes a few hundred milliseconds, except in a hold, a rebalance or an outage."""

Due = int | None


ONE: Final = (
    ACTION_REFUSALS
    | NOT_FOUND
    | error_response(HTTPStatus.GATEWAY_TIMEOUT, "The command is written, and has no answer yet.")
)
MANY: Final[Responses] = ACTION_REFUSALS | {
    200: {
        "description": "With dry_run: the number of matching messages (JSON); else: the progress, line by line.",
        "model": models.Counted,
        "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/BulkProgress"}}},
    },
}


def add_message_actions(app: FastAPI, asked: Asked) -> None:
    acts = _Actions(asked)
    _add_single_actions(app, acts)
    _add_bulk_actions(app, acts)


def _add_single_actions(app: FastAPI, acts: _Actions) -> None:
    single = f"{PREFIX}/messages/{PLACE}"

    @app.post(f"{single}/cancel", operation_id="cancel", responses=ONE)
    async def cancel(request: Request, place: Place, _: Nothing = None) -> Acted:
        """Cancel the message with this origin."""
        return await acts.act_on_one(request, "cancel", place, None)

    @app.post(f"{single}/move", operation_id="move", responses=ONE)
    async def move(request: Request, place: Place, when: When) -> Acted:
        """Move a message to another due time."""
        return await acts.act_on_one(request, "move", place, checked(lambda: when.due_ms(acts.now_ms())))

    @app.post(f"{single}/deliver", operation_id="deliver", responses=ONE)
    async def deliver(request: Request, place: Place, _: Nothing = None) -> Acted:
        """Deliver a message now."""
        return await acts.act_on_one(request, "deliver", place, acts.now_ms())

    @app.post(f"{single}/pause", operation_id="pause_schedule", responses=ONE)
    async def pause_schedule(request: Request, place: Place, _: Nothing = None) -> Acted:
        """Pause a recurring message: deliver no ticks until it is resumed."""
        return await acts.act_on_one(request, "pause", place, NEVER_MS)

    @app.post(f"{single}/resume", operation_id="resume_schedule", responses=ONE)
    async def resume_schedule(request: Request, place: Place, _: Nothing = None) -> Acted:
        """Resume a paused recurring message at its next regular tick."""
        return await acts.act_on_one(request, "resume", place, NEXT_MS)


def _add_bulk_actions(app: FastAPI, acts: _Actions) -> None:
    @app.post(f"{PREFIX}/messages/cancel", operation_id="cancel_many", responses=MANY, response_class=Response)
    async def cancel_many(request: Request, which: Many) -> Response:
        """Cancel all matching messages."""
        return await acts.act_on_many(request, "cancel", which, None)

    @app.post(f"{PREFIX}/messages/move", operation_id="move_many", responses=MANY, response_class=Response)
    async def move_many(request: Request, which: ManyMoved) -> Response:
        """Move all matching messages to another due time."""
        return await acts.act_on_many(request, "move", which, checked(lambda: which.due_ms(acts.now_ms())))

    @app.post(f"{PREFIX}/messages/deliver", operation_id="deliver_many", responses=MANY, response_class=Response)
    async def deliver_many(request: Request, which: Many) -> Response:
        """Deliver all matching messages now."""
        return await acts.act_on_many(request, "deliver", which, acts.now_ms())


class _Actions:
    """The actions of all routes; for one event loop."""

    def __init__(self, asked: Asked) -> None:
        self._asked, self._bulks = asked, Bulks(asked)

    def now_ms(self) -> int:
        return self._asked.source.now_ms()

    async def act_on_one(self, request: Request, action: str, origin: Origin, due_ms: Due) -> Acted:
        """Act on the message with this origin; its answer has ANSWER_S."""
        name = origin_text(*origin)
        commands = self._asked.there(self._asked.source.commands())
        try:
            topic, partition, offset = origin
            (future,) = await self._asked.workers.run(
                lambda: commands.send([Order((topic, partition), (offset,), due_ms)])
            )
            (done,) = await asyncio.wait_for(asyncio.wrap_future(future), ANSWER_S)
        except NotOwnedError:
            detail = f"{name}: another instance owns its partition, or its topic is not a delay topic."
            raise Problem(HTTPStatus.NOT_FOUND, detail) from None
        except ValueError as error:
            raise Problem(HTTPStatus.BAD_REQUEST, str(error)) from None
        except TimeoutError:
            note(request, action, name, outcome="no answer")
            detail = (
                f"The command is in the delay topic, but has no answer after {ANSWER_S:.0f} s. Look up the message."
            )
            raise Problem(HTTPStatus.GATEWAY_TIMEOUT, detail) from None
        except BridgeError as error:
            raise unavailable(error) from None
        note(request, action, name, outcome=done.outcome.value, count=done.count)
        return Acted.of(done, origin=name)

    async def act_on_many(self, request: Request, action: str, which: Many, due_ms: Due) -> Response:
        """Act on all matching messages, at all instances, or count them."""
        must_choose(which, Filters, all=which.all)
        query, after = self._asked.query(**checked(which.values)), checked(which.after_position)
        if which.dry_run:
            return JSONResponse((await self._asked.count(query)).model_dump(exclude_unset=True))
        others, store, commands = (
            self._asked.others(request),
            self._asked.source.pending(),
            self._asked.source.commands(),
        )
        lines = None
        if store is not None and commands is not None:
            job = Job(
                store=store, commands=commands, query=query, after=after, due_ms=due_ms,
                log_ends=self._asked.source.log_ends, now_ms=self.now_ms,
            )  # fmt: skip
            lines = self._bulks.run(job)
        if others is not None:
            # All instances get the same due time, by the clock of this one.
            when = {"due": str(due_ms)} if action == "move" else {}
            body = which.model_dump(mode="json", exclude_defaults=True, exclude={"due", "after"}) | when
            lines = everywhere(lines, others, request.scope["path"], json.dumps(body).encode(), which.cursor)
        if lines is None:
            raise not_ready(self._asked.source.phase())

        def ended(last: BulkProgress) -> None:
            chosen = which.model_dump(mode="json", exclude_defaults=True)
            outcome = last.error or ("complete" if last.complete else "broken off")
            outcomes = {kind.value: count for kind, count in last.outcomes.items()}
            note(request, action, chosen, outcome=outcome, count=last.done, outcomes=outcomes)

        return self._bulks.answer(lines, which.cursor, ended)
