"""Factories for the parts of the bridge, from its settings."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Final

import structlog

from bridge import __version__
from bridge.api.listener import Listener
from bridge.api.source import NotOwnedError, Order, Source
from bridge.dead_letters.reading import make_consumer
from bridge.delivery.commands_first import CommandsFirst
from bridge.delivery.doubt.doubt_file import DoubtFile
from bridge.delivery.doubt.doubts import Doubts, look_up_in_thread
from bridge.delivery.doubt.look_up import LookUp
from bridge.delivery.doubt.torn_states import TornStates
from bridge.delivery.plan.backoff import RetryPolicy
from bridge.delivery.plan.overdue import OverduePolicy
from bridge.delivery.plan.planner import Planner
from bridge.delivery.plan.record_size import SizeLimits
from bridge.delivery.plan.spans import OpenTelemetry
from bridge.delivery.plan.ticks import ScheduleLimits
from bridge.delivery.producer.acknowledged import AcknowledgedWriter
from bridge.delivery.producer.outcomes import Incident
from bridge.delivery.producer.transaction_markers import MarkerRepair
from bridge.delivery.producer.transactional import TransactionalWriter
from bridge.delivery.producer.writer import Writer
from bridge.delivery.resuming import LOOK_S, Named, Resuming
from bridge.delivery.targets.cache import Targets
from bridge.delivery.targets.look_up import TargetLookUp
from bridge.delivery.targets.pauses import Pauses
from bridge.http.management import ManagementServer
from bridge.http.protection import Protection
from bridge.ingest.batches.choices import ENDS, Choices
from bridge.ingest.batches.reader import BatchReader
from bridge.ingest.batches.reading_mark import LOOKED_UP, ReadingMark
from bridge.install import connector
from bridge.kafka.admin import Cluster
from bridge.kafka.membership import Ownership
from bridge.runtime.command_sender import CommandSender
from bridge.runtime.context import PipelineContext
from bridge.runtime.pipeline import Pipeline
from bridge.settings.clients import librdkafka
from bridge.settings.model import Settings
from bridge.spark import session as spark
from bridge.spark.transactions import coordinators
from bridge.start.facts import states_of_others
from bridge.start.first_commits import StartPlan
from bridge.stores.names import SourceName
from bridge.stores.stores import Stores
from bridge.telemetry.health import Health
from bridge.telemetry.heartbeats import CALLS_S, Heartbeats, Repeating
from bridge.telemetry.heartbeats import LOOK_S as ANSWER_S
from bridge.telemetry.metrics import Metrics
from bridge.wire.answers import Answer
from bridge.wire.committed_state import CommittedState
from bridge.wire.headers import AS_DUE_MS
from timerstore.clock import Clock

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from bridge.remote.remote import Remote

ANY_ADDRESS: Final = ("0.0.0.0", "::", "")
COMPRESSION: Final = ("compression.type", "compression.codec")
"""Two names of one property: users may set either."""

log = structlog.get_logger("bridge.runtime.wiring")


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
            compressed=any(str(properties.get(name, "none")) != "none" for name in COMPRESSION),
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


def make_targets(settings: Settings, clock: Clock, hearts: Heartbeats, pauses: Pauses) -> Targets:
    look_up = TargetLookUp(librdkafka(settings, "admin"), settings.budgets.look_up_s)
    return Targets(look_up, clock, hearts.watch("targets", CALLS_S), pauses)


def make_pauses(settings: Settings, clock: Clock) -> Pauses:
    own = {*settings.delay_topics, *map(settings.dead_letter_topic, settings.delay_topics)}
    defaults = {name: topic.target for name, topic in settings.delay_topics.items()}
    return Pauses(clock, own, defaults, settings.store.directory)


def plan_reader(pauses: Pauses, planner: Planner) -> Callable[[StartPlan], None]:
    """Passes the start plan's facts about the delay topics to the parts of delivery."""

    def read(plan: StartPlan) -> None:
        pauses.learn(plan.pauses)
        planner.windows_ms |= {topic: windows.current_ms for topic, windows in plan.windows.items()}

    return read


def make_resuming(
    context: PipelineContext,
    pauses: Pauses,
    commands: CommandSender,
    pipeline: Callable[[], Pipeline | None],
) -> Repeating:
    """The thread that brings messages forward after a pause of their target."""
    settings, cluster = context.settings, context.cluster

    def store() -> Stores | None:
        running = pipeline()
        return None if running is None or context.health.phase.name != "running" else running.store

    def read(partitions: Collection[SourceName]) -> Iterator[CommittedState]:
        return (state for _, state in states_of_others(cluster, settings.group_id, partitions))

    def bring(named: Named) -> Sequence[Future[Sequence[Answer]]] | None:
        try:
            return commands.send([Order(source, (origin,), AS_DUE_MS) for source, origin in named])
        except NotOwnedError:
            return None

    resuming = Resuming(
        pauses=pauses,
        store=store,
        bring=bring,
        read=read,
        log_ends=partial(log_ends, cluster),
        clock=context.clock,
        rate=settings.delivery.resume_rate,
    )
    return Repeating("resuming", resuming.look, context.hearts.watch("resuming", CALLS_S), LOOK_S)


def make_repair(settings: Settings) -> MarkerRepair:
    return MarkerRepair(settings, coordinators(settings, connector.jars))


def make_writer(
    settings: Settings, ownership: Ownership, clock: Clock, repair: MarkerRepair, metrics: Metrics
) -> Writer:
    properties = librdkafka(settings, "producer")
    if settings.delivery.mode == "at-least-once":
        return AcknowledgedWriter(properties, clock, ownership.commit_offsets, budgets=settings.budgets)

    def on_incident(incident: Incident) -> None:
        metrics.incidents.labels(incident.value).inc()

    return TransactionalWriter(properties, clock, budgets=settings.budgets, repair=repair, on_incident=on_incident)


def make_doubts(settings: Settings, cluster: Cluster, clock: Clock, metrics: Metrics, hearts: Heartbeats) -> Doubts:
    """The look-up of transactions that ended unasked."""
    return Doubts(
        read=LookUp(
            cluster,
            partial(make_consumer, settings),
            clock,
            ReadingMark(settings.store.directory, LOOKED_UP),
            BatchReader.of(settings, connector.jars).read,
        ),
        choices=Choices(settings.store.directory, ENDS),
        letter_topics={settings.dead_letter_topic(name) for name in settings.delay_topics},
        file=DoubtFile(settings.store.directory),
        torn=TornStates(settings.store.directory),
        clock=clock,
        metrics=metrics,
        run=partial(look_up_in_thread, hearts),
    )


def make_remote(settings: Settings, clock: Clock, metrics: Metrics) -> Remote | None:
    """The index on shared storage, if configured. Its client takes a while to load. Raises ConfigurationError."""
    if settings.store.remote is None:
        return None
    from bridge.remote.remote import Remote

    return Remote(settings.store.remote, settings, clock, metrics)


def make_sender(settings: Settings, ownership: Ownership, clock: Clock) -> CommandSender:
    return CommandSender(
        librdkafka(settings, "producer"),
        owned=lambda: ownership.membership().partitions,
        delay_max_ms=settings.delay.max,
        clock=clock,
    )


def make_management(settings: Settings, health: Health, metrics: Metrics) -> ManagementServer:
    """The server of the management port."""
    http = settings.http
    server = ManagementServer(
        http.host, http.port, health=health, registry=metrics.registry,
        protection=Protection.of(http, metrics.logins_failed.inc),
    )  # fmt: skip
    log.info("management-port", host=http.host, port=server.port)
    return server


def make_api(
    settings: Settings, answers: Source, metrics: Metrics, hearts: Heartbeats
) -> AbstractContextManager[object]:
    """The API's listener, if enabled."""
    http = settings.http
    if http.api == "off":
        return nullcontext()
    listener = Listener(
        http.host, http.api_port, source=answers, protection=Protection.of(http, metrics.logins_failed.inc),
        show_payloads=http.show_payloads, is_writable=http.api == "write", peers=http.peers,
        instance=settings.group_instance_id,
        base_path=http.base_path.rstrip("/"),
        beat=hearts.watch("api", ANSWER_S),
    )  # fmt: skip
    scheme = "http" if http.certificate_file is None else "https"
    host = settings.bridge.instance if http.host in ANY_ADDRESS else http.host
    log.info("api-port", host=http.host, port=listener.port, page=f"{scheme}://{host}:{listener.port}/")
    return listener


def introduce(settings: Settings, cluster: Cluster) -> None:
    """Log one line with the identity of this bridge."""
    description, bridge = cluster.describe(), settings.bridge
    log.info(
        "introduction", version=__version__, id=bridge.id, instance=bridge.instance, cluster=description.cluster_id,
        brokers=description.brokers, delay_topics=sorted(settings.delay_topics), mode=settings.delivery.mode,
    )  # fmt: skip


def session_maker(settings: Settings, cluster: Cluster) -> Callable[[], SparkSession]:
    """A factory for Spark's session. It takes seconds, and only the query waits for it."""
    jars = connector.jars()
    partitions = sum(topic.partitions for topic in cluster.topics(sorted(settings.delay_topics)).values())
    return lambda: spark.start(settings, jars, partitions)


def log_ends(cluster: Cluster, names: Collection[SourceName]) -> dict[SourceName, int]:
    """The ends of these logs, except those without a leader. Raises EnvironmentFailure."""
    return {name: mark.end for name, mark in cluster.watermarks(sorted(names), of_all=False).items()}


def make_commands_first(settings: Settings, cluster: Cluster, clock: Clock) -> CommandsFirst:
    """The wait of messages for earlier commands after a start, from the settings."""
    return CommandsFirst(clock, settings.start.read_commands / 1000, partial(log_ends, cluster))
