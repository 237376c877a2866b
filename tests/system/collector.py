"""An OpenTelemetry collector, as far as delivery spans need one: it keeps what it is sent."""

from __future__ import annotations

import gzip
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from embedded.broker import HOST


class Collector:
    """Listens at `endpoint` while it is entered; `spans` are those that have come."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._server = ThreadingHTTPServer((HOST, 0), type("BoundHandler", (_Handler,), {"spans": self.spans}))
        self._thread = threading.Thread(target=self._server.serve_forever, name="collector", daemon=True)

    @property
    def endpoint(self) -> str:
        """For `tracing.endpoint`."""
        return f"http://{HOST}:{self._server.server_address[1]}/v1/traces"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    spans: list[Span]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        request = ExportTraceServiceRequest.FromString(body)
        self.spans += [s for resource in request.resource_spans for scope in resource.scope_spans for s in scope.spans]
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing."""
