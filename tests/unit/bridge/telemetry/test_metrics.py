"""bridge.metrics: gauges that cannot drift, and a histogram that costs nothing per message."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from bridge.delivery.producer.outcomes import Incident
from bridge.runtime.gauges import largest
from bridge.telemetry.counts import Counts
from bridge.telemetry.lateness import LATENESS_BUCKETS_MS
from bridge.telemetry.metrics import INCIDENTS, TIME_TO_GO, Metrics, StoreSnapshot
from bridge.wire.reasons import RejectReason


def samples(metrics: Metrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """(name, labels) -> value, as Prometheus reads them."""
    families = text_string_to_metric_families(generate_latest(metrics.registry).decode())
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def value(metrics: Metrics, name: str, **labels: str) -> float:
    return samples(metrics)[f"delay_bridge_{name}", frozenset(labels.items())]


def test_incidents_are_there_from_the_start() -> None:
    """An alert tells of the first one, since the series does not begin with it."""
    metrics = Metrics()
    assert {each.value for each in Incident} == set(INCIDENTS)
    metrics.incidents.labels(Incident.ENDED_UNASKED.value).inc()
    counts = {kind: value(metrics, "transaction_incidents_total", incident=kind) for kind in INCIDENTS}
    assert counts == {**dict.fromkeys(INCIDENTS, 0.0), "ended unasked": 1.0}


def test_gauges_are_read_from_the_snapshot_at_every_scrape() -> None:
    """Nothing is incremented and decremented: pending can neither drift nor go negative (RocketMQ #7381, #7979)."""
    current = StoreSnapshot()
    metrics = Metrics(lambda: current)
    assert value(metrics, "pending_messages") == 0
    current = StoreSnapshot(
        pending_total=5,
        pending_by_topic={"orders": 5},
        pending_by_time_to_go=(1, 0, 4, 0, 0, 0, 0),
        oldest_overdue_s=1.5,
        ready_rows=2,
        ready_rows_bytes=300,
        segments=4,
        segment_bytes=1000,
        disk_free_bytes=70,
        disk_bytes=100,
        cancelled_total=8,
        tombstones=9,
        checkpoint_age_s=12.0,
        consumer_lag={("delay", 0): 7, ("delay", 1): 0},
        failing={("orders", "target-denied"): 3},
    )
    assert value(metrics, "pending_messages") == 5
    assert value(metrics, "pending_messages_by_topic", topic="orders") == 5
    assert [value(metrics, "pending_messages_by_time_to_go", within=w) for w in TIME_TO_GO] == [1, 0, 4, 0, 0, 0, 0]
    assert value(metrics, "oldest_overdue_seconds") == 1.5
    assert (value(metrics, "ready_messages"), value(metrics, "ready_rows_bytes")) == (2, 300)
    assert (value(metrics, "segments"), value(metrics, "segment_bytes")) == (4, 1000)
    assert (value(metrics, "disk_free_bytes"), value(metrics, "disk_size_bytes")) == (70, 100)
    assert (value(metrics, "records_cancelled_total"), value(metrics, "tombstone_records")) == (8, 9)
    assert value(metrics, "checkpoint_age_seconds") == 12
    assert value(metrics, "consumer_lag_records", topic="delay", partition="0") == 7
    assert value(metrics, "target_partitions_failing", topic="orders", reason="target-denied") == 3


def test_pending_messages_are_told_of_a_hundred_topics_and_of_the_others_together() -> None:
    """Those with most of them: who makes up names does not hide the topics that matter."""
    made_up = {f"made-up-{i}": 1 for i in range(1_000)}
    told = largest({**made_up, "(other)": 5, "orders": 70})
    assert len(told) == 101 and told["orders"] == 70
    assert told["(other)"] == 5 + 1_000 - 99
    assert largest({"orders": 1}) == {"orders": 1}


def test_a_snapshot_with_the_wrong_number_of_buckets_is_refused() -> None:
    """A count under a wrong label would be a lie that nobody notices."""
    with pytest.raises(ValueError, match="buckets"):
        StoreSnapshot(pending_by_time_to_go=(1, 2))


def test_counters() -> None:
    """Ingested by delay topic, rejected and retried by reason, delivered by real topic, and what else is committed."""
    metrics = Metrics()
    metrics.ingested("delay", 10)
    counts = Counts(rejected=Counter({"no-time": 2}), retried=Counter({"target-denied": 4}), rolled=5, forwarded=3)
    counts += Counts(delivered=Counter(orders=7), deferred=6)
    metrics.committed(counts, 0.1)
    metrics.committed(Counts(delivered=Counter(orders=1)), 0.1)
    metrics.transactions_aborted.inc()
    metrics.producers_rebuilt.inc()
    metrics.rebalances.inc()
    assert value(metrics, "records_ingested_total", topic="delay") == 10
    assert value(metrics, "records_rejected_total", reason="no-time") == 2
    assert value(metrics, "records_delivered_total", topic="orders") == 8
    assert value(metrics, "records_retried_total", reason="target-denied") == 4
    assert value(metrics, "records_rolled_total") == 5
    assert value(metrics, "records_deferred_total") == 6
    assert value(metrics, "cancels_forwarded_total") == 3
    for name in ("transactions_aborted", "producer_rebuilds", "rebalances"):
        assert value(metrics, f"{name}_total") == 1
    assert value(metrics, "early_deliveries_total") == 0


def test_the_first_of_a_kind_is_an_increase() -> None:
    """Prometheus sees none where a series begins with 1: what alerts count is there with 0 before it happens."""
    metrics = Metrics()
    for reason in RejectReason:
        assert value(metrics, "records_rejected_total", reason=reason) == 0
    for direction in ("forward", "back"):
        assert value(metrics, "clock_jumps_total", direction=direction) == 0


def test_durations() -> None:
    """Flush, window, transaction and ingest, in seconds."""
    metrics = Metrics()
    observers: dict[str, Callable[[float], None]] = {
        "flush": metrics.flush.observe,
        "window": metrics.window.observe,
        "transaction": lambda seconds: metrics.committed(Counts(), seconds),
        "ingest_batch": metrics.batch.observe,
    }
    for name, observe in observers.items():
        observe(0.25)
        assert value(metrics, f"{name}_duration_seconds_count") == 1
        assert value(metrics, f"{name}_duration_seconds_sum") == 0.25


def test_lateness_falls_into_the_bucket_that_contains_it() -> None:
    """Upper edges are inclusive, buckets cumulative, sum and count exact; the edges go from 1 ms to 1 h."""
    assert (LATENESS_BUCKETS_MS[0], LATENESS_BUCKETS_MS[-1]) == (1, 3_600_000)
    metrics = Metrics()
    observed = np.array([0, 1, 2, 3, 5, 6, 3_600_000, 3_600_001], dtype=np.int64)
    metrics.committed(Counts(lateness_ms=[observed[:3], observed[3:]]), 0.1)
    for edge in LATENESS_BUCKETS_MS:
        expected = int((observed <= edge).sum())
        assert value(metrics, "lateness_seconds_bucket", le=f"{edge / 1000!r}") == expected
    assert value(metrics, "lateness_seconds_bucket", le="+Inf") == 8
    assert value(metrics, "lateness_seconds_count") == 8
    assert value(metrics, "lateness_seconds_sum") == observed.sum() / 1000


def test_a_negative_lateness_counts_as_early() -> None:
    """The one number that must stay 0 is counted where the lateness is known."""
    metrics = Metrics()
    metrics.committed(Counts(lateness_ms=[np.array([-1, 0, 4, -20], dtype=np.int64)]), 0.1)
    assert value(metrics, "early_deliveries_total") == 2
    assert value(metrics, "lateness_seconds_count") == 4


def test_an_empty_transaction_may_be_observed() -> None:
    """Idle transactions move O and deliver nothing."""
    metrics = Metrics()
    metrics.committed(Counts(lateness_ms=[np.array([], dtype=np.int64)]), 0.1)
    assert value(metrics, "lateness_seconds_count") == 0


def test_observing_a_thousand_rows_costs_microseconds() -> None:
    """It runs in the dispatcher's loop; prometheus_client's own histogram would take a millisecond."""
    metrics = Metrics()
    rows = np.random.default_rng(0).integers(0, 4_000_000, 1000)
    metrics.committed(Counts(lateness_ms=[rows]), 0.1)
    best = min(_timed(metrics, rows) for _ in range(20))
    assert best < 0.0005


def _timed(metrics: Metrics, rows: np.ndarray[tuple[int], np.dtype[np.int64]]) -> float:
    started = time.perf_counter()
    metrics.committed(Counts(lateness_ms=[rows]), 0.1)
    return time.perf_counter() - started


def test_names_follow_the_conventions() -> None:
    """One prefix, base units, _total on counters, and a HELP text that says something."""
    families = list(text_string_to_metric_families(generate_latest(Metrics().registry).decode()))
    flags = ("_full", "_refused", "_offset")
    units = (
        "_seconds",
        "_bytes",
        "_messages",
        "_records",
        "_segments",
        "_partitions",
        "_created",
        "_info",
        "_offset",
        *flags,
    )
    for family in families:
        if family.name.startswith("process_"):  # Prometheus's own names for every program
            continue
        assert family.name.startswith("delay_bridge_")
        assert len(family.documentation) > 10, family.name
        assert "_ms" not in family.name
        if family.type == "histogram":
            assert family.name.endswith("_seconds")
        if family.type == "gauge":
            assert any(unit in family.name for unit in units), family.name
