"""Errors in the form of RFC 9457: `application/problem+json` with status, title and detail."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Final

from fastapi.responses import JSONResponse

from bridge.telemetry.health import Phase

MEDIA_TYPE: Final = "application/problem+json"
RETRY_S: Final = 1
_LATER: Final = (HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.GATEWAY_TIMEOUT)


class Problem(Exception):
    """An error answer: its status, and a detail with advice."""

    def __init__(self, status: HTTPStatus, detail: str, **more: object) -> None:
        """`more` are further members of the answer."""
        super().__init__(detail)
        self.status, self.detail, self.more = status, detail, more

    def response(self, headers: Mapping[str, str] | None = None) -> JSONResponse:
        body = {"type": "about:blank", "title": self.status.phrase, "status": self.status.value, "detail": self.detail}
        retry = {"Retry-After": str(RETRY_S)} if self.status in _LATER else {}
        return JSONResponse(body | self.more, self.status.value, {**retry, **(headers or {})}, MEDIA_TYPE)


def not_ready(phase: Phase) -> Problem:
    """The answer before the pending messages are known: the present phase."""
    why = ", ".join(phase.reasons) or phase.name
    more = {} if phase.progress is None else {"progress": round(phase.progress, 3)}
    return Problem(
        HTTPStatus.SERVICE_UNAVAILABLE,
        f"This instance does not know its pending messages now: {why}. Try again, or ask another instance.",
        phase=phase.name,
        reasons=list(phase.reasons),
        **more,
    )
