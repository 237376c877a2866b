"""The guard in front of all routes: it checks the password or token, the headers of actions, and limits.

*CSRF.* An action must come from a program or from the page, never from a page of another site, even if the browser adds
credentials to that site's request. So an action needs a header that no form can send. A script of another origin cannot
send it either, since the API admits no other origin (CORS). And the browser's own statement about the request's origin
must name this host.

*DNS rebinding.* A page of another site cannot read answers from here, unless the site's DNS name points to this
machine: then the browser takes the bridge for the site's server. The Host header has the name. So without a password
the guard answers only names that no stranger can own. A password or TLS keeps such a page out: the browser sends the
password only to the origin for which it was typed, and the bridge has no certificate for the site's name.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from http import HTTPStatus
from ipaddress import ip_address
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bridge.api.problems import Problem
from bridge.http.protection import Protection

REQUESTS_MAX: Final = 32
BODY_BYTES_MAX: Final = 64 << 10
ACTION: Final = "X-Delay-Bridge-Action"
"""The header of an action; its value is 1."""
SECURITY: Final = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
"""Headers of every answer, unless it has its own of that name. None of them admits other origins (CORS)."""

PRIVATE: Final = (".localhost", ".svc", ".local", ".internal")
"""Suffixes of names that nobody can register: this machine, Kubernetes services (`.svc`, `.svc.cluster.local`), private
networks. A name without a dot, such as a container's or a pod's, is private too."""


class Guard:
    """ASGI middleware around the whole application; for one event loop."""

    def __init__(
        self,
        app: ASGIApp,
        protection: Protection,
        names: Collection[str] = (),
        *,
        is_writable: bool = False,
    ) -> None:
        """`names` are further host names of this bridge, beside addresses and private names."""
        self._app, self._protection, self._is_writable = app, protection, is_writable
        self._names = frozenset(name.lower() for name in names)
        self._requests = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # uvicorn refuses a websocket that the application does not accept

        async def send_secured(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY.items():
                    headers.setdefault(name, value)
            await send(message)

        request_headers = Headers(scope=scope)
        refused, headers = self._refused(request_headers, scope["method"], self._protection.login(scope)), {}
        if refused is not None:
            if refused.status is HTTPStatus.UNAUTHORIZED:
                headers["WWW-Authenticate"] = 'Basic realm="delay-bridge", charset="UTF-8"'
            await refused.response(headers)(scope, receive, send_secured)
            return
        self._requests += 1
        try:
            await self._app(scope, receive, send_secured)
        finally:
            self._requests -= 1

    def _refused(self, headers: Headers, method: str, who: str | None) -> Problem | None:
        if who is None:
            detail = "Send the user and password of http.user and http.password_file, or the token of http.token_file."
            return Problem(HTTPStatus.UNAUTHORIZED, detail)
        is_open = self._protection.is_open and self._protection.certificate is None
        if is_open and not is_private(headers.get("Host"), self._names):
            detail = "Without a password, this API answers only addresses and private host names. Set http.user."
            return Problem(HTTPStatus.MISDIRECTED_REQUEST, detail)
        if method == "POST" and (problem := self._refused_action(headers)) is not None:
            return problem
        if method != "POST" and (headers.get("Content-Length", "0") != "0" or "Transfer-Encoding" in headers):
            return Problem(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "Send no body: only actions have one.")
        if self._requests >= REQUESTS_MAX:
            return Problem(HTTPStatus.SERVICE_UNAVAILABLE, f"{REQUESTS_MAX} requests are under way. Try again.")
        return None

    def _refused_action(self, headers: Headers) -> Problem | None:
        origin, site = headers.get("Origin"), headers.get("Sec-Fetch-Site")
        length = headers.get("Content-Length", "0")
        if not self._is_writable:
            return Problem(HTTPStatus.FORBIDDEN, "This API only reads: set http.api to write.")
        if headers.get(ACTION) != "1":
            return Problem(HTTPStatus.FORBIDDEN, f"Send the header {ACTION}: 1 with every action.")
        if site not in (None, "same-origin") or (origin and not _is_at(origin, headers.get("Host"))):
            return Problem(HTTPStatus.FORBIDDEN, "Actions from a page of another site are refused.")
        if "Transfer-Encoding" in headers or not length.isdecimal() or int(length) > BODY_BYTES_MAX:
            detail = f"Send a body of at most {BODY_BYTES_MAX} bytes, and its Content-Length."
            return Problem(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, detail)
        media_type = headers.get("Content-Type", "").partition(";")[0].strip().lower()
        if length != "0" and media_type != "application/json":
            return Problem(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "Send JSON, with Content-Type: application/json.")
        return None


def _is_at(origin: str, host: str | None) -> bool:
    """Whether an origin is this host and port. Text that is not a URL is no origin."""
    try:
        place = urlsplit(origin).netloc
    except ValueError:
        return False
    return place != "" and place == host


def is_private(host: str | None, own: Collection[str] = ()) -> bool:
    """Whether a Host header has an address, a private name, or one of our `own` names. A missing header passes:
    browsers always send one."""
    if host is None:
        return True
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]]+)(?::[0-9]{1,5})?", host)
    if match is None:
        return False
    name = match[1].lower().removesuffix(".")
    is_plain = "." not in name and not name.startswith("[")
    return is_plain or name in own or name.endswith(PRIVATE) or _is_address(name)


def _is_address(name: str) -> bool:
    try:
        ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True
