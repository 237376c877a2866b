"""Answers for all instances: ASGI middleware that forwards requests to the others and merges the answers.

    question, count of a dry run  the answers of all instances, merged
    one message, an action on it  the answer of the partition's owner: this instance, or another one
    pause, resume of a target     done by all
    bulk action, export           their routes merge streams (bulk.py and export.py here)
    other requests                this instance's answer: every instance reads all dead letters

The answer names the instances that did not answer (`incomplete`), and the partitions that an answer lacks. The receiver
of a forwarded request answers alone; a request that this instance has forwarded to itself is refused.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import parse_qs, quote

from fastapi.responses import JSONResponse, Response
from pydantic import ValidationError
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bridge.api.actions.bodies import ManyMoved
from bridge.api.models import LIMIT_DEFAULT
from bridge.api.peers import merge
from bridge.api.peers.client import FORWARDED, INSTANCE, THIS, Peers, Reply
from bridge.api.problems import Problem
from bridge.api.source import BULK, PREFIX

MESSAGE: Final = re.compile(r"/messages/[^/]+/[0-9]+/[0-9]+")
ACTION_ON: Final = re.compile(rf"{MESSAGE.pattern}/(cancel|move|deliver|pause|resume)")
DONE_BY_ALL: Final = re.compile(r"/targets/[^/]+/(pause|resume)")


class FanOut:
    """ASGI middleware around the application, inside the guard."""

    def __init__(self, app: ASGIApp, peers: Peers) -> None:
        self._app, self._peers = app, peers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[INSTANCE] = self._peers.instance
            await send(message)

        path = _asked(scope["path"])
        sender, is_action = Headers(scope=scope).get(FORWARDED), scope["method"] == "POST"
        if sender is not None and sender == self._peers.instance:
            detail = "Request loop: this instance forwarded the request to itself."
            await Problem(HTTPStatus.LOOP_DETECTED, detail).response()(scope, receive, named)
            return
        is_question = scope["method"] == "GET"  # the application refuses other methods and names the allowed ones
        is_merged = is_question and (path in merge.MERGED or path in merge.LISTS)
        is_owned = (is_question and MESSAGE.fullmatch(path)) or (is_action and ACTION_ON.fullmatch(path))
        is_for_all = is_action and DONE_BY_ALL.fullmatch(path) is not None
        is_many = is_action and scope["path"] in BULK
        if sender is not None or not self._peers.urls or not (is_merged or is_owned or is_many or is_for_all):
            await self._app(scope, receive, named)
            return
        body = await _body(receive) if is_action else None
        if is_many and not _is_dry_run(body or b""):
            await self._app(scope, _again(body or b"", receive), named)
            return
        if is_owned:
            owned = await self._of_its_owner(scope, body)
            await owned(scope, receive, named)
            return
        (status, content), replies = await asyncio.gather(self._local(scope, body), self._ask(scope, body))
        if status not in (HTTPStatus.OK, HTTPStatus.SERVICE_UNAVAILABLE):
            answer: Response = _answer(status, content)
        else:
            replies = [Reply(url=THIS, status=status, body=content), *replies]
            answer = _done_by_all(replies) if is_for_all else _merged("/count" if is_many else path, scope, replies)
        await answer(scope, receive, named)

    async def _of_its_owner(self, scope: Scope, body: bytes | None) -> Response:
        """The answer about one message: of this instance, or else of the others."""
        status, content = await self._local(scope, body)
        if status != HTTPStatus.NOT_FOUND:
            return _answer(status, content)
        replies = await self._ask(scope, body)
        owner = next((reply for reply in replies if reply.status not in (0, 404, 503)), None)
        if owner is not None:
            return _answer(owner.status, owner.body)
        silent = [reply.url for reply in replies if reply.status != HTTPStatus.NOT_FOUND]
        if not silent:
            return _answer(status, content)
        detail = f"Not found here, and these instances do not answer: {', '.join(silent)}."
        return Problem(HTTPStatus.SERVICE_UNAVAILABLE, detail, incomplete=silent).response()

    async def _ask(self, scope: Scope, body: bytes | None) -> list[Reply]:
        query = scope["query_string"].decode("latin-1")
        return await self._peers.ask(quote(scope["path"]) + (f"?{query}" if query else ""), body)

    async def _local(self, scope: Scope, body: bytes | None) -> tuple[int, Mapping[str, Any]]:
        status, parts = 0, bytearray()

        async def keep(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                parts.extend(message.get("body", b""))

        await self._app(dict(scope), _again(body or b""), keep)
        return status, json.loads(bytes(parts))


def _asked(path: str) -> str:
    """The path of a request to the API, without its prefix; "" for other requests, such as the page's views with the
    same paths."""
    return path.removeprefix(PREFIX) if path.startswith(f"{PREFIX}/") else ""


def _again(body: bytes, receive: Receive | None = None) -> Receive:
    """Replays a body that was read, and then receives the following messages."""
    is_given = False

    async def give() -> Message:
        nonlocal is_given
        if is_given and receive is not None:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return give


def _is_dry_run(body: bytes) -> bool:
    """Whether the body asks for a dry run. An invalid body counts as one: the application names the fault."""
    try:
        return ManyMoved.model_validate_json(body).dry_run
    except ValidationError:
        return True


async def _body(receive: Receive) -> bytes:
    """The request's body; the guard limits its size."""
    parts = bytearray()
    while True:
        message = await receive()
        parts.extend(message.get("body", b""))
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            return bytes(parts)


def _merged(path: str, scope: Scope, replies: Sequence[Reply]) -> Response:
    answers = [dict(reply.body) for reply in replies if reply.status == HTTPStatus.OK]
    silent = [reply.url for reply in replies if reply.status != HTTPStatus.OK]
    silent += [partition for answer in answers for partition in answer.get("incomplete", ())]
    if not answers:
        return _answer(HTTPStatus.SERVICE_UNAVAILABLE, replies[0].body)
    try:
        if path in merge.LISTS:
            limit = int(parse_qs(scope["query_string"].decode("latin-1")).get("limit", [str(LIMIT_DEFAULT)])[0])
            merged = merge.merge_messages(answers, limit, merge.LISTS[path])
        else:
            merged = merge.MERGED[path](answers)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        detail = "An instance gives answers of another form: make sure that all instances run the same version."
        return Problem(HTTPStatus.SERVICE_UNAVAILABLE, detail).response()
    return JSONResponse(merged | ({"incomplete": silent} if silent else {}))


def _done_by_all(replies: Sequence[Reply]) -> Response:
    first, *others = replies
    silent = [reply.url for reply in others if reply.status != HTTPStatus.OK]
    if first.status != HTTPStatus.OK:
        return _answer(first.status, first.body)
    return JSONResponse({**first.body, **({"incomplete": silent} if silent else {})})


def _answer(status: int, content: Mapping[str, Any]) -> Response:
    if status == HTTPStatus.OK:
        return JSONResponse(content)
    more = {name: value for name, value in content.items() if name not in ("status", "detail")}
    return Problem(HTTPStatus(status), content.get("detail", ""), **more).response()
