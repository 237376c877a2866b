"""Delivery spans of messages that carry a trace."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from bridge.delivery.plan.due_rows import DueRows, SourceColumns
from bridge.delivery.plan.spans import Delivery, OpenTelemetry, Sampler
from bridge.settings.model import Settings
from bridge.stores.names import Sources
from tests.entries import rows_of, timer

NOW = 1_800_000_000_000
SPAN = "00f067aa0ba902b7"
SOURCES = Sources([("delay", 0)])
Headers = Sequence[tuple[str, bytes | None]]


def trace(number: int, low: str = "0" * 16) -> str:
    """A trace's id; `low` is what samplers choose by."""
    return f"{number:016x}{low}"


def parent(trace_id: str, flags: str = "01") -> tuple[str, bytes]:
    """The header of a producer."""
    return ("traceparent", f"00-{trace_id}-{SPAN}-{flags}".encode())


def due_rows(*headers: Headers) -> DueRows:
    """Messages with these headers, for the targets t0, t1, t0, ..."""
    entries = [timer("delay", 0, i, NOW - 5, f"t{i % 2}", headers=list(own)) for i, own in enumerate(headers)]
    rows = [(entry["at"], 0, entry["offset"], entry) for entry in entries]
    return DueRows(rows_of(rows), SourceColumns(SOURCES, {}))


def chosen(sampler: Sampler, messages: DueRows, *withheld: int, now_ms: int = NOW) -> list[Delivery]:
    """Those of the messages that get a span; `withheld` are not delivered."""
    deliver = np.ones(len(messages), np.bool_)
    deliver[list(withheld)] = False
    return sampler.chosen(messages, deliver, now_ms)


def test_messages_that_carry_a_recorded_trace_are_chosen() -> None:
    """Not those without, with something else in the header, of a trace that is not recorded, or that are put off."""
    good = parent(trace(1))
    wrong: list[Headers] = [
        [],
        [("x", good[1])],
        [parent(trace(2), "00")],
        [("traceparent", None)],
        [("traceparent", b"\xff")],
        [("traceparent", good[1] + b"-1")],
        [("traceparent", good[1].upper())],
        [parent("0" * 32)],
        [("traceparent", f"00-{trace(1)}-{'0' * 16}-01".encode())],
    ]
    messages = due_rows([("a", b"1"), good], *wrong, [good], [good, parent(trace(3))])
    first, last = chosen(Sampler(ratio=1, rate=100), messages, 10)
    assert first == Delivery(traceparent=good[1].decode(), target="t0", origin="delay/0/0", due_ms=NOW - 5)
    assert (last.traceparent, last.target, last.origin) == (good[1].decode(), "t1", "delay/0/11")


def test_the_number_a_second_is_bounded() -> None:
    """Whatever comes, and however it is cut into pieces; the next second has its own."""
    sampler = Sampler(ratio=1, rate=5)
    messages = due_rows(*([parent(trace(i + 1))] for i in range(3)))
    assert [len(chosen(sampler, messages)) for _ in range(3)] == [3, 2, 0]
    assert len(chosen(sampler, messages, now_ms=NOW + 1_000)) == 3


@pytest.mark.parametrize(("ratio", "count"), [(1.0, 16), (0.5, 8), (0.25, 4)])
def test_a_part_of_the_traces_is_followed_by_their_ids(ratio: float, count: int) -> None:
    """As OpenTelemetry's samplers choose, so that a trace is whole or not there."""
    messages = due_rows(*([parent(trace(1, f"{i:x}" + "0" * 15))] for i in range(16)))
    found = chosen(Sampler(ratio=ratio, rate=100), messages)
    assert [one.origin for one in found] == [f"delay/0/{i}" for i in range(count)]


def test_a_span_links_to_its_producer() -> None:
    """A trace of its own, by the conventions for messaging; start and end are production and commit."""
    exporter = InMemorySpanExporter()
    settings = Settings.of({"bridge": {"id": "orders", "instance": "a"}, "tracing": {"endpoint": "http://collector"}})
    tracing = OpenTelemetry(settings, exporter)
    messages = due_rows([parent(trace(7))])
    deliveries = tracing.chosen(messages, np.ones(1, np.bool_), NOW)
    tracing.delivered(deliveries, NOW, NOW + 12)
    tracing.stop()
    (span,) = exporter.get_finished_spans()
    (link,) = span.links
    assert (f"{link.context.trace_id:032x}", f"{link.context.span_id:016x}") == (trace(7), SPAN)
    assert link.context.is_remote
    assert span.parent is None
    assert (span.name, span.kind) == ("send t0", SpanKind.PRODUCER)
    assert (span.start_time, span.end_time) == (NOW * 1_000_000, (NOW + 12) * 1_000_000)
    assert dict(span.attributes or {}) == {
        "messaging.system": "kafka",
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
        "messaging.destination.name": "t0",
        "delay_bridge.origin": "delay/0/0",
        "delay_bridge.due_ms": NOW - 5,
        "delay_bridge.lateness_ms": 5,
    }
    assert {"service.name": "orders", "service.instance.id": "a"}.items() <= dict(span.resource.attributes).items()
