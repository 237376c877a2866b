"""What each request passes before it is answered: a password where one is set, and limits on what it may use."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection
from http import HTTPStatus
from typing import Final, TypeVar

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bridge.api.hosts import is_private
from bridge.api.problems import Problem
from bridge.telemetry.http import Protection

REQUESTS_MAX: Final = 32
WORKERS_MAX: Final = 4
"""Threads that ask the store; one that is given up on counts until it ends."""
REQUEST_S: Final = 20.0
"""Longer than a search of as many rows as one may look at."""
SECURITY: Final = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
"""Headers of each answer, where it has no other of that name. None admits other origins (CORS)."""

T = TypeVar("T")


class Guard:
    """ASGI middleware around the whole application; for one event loop."""

    def __init__(self, app: ASGIApp, protection: Protection, names: Collection[str] = ()) -> None:
        """`names` are the bridge's own, beside addresses and private ones."""
        self._app = app
        self._protection = protection
        self._names = frozenset(name.lower() for name in names)
        self._requests = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or refuse to."""
        if scope["type"] != "http":
            return  # no websockets; uvicorn refuses them where nothing accepts

        async def send_secured(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY.items():
                    headers.setdefault(name, value)
            await send(message)

        refused, headers = self._refused(Headers(scope=scope)), {}
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

    def _refused(self, headers: Headers) -> Problem | None:
        if not self._protection.permits(headers.get("Authorization")):
            return Problem(HTTPStatus.UNAUTHORIZED, "Send user and password, as http.user and http.password_file say.")
        is_open = self._protection.user is None and self._protection.certificate is None
        if is_open and not is_private(headers.get("Host"), self._names):
            detail = "Without a password, only addresses and private names are answered, not this one. Set http.user."
            return Problem(HTTPStatus.MISDIRECTED_REQUEST, detail)
        if headers.get("Content-Length", "0") != "0" or "Transfer-Encoding" in headers:
            return Problem(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "Send no body: this API only reads.")
        if self._requests >= REQUESTS_MAX:
            return Problem(HTTPStatus.SERVICE_UNAVAILABLE, f"{REQUESTS_MAX} requests are under way. Ask again.")
        return None


class Workers:
    """Runs what may wait for locks and disks on threads that the end of the process does not wait for."""

    def __init__(self) -> None:
        self._free = threading.Semaphore(WORKERS_MAX)

    async def run(self, work: Callable[[], T], within_s: float = REQUEST_S) -> T:
        """What `work` returns or raises. Raises Problem if there is no thread for it, or no end of it in time."""
        if not self._free.acquire(blocking=False):
            raise Problem(HTTPStatus.SERVICE_UNAVAILABLE, f"{WORKERS_MAX} searches are under way. Ask again.")
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def settle(result: T | None, error: BaseException | None) -> None:
            if done.done():
                return  # given up
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(result)  # type: ignore[arg-type] # of `work`, since there is no error

        def process() -> None:
            result, error = None, None
            try:
                result = work()
            except Exception as raised:  # noqa: BLE001 - raised where it is waited for
                error = raised
            finally:
                self._free.release()
            try:
                loop.call_soon_threadsafe(settle, result, error)
            except RuntimeError:
                pass  # the loop has ended: nothing waits for it

        try:
            threading.Thread(target=process, name="api-request", daemon=True).start()
        except RuntimeError:  # the machine has no more of them
            self._free.release()
            raise Problem(HTTPStatus.SERVICE_UNAVAILABLE, "No thread could be started. Ask again.") from None
        try:
            return await asyncio.wait_for(done, within_s)
        except TimeoutError:
            detail = f"No answer within {within_s:.0f} s. Narrow the filters, or give a smaller limit."
            raise Problem(HTTPStatus.SERVICE_UNAVAILABLE, detail) from None
