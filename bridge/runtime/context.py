"""The parts of the bridge that outlive a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bridge.delivery.dispatcher import Dispatcher
from bridge.errors import BridgeError
from bridge.kafka.admin import Cluster
from bridge.kafka.membership import Ownership
from bridge.settings.model import Settings
from bridge.start.first_commits import StartPlan
from bridge.start.identity_watch import IdentityWatch
from bridge.telemetry.health import Health
from bridge.telemetry.heartbeats import Beat, Heartbeats, unwatched
from bridge.telemetry.metrics import Metrics
from timerstore.clock import Clock

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from bridge.remote.remote import Remote


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineContext:
    """The parts that outlive a pipeline and serve each one."""

    settings: Settings
    clock: Clock
    cluster: Cluster
    spark: Future[SparkSession]
    make_session: Callable[[], SparkSession]
    ownership: Ownership
    dispatcher: Dispatcher
    metrics: Metrics
    health: Health
    hearts: Heartbeats
    on_fatal: Callable[[BridgeError], None]
    on_rebuild: Callable[[], None]
    on_held: Callable[[], None]
    """Called when the partitions to deliver have changed, or one must come again."""
    identity: IdentityWatch
    beat: Beat = unwatched
    """The heartbeat of the thread that starts a pipeline."""
    on_plan: Callable[[StartPlan], None] = lambda _: None
    """Called before the first delivery from its partitions."""
    remote: Remote | None = None
    """The index on shared storage."""
