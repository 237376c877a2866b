"""The export: all matching messages of one moment, as a stream in Arrow's IPC format.

The next batch is read after the previous one was sent: a slow client slows down the reading, and nothing piles up. The
last batch has no rows; its metadata has the number of all rows as `rows`, and as `incomplete` the instances without an
answer and the partitions whose earlier records are still being read. A stream without this batch has broken off.
"""

from __future__ import annotations

import asyncio
import io
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from http import HTTPStatus
from typing import Annotated, Final

import pyarrow as pa
import structlog
from fastapi import FastAPI, Query, Request
from fastapi.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from bridge.api.filters import Filters
from bridge.api.peers.batches import MEDIA_TYPE
from bridge.api.peers.client import THIS, Peers, Reply
from bridge.api.peers.export import Everywhere
from bridge.api.problems import Problem, not_ready
from bridge.api.routing import Asked, Incomplete, checked
from bridge.api.source import EXPORT, BatchStream
from bridge.http.workers import Unavailable, Workers
from bridge.stores.search import EMPTY, SCHEMA
from timerstore.errors import TimerStoreError

EXPORTS_MAX: Final = 2
"""Exports at a time: each keeps files open and rows in memory."""
STALL_S: Final = 30.0
"""The longest time without a read by the client."""
EXPORT_S: Final = 3_600.0
"""The longest duration: while an export is under way, removed files take up space."""

Begin = Callable[[], tuple[BatchStream, Incomplete]]

log = structlog.get_logger("bridge.api.export")


class ArrowStream(StreamingResponse):
    """The type of the response, for the OpenAPI document."""

    media_type = MEDIA_TYPE


class Exports:
    """Exports under way; for one event loop."""

    def __init__(self) -> None:
        self.workers = Workers()
        self.under_way = 0

    def answer(self, begin: Begin | None, others: Peers | None = None, target: str = "") -> ArrowStream:
        """The response with an export. It begins when the response is sent: here, if `begin` is given, and at the
        `others`, with a request for `target`."""
        return _Answer(self, lambda: self._begun(begin, others, target))

    async def _begun(self, begin: Begin | None, others: Peers | None, target: str) -> _Stream:
        async def here() -> tuple[BatchStream | None, Incomplete]:
            return (None, {}) if begin is None else await self.workers.run(begin)

        async def there() -> list[Reply]:
            return [] if others is None else await others.open(target)

        mine, theirs = asyncio.create_task(here()), asyncio.create_task(there())
        await asyncio.wait((mine, theirs))
        replies = theirs.result()
        streams = [reply for reply in replies if reply.stream is not None]
        try:
            export, incomplete = mine.result()
        except Exception:
            Everywhere(None, streams).close()
            raise
        silent = [reply.url for reply in replies if reply.stream is None] + ([THIS] if export is None else [])
        if export is None and not streams:
            raise Problem(HTTPStatus.SERVICE_UNAVAILABLE, "No instance knows its pending messages now. Try again.")
        return _Stream(Everywhere(export, streams, [*silent, *incomplete.get("incomplete", ())]))


def add_export(app: FastAPI, asked: Asked) -> None:
    exports = Exports()

    @app.get(
        EXPORT,
        operation_id="export",
        response_class=ArrowStream,
        responses={200: {"content": {MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}}}},
    )
    async def export_messages(request: Request, filters: Annotated[Filters, Query()]) -> ArrowStream:
        """All matching messages of one moment, unordered, as an Arrow IPC stream. The last batch has no rows; its
        metadata has the number of messages as `rows`, and as `incomplete` the instances without an answer and
        the partitions whose earlier records are still being read."""
        query, store, others = asked.query(**checked(filters.values)), asked.source.pending(), asked.others(request)
        if store is None and others is None:
            raise not_ready(asked.source.phase())
        begin = None
        if store is not None:
            export = partial(store.export, query, asked.source.now_ms(), bulky=asked.show_payloads)
            begin = partial(asked.covered, export)
        return exports.answer(begin, others, f"{EXPORT}?{request.scope['query_string'].decode()}")


class _Answer(ArrowStream):
    def __init__(self, exports: Exports, begin: Callable[[], Awaitable[_Stream]]) -> None:
        super().__init__(self._chunks(), headers={"Content-Disposition": 'attachment; filename="pending.arrows"'})
        self._exports, self._begin = exports, begin
        self._stream: _Stream | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._exports.under_way >= EXPORTS_MAX:
            raise Problem(HTTPStatus.SERVICE_UNAVAILABLE, f"{EXPORTS_MAX} exports are under way. Try again.")
        self._exports.under_way += 1
        try:
            self._stream = await self._begin()
            await super().__call__(scope, receive, send)  # it ends when the client leaves
        finally:
            self._exports.under_way -= 1
            if self._stream is not None:
                self._stream.close()

    async def stream_response(self, send: Send) -> None:
        """Send the stream. After a failure it has no end, so that uvicorn cuts off the connection."""

        async def send_in_time(message: Message) -> None:
            await asyncio.wait_for(send(message), STALL_S)

        try:
            async with asyncio.timeout(EXPORT_S):
                await super().stream_response(send_in_time)
        except TimeoutError:
            log.warning("api-export-cut-off", reason="the client takes too long")
        except (TimerStoreError, Problem, Unavailable) as error:
            log.warning("api-export-cut-off", reason=str(error))

    async def _chunks(self) -> AsyncIterator[bytes]:
        assert self._stream is not None
        while (chunk := await self._exports.workers.run(self._stream.next)) is not None:
            yield chunk


class _Stream:
    """An export as chunks of bytes. `close` may be called while another thread is in `next`, and does not wait."""

    def __init__(self, export: Everywhere) -> None:
        self._export = export
        self._sink = io.BytesIO()
        self._writer: pa.RecordBatchStreamWriter | None = pa.ipc.new_stream(self._sink, SCHEMA)
        self._rows = 0
        self._turn = threading.Lock()
        self._is_closing = False

    def next(self) -> bytes | None:
        """The next batch; None after the last one."""
        try:
            with self._turn:
                return None if self._is_closing or self._writer is None else self._write(self._writer)
        finally:
            self._close_if_asked()

    def close(self) -> None:
        """Close the files: at once, or at the end of a call of `next` on another thread."""
        self._is_closing = True
        self._close_if_asked()

    def _write(self, writer: pa.RecordBatchStreamWriter) -> bytes:
        batch = next(self._export, None)
        if batch is None:
            missing = self._export.incomplete
            incomplete = {"incomplete": json.dumps(missing)} if missing else {}
            writer.write_batch(EMPTY, custom_metadata={"rows": str(self._rows), **incomplete})
            writer.close()
            self._writer = None
        else:
            writer.write_batch(batch)
            self._rows += batch.num_rows
        chunk = self._sink.getvalue()
        self._sink.seek(0)
        self._sink.truncate()
        return chunk

    def _close_if_asked(self) -> None:
        # If another thread holds `_turn`, it closes the files itself: it calls this method next.
        if self._is_closing and self._turn.acquire(blocking=False):
            try:
                self._export.close()
            finally:
                self._turn.release()
