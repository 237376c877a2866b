"""Delivery spans: a message with a `traceparent` continues its trace with a span that links to its producer's.

OpenTelemetry is an extra (`pip install delay-bridge[bridge,otel]`) and off unless `tracing.endpoint` is set. Its cost
is bounded: a take without the header costs one comparison of a column, and only chosen messages, up to `tracing.rate` a
second, cost Python. A span exists once its transaction is committed, so an abort leaves none.

Names follow OpenTelemetry's semantic conventions for messaging; other names begin with `delay_bridge.`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import structlog

from bridge.delivery.plan.due_rows import DueRows
from bridge.errors import ConfigurationError
from bridge.settings.model import Settings
from timerstore.rows.position import Bools

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

TRACEPARENT: Final = "traceparent"
_SAMPLED: Final = "^00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f][13579bdf]$"
"""W3C Trace Context, version 00, with the producer's flag for a recorded trace."""
_NO_ID: Final = "^00-(?:0{32}|[0-9a-f]{32}-0{16})-"
_RANDOM: Final = (19, 35)
"""The lower 64 bits of the trace id, by which OpenTelemetry's samplers choose."""
EXPORT_TIMEOUT_S: Final = 5
SHUTDOWN_MS_MAX: Final = 1_000

log = structlog.get_logger("bridge.delivery.plan.spans")


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """A chosen message: its trace context, target, origin, and due time (ms)."""

    traceparent: str
    target: str
    origin: str
    due_ms: int


class Sampler:
    """Chooses the messages that get a span. One thread."""

    def __init__(self, *, ratio: float, rate: int) -> None:
        """`ratio`: the share (0 to 1) of traces, as OpenTelemetry's samplers choose them; `rate`: the limit of messages
        a second."""
        self._below = f"{int(ratio * 2**64):016x}" if ratio < 1 else None
        self._rate = rate
        self._second = 0
        self._left = rate

    def chosen(self, rows: DueRows, deliver: Bools, now_ms: int) -> list[Delivery]:
        """The choice among the rows in `deliver` (bool[n]), taken at `now_ms`."""
        headers = rows.named_headers(TRACEPARENT)
        if headers is None:
            return []
        if now_ms // 1000 != self._second:
            self._second, self._left = now_ms // 1000, self._rate
        if not self._left:
            return []
        ids, values = headers
        good = pc.and_not(pc.match_substring_regex(values, _SAMPLED), pc.match_substring_regex(values, _NO_ID))
        good = good.fill_null(False).to_numpy(zero_copy_only=False) & deliver[ids]
        ids, texts = ids[good], pc.cast(values.filter(pa.array(good)), pa.string())
        if self._below is not None and len(ids):
            kept = pc.less(pc.utf8_slice_codeunits(texts, *_RANDOM), self._below).to_numpy(zero_copy_only=False)
            ids, texts = ids[kept], texts.filter(pa.array(kept))
        ids, first = np.unique(ids, return_index=True)  # a record may have the header twice
        ids, first = ids[: self._left], first[: self._left]
        self._left -= len(ids)
        names, codes = rows.targets
        targets = [names[code] for code in codes[ids].tolist()]
        columns = texts.take(pa.array(first)).to_pylist(), targets, rows.origins(ids), rows.due[ids].tolist()
        return [
            Delivery(traceparent=text, target=target, origin=origin, due_ms=due_ms)
            for text, target, origin, due_ms in zip(*columns, strict=True)
        ]


class OpenTelemetry:
    """Makes the spans, and puts them into a queue that a thread of the SDK exports; a full queue drops spans."""

    def __init__(self, settings: Settings, exporter: SpanExporter | None = None) -> None:
        """`exporter` replaces OTLP over HTTP. Raises ConfigurationError without the extra."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.trace.sampling import ALWAYS_ON
        except ImportError as error:
            raise ConfigurationError(
                "tracing.endpoint is set, but OpenTelemetry is not installed",
                hint="Run pip install 'delay-bridge[bridge,otel]', or remove tracing.endpoint.",
                missing=error.name,
                code="DB-2002",
            ) from None
        resource = {"service.name": settings.bridge.id, "service.instance.id": settings.bridge.instance}
        self._provider = TracerProvider(sampler=ALWAYS_ON, resource=Resource.create(resource), shutdown_on_exit=False)
        otlp = exporter or OTLPSpanExporter(endpoint=settings.tracing.endpoint, timeout=EXPORT_TIMEOUT_S)
        self._provider.add_span_processor(BatchSpanProcessor(otlp))
        self._tracer = self._provider.get_tracer("delay-bridge")
        self._sampler = Sampler(ratio=settings.tracing.ratio, rate=settings.tracing.rate)

    def chosen(self, rows: DueRows, deliver: Bools, now_ms: int) -> list[Delivery]:
        """The messages with a span (`Sampler`)."""
        return self._sampler.chosen(rows, deliver, now_ms)

    def delivered(self, deliveries: Sequence[Delivery], produced_ms: int, committed_ms: int) -> None:
        """A root span for each message, from its production to the commit."""
        from opentelemetry.context import Context
        from opentelemetry.trace import Link, SpanContext, SpanKind, TraceFlags

        for one in deliveries:
            _, trace_id, span_id, flags = one.traceparent.split("-")
            producer = SpanContext(
                int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=TraceFlags(int(flags, 16))
            )
            span = self._tracer.start_span(
                f"send {one.target}",
                context=Context(),
                kind=SpanKind.PRODUCER,
                links=[Link(producer)],
                start_time=produced_ms * 1_000_000,
                attributes={
                    "messaging.system": "kafka",
                    "messaging.operation.name": "send",
                    "messaging.operation.type": "send",
                    "messaging.destination.name": one.target,
                    "delay_bridge.origin": one.origin,
                    "delay_bridge.due_ms": one.due_ms,
                    "delay_bridge.lateness_ms": produced_ms - one.due_ms,
                },
            )
            span.end(end_time=max(produced_ms, committed_ms) * 1_000_000)

    def stop(self) -> None:
        """Export the remaining spans, for up to a second."""
        if not self._provider.force_flush(SHUTDOWN_MS_MAX):
            log.warning("spans-not-exported")
