"""Cancel, move and deliver: one message by its origin, or all that fit; pause and resume one that comes again."""

from __future__ import annotations

import asyncio
import json
from http import HTTPStatus
from typing import Final

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from bridge.api import models
from bridge.api.actions.bodies import Acted, Many, ManyMoved, Nothing, Progress, When
from bridge.api.actions.bulk import MEDIA_TYPE, Bulks, Job
from bridge.api.peers.bulk import everywhere
from bridge.api.problems import Problem, not_ready
from bridge.api.routing import (
    ACTION_REFUSALS,
    NOT_FOUND,
    PLACE,
    PREFIX,
    Asked,
    Place,
    Responses,
    checked,
    failed,
    must_choose,
    note,
    refusal,
)
from bridge.api.source import NotOwnedError, Order
from bridge.errors import BridgeError
from bridge.wire.headers import NEVER_MS, NEXT_MS, Origin, origin_text

ANSWER_S: Final = 10.0
"""An answer comes within a few hundred milliseconds, but for a hold, a rebalance or an outage."""

Due = int | None


def add(app: FastAPI, asked: Asked) -> None:
    unanswered = refusal(HTTPStatus.GATEWAY_TIMEOUT, "The command is written, and not answered yet.")
    one = ACTION_REFUSALS | NOT_FOUND | unanswered
    many: Responses = ACTION_REFUSALS | {
        200: {
            "description": "With dry_run how many fit (JSON); else the progress, a line for each page.",
            "model": models.Counted,
            "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Progress"}}},
        },
    }
    bulks = Bulks(asked)
    single = f"{PREFIX}/messages/{PLACE}"

    @app.post(f"{single}/cancel", operation_id="cancel", responses=one)
    async def cancel(request: Request, place: Place, _: Nothing = None) -> Acted:
        """Cancel a message, by the record that was sent."""
        return await act(request, "cancel", place, None)

    @app.post(f"{single}/move", operation_id="move", responses=one)
    async def move(request: Request, place: Place, when: When) -> Acted:
        """Have a message be due at another time."""
        return await act(request, "move", place, checked(lambda: when.due_ms(now_ms())))

    @app.post(f"{single}/deliver", operation_id="deliver", responses=one)
    async def deliver(request: Request, place: Place, _: Nothing = None) -> Acted:
        """Deliver a message now."""
        return await act(request, "deliver", place, now_ms())

    @app.post(f"{single}/pause", operation_id="pause_schedule", responses=one)
    async def pause_schedule(request: Request, place: Place, _: Nothing = None) -> Acted:
        """Deliver no more ticks of a message that comes again, until it is resumed."""
        return await act(request, "pause", place, NEVER_MS)

    @app.post(f"{single}/resume", operation_id="resume_schedule", responses=one)
    async def resume_schedule(request: Request, place: Place, _: Nothing = None) -> Acted:
        """Go on with a message that was paused, at its next regular tick."""
        return await act(request, "resume", place, NEXT_MS)

    @app.post(f"{PREFIX}/messages/cancel", operation_id="cancel_many", responses=many, response_class=Response)
    async def cancel_many(request: Request, which: Many) -> Response:
        """Cancel all messages that fit."""
        return await act_on(request, "cancel", which, None)

    @app.post(f"{PREFIX}/messages/move", operation_id="move_many", responses=many, response_class=Response)
    async def move_many(request: Request, which: ManyMoved) -> Response:
        """Have all messages that fit be due at another time."""
        return await act_on(request, "move", which, checked(lambda: which.due_ms(now_ms())))

    @app.post(f"{PREFIX}/messages/deliver", operation_id="deliver_many", responses=many, response_class=Response)
    async def deliver_many(request: Request, which: Many) -> Response:
        """Deliver all messages that fit, now."""
        return await act_on(request, "deliver", which, now_ms())

    def now_ms() -> int:
        return asked.source.now_ms()

    async def act(request: Request, action: str, origin: Origin, due_ms: Due) -> Acted:
        name = origin_text(*origin)
        commands = asked.there(asked.source.commands())
        try:
            topic, partition, offset = origin
            (future,) = await asked.workers.run(lambda: commands.send([Order((topic, partition), (offset,), due_ms)]))
            (done,) = await asyncio.wait_for(asyncio.wrap_future(future), ANSWER_S)
        except NotOwnedError:
            detail = f"{name} is of a partition of another instance, or of a topic that is no delay topic."
            raise Problem(HTTPStatus.NOT_FOUND, detail) from None
        except ValueError as error:
            raise Problem(HTTPStatus.BAD_REQUEST, str(error)) from None
        except TimeoutError:
            note(request, action, name, outcome="no answer")
            detail = (
                f"The command is in the delay topic, and not answered within {ANSWER_S:.0f} s. Look at the message."
            )
            raise Problem(HTTPStatus.GATEWAY_TIMEOUT, detail) from None
        except BridgeError as error:
            raise failed(error) from None
        note(request, action, name, outcome=done.outcome.value, count=done.count)
        return Acted.of(done, name)

    async def act_on(request: Request, action: str, which: Many, due_ms: Due) -> Response:
        must_choose(which, models.Filters, all=which.all)
        query, after = asked.marked(checked(which.query)), checked(which.after_position)
        if which.dry_run:
            found = await asked.ask(lambda store: store.count_where(query, now_ms()))
            return JSONResponse(models.Counted(count=found.rows, exact=found.is_exact).model_dump(exclude_unset=True))
        others, store, commands = asked.others(request), asked.source.pending(), asked.source.commands()
        lines = None
        if store is not None and commands is not None:
            job = Job(
                store=store, commands=commands, query=query, after=after, due_ms=due_ms, ends=store.next_offsets(),
                now_ms=now_ms,
            )  # fmt: skip
            lines = bulks.run(job)
        if others is not None:
            # At the same time everywhere, as this clock has it.
            when = {"due": str(due_ms)} if action == "move" else {}
            told = which.model_dump(mode="json", exclude_defaults=True, exclude={"due", "after"}) | when
            lines = everywhere(lines, others, request.url.path, json.dumps(told).encode(), which.cursor)
        if lines is None:
            raise not_ready(asked.source.phase())

        def ended(last: Progress) -> None:
            chosen = which.model_dump(mode="json", exclude_defaults=True)
            outcome = last.error or ("complete" if last.complete else "broken off")
            outcomes = {each.value: count for each, count in last.outcomes.items()}
            note(request, action, chosen, outcome=outcome, count=last.done, outcomes=outcomes)

        return bulks.answer(lines, which.cursor, ended)
