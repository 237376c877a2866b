"""The client for the other instances: it asks them all at once, with the patience of a client of its own.

Every request names the forwarding instance. So no request is forwarded twice, and an instance in its own list of peers
does not act again. Every answer names its instance in a header: by it an instance recognises itself.
"""

from __future__ import annotations

import asyncio
import base64
import http.client
import json
import ssl
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import urlsplit

from bridge.api.guard import ACTION, Workers
from bridge.api.problems import Problem
from bridge.telemetry.http import Protection

FORWARDED: Final = "X-Delay-Bridge-Forwarded"
INSTANCE: Final = "X-Delay-Bridge-Instance"
THIS: Final = "this instance"
PEER_S: Final = 12.0
"""The longest wait for an action: longer than its answer takes."""
QUESTION_S: Final = 5.0
PART_S: Final = 15.0
"""The longest wait for the next part of an export: less than that for a request."""
LINE_S: Final = 90.0
"""The longest wait for the next line of a bulk action: longer than a page takes."""
FOLLOW_S: Final = 86_400.0
ANSWER_BYTES_MAX: Final = 4 << 20
"""Only tens of thousands of partitions make a longer answer. It counts as none."""
LINE_BYTES_MAX: Final = 64 << 10
THREADS_MAX: Final = 64
FOLLOWING_MAX: Final = 128
"""Enough for two bulk actions at the largest number of peers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The answer of a peer; `status` 0: it gave none. `stream` is the unread body of an answer of `open`."""

    url: str
    instance: str = ""
    status: int = 0
    body: Mapping[str, Any] | None = None
    stream: http.client.HTTPResponse | None = None


class Peers:
    """The other instances, by their base URLs. For one event loop."""

    def __init__(self, urls: Sequence[str], instance: str, protection: Protection) -> None:
        """`instance` is the name of this one."""
        self.urls, self.instance = tuple(dict.fromkeys(url.rstrip("/") for url in urls)), instance
        self._workers, self._followers = Workers(THREADS_MAX), Workers(FOLLOWING_MAX)
        self._own: set[str] = set()
        self._headers = {FORWARDED: instance, "Accept": "*/*", "Connection": "close"}
        if protection.token is not None:
            self._headers["Authorization"] = f"Bearer {protection.token}"
        elif protection.user is not None:
            credentials = base64.b64encode(f"{protection.user}:{protection.password}".encode()).decode()
            self._headers["Authorization"] = f"Basic {credentials}"
        self._context = ssl.create_default_context()
        if protection.certificate is not None:
            with suppress(ssl.SSLError):  # a chain of the authority that the instances share
                self._context.load_verify_locations(cafile=protection.certificate.files[0])

    def others(self) -> list[str]:
        """The URLs, without the known ones of this instance."""
        return [url for url in self.urls if url not in self._own]

    async def ask(self, target: str, body: bytes | None) -> list[Reply]:
        """The answers of the other instances. `target` is path and query; a `body` makes the request an action."""
        wait_s = QUESTION_S if body is None else PEER_S
        return await self._all(wait_s, lambda url: self._reply(url, self._opened(url, target, body, wait_s)))

    async def open(self, target: str) -> list[Reply]:
        """The same, with a stream in each answer of status 200. The caller reads and closes it."""

        def opened(url: str) -> Reply:
            response = self._opened(url, target, None, PEER_S, PART_S)
            if response.status != HTTPStatus.OK:
                return self._reply(url, response)
            return Reply(url=url, instance=_instance(response), status=response.status, stream=response)

        return await self._all(PEER_S, opened)

    async def follow(self, url: str, target: str, body: bytes, tell: Callable[[bytes], bool]) -> Reply:
        """Send an action to one of the others. A thread calls `tell` with each line of the answer, until it returns
        False. A ValueError of `tell` counts as no answer."""

        def read() -> Reply:
            response = self._opened(url, target, body, PEER_S, LINE_S)
            if response.status != HTTPStatus.OK:
                return self._reply(url, response)
            with response:
                while (line := response.readline(LINE_BYTES_MAX)) and tell(line):
                    pass
            return Reply(url=url, instance=_instance(response), status=response.status)

        return await self._run(self._followers, url, read, FOLLOW_S)

    async def _all(self, wait_s: float, ask: Callable[[str], Reply]) -> list[Reply]:
        requests = [self._run(self._workers, url, lambda url=url: ask(url), wait_s) for url in self.others()]  # type: ignore[misc]
        return [reply for reply in await asyncio.gather(*requests) if reply.instance != self.instance]

    async def _run(self, workers: Workers, url: str, work: Callable[[], Reply], wait_s: float) -> Reply:
        try:
            reply = await workers.run(work, wait_s)
        except (Problem, OSError, http.client.HTTPException, ValueError):
            return Reply(url=url)
        if reply.instance == self.instance:
            self._own.add(url)
        return reply

    def _opened(
        self, url: str, target: str, body: bytes | None, wait_s: float, then_s: float | None = None
    ) -> http.client.HTTPResponse:
        """An answer after its head; `then_s` is the longest wait for each further part. Redirects are not followed:
        they would take the password along. No proxy is used."""
        parts = urlsplit(url)
        connection = (
            http.client.HTTPSConnection(parts.netloc, timeout=wait_s, context=self._context)
            if parts.scheme == "https"
            else http.client.HTTPConnection(parts.netloc, timeout=wait_s)
        )
        action = {} if body is None else {ACTION: "1", "Content-Type": "application/json"}
        connection.request("GET" if body is None else "POST", parts.path + target, body, self._headers | action)
        sock = connection.sock
        response = connection.getresponse()  # the response holds the socket open; the connection does not
        sock.settimeout(then_s or wait_s)
        return response

    def _reply(self, url: str, response: http.client.HTTPResponse) -> Reply:
        with response:
            text = response.read(ANSWER_BYTES_MAX + 1)
        body = None
        if len(text) <= ANSWER_BYTES_MAX:
            with suppress(ValueError, RecursionError):
                body = json.loads(text)
        body = body if isinstance(body, dict) else None
        return Reply(url=url, instance=_instance(response), status=response.status, body=body)


def _instance(response: http.client.HTTPResponse) -> str:
    return response.headers.get(INSTANCE) or ""
