"""The routes to pause and resume a target."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any

from fastapi import Body, FastAPI, Request

from bridge.api.actions.bodies import Nothing, PauseWanted, TargetPause
from bridge.api.problems import Problem
from bridge.api.routing import ACTION_REFUSALS, Asked, Topic, note, unavailable
from bridge.api.source import PREFIX
from bridge.errors import BridgeError
from bridge.wire.headers import check_topic


def add_target_actions(app: FastAPI, asked: Asked) -> None:
    async def put(request: Request, name: str, *, paused: bool, wanted: PauseWanted) -> TargetPause:
        try:
            name, pauses = check_topic(name), asked.source.pauses()
            more: dict[str, Any] = {"why": wanted.reason} if wanted.reason else {}
            if (until_ms := wanted.until_ms(asked.source.now_ms())) is not None:
                more["until_ms"] = until_ms
            changed = await asked.workers.run(lambda: pauses.put(name, paused=paused, **more))
        except ValueError as error:
            raise Problem(HTTPStatus.BAD_REQUEST, str(error)) from None
        except BridgeError as error:
            raise unavailable(error) from None
        note(request, "pause" if paused else "resume", name, changed=changed)
        return TargetPause(name=name, paused=paused, changed=changed)

    @app.post(f"{PREFIX}/targets/{{name}}/pause", operation_id="pause", responses=ACTION_REFUSALS)
    async def pause(request: Request, name: Topic, wanted: Annotated[PauseWanted | None, Body()] = None) -> TargetPause:
        """Pause a target: its messages wait until it is resumed, or until the pause ends. Waiting counts as no attempt.
        The answer means that the pause is in Kafka; all instances obey it within seconds."""
        return await put(request, name, paused=True, wanted=wanted or PauseWanted())

    @app.post(f"{PREFIX}/targets/{{name}}/resume", operation_id="resume", responses=ACTION_REFUSALS)
    async def resume(request: Request, name: Topic, _: Nothing = None) -> TargetPause:
        """Resume a target. Its waiting messages are brought forward at the rate of delivery.resume_rate."""
        return await put(request, name, paused=False, wanted=PauseWanted())
