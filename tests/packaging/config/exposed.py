"""The bridge's metrics after each event has happened once: names of samples, and their labels."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable
from functools import cache

from bridge.telemetry.counts import Counts
from bridge.telemetry.metrics import Metrics, StoreSnapshot


@cache
def _samples() -> dict[str, frozenset[str]]:
    # A gauge without a known value, or with labels, is exposed only with a value.
    known = {field.name: 1 for field in dataclasses.fields(StoreSnapshot) if field.default is None}
    metrics = Metrics(
        lambda: StoreSnapshot(
            consumer_lag={("delay", 0): 1},
            pending_by_topic={"orders": 1},
            failing={("orders", "target-denied"): 1},
            paused_s={"orders": 1.0},
            retention_headroom_s={"delay": 1.0},
            trimmed_partitions={"delay": 1},
            corrupt_batches={("delay", 0): 1},
            in_doubt={("delay", "replaced"): 1},
            unmet={"delay topic delay": 1},
            heartbeats={"main": (1.0, 2.0)},
            **known,  # type: ignore[arg-type]
        )
    )
    metrics.ingested("delay", 1)
    rejected, retried = Counter(["no-time"]), Counter(["target-denied"])
    metrics.committed(Counts(rejected=rejected, retried=retried, delivered=Counter(["orders"])), 0.1)
    metrics.clock_jumped(-1)
    metrics.truncated("delay", 1)
    return {s.name: frozenset(s.labels) for family in metrics.registry.collect() for s in family.samples}


def exposed() -> frozenset[str]:
    """Names of samples: counters with `_total`, histograms with `_bucket`, `_sum` and `_count`."""
    return frozenset(_samples())


def labels(names: Iterable[str]) -> frozenset[str]:
    """All labels of these samples."""
    return frozenset(label for name in names for label in _samples()[re.sub(r"\W", "", name)])
