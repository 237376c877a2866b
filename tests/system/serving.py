"""A small HTTP server for tests: in place of a service that the bridge or its clients talk to."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from dev.broker.embedded import HOST


class Serving:
    """Answers at `url` while it is entered."""

    def __init__(self, handler: type[BaseHTTPRequestHandler], **bound: Any) -> None:
        """`bound` are attributes that the handler gets."""
        self._server = ThreadingHTTPServer((HOST, 0), type("BoundHandler", (handler,), bound))
        self._thread = threading.Thread(target=self._server.serve_forever, name=handler.__name__, daemon=True)

    @property
    def url(self) -> str:
        """Where it is, without a path."""
        return f"http://{HOST}:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
