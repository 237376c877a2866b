"""The shared parts of all routes: prefix, documented refusals, and access to the bridge."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import Annotated, Any, Final, TypeVar

import structlog
from fastapi import Depends, Path, Request
from pydantic import BaseModel

from bridge.api import cursor as cursors
from bridge.api import models
from bridge.api.peers.client import FORWARDED, Peers
from bridge.api.problems import MEDIA_TYPE, Problem, not_ready
from bridge.api.source import PendingMessages, Source
from bridge.errors import BridgeError
from bridge.http.protection import WHO
from bridge.http.workers import Workers
from bridge.stores.names import texts_of
from bridge.stores.search import PendingRow, Query
from bridge.wire.headers import Origin
from timerstore.rows.position import OFFSET_MAX

FILTER_LENGTH_MAX: Final = 500
"""Maximum number of characters of an action's filter in the log."""

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)
Responses = dict[int | str, dict[str, Any]]
Incomplete = dict[str, list[str]]
"""The field `incomplete` of an answer, or nothing."""
Topic = Annotated[str, Path(min_length=1, max_length=249)]


async def _place(
    topic: Topic,
    partition: Annotated[int, Path(ge=0, le=cursors.PARTITION_MAX)],
    offset: Annotated[int, Path(ge=0, le=OFFSET_MAX)],
) -> Origin:
    return topic, partition, offset


PLACE: Final = "{topic}/{partition}/{offset}"
Place = Annotated[Origin, Depends(_place)]
"""The record that the end of a path names: PLACE."""

log = structlog.get_logger("bridge.api.routing")


def error_response(status: HTTPStatus, description: str | None = None) -> Responses:
    """An error status, for the OpenAPI document."""
    content = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/ProblemDocument"}}}
    described = description or status.phrase
    return {status.value: {"description": described, "model": models.ProblemDocument, "content": content}}


REFUSALS: Final = {
    **error_response(HTTPStatus.BAD_REQUEST),
    **error_response(HTTPStatus.UNAUTHORIZED),
    **error_response(HTTPStatus.REQUEST_ENTITY_TOO_LARGE),
    **error_response(HTTPStatus.MISDIRECTED_REQUEST),
    **error_response(HTTPStatus.UNPROCESSABLE_ENTITY),
    **error_response(HTTPStatus.SERVICE_UNAVAILABLE),
}
ACTION_REFUSALS: Final = {
    **error_response(HTTPStatus.FORBIDDEN, "This instance only reads, or the request may come from another site."),
    **error_response(HTTPStatus.UNSUPPORTED_MEDIA_TYPE),
}
NOT_FOUND: Final = error_response(HTTPStatus.NOT_FOUND, "Not found on this instance.")


class Asked:
    """The routes' access to the bridge; for one event loop."""

    def __init__(self, source: Source, peers: Peers, *, show_payloads: bool, is_writable: bool) -> None:
        self.source, self.show_payloads, self.is_writable = source, show_payloads, is_writable
        self.workers, self._peers = Workers(), peers

    def query(self, **wanted: Any) -> Query:
        """A query of the store that knows the paused targets."""
        pauses = self.source.pauses()
        return Query(**wanted, paused=pauses.names(), paused_topics=pauses.topics())

    def others(self, request: Request) -> Peers | None:
        """The other instances to ask; None for a forwarded request, and without other instances."""
        return None if FORWARDED in request.headers or not self._peers.urls else self._peers

    def pending(self) -> PendingMessages:
        """The pending messages. Raises Problem while they are unknown."""
        return self.there(self.source.pending())

    def there(self, part: T | None) -> T:
        """A part of the bridge. Raises Problem while it is None."""
        if part is None:
            raise not_ready(self.source.phase())
        return part

    async def ask(self, work: Callable[[PendingMessages], T]) -> tuple[T, Incomplete]:
        """The result of a call of the store, and the field of the answer about missing messages."""
        store = self.pending()
        return await self.run(lambda: work(store))

    async def run(self, work: Callable[[], T]) -> tuple[T, Incomplete]:
        """As `ask`, for a call of the bridge."""
        return await self.workers.run(lambda: self.covered(work))

    def covered(self, work: Callable[[], T]) -> tuple[T, Incomplete]:
        """As `run`, for the calling thread."""
        before = self.source.unread()
        result = work()
        unread = texts_of({*before, *self.source.unread()})  # a partition may come or catch up meanwhile
        return result, {"incomplete": unread} if unread else {}

    async def count(self, query: Query) -> models.Counted:
        """The number of messages of a query."""
        found, incomplete = await self.ask(lambda store: store.count_where(query, self.source.now_ms()))
        return models.Counted.of(found, **incomplete)

    async def page(
        self, filters: models.PageFilters, shown: Callable[[PendingRow], M], *, recurring: bool = False
    ) -> tuple[list[M], str | None, Incomplete]:
        """The messages of a page, each converted by `shown`, the cursor of the next page, and the field of `ask`.
        Raises Problem with advice."""
        wanted, after = checked(lambda: (filters.values(), filters.after()))
        query, now_ms = self.query(**wanted, recurring=recurring), self.source.now_ms()
        try:
            page, incomplete = await self.ask(
                lambda store: store.find(query, now_ms, after=after, limit=filters.limit, bulky=False)
            )
        except KeyError:
            detail = "cursor names a partition that this instance does not know: start again without a cursor."
            raise Problem(HTTPStatus.BAD_REQUEST, detail) from None
        messages = models.fitting_answer(map(shown, page.rows))
        end = page.next
        if len(messages) < len(page.rows):
            last = page.rows[len(messages) - 1]
            end = last.at_ms, last.topic, last.partition, last.offset
        return messages, None if end is None else cursors.encode_position(end), incomplete


def checked(read: Callable[[], T]) -> T:
    """The result of `read`; its ValueError becomes the answer."""
    try:
        return read()
    except ValueError as error:
        raise Problem(HTTPStatus.BAD_REQUEST, str(error)) from None


def must_choose(body: BaseModel, filters: type[BaseModel], *, all: bool) -> None:
    """Raises Problem if the body has no filter and `all` is false."""
    if not all and not body.model_dump(include=set(filters.model_fields), exclude_defaults=True):
        raise Problem(HTTPStatus.BAD_REQUEST, "no filter is given: give one, or all: true.")


def unavailable(error: BridgeError) -> Problem:
    """The answer to a failure of the brokers or of the disk."""
    return Problem(HTTPStatus.SERVICE_UNAVAILABLE, str(error), code=error.code)


def note(request: Request, action: str, chosen: object, **outcome: object) -> None:
    """Log an action with its client and its outcome."""
    who = request.scope.get("state", {}).get(WHO, "")
    client = "" if request.client is None else request.client.host
    log.info("api-action", who=who, client=client, action=action, chosen=str(chosen)[:FILTER_LENGTH_MAX], **outcome)
