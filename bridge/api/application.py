"""The API under /api/v1: routes, and what each asks of the bridge."""

from __future__ import annotations

from collections.abc import Callable, Collection
from http import HTTPStatus
from itertools import pairwise
from typing import Annotated, Final, TypeVar

import structlog
from fastapi import Depends, FastAPI, Path, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from bridge import __version__
from bridge.api import cursor as cursors
from bridge.api import export, files, models
from bridge.api.guard import Guard, Workers
from bridge.api.problems import MEDIA_TYPE, Problem, not_ready
from bridge.api.source import Overview, PendingMessages, Source
from bridge.telemetry.health import Phase
from bridge.telemetry.http import Protection
from bridge.telemetry.metrics import TIME_TO_GO
from timerstore.errors import TimerStoreError
from timerstore.operations import find
from timerstore.rows.position import AT_MAX, OFFSET_MAX

PREFIX: Final = "/api/v1"
PAGES_MAX: Final = 100
"""Of a search for one message: each page without it has looked at millions of rows."""
REFUSALS: Final = {
    status.value: {
        "description": status.phrase,
        "model": models.ProblemDocument,
        "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/ProblemDocument"}}},
    }
    for status in (
        *(HTTPStatus.BAD_REQUEST, HTTPStatus.UNAUTHORIZED, HTTPStatus.REQUEST_ENTITY_TOO_LARGE),
        *(HTTPStatus.MISDIRECTED_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY, HTTPStatus.SERVICE_UNAVAILABLE),
    )
}
NOT_FOUND: Final = {404: {**REFUSALS[400], "description": "It is not pending."}}

T = TypeVar("T")
log = structlog.get_logger("bridge.api.application")


def application(source: Source, protection: Protection, *, show_payloads: bool, names: Collection[str] = ()) -> ASGIApp:
    """The application and the page, guarded; for one event loop. `names` are the bridge's own."""
    app = routes(source, show_payloads=show_payloads)
    app.router.routes.extend(files.routes())
    return Guard(app, protection, names)


def routes(source: Source, *, show_payloads: bool) -> FastAPI:
    """The API without its guard."""
    app = FastAPI(
        title="Delay bridge",
        version=__version__,
        description="What is pending, where it is, and why. Each instance answers for its own partitions.",
        openapi_url=f"{PREFIX}/openapi.json",
        docs_url=None,
        redoc_url=None,
        swagger_ui_oauth2_redirect_url=None,
        redirect_slashes=False,
        responses=REFUSALS,  # type: ignore[arg-type] # keys may be int or str
        dependencies=[Depends(_once)],
    )
    workers, exports = Workers(), export.Exports()

    def pending() -> PendingMessages:
        store = source.pending()
        if store is None:
            raise not_ready(source.phase())
        return store

    async def ask(work: Callable[[PendingMessages], T]) -> T:
        store = pending()
        return await workers.run(lambda: work(store))

    @app.get(f"{PREFIX}/summary", operation_id="summary")
    async def summary() -> models.Summary:
        """What is pending as a whole, and how the bridge is."""
        overview = await workers.run(source.overview)
        if overview is None:
            raise not_ready(source.phase())
        return _summary(overview, source.phase())

    @app.get(f"{PREFIX}/messages", operation_id="messages", response_model_exclude_unset=True)
    async def messages(filters: Annotated[models.PageFilters, Query()]) -> models.Messages:
        """Messages, a page at a time. The cursor stays valid while messages come and go."""
        query, after = _checked(lambda: (filters.query(), filters.after()))
        try:
            page = await ask(
                lambda store: store.find(query, source.now_ms(), after=after, limit=filters.limit, bulky=False)
            )
        except KeyError:
            detail = "cursor names a partition that this instance does not know: begin anew, without it."
            raise Problem(HTTPStatus.BAD_REQUEST, detail) from None
        following = None if page.next is None else cursors.encode(page.next)
        return models.Messages(messages=[models.Message.of(row) for row in page.rows], next=following)

    @app.get(
        f"{PREFIX}/messages/{{topic}}/{{partition}}/{{offset}}",
        operation_id="message",
        response_model_exclude_unset=True,
        responses=NOT_FOUND,  # type: ignore[arg-type]
    )
    async def message(
        topic: Annotated[str, Path(max_length=249)],
        partition: Annotated[int, Path(ge=0, le=models.PARTITION_MAX)],
        offset: Annotated[int, Path(ge=0, le=OFFSET_MAX)],
    ) -> models.MessageDetail:
        """One message, by the record that was sent: topic, partition and offset."""
        row = await ask(lambda store: _one(store, (topic, partition, offset), source.now_ms()))
        if row is None:
            detail = f"{topic}/{partition}/{offset} is not pending here: it is finished, was never a message, or is "
            raise Problem(HTTPStatus.NOT_FOUND, detail + "of a partition of another instance.")
        return models.MessageDetail.of_all(row, show_payloads=show_payloads)

    @app.get(f"{PREFIX}/count", operation_id="count")
    async def count(filters: Annotated[models.Filters, Query()]) -> models.Counted:
        """How many messages fit."""
        query = _checked(filters.query)
        found = await ask(lambda store: store.count_where(query, source.now_ms()))
        return models.Counted(count=found.rows, exact=found.is_exact)

    @app.get(f"{PREFIX}/timeline", operation_id="timeline")
    async def timeline(asked: Annotated[models.Edges, Query()]) -> models.Timeline:
        """How many messages come up when, between times that are asked for."""
        edges = _checked(asked.times)
        until = await ask(lambda store: store.pending_until([*edges, AT_MAX]))
        *counts, after = (b - a for a, b in pairwise(until))
        return models.Timeline(before=until[0], counts=counts, after=after)

    @app.get(
        export.PATH,
        operation_id="export",
        response_class=export.ArrowStream,
        responses={200: {"content": {export.MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}}}},
    )
    async def export_messages(filters: Annotated[models.Filters, Query()]) -> export.ArrowStream:
        """All messages that fit, of one moment and in no order, as an Arrow IPC stream; its last batch has no rows, and
        their number as `rows` in its metadata."""
        query, store = _checked(filters.query), pending()
        return exports.answer(lambda: store.export(query, source.now_ms(), bulky=show_payloads))

    @app.get(f"{PREFIX}/targets", operation_id="targets")
    async def targets() -> models.TargetStates:
        """Targets that were used lately, those in trouble first."""
        found = await workers.run(source.targets)
        return models.TargetStates(
            targets=[
                models.TargetState(
                    name=each.name,
                    partitions=each.partitions,
                    failing_partitions=each.failing_partitions,
                    reason=None if each.reason is None else str(each.reason),
                    detail=each.detail,
                    open_breakers=each.open_breakers,
                    retry_in_s=None if each.retry_s is None else round(each.retry_s, 1),
                )
                for each in found
            ]
        )

    app.add_exception_handler(Problem, _answer)
    app.add_exception_handler(RequestValidationError, _answer)
    app.add_exception_handler(HTTPException, _answer)
    app.add_exception_handler(TimerStoreError, _answer)
    app.add_exception_handler(Exception, _answer)
    return app


async def _once(request: Request) -> None:
    """No parameter is given twice, where one of them would be ignored."""
    names = [name for name, _ in request.query_params.multi_items()]
    twice = sorted({name for name in names if name not in ("state", "edge") and names.count(name) > 1})
    if twice:
        raise Problem(HTTPStatus.BAD_REQUEST, f"{', '.join(twice)[:200]}: give it once.")


async def _answer(request: Request, error: Exception) -> JSONResponse:
    return _problem(request, error).response(
        error.headers if isinstance(error, HTTPException) else None,
    )


def _problem(request: Request, error: Exception) -> Problem:
    match error:
        case Problem():
            return error
        case RequestValidationError():
            said = [f"{'.'.join(map(str, each['loc'][1:]))}: {each['msg']}" for each in error.errors()]
            model = models.Edges if request.url.path == f"{PREFIX}/timeline" else models.PageFilters
            known = ", ".join(model.model_fields)
            detail = f"{'; '.join(said)[:1000]}. The parameters are: {known}."
            return Problem(HTTPStatus.UNPROCESSABLE_ENTITY, detail)
        case HTTPException(status_code=404):
            return Problem(HTTPStatus.NOT_FOUND, f"There is nothing here; {PREFIX}/openapi.json has what there is.")
        case HTTPException():
            return Problem(
                HTTPStatus(error.status_code), f"{request.method} is not possible here: this API only reads."
            )
        case TimerStoreError():
            log.warning("api-search-failed", reason=error.message, hint=error.hint)
            detail = f"The index cannot be read now: {error.message}. Ask again; the log of the bridge has more."
            return Problem(HTTPStatus.SERVICE_UNAVAILABLE, detail)
    log.error("api-request-failed", path=request.url.path, exc_info=error)
    return Problem(HTTPStatus.INTERNAL_SERVER_ERROR, "This is a bug of the bridge: its log has what happened.")


def _checked(read: Callable[[], T]) -> T:
    try:
        return read()
    except ValueError as error:
        raise Problem(HTTPStatus.BAD_REQUEST, str(error)) from None


def _one(store: PendingMessages, origin: tuple[str, int, int], now_ms: int) -> find.PendingRow | None:
    """The message of an origin, whatever its state."""
    query, after = find.Query(origin=origin, states=frozenset(find.PendingState)), None
    for _ in range(PAGES_MAX):
        page = store.find(query, now_ms, after=after, limit=1, bulky=True)
        if page.rows:
            return page.rows[0]
        after = page.next
        if after is None:
            return None
    detail = "The index is too large for this search now. Ask again later."
    raise Problem(HTTPStatus.SERVICE_UNAVAILABLE, detail)


def _summary(overview: Overview, phase: Phase) -> models.Summary:
    gauges = overview.gauges
    return models.Summary(
        now=overview.now_ms,
        phase=phase.name,
        ready=phase.ready,
        reasons=list(phase.reasons),
        reader=phase.reader,
        pending=gauges.pending_total,
        overdue=overview.overdue,
        oldest_overdue_s=gauges.oldest_overdue_s,
        next_at=overview.next_at_ms,
        lateness=None if overview.lateness is None else models.Lateness.of(overview.lateness),
        by_target=dict(overview.by_target),
        by_time_to_go=[
            models.TimeToGo(until=until, pending=pending)
            for until, pending in zip(TIME_TO_GO, gauges.pending_by_time_to_go, strict=True)
        ],
        partitions=[
            models.PartitionState(
                topic=topic, partition=partition, lag=lag, behind_s=overview.behind_s.get((topic, partition), 0.0)
            )
            for (topic, partition), lag in sorted(gauges.consumer_lag.items())
        ],
        retention_headroom_s=dict(gauges.retention_headroom_s),
        disk=models.Disk(
            bytes=gauges.disk_bytes,
            free_bytes=gauges.disk_free_bytes,
            segments=gauges.segments,
            segment_bytes=gauges.segment_bytes,
            full=gauges.disk_full,
        ),
        failing=[
            models.FailingTarget(name=name, reason=reason, partitions=partitions)
            for (name, reason), partitions in sorted(gauges.failing.items())
        ],
    )
