"""An OpenTelemetry collector, as far as delivery spans need one: it keeps the received spans."""

from __future__ import annotations

import gzip
from http.server import BaseHTTPRequestHandler

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.system.serving import Serving


class Collector(Serving):
    """Listens at `endpoint` while it is entered; `spans` are those that have come."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        super().__init__(_Handler, spans=self.spans)

    @property
    def endpoint(self) -> str:
        """For `tracing.endpoint`."""
        return f"{self.url}/v1/traces"


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
