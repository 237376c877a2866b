"""The client for the other instances: it asks them all at once, with the patience of a client of its own.

Every request names the forwarding instance. So no request is forwarded twice, and an instance in its own list of peers
does not act again. Every answer names its instance in a header: by it an instance recognises itself.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final

import httpx
import structlog

from bridge.api.guard import ACTION
from bridge.api.peers.batches import as_file
from bridge.http.protection import Protection

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
ASKED_MAX: Final = 64
"""Questions and actions under way at a time, over all peers; the others wait. Exports and bulk actions have limits of
their own."""
REASON_CHARS_MAX: Final = 200
"""Maximum number of characters of a peer's reason in the log."""
ANSWERS: Final = (HTTPStatus.OK, HTTPStatus.BAD_REQUEST, HTTPStatus.NOT_FOUND, HTTPStatus.UNPROCESSABLE_ENTITY)
"""The statuses of a peer that is well."""

log = structlog.get_logger("bridge.api.peers.client")


class PeerStream:
    """An unread body. `file` is for one thread that is not the event loop's."""

    def __init__(self, response: httpx.Response, connection: AsyncExitStack) -> None:
        self._response, self._connection, self._loop = response, connection, asyncio.get_running_loop()
        self.file = as_file(self._parts())

    def _parts(self) -> Iterator[bytes]:
        parts = self._response.aiter_raw()

        async def following() -> bytes | None:
            return await anext(parts, None)

        while (part := asyncio.run_coroutine_threadsafe(following(), self._loop).result(2 * PART_S)) is not None:
            yield part

    def close(self) -> None:
        """End the connection; any thread."""
        asyncio.run_coroutine_threadsafe(self._connection.aclose(), self._loop)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The answer of a peer; `status` 0: it gave none. `stream` is the unread body of an answer to `open`."""

    url: str
    instance: str = ""
    status: int = 0
    body: Mapping[str, Any] = field(default_factory=dict)
    stream: PeerStream | None = None


class Peers:
    """The other instances, by their base URLs. For one event loop."""

    def __init__(self, urls: Sequence[str], instance: str, protection: Protection) -> None:
        """`instance` is the name of this one."""
        self.urls, self.instance = tuple(dict.fromkeys(url.rstrip("/") for url in urls)), instance
        self._own: set[str] = set()
        self._turns = asyncio.Semaphore(ASKED_MAX)
        headers = {FORWARDED: instance, "Accept": "*/*", "Accept-Encoding": "identity", "Connection": "close"}
        trust = ssl.create_default_context()
        if protection.certificate is not None:
            with suppress(ssl.SSLError):  # a chain of the authority that the instances share
                trust.load_verify_locations(cafile=protection.certificate.files[0])
        self._headers, self._trust = headers | protection.authorization(), trust

    def others(self) -> list[str]:
        """The URLs, without the known ones of this instance."""
        return [url for url in self.urls if url not in self._own]

    async def ask(self, target: str, body: bytes | None) -> list[Reply]:
        """The answers of the other instances. `target` is path and query; a `body` makes the request an action."""
        wait_s = QUESTION_S if body is None else PEER_S

        async def ask(url: str) -> Reply:
            async with asyncio.timeout(wait_s), self._turns, self._connection() as peer:
                return await _reply(url, await _head(peer, url, target, body, wait_s))

        return await self._all(ask)

    async def open(self, target: str) -> list[Reply]:
        """The same, with a stream in each answer of status 200. The caller reads and closes it."""

        async def open(url: str) -> Reply:
            async with asyncio.timeout(PEER_S), AsyncExitStack() as connection:
                peer = await connection.enter_async_context(self._connection())
                response = await _head(peer, url, target, None, PART_S)
                if response.status_code != HTTPStatus.OK:
                    return await _reply(url, response)
                stream = PeerStream(response, connection.pop_all())
                return Reply(url=url, instance=_instance(response), status=HTTPStatus.OK, stream=stream)

        return await self._all(open)

    async def follow(self, url: str, target: str, body: bytes, tell: Callable[[bytes], None]) -> Reply:
        """Send an action to one of the others. `tell` gets each line of the answer; a ValueError of it counts as no
        answer."""

        async def follow(url: str) -> Reply:
            async with asyncio.timeout(FOLLOW_S), self._connection() as peer:
                response = await _head(peer, url, target, body, LINE_S)
                if response.status_code != HTTPStatus.OK:
                    return await _reply(url, response)
                left = b""
                async for part in response.aiter_raw():
                    *lines, left = (left + part).split(b"\n")
                    for line in lines:
                        tell(line)
                    if len(left) > LINE_BYTES_MAX:
                        raise ValueError("too long a line")
                return Reply(url=url, instance=_instance(response), status=response.status_code)

        return await self._run(url, follow)

    async def _all(self, ask: Callable[[str], Awaitable[Reply]]) -> list[Reply]:
        replies = await asyncio.gather(*(self._run(url, ask) for url in self.others()))
        return [reply for reply in replies if reply.instance != self.instance]

    async def _run(self, url: str, ask: Callable[[str], Awaitable[Reply]]) -> Reply:
        try:
            reply = await ask(url)
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            log.warning("peer-unavailable", peer=url, reason=str(error) or type(error).__name__)
            return Reply(url=url)
        if reply.instance == self.instance:
            self._own.add(url)
        elif reply.status not in ANSWERS:
            reason = f"{reply.status}: {reply.body.get('detail')}"
            log.warning("peer-unavailable", peer=url, reason=reason[:REASON_CHARS_MAX])
        return reply

    def _connection(self) -> httpx.AsyncClient:
        """A client for one request: a request that asyncio cancels may stay in its client's pool.

        Redirects are not followed: they would take the password along. No proxy is used.
        """
        return httpx.AsyncClient(headers=self._headers, verify=self._trust, trust_env=False)


async def _head(peer: httpx.AsyncClient, url: str, target: str, body: bytes | None, wait_s: float) -> httpx.Response:
    """An answer after its head, which has PEER_S; `wait_s` is the longest wait for each further part."""
    method, action = ("GET", {}) if body is None else ("POST", {ACTION: "1", "Content-Type": "application/json"})
    # The target comes from a client: appended to the URL, it could name another host.
    there = httpx.URL(url).copy_with(raw_path=target.replace("#", "%23").encode())
    request = peer.build_request(method, there, content=body, headers=action, timeout=wait_s)
    async with asyncio.timeout(PEER_S):
        return await peer.send(request, stream=True)


async def _reply(url: str, response: httpx.Response) -> Reply:
    """The whole answer. Raises ValueError if it is not an answer of the API."""
    text = bytearray()
    async for part in response.aiter_raw():
        text += part
        if len(text) > ANSWER_BYTES_MAX:
            raise ValueError("too long an answer")
    status, body = HTTPStatus(response.status_code), None
    with suppress(ValueError, RecursionError):
        body = json.loads(text)
    if not isinstance(body, dict):
        raise ValueError(f"{status.value} without a JSON object")
    return Reply(url=url, instance=_instance(response), status=status, body=body)


def _instance(response: httpx.Response) -> str:
    return str(response.headers.get(INSTANCE, ""))
