"""The dispatcher's parts, as the settings say."""

from __future__ import annotations

from bridge.delivery.plan.backoff import RetryPolicy
from bridge.delivery.plan.overdue import OverduePolicy
from bridge.delivery.plan.planner import Planner
from bridge.delivery.plan.record_size import SizeLimits
from bridge.delivery.plan.spans import OpenTelemetry
from bridge.delivery.plan.ticks import ScheduleLimits
from bridge.delivery.producer.acknowledged import AcknowledgedWriter
from bridge.delivery.producer.transaction_markers import MarkerRepair
from bridge.delivery.producer.transactional import TransactionalWriter
from bridge.delivery.producer.writer import Writer
from bridge.delivery.targets.cache import Targets
from bridge.kafka.membership import Ownership
from bridge.runtime.command_sender import CommandSender
from bridge.settings.clients import librdkafka
from bridge.settings.model import Settings
from timerstore.clock import Clock


def make_planner(settings: Settings, targets: Targets, tracer: OpenTelemetry | None) -> Planner:
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
        schedules=ScheduleLimits(
            every_min_ms=settings.limits.every_min,
            delay_max_ms=settings.delay.max,
            is_exact=settings.delivery.mode == "exactly-once",
        ),
        overdue=OverduePolicy(
            give_up_ms=settings.overdue.older_than if settings.overdue.policy == "dead-letter" else None,
            rate=settings.overdue.rate,
        ),
        partitioner=str(properties["partitioner"]),
        tracer=tracer,
    )


def make_writer(settings: Settings, ownership: Ownership, clock: Clock, repair: MarkerRepair) -> Writer:
    properties = librdkafka(settings, "producer")
    if settings.delivery.mode == "at-least-once":
        return AcknowledgedWriter(properties, clock, ownership.commit_offsets, budgets=settings.budgets)
    return TransactionalWriter(properties, clock, budgets=settings.budgets, repair=repair)


def make_sender(settings: Settings, ownership: Ownership, clock: Clock) -> CommandSender:
    return CommandSender(
        librdkafka(settings, "producer"),
        owned=lambda: ownership.membership().partitions,
        delay_max_ms=settings.delay.max,
        clock=clock,
    )
