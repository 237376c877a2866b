"""Pause and resume a target."""

from __future__ import annotations

from http import HTTPStatus

from fastapi import FastAPI, Request

from bridge.api.actions.bodies import Nothing, TargetPause
from bridge.api.problems import Problem
from bridge.api.routing import ACTION_REFUSALS, PREFIX, Asked, Topic, failed, note
from bridge.errors import BridgeError
from bridge.wire.headers import check_topic


def add(app: FastAPI, asked: Asked) -> None:
    async def put(request: Request, name: str, *, paused: bool) -> TargetPause:
        try:
            name, pauses = check_topic(name), asked.source.pauses()
            changed = await asked.workers.run(lambda: pauses.put(name, paused=paused))
        except ValueError as error:
            raise Problem(HTTPStatus.BAD_REQUEST, str(error)) from None
        except BridgeError as error:
            raise failed(error) from None
        note(request, "pause" if paused else "resume", name, changed=changed)
        return TargetPause(name=name, paused=paused, changed=changed)

    @app.post(f"{PREFIX}/targets/{{name}}/pause", operation_id="pause", responses=ACTION_REFUSALS)
    async def pause(request: Request, name: Topic, _: Nothing = None) -> TargetPause:
        """Put the messages of a target off until it is resumed; no attempt is counted."""
        return await put(request, name, paused=True)

    @app.post(f"{PREFIX}/targets/{{name}}/resume", operation_id="resume", responses=ACTION_REFUSALS)
    async def resume(request: Request, name: Topic, _: Nothing = None) -> TargetPause:
        """Deliver to a target again. What was put off comes when it is tried next."""
        return await put(request, name, paused=False)
