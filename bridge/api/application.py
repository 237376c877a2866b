"""The application: the routes under /api/v1, their OpenAPI document and their errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from itertools import pairwise
from typing import Annotated, Any, Final

import structlog
from fastapi import Depends, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from bridge import __version__
from bridge.api import export, files, models
from bridge.api.actions.messages import add_message_actions
from bridge.api.actions.targets import add_target_actions
from bridge.api.dead_letters.models import LetterFilters, LetterPageFilters
from bridge.api.dead_letters.routes import add_dead_letters
from bridge.api.guard import ACTION, Guard
from bridge.api.peers.batches import MEDIA_TYPE
from bridge.api.peers.client import Peers
from bridge.api.peers.fan_out import FanOut
from bridge.api.problems import Problem, not_ready
from bridge.api.routing import NOT_FOUND, PLACE, PREFIX, REFUSALS, Asked, Place, checked
from bridge.api.schedules import add_schedules
from bridge.api.source import Overview, PauseControl, PendingMessages, Source
from bridge.delivery.targets.target import TargetReport
from bridge.stores import search
from bridge.telemetry.health import Phase
from bridge.telemetry.http import Protection
from bridge.telemetry.logins import Logins
from bridge.telemetry.metrics import TIME_TO_GO
from bridge.wire.headers import origin_text
from timerstore.errors import TimerStoreError
from timerstore.operations.find import PendingState
from timerstore.rows.position import AT_MAX

PAGES_MAX: Final = 100
"""Maximum number of pages of a search for one message: each page without it has gone through millions of rows."""

NO_JSON: Final = "The body is not JSON: send a JSON object in UTF-8, or no body if the action needs none."
SCHEMES: Final = {
    "password": {"type": "http", "scheme": "basic", "description": "http.user and http.password_file."},
    "token": {"type": "http", "scheme": "bearer", "description": "The token of http.token_file."},
}
"""The ways to authenticate, for the OpenAPI document."""
ACTION_HEADER: Final = {
    "name": ACTION,
    "in": "header",
    "required": True,
    "description": "Proves that the request does not come from a page of another site.",
    "schema": {"type": "string", "enum": ["1"]},
}
_PARAMETERS: Final[Mapping[str, Collection[str]]] = {
    "/messages": models.PageFilters.model_fields,
    "/schedules": models.PageFilters.model_fields,
    "/count": models.Filters.model_fields,
    "/export": models.Filters.model_fields,
    "/timeline": models.Edges.model_fields,
    "/dead-letters": LetterPageFilters.model_fields,
    "/dead-letters/count": LetterFilters.model_fields,
}
"""The parameters by path, for the answer to a misspelled one."""

log = structlog.get_logger("bridge.api.application")


def application(
    source: Source,
    protection: Protection,
    *,
    show_payloads: bool,
    is_writable: bool = False,
    names: Collection[str] = (),
    peers: Sequence[str] = (),
    instance: str = "",
    logins: Logins | None = None,
    base_path: str = "",
) -> ASGIApp:
    """The application and the page behind their guard, for one event loop.

    `names` are the host names of this bridge, `peers` the base URLs of all instances, `instance` the name of this one.
    Every path also exists below `base_path`.
    """
    others = Peers(peers, instance, protection)
    app = unguarded_application(Asked(source, others, show_payloads=show_payloads, is_writable=is_writable), protection)
    if base_path:
        app.servers = [{"url": base_path}]
    app.router.routes.extend(files.page_routes(base_path))
    guard = Guard(FanOut(app, others), protection, names, is_writable=is_writable, logins=logins)
    return _below(base_path, guard) if base_path else guard


def _below(base_path: str, app: ASGIApp) -> ASGIApp:
    """Strip the base path, for a proxy that does not. The scope is changed in place, since the connection reads it,
    too."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if path == base_path or path.startswith(f"{base_path}/"):
            scope["path"] = path[len(base_path) :] or "/"
            scope["raw_path"] = scope["raw_path"][len(base_path) :] or b"/"
        await app(scope, receive, send)

    return call


class _Api(FastAPI):
    """FastAPI with the guard's requirements in the OpenAPI document."""

    def __init__(self, protection: Protection, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._protection = protection

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            document = super().openapi()
            document["components"]["securitySchemes"] = SCHEMES
            has = {"password": self._protection.user is not None, "token": self._protection.token is not None}
            document["security"] = [{name: []} for name in SCHEMES if has[name] or self._protection.is_open]
            if self._protection.is_open:
                document["security"].append({})
            for methods in document["paths"].values():
                if "post" in methods:
                    methods["post"].setdefault("parameters", []).append(ACTION_HEADER)
        return self.openapi_schema or {}


def unguarded_application(asked: Asked, protection: Protection) -> FastAPI:
    """The API without its guard."""
    source, exports = asked.source, export.Exports()
    app = _Api(
        protection,
        title="Delay bridge",
        version=__version__,
        description="Pending messages, dead letters and targets: look them up, and act on them.",
        openapi_url=f"{PREFIX}/openapi.json",
        docs_url=None,
        redoc_url=None,
        swagger_ui_oauth2_redirect_url=None,
        redirect_slashes=False,
        responses=REFUSALS,
        dependencies=[Depends(_once)],
    )

    @app.get(f"{PREFIX}/summary", operation_id="summary", response_model_exclude_unset=True)
    async def summary() -> models.Summary:
        """Totals of the pending messages, and the state of the bridge."""
        overview = await asked.workers.run(source.overview)
        if overview is None:
            raise not_ready(source.phase())
        return _summary(overview, source.phase(), is_writable=asked.is_writable)

    @app.get(f"{PREFIX}/messages", operation_id="messages", response_model_exclude_unset=True)
    async def messages(filters: Annotated[models.PageFilters, Query()]) -> models.Messages:
        """A page of the pending messages. Its cursor stays valid while messages come and go."""
        page, following = await asked.page(filters, models.Message.of)
        return models.Messages(messages=page, next=following)

    @app.get(
        f"{PREFIX}/messages/{PLACE}",
        operation_id="message",
        response_model_exclude_unset=True,
        responses=NOT_FOUND,
    )
    async def message(place: Place) -> models.MessageDetail:
        """One message, by its origin: topic, partition and offset of its first record."""
        query = asked.marked(search.Query(origin=place, states=frozenset(PendingState)))
        row = await asked.ask(lambda store: _one(store, query, source.now_ms()))
        if row is None:
            detail = f"{origin_text(*place)} is not pending here: it is finished, was never a message, or "
            raise Problem(HTTPStatus.NOT_FOUND, detail + "belongs to a partition of another instance.")
        return models.MessageDetail.of_all(row, show_payloads=asked.show_payloads)

    @app.get(f"{PREFIX}/count", operation_id="count", response_model_exclude_unset=True)
    async def count(filters: Annotated[models.Filters, Query()]) -> models.Counted:
        """The number of matching messages."""
        query = asked.marked(checked(filters.query))
        matching = await asked.ask(lambda store: store.count_where(query, source.now_ms()))
        return models.Counted(count=matching.rows, exact=matching.is_exact)

    @app.get(f"{PREFIX}/timeline", operation_id="timeline", response_model_exclude_unset=True)
    async def timeline(wanted: Annotated[models.Edges, Query()]) -> models.Timeline:
        """The number of messages that come up between each two of the given times."""
        edges = checked(wanted.times)
        until = await asked.ask(lambda store: store.pending_until([*edges, AT_MAX]))
        *counts, after = (b - a for a, b in pairwise(until))
        return models.Timeline(before=until[0], counts=counts, after=after)

    @app.get(
        export.PATH,
        operation_id="export",
        response_class=export.ArrowStream,
        responses={200: {"content": {MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}}}},
    )
    async def export_messages(request: Request, filters: Annotated[models.Filters, Query()]) -> export.ArrowStream:
        """All matching messages of one moment, unordered, as an Arrow IPC stream. The last batch has no rows; its
        metadata has the number of messages as `rows`, and the instances without an answer as `incomplete`."""
        query, store, others = asked.marked(checked(filters.query)), source.pending(), asked.others(request)
        if store is None and others is None:
            raise not_ready(source.phase())
        begin = None
        if store is not None:
            begin = partial(store.export, query, source.now_ms(), bulky=asked.show_payloads)
        return exports.answer(begin, others, f"{export.PATH}?{request.url.query}")

    @app.get(f"{PREFIX}/targets", operation_id="targets", response_model_exclude_unset=True)
    async def targets() -> models.TargetStates:
        """The recently used targets, failing ones first."""
        pauses = source.pauses()
        used = {report.name: report for report in await asked.workers.run(source.targets)}
        unused = [TargetReport(name=name, partitions=0) for name in sorted(pauses.names() - used.keys())]
        return models.TargetStates(targets=[_target(report, pauses) for report in (*unused, *used.values())])

    for add in (add_message_actions, add_target_actions, add_dead_letters, add_schedules):
        add(app, asked)
    for kind in (Problem, RequestValidationError, HTTPException, TimerStoreError, Exception):
        app.add_exception_handler(kind, _answer)
    return app


async def _once(request: Request) -> None:
    """Refuse a parameter that is given twice, unless it is a list: one value would be ignored."""
    counts = Counter(name for name, _ in request.query_params.multi_items())
    twice = sorted(name for name, n in counts.items() if n > 1 and name not in ("state", "edge", "reason"))
    if twice:
        raise Problem(HTTPStatus.BAD_REQUEST, f"{', '.join(twice)[:200]}: give it once.")


async def _answer(request: Request, error: Exception) -> JSONResponse:
    return _problem(request, error).response(error.headers if isinstance(error, HTTPException) else None)


def _problem(request: Request, error: Exception) -> Problem:
    match error:
        case Problem():
            return error
        case RequestValidationError():
            if any(fault["type"] == "json_invalid" for fault in error.errors()):
                return Problem(HTTPStatus.BAD_REQUEST, NO_JSON)
            faults = [
                f"{'.'.join(map(str, fault['loc'][1:])) or fault['loc'][0]}: {fault['msg']}" for fault in error.errors()
            ]
            parameters = ", ".join(_PARAMETERS.get(request.url.path.removeprefix(PREFIX), ()))
            detail = f"{'; '.join(faults)[:1000]}.{parameters and f' The parameters are: {parameters}.'}"
            return Problem(HTTPStatus.UNPROCESSABLE_ENTITY, detail)
        case HTTPException(status_code=404):
            return Problem(HTTPStatus.NOT_FOUND, f"Not found; {PREFIX}/openapi.json lists all paths.")
        case HTTPException(status_code=405):
            allowed = (error.headers or {}).get("Allow", "")
            return Problem(HTTPStatus.METHOD_NOT_ALLOWED, f"{request.method} is not allowed here: use {allowed}.")
        case HTTPException(status_code=400):
            return Problem(HTTPStatus.BAD_REQUEST, NO_JSON)
        case HTTPException():
            return Problem(HTTPStatus(error.status_code), str(error.detail)[:1000])
        case TimerStoreError():
            log.warning("api-search-failed", reason=error.message, hint=error.hint)
            detail = f"The index cannot be read now: {error.message}. Try again; the log of the bridge says more."
            return Problem(HTTPStatus.SERVICE_UNAVAILABLE, detail)
    log.error("api-request-failed", path=request.url.path, exc_info=error)
    return Problem(HTTPStatus.INTERNAL_SERVER_ERROR, "This is a bug of the bridge: its log has the details.")


def _target(report: TargetReport, pauses: PauseControl) -> models.TargetState:
    pause = report.pause
    paused = (
        {}
        if pause is None
        else {"pause": models.PauseState(since=pause.changed_ms, until=pause.until_ms, reason=pause.why)}
    )
    return models.TargetState(
        name=report.name,
        partitions=report.partitions,
        failing_partitions=report.failing_partitions,
        reason=None if report.reason is None else str(report.reason),
        detail=report.detail,
        open_breakers=report.open_breakers,
        retry_in_s=None if report.retry_s is None else round(report.retry_s, 1),
        paused=report.name in pauses.names(),
        pausable=not pauses.owns(report.name),
        **paused,
    )


def _one(store: PendingMessages, query: search.Query, now_ms: int) -> search.PendingRow | None:
    after = None
    for _ in range(PAGES_MAX):
        page = store.find(query, now_ms, after=after, limit=1, bulky=True)
        if page.rows:
            return page.rows[0]
        after = page.next
        if after is None:
            return None
    detail = "The index is too large for this search now. Try again later."
    raise Problem(HTTPStatus.SERVICE_UNAVAILABLE, detail)


def _summary(overview: Overview, phase: Phase, *, is_writable: bool) -> models.Summary:
    gauges = overview.gauges
    return models.Summary(
        writable=is_writable,
        now=overview.now_ms,
        phase=phase.name,
        ready=phase.ready,
        reasons=list(phase.reasons),
        reader=phase.reader,
        pending=gauges.pending_total,
        schedules=gauges.schedules,
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
        paused=[
            models.PausedTarget(name=name, paused_s=round(paused_s, 1))
            for name, paused_s in sorted(gauges.paused_s.items(), key=lambda item: -item[1])
        ],
    )
