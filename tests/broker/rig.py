"""A dispatcher with everything around it, on a real broker and a real store, which a test fills."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Self, cast

from confluent_kafka import Producer

from bridge.delivery.dispatcher import Dispatcher
from bridge.delivery.plan.backoff import RetryPolicy
from bridge.delivery.plan.overdue import OverduePolicy
from bridge.delivery.plan.planner import Planner
from bridge.delivery.plan.record_size import SizeLimits
from bridge.delivery.producer.acknowledged import AcknowledgedWriter
from bridge.delivery.producer.transaction_markers import MarkerRepair, States
from bridge.delivery.producer.transactional import TransactionalWriter
from bridge.delivery.producer.writer import Writer
from bridge.delivery.states import AT_REST
from bridge.delivery.targets.cache import Targets
from bridge.delivery.targets.look_up import TargetLookUp
from bridge.errors import BridgeError
from bridge.kafka.admin import Cluster
from bridge.kafka.membership import Ownership
from bridge.runtime import wiring
from bridge.settings.clients import librdkafka
from bridge.settings.model import Settings
from bridge.start.facts import gather as gather_facts
from bridge.start.facts import plan_start
from bridge.stores.directory import StoreDirectory
from bridge.stores.names import SourceName
from bridge.stores.stores import Opening, Stores
from bridge.telemetry.counts import Counts
from bridge.telemetry.heartbeats import Heartbeats
from bridge.telemetry.metrics import Metrics
from bridge.wire.committed_state import CommittedState
from bridge.wire.decode_epochs import DecodeParameters
from dev.harness.waiting import wait_until
from tests.entries import table_of
from tests.unit.timerstore.entries import gather
from timerstore.clock import Clock, SystemClock
from timerstore.limits import DEFAULTS

PARAMETERS = DecodeParameters(max_delay_ms=10**9, roll_window_ms=10**8, has_default_target=False)
DEADLINE_S = 30.0


class Listener:
    """Remembers what ownership says; `quiesce` is called at a revocation."""

    def __init__(self, quiesce: Callable[[], object] = lambda: None) -> None:
        self.assigned: list[frozenset[SourceName]] = []
        self.revoked: list[tuple[frozenset[SourceName], bool]] = []
        self.fatal: list[BridgeError] = []
        self.counted: list[int] = []
        self.quiesce = quiesce

    def on_assigned(self, partitions: frozenset[SourceName]) -> None:
        self.assigned.append(partitions)

    def on_revoked(self, partitions: frozenset[SourceName], *, lost: bool, revocations: int) -> None:
        self.revoked.append((partitions, lost))
        self.counted.append(revocations)
        self.quiesce()

    def on_fatal(self, error: BridgeError) -> None:
        self.fatal.append(error)


class Tally:
    """The dispatcher's metrics as plain numbers."""

    def __init__(self) -> None:
        self.by_topic: Counter[str] = Counter()
        self.by_reason: dict[str, int] = {}
        self.by_retry: dict[str, int] = {}
        self.lateness_ms: list[int] = []
        self.transactions = self.aborted = self.rebuilt = self.rolls = self.deferrals = self.forwarded = 0
        self.longest_s = 0.0
        self.held = self.steps_refused = self.found = self.rewritten = 0
        self.transactions_aborted, self.producers_rebuilt = _Number(self, "aborted"), _Number(self, "rebuilt")
        self.partitions_held, self.rows_found = _Number(self, "held"), _Number(self, "found")
        self.clock_steps_refused, self.states_rewritten = _Number(self, "steps_refused"), _Number(self, "rewritten")

    def committed(self, counts: Counts, seconds: float) -> None:
        self.by_topic += counts.delivered
        self.by_reason = dict(Counter(self.by_reason) + counts.rejected)
        self.by_retry = dict(Counter(self.by_retry) + counts.retried)
        self.rolls += counts.rolled
        self.forwarded += counts.forwarded
        self.deferrals += counts.deferred
        for lateness_ms in counts.lateness_ms:
            self.lateness_ms += lateness_ms.tolist()
        self.transactions += 1
        self.longest_s = max(self.longest_s, seconds)


class _Number:
    """A counter or gauge that is a plain number of the tally."""

    def __init__(self, tally: Tally, name: str) -> None:
        self._tally, self._name = tally, name

    def inc(self, by: int = 1) -> None:
        self.set(getattr(self._tally, self._name) + by)

    def set(self, number: int) -> None:
        setattr(self._tally, self._name, number)


def settings_for(bootstrap: str, *delay_topics: str, **tree: Any) -> Settings:
    """Settings of a bridge on that broker, named after its first delay topic."""
    kafka = {"common": {"bootstrap.servers": bootstrap}, **tree.pop("kafka", {})}
    bridge = {"id": f"bridge-{delay_topics[0]}", "instance": "one", **tree.pop("bridge", {})}
    return Settings.of({"bridge": bridge, "kafka": kafka, "delay_topics": {t: {} for t in delay_topics}, **tree})


def ownership_of(
    settings: Settings,
    listener: Listener,
    clock: Clock | None = None,
    explain: Callable[[], BridgeError | None] = lambda: None,
    **config: Any,
) -> Ownership:
    """Group membership by settings."""
    return Ownership(
        config={**librdkafka(settings, "consumer"), **config},
        group_id=settings.group_id,
        instance_id=settings.group_instance_id,
        topics=list(settings.delay_topics),
        listener=listener,
        clock=clock or SystemClock(),
        poll_interval_s=0.02,
        explain=explain,
    )


def each(ask: Callable[[str], str | None]) -> States:
    """Answers for coordinators, id by id."""
    return lambda names: {name: ask(name) for name in names}


class Rig:
    """One bridge's delivery half. `add` may be called any time; delivery starts with `start`."""

    def __init__(
        self,
        bootstrap: str,
        delay_topic: str,
        *,
        mode: str = "exactly-once",
        instance: str = "one",
        deny: Iterable[str] = (),
        make_writer: Callable[[Writer], Writer] = lambda writer: writer,
        make_producer: Callable[[dict[str, Any]], Producer] = Producer,
        properties: Mapping[str, Any] | None = None,
        transaction_rows: int = 20_000,
        clock: Clock | None = None,
        default_target: str | None = None,
        session_timeout: str = "30s",
        retry: RetryPolicy | None = None,
        overdue: OverduePolicy | None = None,
        ask: Callable[[str], str | None] = lambda _: None,
        is_opened_early: bool = False,
        renews: bool = True,
    ) -> None:
        """`ask` answers for the coordinators of transactional ids; `is_opened_early`: the producer is opened with the
        membership, as the bridge does; `renews`: as of the writer.
        """
        self.is_opened_early = is_opened_early
        self.clock = clock or SystemClock()
        self.directory = TemporaryDirectory(prefix="rig-")
        self.settings = settings_for(
            bootstrap,
            delay_topic,
            bridge={"instance": instance},
            store={"directory": self.directory.name},
            delivery={"mode": mode, "session_timeout": session_timeout},
            targets={"deny": list(deny)},
        )
        self.delay_topic = delay_topic
        self.listener = Listener(lambda: self.dispatcher.quiesce())
        repair = MarkerRepair(self.settings, each(ask))
        self.ownership = ownership_of(self.settings, self.listener, self.clock, repair.explain)
        self.tally = Tally()
        self.fatal: list[BridgeError] = []
        self.properties = {**librdkafka(self.settings, "producer"), **(properties or {})}
        self.targets = Targets(TargetLookUp(librdkafka(self.settings, "admin")), self.clock)
        writer: Writer
        if mode == "exactly-once":
            writer = TransactionalWriter(self.properties, self.clock, make_producer, repair=repair, renews=renews)
        else:
            writer = AcknowledgedWriter(self.properties, self.clock, self.ownership.commit_offsets)
        self.planner = Planner(
            targets=self.targets,
            permitted=self.settings.target_permitted,
            default_targets={delay_topic: default_target},
            dead_letter_topics={delay_topic: f"{delay_topic}.dlt"},
            retry=retry or RetryPolicy(),
            overdue=overdue or OverduePolicy(),
            limits=SizeLimits(compressed=str(self.properties.get("compression.type", "none")) != "none"),
        )
        self.dispatcher = Dispatcher(
            writer=make_writer(writer),
            planner=self.planner,
            targets=self.targets,
            membership=self.ownership.membership,
            read_committed=self.ownership.read_committed_states,
            doubts=wiring.make_doubts(
                self.settings, Cluster(self.settings), self.clock, cast(Metrics, self.tally), Heartbeats(self.clock)
            ),
            clock=self.clock,
            metrics=cast(Metrics, self.tally),
            on_fatal=self.fatal.append,
            commit_interval_ms=self.settings.delivery.commit_interval,
            transaction_rows=transaction_rows,
        )
        self.store: Stores | None = None
        self.states: dict[SourceName, CommittedState] = {}

    def join(self) -> None:
        """Join the group and settle."""
        self.ownership.start()
        if self.is_opened_early:
            self.dispatcher.start()
        wait_until(lambda: self.listener.assigned or self.listener.fatal, DEADLINE_S, "an assignment")
        assert not self.listener.fatal
        self.settle()

    def settle(self) -> Stores:
        """Read (or make) the committed states, and put a store on them."""
        self.states = states_of(self.ownership, self.settings, self.clock)
        states = self.states
        directory = StoreDirectory.take(Path(self.directory.name), "cluster", {self.delay_topic: "id"})
        self.store = Stores(directory, list(states), DEFAULTS)
        now_ms = self.clock.now_ms()
        openings = {
            name: Opening(found=directory.find(name, now_ms), committed=state.progress(), log_start=0)
            for name, state in states.items()
        }
        offsets = {name: state.offset for name, state in states.items()}
        prepared = self.store.prepare(openings, now_ms)
        prepared.start_at(offsets, offsets)
        self.store.add(prepared)
        return self.store

    def add(self, entries: Sequence[dict[str, Any]], ends: Mapping[SourceName, int] | None = None) -> None:
        """Ingest entries whose offsets rise, up to `ends` (else to the last of them), and load near rows."""
        store, now_ms = self.store, self.clock.now_ms()
        assert store is not None
        reached = dict(ends or {})
        for entry in entries:
            name = entry["topic"], entry["partition"]
            reached[name] = max(reached.get(name, 0), entry["offset"] + 1)
        assert store.append(table_of(entries), reached, now_ms) == len(entries)
        self.load()

    def load(self) -> None:
        """The bridge's maintenance: load near rows."""
        assert self.store is not None
        reading = self.store.upkeep.next_window(self.clock.now_ms())
        assert reading is None or self.store.upkeep.admit(reading, gather(reading.window))

    def is_behind(self) -> bool:
        """Whether O has to follow ingest."""
        assert self.store is not None
        return self.store.offsets_behind()

    def pending(self) -> int:
        """Timers that are neither delivered nor anything else."""
        assert self.store is not None
        return self.store.stats().pending

    def start(self) -> None:
        """Deliver."""
        if not self.is_opened_early:
            self.dispatcher.start()
        wait_until(lambda: self.dispatcher.state in AT_REST, DEADLINE_S, "the dispatcher is at rest")
        self.resume()

    def resume(self, revocations: int | None = None) -> None:
        """Go on, with this number of revocations at the reading of the states (None: those that there were)."""
        assert self.store is not None
        known = self.ownership.membership().revocations if revocations is None else revocations
        self.dispatcher.resume(self.store, self.states, known)

    def is_ready(self) -> bool:
        """Whether another transactional id could go on at once."""
        writer = self.dispatcher._writer
        pooled = writer._ids._all if isinstance(writer, TransactionalWriter) else []
        return all(one.state.value in ("ready", "used") and not one.faults for one in pooled)

    def wait_delivered(self, deadline_s: float = DEADLINE_S) -> None:
        """Wait until everything in the store is committed."""
        store = self.store
        assert store is not None

        def is_done() -> bool:
            self.load()
            is_idle = store._loan is None and store.next_wakeup_ms() is None and not self.is_behind()
            return is_idle and not self.pending()

        wait_until(lambda: is_done() or self.fatal, deadline_s, lambda: f"{self.pending()} rows are left")
        assert not self.fatal, self.fatal

    def committed(self) -> dict[SourceName, CommittedState | None]:
        """What Kafka holds."""
        return self.ownership.read_committed_states(self.ownership.assignment())

    def __enter__(self) -> Self:
        try:
            self.join()
        except BaseException:  # its clients would tell of their trouble in the output of other tests
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.dispatcher.stop()
        self.ownership.stop()
        if self.store is not None:
            self.store.close()
        self.directory.cleanup()


def states_of(ownership: Ownership, settings: Settings, clock: Clock) -> dict[SourceName, CommittedState]:
    """The owned partitions' states, as at a start without a local index."""
    owned, cluster = ownership.assignment(), Cluster(settings)
    parameters = {topic: PARAMETERS for topic, _ in owned}
    plan = plan_start(
        ownership,
        owned,
        lambda: gather_facts(ownership, cluster, owned, parameters=parameters, limits={}),
        clock,
    )
    assert plan is not None
    return dict(plan.states)
