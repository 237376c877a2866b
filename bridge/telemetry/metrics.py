"""The bridge's metrics for Prometheus, on their own registry.

Events feed counters and histograms. Gauges are not kept: each scrape reads them from a snapshot of the store, so that
they cannot drift from the truth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from bridge import __version__
from bridge.telemetry.counts import Counts
from bridge.telemetry.lateness import LatenessHistogram
from bridge.wire.reasons import RejectReason
from bridge.wire.schedule import Missed

TIME_TO_GO: Final = ("1m", "5m", "1h", "6h", "1d", "7d", "more")
INCIDENTS: Final = ("end in doubt", "id renewed", "delivery waited", "ended unasked")
DURATION_BUCKETS_S: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSnapshot:
    """The state of the store and of ingest at one moment.

    `pending_by_time_to_go`: counts for the buckets of `TIME_TO_GO`, in that order and not cumulative; the first has the
    overdue messages, too. `cancelled_total` counts from the start of the pipeline. `oldest_overdue_s` is 0 without
    overdue messages, `checkpoint_age_s` None before the first checkpoint.
    """

    pending_total: int = 0
    schedules: int = 0
    pending_by_topic: Mapping[str, int] = field(default_factory=dict)
    pending_by_time_to_go: tuple[int, ...] = (0,) * len(TIME_TO_GO)
    oldest_overdue_s: float = 0.0
    ready_rows: int = 0
    ready_rows_bytes: int = 0
    segments: int = 0
    segment_bytes: int = 0
    disk_free_bytes: int | None = None
    disk_full: bool = False
    credentials_refused: bool = False
    disk_bytes: int | None = None
    cancelled_total: int = 0
    tombstones: int = 0
    checkpoint_age_s: float | None = None
    remote_age_s: float | None = None
    """The time for which store.remote has lacked the present index of a partition; None without store.remote."""
    consumer_lag: Mapping[tuple[str, int], int] = field(default_factory=dict)
    retention_headroom_s: Mapping[str, float] = field(default_factory=dict)
    trimmed_partitions: Mapping[str, int] = field(default_factory=dict)
    corrupt_batches: Mapping[tuple[str, int], int] = field(default_factory=dict)
    """The first offset of the corrupt batch, by partition."""
    failing: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """Partitions that take no records now, by target and reason."""
    paused_s: Mapping[str, float] = field(default_factory=dict)
    """The time since the pause began, by target."""
    in_doubt: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """Held partitions of delay topics, by topic and doubt."""
    unmet: Mapping[str, int] = field(default_factory=dict)
    """Failed conditions of a start, by topic."""
    heartbeats: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Seconds since the last heartbeat, and their limit, by thread."""

    def __post_init__(self) -> None:
        if len(self.pending_by_time_to_go) != len(TIME_TO_GO):
            raise ValueError(f"{len(self.pending_by_time_to_go)} buckets of time to go, expected {len(TIME_TO_GO)}")


class Metrics:
    """All metrics of the process. Every scrape calls `snapshot`, which must be cheap and safe from any thread."""

    def __init__(self, snapshot: Callable[[], StoreSnapshot] = StoreSnapshot) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        self.lateness = LatenessHistogram()
        self.registry.register(_Gauges(snapshot))
        self.registry.register(self.lateness)
        # The Python process alone: the JVM is another one. The start time shows restarts.
        ProcessCollector(registry=self.registry)
        version = Gauge("delay_bridge_build_info", "Version, as a label.", ["version"], registry=self.registry)
        version.labels(__version__).set(1)
        self._ingested = self._counter(
            "records_ingested", "Records read from delay topics: messages, cancels, copies and rejects.", "topic"
        )
        self._rejected = self._counter(
            "records_rejected",
            "Records sent to a dead-letter topic; their headers give reason and origin.",
            "reason",
            known=RejectReason,
        )
        self._forwarded = self._counter(
            "cancels_forwarded", "Forwarded cancels without a key, counted once for each other partition."
        )
        self._deferred = self._counter(
            "records_deferred",
            "Overdue messages that overdue.rate has spread over time. Raise the rate if catching up takes too long.",
        )
        self._retried = self._counter(
            "records_retried",
            "Retry copies for targets that fail for now. target_partitions_failing names the target.",
            "reason",
        )
        self._delivered = self._counter("records_delivered", "Messages committed to their targets.", "topic")
        self._rolled = self._counter(
            "records_rolled", "Rolls: copies of messages that are due after their roll window."
        )
        self._ticks = self._counter(
            "ticks_delivered", "Delivered ticks of recurring messages; records_delivered counts them, too."
        )
        self._missed = self._counter(
            "ticks_missed",
            "Occasions when several ticks of a recurring message were due at once, by its delay-missed.",
            "policy",
            known=Missed,
        )
        self._commands = self._counter(
            "commands_answered",
            "Moves, and cancels that ask for an answer, by outcome. answer-dropped: the topic refused the answer.",
            "command",
            "outcome",
        )
        self._early = self._counter(
            "early_deliveries", "Messages sent before their due time. Must stay 0; please report others."
        )
        self.transactions_aborted = self._counter(
            "transactions_aborted", "Transactions that were rolled back and tried again."
        )
        self.producers_rebuilt = self._counter(
            "producer_rebuilds", "Producers replaced because the outcome of a commit was unknown."
        )
        self.incidents = self._counter(
            "transaction_incidents",
            "Transactions whose end is in doubt, and the consequences. ended unasked: a transaction ended before the "
            "bridge asked for its end, and the bridge looks up its messages in their targets. Must stay 0.",
            "incident",
            known=INCIDENTS,
        )
        self.rows_found = self._counter(
            "rows_found", "Messages that a transaction wrote before it ended unasked: they are not written again."
        )
        self.states_rewritten = self._counter(
            "states_rewritten",
            "Committed states of partitions written again, since Kafka held other ones. Must stay 0.",
        )
        self.rebalances = self._counter("rebalances", "Assignment changes applied.")
        self._clock_jumps = self._counter(
            "clock_jumps",
            "Jumps of the wall clock by a second or more. Messages follow the new time.",
            "direction",
            known=("forward", "back"),
        )
        self.logins_failed = self._counter(
            "logins_failed", "Requests to the HTTP ports with a wrong password or token. The log names the client."
        )
        self.clock_steps_refused = self._counter(
            "clock_steps_refused",
            "Backward clock jumps beyond the limit: no message is due until the clock has caught up.",
        )
        self._truncated = self._counter(
            "records_truncated",
            "Acknowledged records that the brokers lost after they were read. Must stay 0; check the brokers.",
            "topic",
        )
        text = (
            "Held partitions of delay topics: they take no rolls or retries, or a dead letter has no topic. "
            "Their messages wait; check the brokers and the dead-letter topics."
        )
        self.partitions_held = Gauge("delay_bridge_partitions_held", text, registry=self.registry)
        self.remote_uploads = self._counter("remote_uploads", "Files of indexes that were written to store.remote.")
        self.remote_bytes = self._counter("remote_bytes", "Bytes of these files.")
        self.remote_failures = self._counter(
            "remote_failures", "Failed attempts to use store.remote. Delivery goes on; the log names the reason."
        )
        self.adoption = self._duration("adoption", "Fetching the index of one partition from store.remote.")
        self.flush = self._duration("flush", "Writing one segment of the TimerLog.")
        self.window = self._duration("window", "Loading one window from the TimerLog into memory.")
        self.compaction = self._duration("compaction", "Rewriting one window of several segments into one.")
        self._transaction = self._duration("transaction", "One transaction, from its first record to its commit.")
        self.batch = self._duration("ingest_batch", "Storing one batch of entries of delay topics.")

    def ingested(self, topic: str, rows: int) -> None:
        self._ingested.labels(topic).inc(rows)

    def committed(self, counts: Counts, seconds: float) -> None:
        """A transaction was committed `seconds` after its beginning. A lateness below 0 counts as early, too."""
        for counter, by_label in (
            (self._delivered, counts.delivered),
            (self._rejected, counts.rejected),
            (self._retried, counts.retried),
            (self._missed, counts.missed),
        ):
            for label, count in by_label.items():
                counter.labels(label).inc(count)
        for labels, count in counts.commands.items():
            self._commands.labels(*labels).inc(count)
        self._rolled.inc(counts.rolled)
        self._deferred.inc(counts.deferred)
        self._ticks.inc(counts.ticks)
        self._forwarded.inc(counts.forwarded)
        for lateness_ms in counts.lateness_ms:
            self._early.inc(int(np.count_nonzero(lateness_ms < 0)))
            self.lateness.observe(lateness_ms)
        self._transaction.observe(seconds)

    def truncated(self, topic: str, records: int) -> None:
        """The brokers have lost this number of acknowledged records of a delay topic."""
        self._truncated.labels(topic).inc(records)

    def clock_jumped(self, jump_ms: int) -> None:
        """The wall clock jumped, forward or (negative) back."""
        self._clock_jumps.labels("forward" if jump_ms > 0 else "back").inc()

    def _counter(self, name: str, text: str, *labels: str, known: Iterable[str] = ()) -> Counter:
        """A counter. The series of the `known` values of its one label begin with 0 at the start: Prometheus sees no
        increase in a series that begins with 1, and no alert would report the first event.
        """
        counter = Counter(f"delay_bridge_{name}", text, labels, registry=self.registry)
        for value in known:
            counter.labels(value)
        return counter

    def _duration(self, name: str, text: str) -> Histogram:
        full = f"delay_bridge_{name}_duration_seconds"
        return Histogram(full, f"{text} Seconds.", buckets=DURATION_BUCKETS_S, registry=self.registry)


class _Gauges(Collector):
    def __init__(self, snapshot: Callable[[], StoreSnapshot]) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        now = self._snapshot()
        yield _gauge("pending_messages", "Messages that wait for their due time.", now.pending_total)
        yield _gauge("recurring_messages", "Recurring messages, including paused ones.", now.schedules)
        text = "Pending messages by target topic: the hundred largest, and (other)."
        yield _gauge("pending_messages_by_topic", text, now.pending_by_topic, "topic")
        text = (
            "Pending messages by the time until their delivery or, for delays beyond roll.window, their next roll: "
            "up to the label, beyond the previous one."
        )
        by_time = dict(zip(TIME_TO_GO, now.pending_by_time_to_go, strict=True))
        yield _gauge("pending_messages_by_time_to_go", text, by_time, "within")
        text = (
            "Waiting time of the oldest due message: since its due time, or since it was written if that is later. "
            "Rises when targets or brokers do not take writes."
        )
        yield _gauge("oldest_overdue_seconds", text, now.oldest_overdue_s)
        text = "Unread records of a delay topic. Rises when ingest is slower than producers, or stopped."
        yield _gauge("consumer_lag_records", text, now.consumer_lag, "topic", "partition")
        text = (
            "Partitions of targets that take no records now: their messages are retried, and then become dead letters. "
            "unknown-target: create the topic; target-denied: grant WRITE; target-unavailable: check its brokers. "
            "Topics that no broker knows count together, as (unknown)."
        )
        yield _gauge("target_partitions_failing", text, now.failing, "topic", "reason")
        text = "Time since an operator paused a target: its messages wait until `delay-bridge targets resume`."
        yield _gauge("target_paused_seconds", text, now.paused_s, "topic")
        text = (
            "Time for which a delay topic keeps records after their last use: retention less roll window, lag and "
            "lateness. Below 0 it may delete pending messages: raise retention.ms, or lower roll.window."
        )
        yield _gauge("retention_headroom_seconds", text, now.retention_headroom_s, "topic")
        text = (
            "Partitions of a delay topic in which Kafka has deleted records of pending messages: only store.directory "
            "has these messages. Must stay 0; raise retention.ms, and do not lose the directory."
        )
        yield _gauge("trimmed_partitions", text, now.trimmed_partitions, "topic")
        text = (
            "First offset of a corrupt batch, which holds up its partition of a delay topic: reading goes on after "
            "a broker has repaired the batch, or an operator has skipped it. Absent without a corrupt batch."
        )
        yield _gauge("corrupt_batch_offset", text, now.corrupt_batches, "topic", "partition")
        text = (
            "Partitions of delay topics that are held, since their records may have changed: replaced, missing, "
            "records-deleted, truncated, refused, no-answer. The log says more; other partitions are delivered."
        )
        yield _gauge("partitions_in_doubt", text, now.in_doubt, "topic", "doubt")
        text = (
            "Failed conditions of a start, by topic: the next start will be refused. The log and delay-bridge check "
            "name the remedy."
        )
        yield _gauge("conditions_refused", text, now.unmet, "about")
        text = "Time since the last heartbeat of a thread. Beyond thread_heartbeat_budget_seconds it hangs: restart."
        ages = {thread: age_s for thread, (age_s, _) in now.heartbeats.items()}
        yield _gauge("thread_heartbeat_age_seconds", text, ages, "thread")
        text = "Longest time between two heartbeats of a thread; longer during long operations."
        budgets = {thread: budget_s for thread, (_, budget_s) in now.heartbeats.items()}
        yield _gauge("thread_heartbeat_budget_seconds", text, budgets, "thread")
        yield _gauge("ready_messages", "Messages in memory, ready for delivery.", now.ready_rows)
        text = "Memory of the messages ready for delivery; limited by ready_rows.bytes."
        yield _gauge("ready_rows_bytes", text, now.ready_rows_bytes)
        yield _gauge("segments", "Segments of the TimerLog on disk.", now.segments)
        yield _gauge("segment_bytes", "Size of the segments on disk.", now.segment_bytes)
        text = "1 while a segment waits for room on the disk: delivery goes on, ingest stops when memory is full."
        yield _gauge("disk_full", text, now.disk_full)
        text = "1 while replaced certificates or passwords are unusable: the old ones stay in force until they expire."
        yield _gauge("credentials_refused", text, now.credentials_refused)
        if now.disk_free_bytes is not None and now.disk_bytes is not None:
            text = "Room on the file system of store.directory. When it is full, ingest waits; delivery goes on."
            yield _gauge("disk_free_bytes", text, now.disk_free_bytes)
            yield _gauge("disk_size_bytes", "Size of the file system of store.directory.", now.disk_bytes)
        text = "Pending messages that a cancel or replace has finished."
        yield CounterMetricFamily("delay_bridge_records_cancelled", text, value=now.cancelled_total)
        text = "Cancels that are kept because a copy of the cancelled message may still be read."
        yield _gauge("tombstone_records", text, now.tombstones)
        if now.checkpoint_age_s is not None:
            text = "Age of the local checkpoint: a restart reads again from there. Normally about store.flush_interval."
            yield _gauge("checkpoint_age_seconds", text, now.checkpoint_age_s)
        if now.remote_age_s is not None:
            text = (
                "Time for which no committed manifest on store.remote has had the present index of a partition, at "
                "worst: an instance without a disk reads again from there. Normally below twice store.flush_interval."
            )
            yield _gauge("remote_manifest_age_seconds", text, now.remote_age_s)

    def describe(self) -> Iterable[Metric]:
        """No metrics: the registration must not ask for a snapshot."""
        return []


def _gauge(name: str, text: str, value: float | Mapping[Any, float], *labels: str) -> Metric:
    """A gauge. A mapping has the numbers by the value of the one label, or by a tuple of the labels' values."""
    family = GaugeMetricFamily(f"delay_bridge_{name}", text, labels=labels)
    for key, number in value.items() if isinstance(value, Mapping) else (((), value),):
        family.add_metric([str(part) for part in (key if isinstance(key, tuple) else (key,))], number)
    return family
