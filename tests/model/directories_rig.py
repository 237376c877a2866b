"""Instances of a bridge, each with its own store.directory, on a Kafka in memory: the real pipeline, without Spark.

`Broker` has the logs, the ids of the topics, and the group's commits and assignment; `Instance` is one process after
the other on one directory. A test moves readers, delivery and maintenance.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final
from unittest import mock

from bridge.delivery.doubt.log_notes import LogNotes, States
from bridge.delivery.states import State as Delivery
from bridge.errors import BridgeError, StateError
from bridge.ingest.ingest import Ingest
from bridge.kafka.admin import ClusterDescription, Topic, Watermarks
from bridge.kafka.membership import Membership
from bridge.runtime.context import PipelineContext
from bridge.runtime.gauges import Lag
from bridge.runtime.maintenance_thread import MaintenanceThread
from bridge.runtime.pipeline import Pipeline
from bridge.settings.model import Settings
from bridge.start.identity_watch import IdentityWatch
from bridge.stores.names import Offsets, SourceName
from bridge.stores.search import Query
from bridge.stores.stores import Life, Stores
from bridge.telemetry.health import Health
from bridge.wire.committed_state import CommittedState, decode_metadata
from tests.manual_clock import ManualClock
from tests.model.stores import batch
from tests.unit.timerstore.entries import Record, gather
from timerstore.disk import checkpoint as checkpoints
from timerstore.disk import files
from timerstore.errors import Corrupt

MINUTE_MS: Final = 60_000
RETENTION_MS: Final = 240 * MINUTE_MS
WINDOW_MS: Final = RETENTION_MS // 2
"""The roll window, which `auto` makes of that retention: no record waits for longer."""
PARTITIONS: Final = {"d": 2, "e": 1}
NAMES: Final[tuple[SourceName, ...]] = tuple((topic, p) for topic, count in PARTITIONS.items() for p in range(count))


@dataclass(slots=True, kw_only=True, eq=False)
class Message:
    """A message of a delay topic with this id, and its fate."""

    record: Record
    topic_id: str
    window_ms: int = 0
    """The roll window that it was read with; 0: it is unread."""
    is_delivered: bool = False
    is_given_up: bool = False
    """By an operator, or with its topic."""

    @property
    def name(self) -> SourceName:
        return self.record.topic, self.record.partition

    @property
    def offset(self) -> int:
        return self.record.offset

    @property
    def is_pending(self) -> bool:
        return not (self.is_delivered or self.is_given_up)


class Crash(BaseException):
    """Ends a process between two changes of files."""


@contextmanager
def crashing_after(count: int) -> Iterator[None]:
    """A context in which the change of a file with this number is the last one."""
    left = count

    def then(change: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*args: Any) -> Any:
            nonlocal left
            result, left = change(*args), left - 1
            if not left:
                raise Crash
            return result

        return changed

    changes: dict[str, Any] = {name: then(getattr(files, name)) for name in ("publish", "remove", "set_aside")}
    with mock.patch.multiple(files, **changes):
        yield


class Broker:
    """See the module. It is the bridge's `Cluster`, too."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.retention_ms = RETENTION_MS
        self.ids = {topic: f"{topic}-1" for topic in PARTITIONS}
        self.logs: dict[SourceName, list[Message]] = {name: [] for name in NAMES}
        self.starts = dict.fromkeys(NAMES, 0)
        self.commits: dict[SourceName, tuple[int, str]] = {}
        self.owners: dict[SourceName, int] = {}
        self.silent: set[SourceName] = set()
        """The partitions without a leader."""

    # ---- what happens to it

    def write(self, name: SourceName, due_ms: int) -> None:
        log, now_ms = self.logs[name], self.clock.now_ms()
        log.append(Message(record=Record(*name, len(log), due_ms, ts_ms=now_ms), topic_id=self.ids[name[0]]))

    def pending(self, name: SourceName) -> dict[int, Message]:
        """By offset."""
        return {each.offset: each for each in self.logs[name] if each.is_pending}

    def gone(self, name: SourceName) -> dict[int, Message]:
        """Those pending messages whose records are deleted."""
        return {offset: each for offset, each in self.pending(name).items() if offset < self.starts[name]}

    def state(self, name: SourceName) -> CommittedState | None:
        found = self.commits.get(name)
        return None if found is None else decode_metadata(name, *found)

    # ---- the cluster

    def describe(self) -> ClusterDescription:
        return ClusterDescription(cluster_id="cluster", brokers=())

    def topic_ids(self, names: Iterable[str]) -> dict[str, str]:
        return {name: self.ids[name] for name in names}

    def topic_configs(self, names: Iterable[str]) -> dict[str, dict[str, str]]:
        return {name: {"retention.ms": str(self.retention_ms)} for name in names}

    def topics(self, names: Iterable[str]) -> dict[str, Topic]:
        return {
            name: Topic(name=name, topic_id=self.ids[name], partitions=PARTITIONS[name], replicas=1, leaderless=())
            for name in names
        }

    def watermarks(self, names: Iterable[SourceName], *, of_all: bool = True) -> dict[SourceName, Watermarks]:
        found = {name: Watermarks(start=self.starts[name], end=len(self.logs[name])) for name in names}
        return {name: marks for name, marks in found.items() if of_all or name not in self.silent}

    def committed(self, _: str, names: Iterable[SourceName]) -> dict[SourceName, tuple[int, str]]:
        return {name: self.commits[name] for name in names if name in self.commits}

    def first_after(self, names: Sequence[SourceName], timestamp_ms: int) -> dict[SourceName, int | None]:
        return {
            name: next((m.offset for m in self.logs[name][self.starts[name] :] if m.record.ts_ms >= timestamp_ms), None)
            for name in names
        }

    def cuts(self, stretches: Iterable[SourceName], _: object) -> dict[SourceName, int | None]:
        return dict.fromkeys(stretches)


class Member:
    """The membership of an instance in the group."""

    def __init__(self, broker: Broker, number: int) -> None:
        self._broker, self._number = broker, number
        self.revocations = 0
        self.first_commits: list[SourceName] = []
        """Of partitions that had no commit."""

    def assignment(self) -> frozenset[SourceName]:
        return frozenset(name for name, owner in self._broker.owners.items() if owner == self._number)

    def membership(self) -> Membership:
        return Membership(partitions=self.assignment(), revocations=self.revocations, metadata=None)

    def read_committed_states(
        self, names: Iterable[SourceName], strict: Collection[SourceName] | None = None
    ) -> dict[SourceName, CommittedState | None]:
        states = {}
        for name in names:
            try:
                states[name] = self._broker.state(name)
            except StateError:
                if strict is None or name in strict:
                    raise
        return states

    def commit_states(self, states: States, owned: frozenset[SourceName]) -> bool:
        if owned != self.assignment():
            return False
        self.first_commits += states.keys() - self._broker.commits.keys()
        self._broker.commits |= {name: (state.offset, state.metadata()) for name, state in states.items()}
        return True

    def wait(self, timeout_s: float) -> None:
        self._broker.clock.advance(int(timeout_s * 1_000))


@dataclass(slots=True)
class Delivered:
    """The dispatcher, always between two transactions."""

    states: dict[SourceName, CommittedState] = field(default_factory=dict)
    notes: LogNotes = field(default_factory=LogNotes)
    state: Delivery = Delivery.HELD
    is_held: bool = False
    commands_first: Any = field(default_factory=SimpleNamespace)
    doubts: Any = field(
        default_factory=lambda: SimpleNamespace(torn=SimpleNamespace(taken_back=lambda _: {}), alarms=lambda: ())
    )

    def quiesce(self, timeout_s: float = 0) -> bool:  # noqa: ARG002
        return True

    def resume(self, store: Stores, states: States, revocations: int, log_ends: Offsets) -> None:  # noqa: ARG002
        self.states = dict(states)

    def expect(self, states: States, log_ends: Offsets) -> None:  # noqa: ARG002
        self.states |= states

    def go_on_without(self, gone: Collection[SourceName], revocations: int) -> None:  # noqa: ARG002
        self.states = {name: state for name, state in self.states.items() if name not in gone}


class Maintenance:
    """Flushes only, if it is in time."""

    is_alive, disk_is_full = True, False

    def __init__(self, store: Stores, clock: ManualClock) -> None:
        self.store, self.clock = store, clock
        self.is_in_time = True

    def start(self) -> None: ...

    def pass_step(self, _: float) -> bool:
        return True

    def flush_now(self, _: float, names: Collection[SourceName] | None = None) -> None:
        if self.is_in_time:
            self.store.upkeep_of(names).flush(self.clock.now_ms())

    def stop(self, _: float) -> bool:
        return True

    def flush(self) -> None:
        self.flush_now(0)


class ScriptedPipeline(Pipeline):
    """Its threads are the test's."""

    def _make_maintenance(self, store: Stores) -> MaintenanceThread:
        made: Any = Maintenance(store, self._context.clock)  # type: ignore[arg-type]
        return made  # type: ignore[no-any-return]

    def _make_ingest(self, store: Stores) -> Ingest:  # noqa: ARG002
        return mock.Mock(spec=Ingest)


class Instance:
    """Processes on one directory, one after the other; `pipeline` is None while none runs, or has partitions."""

    def __init__(self, broker: Broker, number: int, directory: Path) -> None:
        self.broker, self.number, self.directory = broker, number, directory
        self.member = Member(broker, number)
        self.settings = Settings.of(
            {
                "bridge": {"id": "bridge", "instance": str(number)},
                "kafka": {"common": {"bootstrap.servers": "localhost:1"}},
                "delay_topics": {topic: {} for topic in PARTITIONS},
                "store": {"directory": str(directory)},
            }
        )
        self.is_running = False
        self.pipeline: ScriptedPipeline | None = None
        self.refusals: list[BridgeError] = []
        """All refusals since the last step of the test."""
        self.refusal: BridgeError | None = None
        """The reason for the end of the last process."""

    # ---- processes

    def start(self) -> None:
        """A new process."""
        assert not self.is_running
        clock = self.broker.clock
        self.is_running, self.refusal, self.delivery, self.lag = True, None, Delivered(), Lag(clock)
        self.identity = IdentityWatch(clock)
        self.context = PipelineContext(
            settings=self.settings, clock=clock, cluster=self.broker, spark=mock.Mock(), make_session=mock.Mock(),  # type: ignore[arg-type]
            ownership=self.member, dispatcher=self.delivery, metrics=mock.Mock(), health=Health(), hearts=mock.Mock(),  # type: ignore[arg-type]
            on_fatal=mock.Mock(), on_rebuild=mock.Mock(), on_held=mock.Mock(), identity=self.identity,
        )  # fmt: skip
        self.rebase(anew=True)

    def rebase(self, *, anew: bool = False) -> None:
        """As `Application._rebase`: follow the assignment, or end."""
        while True:
            try:
                return self._follow(anew=anew)
            except BridgeError as error:
                self.refusals.append(error)
                delivered = frozenset() if self.pipeline is None else self.pipeline.owned
                if not self.identity.refuse(error, self.member.assignment(), delivered):
                    self.refusal = error
                    return self.crash()

    def _follow(self, *, anew: bool) -> None:
        member = self.member.membership()
        owned = self.identity.without(member.partitions)
        if self.pipeline is not None:
            if not anew and owned and self.pipeline.follow(owned, member):
                return
            assert self.pipeline.stop()
            self.pipeline = None
        if owned:
            self.pipeline = ScriptedPipeline(self.context, owned, member)
            assert self.pipeline.start()

    def stop(self) -> None:
        """In order, with a last flush."""
        if self.pipeline is not None:
            assert self.pipeline.stop()
        self.is_running, self.pipeline = False, None

    def crash(self) -> None:
        """The memory is gone."""
        if self.pipeline is not None:
            if self.pipeline.store is not None:
                self.pipeline.store.close()
            elif self.pipeline._directory is not None:
                self.pipeline._directory.release()
        self.is_running, self.pipeline = False, None

    def revoke(self, names: frozenset[SourceName], *, in_time: bool) -> None:
        """As `Application.on_revoked`; `in_time`: for the flush."""
        self.member.revocations += 1
        if self.pipeline is not None:
            maintenance: Any = self.pipeline._maintenance
            maintenance.is_in_time = in_time
            self.pipeline.give_up(names, self.member.revocations)
            maintenance.is_in_time = True

    # ---- its parts

    @property
    def store(self) -> Stores | None:
        return None if self.pipeline is None else self.pipeline.store

    def opened(self) -> frozenset[SourceName]:
        """The partitions that are open."""
        return frozenset() if self.store is None else frozenset(self.store.next_offsets())

    def read(self, limit: int | None = None) -> None:
        """Records of each open partition."""
        store, logs = self.store, self.broker.logs
        if store is None:
            return
        parts = {name: logs[name][at:][:limit] for name, at in store.next_offsets().items()}
        ends = {name: at + len(parts[name]) for name, at in store.next_offsets().items()}
        for name, at in store.next_offsets().items():
            assert at >= self.broker.starts[name] or not parts[name], f"{name}: {at} is read, which is deleted"
        store.append(batch([m.record for part in parts.values() for m in part]), ends, self.broker.clock.now_ms())
        store.arrive()
        store.go_live(store.in_life(Life.COMMANDS_FIRST))

    def flush(self) -> None:
        if self.store is not None:
            self.store.upkeep.flush(self.broker.clock.now_ms())

    def deliver(self, limit: int, *, is_acknowledged: bool = True) -> list[Message]:
        """One transaction, which is committed; the process may end before it knows."""
        store, now_ms = self.store, self.broker.clock.now_ms()
        if store is None:
            return []
        while (reading := store.upkeep.next_window(now_ms)) is not None:
            store.upkeep.admit(reading, gather(reading.window))
        loan = store.begin(now_ms)
        rows = loan.take(now_ms, limit)
        taken = [
            (store.sources.name(source), offset)
            for source, offset in zip(rows.source.tolist(), rows.offset.tolist(), strict=True)
        ]
        after: dict[SourceName, CommittedState] = {}
        for source, progress in loan.progress().items():
            name = store.sources.name(source)
            after[name] = self.delivery.states[name].moved(progress)
        live = {name: self.delivery.states[name] for name in store.in_life(Life.LIVE)}
        after = self.delivery.notes.within(after, live)
        assert after.keys() <= self.member.assignment()
        self.broker.commits |= {name: (state.offset, state.metadata()) for name, state in after.items()}
        if is_acknowledged:
            self.delivery.states |= after
            loan.acknowledge()
        else:
            self.crash()
        return [self.broker.logs[name][offset] for name, offset in taken]

    def look(self) -> None:
        """Once a second: here after a minute."""
        if self.pipeline is not None:
            self.lag.refresh(self.context.cluster, self.pipeline.store, at_once=True)  # type: ignore[arg-type]
            self.pipeline.look_at_retention(self.lag)

    def pending(self) -> dict[SourceName, set[int]]:
        """The pending messages of each open partition."""
        if self.store is None:
            return {}
        found: dict[SourceName, set[int]] = {name: set() for name in self.opened()}
        for row in self.store.find(Query(), self.broker.clock.now_ms(), limit=1_000).rows:
            found[row.topic, row.partition].add(row.offset)
            message = self.broker.logs[row.topic, row.partition][row.offset]
            assert message.record.due_ms == row.due_ms, f"{row} is another message than {message}"
        return found

    # ---- its directory

    def path(self, name: SourceName) -> Path:
        """The directory of a partition's index."""
        return self.directory / name[0] / str(name[1])

    def log_id(self, name: SourceName) -> str:
        """The identity of a partition's log now."""
        return f"{self.broker.ids[name[0]]}/{name[1]}"

    def checkpoint(self, name: SourceName) -> checkpoints.Checkpoint | None:
        """The checkpoint of a partition, if it is readable."""
        try:
            return checkpoints.read(self.path(name))
        except Corrupt:
            return None

    def index(self, name: SourceName) -> checkpoints.Checkpoint | None:
        """The checkpoint of a partition, if it is readable and of this topic."""
        found = self.checkpoint(name)
        return found if found is not None and found.identity.log_id == self.log_id(name) else None

    def has_index_of_earlier_version(self) -> bool:
        return (self.directory / files.CHECKPOINT).exists()

    def earlier_index(self, covered: Mapping[SourceName, int]) -> None:
        """The index of an earlier version, which covers these logs."""
        body = {
            "version": 2, "cluster_id": "cluster", "topic_ids": self.broker.ids, "progress": [], "frozen": [],
            "offsets": [[*name, offset] for name, offset in covered.items()], "segments": [], "tombstones": [],
        }  # fmt: skip
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.directory / files.CHECKPOINT).write_text(json.dumps({"crc": 0, "body": json.dumps(body)}))
        (self.directory / files.segment_name(1)).touch()
