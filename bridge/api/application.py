"""The application: the routes under /api/v1, their OpenAPI document and their errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
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
from bridge.api import files, models
from bridge.api.actions.messages import add_message_actions
from bridge.api.actions.targets import add_target_actions
from bridge.api.dead_letters.routes import add_dead_letters
from bridge.api.export import add_export
from bridge.api.filters import Filters
from bridge.api.guard import ACTION, Guard
from bridge.api.peers.client import Peers
from bridge.api.peers.fan_out import FanOut
from bridge.api.problems import Problem, not_ready
from bridge.api.routing import NOT_FOUND, PLACE, REFUSALS, Asked, Incomplete, Place, checked
from bridge.api.schedules import add_schedules
from bridge.api.source import PREFIX, Overview, PauseControl, PendingMessages, Source
from bridge.delivery.targets.target import TargetReport
from bridge.http.protection import Protection
from bridge.http.workers import Unavailable
from bridge.stores import search
from bridge.stores.names import texts_of
from bridge.telemetry.health import Phase
from bridge.telemetry.metrics import TIME_TO_GO
from bridge.wire.headers import Origin, origin_text
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
    guard = Guard(FanOut(app, others), protection, names, is_writable=is_writable)
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

    for add in (
        _add_states,
        _add_messages,
        add_export,
        add_message_actions,
        add_target_actions,
        add_dead_letters,
        add_schedules,
    ):
        add(app, asked)
    for kind in (Problem, Unavailable, RequestValidationError, HTTPException, TimerStoreError, Exception):
        app.add_exception_handler(kind, _answer)
    return app


def _add_states(app: FastAPI, asked: Asked) -> None:
    """The routes about the bridge and its targets."""
    source = asked.source

    @app.get(f"{PREFIX}/summary", operation_id="summary", response_model_exclude_unset=True)
    async def summary() -> models.Summary:
        """Totals of the pending messages, and the state of the bridge."""
        overview, incomplete = await asked.run(source.overview)
        if overview is None:
            raise not_ready(source.phase())
        return _summary(overview, source.phase(), is_writable=asked.is_writable, **incomplete)

    @app.get(f"{PREFIX}/targets", operation_id="targets", response_model_exclude_unset=True)
    async def targets() -> models.TargetStates:
        """The recently used targets, failing ones first."""
        reports = await asked.workers.run(source.targets)
        return models.TargetStates(targets=[_target(report, source.pauses()) for report in reports])


def _add_messages(app: FastAPI, asked: Asked) -> None:
    """The questions about pending messages."""

    @app.get(f"{PREFIX}/messages", operation_id="messages", response_model_exclude_unset=True)
    async def messages(filters: Annotated[models.PageFilters, Query()]) -> models.Messages:
        """A page of the pending messages. Its cursor stays valid while messages come and go."""
        page, following, incomplete = await asked.page(filters, models.Message.of)
        return models.Messages(messages=page, next=following, **incomplete)

    @app.get(
        f"{PREFIX}/messages/{PLACE}",
        operation_id="message",
        response_model_exclude_unset=True,
        responses=NOT_FOUND,
    )
    async def message(place: Place) -> models.MessageDetail:
        """One message, by its origin: topic, partition and offset of its first record."""
        query = asked.query(origin=place, states=frozenset(PendingState))
        row, incomplete = await asked.ask(lambda store: _one(store, query, asked.source.now_ms()))
        if row is None:
            _must_be_read(place, incomplete)
            detail = f"{origin_text(*place)} is not pending here: it is finished, was never a message, or "
            raise Problem(HTTPStatus.NOT_FOUND, detail + "belongs to a partition of another instance.")
        whole = models.bulk(row.headers, row.value, show_payloads=asked.show_payloads)
        return models.MessageDetail.of(row, **whole)

    @app.get(f"{PREFIX}/count", operation_id="count", response_model_exclude_unset=True)
    async def count(filters: Annotated[Filters, Query()]) -> models.Counted:
        """The number of matching messages."""
        return await asked.count(asked.query(**checked(filters.values)))

    @app.get(f"{PREFIX}/timeline", operation_id="timeline", response_model_exclude_unset=True)
    async def timeline(wanted: Annotated[models.Edges, Query()]) -> models.Timeline:
        """The number of messages that come up between each two of the given times."""
        edges = checked(wanted.times)
        until, incomplete = await asked.ask(lambda store: store.pending_until([*edges, AT_MAX]))
        *counts, after = (b - a for a, b in pairwise(until))
        return models.Timeline(before=until[0], counts=counts, after=after, **incomplete)


async def _once(request: Request) -> None:
    """Refuse a parameter that is given twice, unless it is a list: one value would be ignored."""
    counts = Counter(name for name, _ in request.query_params.multi_items())
    if counts and max(counts.values()) > 1:
        lists = [name for name, schema in _parameters(request).items() if schema.get("type") == "array"]
        if twice := sorted(name for name, n in counts.items() if n > 1 and name not in lists):
            raise Problem(HTTPStatus.BAD_REQUEST, f"{', '.join(twice)[:200]}: give it once.")


def _parameters(request: Request) -> dict[str, dict[str, Any]]:
    """The schemas of the parameters of a question, by name."""
    path = request.app.openapi()["paths"].get(request.url.path, {})
    return {each["name"]: each["schema"] for each in path.get("get", {}).get("parameters", ())}


async def _answer(request: Request, error: Exception) -> JSONResponse:
    return _problem(request, error).response(error.headers if isinstance(error, HTTPException) else None)


def _problem(request: Request, error: Exception) -> Problem:
    match error:
        case Problem():
            return error
        case Unavailable():
            return Problem(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
        case RequestValidationError():
            if any(fault["type"] == "json_invalid" for fault in error.errors()):
                return Problem(HTTPStatus.BAD_REQUEST, NO_JSON)
            faults = [
                f"{'.'.join(map(str, fault['loc'][1:])) or fault['loc'][0]}: {fault['msg']}" for fault in error.errors()
            ]
            parameters = ", ".join(_parameters(request))
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


def _must_be_read(place: Origin, incomplete: Incomplete) -> None:
    (partition,) = texts_of([place[:2]])
    if partition in incomplete.get("incomplete", ()):
        detail = (
            f"{origin_text(*place)} may be pending: {partition} has just come to this instance, "
            "which still reads its earlier records. Try again."
        )
        raise Problem(HTTPStatus.SERVICE_UNAVAILABLE, detail)


def _target(report: TargetReport, pauses: PauseControl) -> models.TargetState:
    pause = {} if report.pause is None else {"pause_in_force": report.pause}
    return models.TargetState.of(report, paused=bool(pause), pausable=not pauses.owns(report.name), **pause)


def _summary(overview: Overview, phase: Phase, *, is_writable: bool, **incomplete: list[str]) -> models.Summary:
    gauges = overview.gauges
    by_time = zip(TIME_TO_GO, gauges.pending_by_time_to_go, strict=True)
    return models.Summary.of(
        overview,
        gauges,
        phase,
        writable=is_writable,
        by_time_to_go=[{"until": until, "pending": pending} for until, pending in by_time],
        partitions=[
            {"topic": place[0], "partition": place[1], "lag": lag, "behind_s": overview.behind_s.get(place, 0.0)}
            for place, lag in sorted(gauges.consumer_lag.items())
        ],
        failing=[{"name": n, "reason": r, "partitions": count} for (n, r), count in sorted(gauges.failing.items())],
        paused=[
            {"name": name, "paused_s": paused_s}
            for name, paused_s in sorted(gauges.paused_s.items(), key=lambda item: -item[1])
        ],
        **incomplete,
    )
