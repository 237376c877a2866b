"""How the harness recognises that the bridge is ready, and reads its metrics."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from dev.harness.bridge import READY, _samples


@pytest.mark.parametrize(
    ("line", "ready"),
    [
        ('{"event": "ready", "logger": "bridge.runtime.app"}', True),
        ("2026-01-01T00:00:00Z [info] ready   pending=0", True),
        ('{"event": "producer-not-ready"}', False),
        ("already there", False),
        ("GET /readyz", False),
    ],
)
def test_ready_is_a_word_of_its_own(line: str, ready: bool) -> None:
    """Other events whose names contain the word do not count."""
    assert bool(READY.search(line)) is ready


def test_samples_are_read_as_prometheus_writes_them() -> None:
    """Names without the prefix, labels by name, values of any kind."""
    registry = CollectorRegistry()
    Gauge("delay_bridge_pending", "How many.", registry=registry).set(3)
    Gauge("up", "No label, no prefix.", registry=registry).set(float("inf"))
    told = Counter("delay_bridge_told", "Labels.", ["topic", "reason"], registry=registry)
    told.labels(topic='a "b}" c\\n\n', reason="x, y").inc(2)
    Histogram("delay_bridge_s", "Buckets.", buckets=[1], registry=registry).observe(0.5)
    found = {(name, labels): value for name, labels, value in _samples(generate_latest(registry).decode())}
    assert {key: value for key, value in found.items() if "created" not in key[0]} == {
        ("pending", ""): 3,
        ("up", ""): float("inf"),
        ("told_total", 'reason="x, y",topic="a "b}" c\\n\n"'): 2,
        ("s_bucket", 'le="1.0"'): 1,
        ("s_bucket", 'le="+Inf"'): 1,
        ("s_count", ""): 1,
        ("s_sum", ""): 0.5,
    }
