"""The dispatcher with all its parts, as the settings say."""

from __future__ import annotations

from collections.abc import Callable

from bridge.delivery.dispatcher import Dispatcher
from bridge.delivery.plan.backoff import RetryPolicy
from bridge.delivery.plan.overdue import OverduePolicy
from bridge.delivery.plan.planner import Planner
from bridge.delivery.plan.record_size import SizeLimits
from bridge.delivery.plan.spans import OpenTelemetry
from bridge.delivery.producer.acknowledged import AcknowledgedWriter
from bridge.delivery.producer.transaction_markers import MarkerRepair
from bridge.delivery.producer.transactional import TransactionalWriter
from bridge.delivery.producer.writer import Writer
from bridge.delivery.targets.cache import Targets
from bridge.errors import BridgeError
from bridge.kafka.membership import Ownership
from bridge.settings.clients import librdkafka
from bridge.settings.model import Settings
from bridge.telemetry.metrics import Metrics
from timerstore.clock import Clock


def make_dispatcher(
    settings: Settings,
    ownership: Ownership,
    targets: Targets,
    tracer: OpenTelemetry | None,
    *,
    clock: Clock,
    metrics: Metrics,
    on_fatal: Callable[[BridgeError], None],
    repair: MarkerRepair,
    beat: Callable[[], None],
) -> Dispatcher:
    """A dispatcher that delivers as a member of the group; `beat` is its thread's."""
    return Dispatcher(
        writer=_writer(settings, ownership, clock, repair),
        planner=_planner(settings, targets, tracer),
        targets=targets,
        membership=ownership.membership,
        read_committed=lambda partitions: ownership.read_committed_states(partitions),
        clock=clock,
        metrics=metrics,
        on_fatal=on_fatal,
        commit_interval_ms=settings.delivery.commit_interval,
        transaction_rows=settings.delivery.transaction_rows,
        budgets=settings.budgets,
        beat=beat,
    )


def _planner(settings: Settings, targets: Targets, tracer: OpenTelemetry | None) -> Planner:
    properties = librdkafka(settings, "producer")
    return Planner(
        targets=targets,
        permitted=settings.target_permitted,
        default_targets={name: topic.target for name, topic in settings.delay_topics.items()},
        dead_letter_topics={name: settings.dead_letter_topic(name) for name in settings.delay_topics},
        retry=RetryPolicy(
            attempts=settings.delivery.retry.attempts,
            backoff_ms=settings.delivery.retry.backoff,
            backoff_max_ms=settings.delivery.retry.backoff_max,
        ),
        limits=SizeLimits(
            record_bytes_max=int(properties.get("message.max.bytes", 1_000_000)),
            batch_bytes_max=int(properties.get("batch.size", 1_000_000)),
            compressed=str(properties.get("compression.type", "none")) != "none",
        ),
        overdue=OverduePolicy(
            give_up_ms=settings.overdue.older_than if settings.overdue.policy == "dead-letter" else None,
            rate=settings.overdue.rate,
        ),
        partitioner=str(properties["partitioner"]),
        tracer=tracer,
    )


def _writer(settings: Settings, ownership: Ownership, clock: Clock, repair: MarkerRepair) -> Writer:
    properties = librdkafka(settings, "producer")
    if settings.delivery.mode == "at-least-once":
        return AcknowledgedWriter(properties, clock, ownership.commit_offsets, budgets=settings.budgets)
    return TransactionalWriter(properties, clock, budgets=settings.budgets, repair=repair)
