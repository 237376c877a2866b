"""The dispatcher's parts, as the settings say."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future

from bridge.api.source import NotOwnedError, Order
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
from bridge.delivery.resuming import LOOK_S, Named, Resuming
from bridge.delivery.targets.cache import Targets
from bridge.delivery.targets.pauses import Pauses
from bridge.kafka.membership import Ownership
from bridge.runtime.command_sender import CommandSender
from bridge.runtime.pipeline import Pipeline, PipelineContext
from bridge.settings.clients import librdkafka
from bridge.settings.model import Settings
from bridge.start.first_commits import StartPlan
from bridge.telemetry.heartbeats import CALLS_S, Repeating
from bridge.wire.answers import Answer
from bridge.wire.committed_state import CommittedState, decode_metadata
from bridge.wire.headers import AS_DUE_MS
from timerstore.clock import Clock
from timerstore.rows.sources import SourceName
from timerstore.store import TimerStore


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


def make_pauses(settings: Settings, clock: Clock) -> Pauses:
    own = {*settings.delay_topics, *map(settings.dead_letter_topic, settings.delay_topics)}
    defaults = {name: topic.target for name, topic in settings.delay_topics.items()}
    return Pauses(clock, own, defaults, settings.store.directory)


def plan_reader(pauses: Pauses, planner: Planner) -> Callable[[StartPlan], None]:
    """Tells the parts of delivery what the plan of a start knows of the delay topics."""

    def read(plan: StartPlan) -> None:
        pauses.learn(plan.pauses)
        planner.windows_ms |= {topic: windows.current_ms for topic, windows in plan.windows.items()}

    return read


def make_resuming(
    context: PipelineContext,
    pauses: Pauses,
    commands: CommandSender,
    planner: Planner,
    pipeline: Callable[[], Pipeline | None],
) -> Repeating:
    """The thread that brings forward what pauses of targets have put off."""
    settings, cluster = context.settings, context.cluster

    def store() -> TimerStore | None:
        found = pipeline()
        return None if found is None or context.health.phase.name != "running" else found.store

    def read(partitions: Collection[SourceName]) -> Iterator[CommittedState]:
        for name, (offset, metadata) in cluster.committed(settings.group_id, partitions).items():
            yield decode_metadata(name, offset, metadata)

    def bring(named: Named) -> Sequence[Future[Sequence[Answer]]] | None:
        try:
            return commands.send([Order(source, origins, AS_DUE_MS) for source, origins in named])
        except NotOwnedError:
            return None

    resuming = Resuming(
        pauses=pauses,
        store=store,
        bring=bring,
        read=read,
        window_ms=lambda: max(planner.windows_ms.values(), default=0),
        clock=context.clock,
        rate=settings.delivery.resume_rate,
    )
    return Repeating("resuming", resuming.look, context.hearts.watch("resuming", CALLS_S), LOOK_S)


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
