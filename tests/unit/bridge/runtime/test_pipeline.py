"""bridge.pipeline: what a start makes of the index that it finds, and how long an end may take. No broker, no Spark."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from bridge.delivery.states import State as Delivery
from bridge.errors import EnvironmentFailure, StateError
from bridge.ingest.batches.reader import CorruptBatch
from bridge.kafka.admin import ClusterDescription, Topic, Watermarks
from bridge.kafka.leader_epochs import ReadStretch
from bridge.kafka.membership import Membership
from bridge.runtime import pipeline as module
from bridge.runtime.app import Application
from bridge.runtime.context import PipelineContext
from bridge.runtime.gauges import Lag
from bridge.runtime.maintenance_thread import MaintenanceThread
from bridge.runtime.pipeline import Pipeline
from bridge.runtime.restart import Restart
from bridge.settings.model import Settings
from bridge.settings.secrets import Redactor
from bridge.start.first_commits import SilentLogs
from bridge.start.identity_watch import IdentityWatch
from bridge.stores.directory import KEPT_MS
from bridge.stores.names import SourceName, Sources
from bridge.stores.stores import Life
from bridge.telemetry.health import Health
from bridge.telemetry.heartbeats import START_S
from bridge.wire.committed_state import CommittedState, initial_state
from bridge.wire.decode_epochs import DecodeParameters
from tests.manual_clock import ManualClock
from tests.model.stores import ModelStores, State
from tests.unit.bridge.stores.rig import BILLS, NOW_MS, ORDERS, Rig
from timerstore.disk import checkpoint, files
from timerstore.disk.checkpoint import Identity
from timerstore.errors import Corrupt, Inconsistent
from timerstore.limits import DAY_MS
from timerstore.memory.memory import Memory

FAR_MS = NOW_MS + 36_000_000
PARAMETERS = DecodeParameters(max_delay_ms=1_000, roll_window_ms=4_000, has_default_target=False)


class StandIn:
    """A cluster and a membership that know of one delay topic."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.marks = {name: Watermarks(start=0, end=len(log)) for name, log in rig.logs.items()}
        self.silent: set[SourceName] = set()
        self.unread_since: int | None = None
        self.first_offset = 0
        self.more: dict[SourceName, dict[str, Any]] = {}
        """Of committed states."""
        self.retention = {"retention.ms": "86400000"}
        self.marked: dict[SourceName, int] = {}
        """The marks of gone records that were committed."""

    def describe(self) -> ClusterDescription:
        return ClusterDescription(cluster_id="cluster", brokers=())

    def topic_ids(self, names: Iterable[str]) -> dict[str, str]:
        return {name: f"id of {name}" for name in names}

    def topic_configs(self, names: Iterable[str]) -> dict[str, dict[str, str]]:
        return dict.fromkeys(names, self.retention)

    def topics(self, names: Iterable[str]) -> dict[str, Topic]:
        return {
            name: Topic(name=name, topic_id=f"id of {name}", partitions=2, replicas=1, leaderless=()) for name in names
        }

    def watermarks(self, partitions: Sequence[SourceName], *, of_all: bool = True) -> dict[SourceName, Watermarks]:
        return {name: self.marks[name] for name in partitions if of_all or name not in self.silent}

    def committed(self, _: str, names: Iterable[SourceName]) -> dict[SourceName, tuple[int, str]]:
        states = self.read_committed_states(names, ())
        return {name: (state.offset, state.metadata()) for name, state in states.items() if state is not None}

    def first_after(self, partitions: Sequence[SourceName], _: int) -> dict[SourceName, int | None]:
        """The first record that is not old; where nothing is, None."""
        return dict.fromkeys(partitions, self.unread_since)

    def commit_states(self, states: Mapping[SourceName, CommittedState], owned: frozenset[SourceName]) -> bool:
        assert owned == self.assignment()
        self.marked |= {name: state.gone_below for name, state in states.items()}
        return True

    def assignment(self) -> frozenset[SourceName]:
        return frozenset(self.rig.states)

    def read_committed_states(
        self, partitions: Iterable[SourceName], strict: object = None
    ) -> Mapping[SourceName, CommittedState | None]:
        states = {}
        assert strict is not None, "what is wrong with partitions of others is theirs"
        for name in partitions:
            state = self.rig.states.get(name, State(offset=self.marks[name].end))
            first = initial_state(offset=state.offset, topic_id=f"id of {name[0]}", partitions=2, parameters=PARAMETERS)
            cuts = self.rig.cuts.get(name, ())
            known = replace(first, position=state.position, first_offset=self.first_offset, cuts=cuts)
            states[name] = replace(known, **self.more.get(name, {}))
        return states

    def cuts(self, stretches: Mapping[SourceName, ReadStretch], _: object) -> dict[SourceName, int | None]:
        """No log was cut and has grown again."""
        return dict.fromkeys(stretches)


def member(owned: frozenset[SourceName], revocations: int = 0) -> Membership:
    """What the group says."""
    return Membership(partitions=owned, revocations=revocations, metadata=mock.Mock())


class Bench:
    """A pipeline over the directory of a rig, from the committed offsets to where reading begins."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.stand_in = StandIn(rig)
        tree = {"store": {"directory": str(rig.directory)}}
        self.dispatcher = mock.Mock(
            state=Delivery.HELD,
            is_held=False,
            **{"doubts.alarms.return_value": (), "doubts.torn.taken_back.return_value": {}},
        )
        self.pipeline = Pipeline(
            PipelineContext(
                settings=Settings.of(tree),
                clock=ManualClock(now_ms=NOW_MS),
                cluster=self.stand_in,  # type: ignore[arg-type]
                spark=mock.Mock(),
                make_session=mock.Mock(),
                ownership=self.stand_in,  # type: ignore[arg-type]
                dispatcher=self.dispatcher,
                metrics=mock.Mock(),
                health=Health(),
                on_fatal=mock.Mock(),
                on_rebuild=mock.Mock(),
                on_held=mock.Mock(),
                hearts=mock.Mock(),
                identity=IdentityWatch(ManualClock(now_ms=NOW_MS)),
                beat=mock.Mock(),
            ),
            frozenset(rig.states),
            member(frozenset(rig.states)),
        )

    def start(self) -> dict[SourceName, int]:
        """Where reading begins."""
        self.rig.stores.close()
        assert self.pipeline.start()
        return self.store.next_offsets()

    def live(self) -> None:
        """All that has caught up is delivered."""
        self.store.go_live([*self.store.arrive(), *self.store.in_life(Life.COMMANDS_FIRST)])

    @property
    def maintenance(self) -> mock.Mock:
        """Stands in for the thread."""
        made = self.pipeline._maintenance
        assert isinstance(made, mock.Mock)
        return made

    @property
    def ingest(self) -> mock.Mock:
        """Stands in for the query."""
        made = self.pipeline._ingest
        assert isinstance(made, mock.Mock)
        return made

    @property
    def store(self) -> ModelStores:
        assert isinstance(self.pipeline.store, ModelStores)
        return self.pipeline.store


@pytest.fixture(autouse=True)
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a query nor maintenance: what they would be told is looked at."""
    monkeypatch.setattr(module, "Ingest", mock.Mock(side_effect=lambda **_: mock.Mock()))
    monkeypatch.setattr(module, "MaintenanceThread", mock.Mock(side_effect=lambda **_: mock.Mock()))
    monkeypatch.setattr("bridge.start.index.Stores", ModelStores)


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    """An index with two far messages of each partition."""
    rig = Rig(tmp_path / "store", [ORDERS, BILLS])
    rig.load()
    for name in (ORDERS, BILLS):
        rig.produce(name, FAR_MS, FAR_MS + 1)
    rig.ingest()
    rig.deliver()
    rig.stores.flush(NOW_MS)
    return rig


def test_a_change_of_the_retention_holds_from_the_next_start_and_the_next_record_on(rig: Rig) -> None:
    """Earlier records keep their roll window, on whichever instance, and cancels are kept for the longest one."""
    rig.produce(ORDERS, FAR_MS)
    rig.states[ORDERS] = replace(rig.states[ORDERS], offset=2)
    for retention_ms, window_ms in ((-1, 3_650 * DAY_MS), (86_400_000, DAY_MS // 2)):
        bench = Bench(rig)
        bench.stand_in.retention = {"retention.ms": str(retention_ms)}
        bench.start()
        [first, second] = bench.pipeline._epochs[ORDERS]
        assert (first.offset, first.parameters.roll_window_ms) == (0, PARAMETERS.roll_window_ms)
        assert (second.offset, second.parameters.roll_window_ms) == (2, window_ms)
        assert bench.store.limits.window_ms == min(window_ms, 7 * DAY_MS)
        assert bench.pipeline.stop()


def test_an_index_that_was_outrun_elsewhere_is_read_from_where_the_log_begins(rig: Rig) -> None:
    """Another instance had a partition until after its records here were deleted, and has read all there is: nothing
    can be lost, so the start is not refused, though the index ends before the log begins."""
    rig.produce(BILLS, *[FAR_MS] * 8)
    rig.states[BILLS] = replace(rig.states[BILLS], offset=10)
    bench = Bench(rig)
    bench.stand_in.marks[BILLS] = Watermarks(start=7, end=10)
    bench.stand_in.unread_since = 10
    assert bench.start() == {ORDERS: 2, BILLS: 7}
    assert bench.store.stats().pending == 4, "what only this index has is kept"
    assert bench.pipeline.stop()


@pytest.mark.fault("a downtime beyond the retention, and the only index in another instance's directory")
def test_an_index_that_was_outrun_is_refused_where_pending_messages_may_be_gone(rig: Rig) -> None:
    """Where nothing was read for longer than records live, a start without their index is refused, and the next one,
    too. Kafka then knows of the gone records, so that no other instance removes its index of them."""
    rig.produce(BILLS, *[FAR_MS] * 8)
    rig.states[BILLS] = replace(rig.states[BILLS], offset=8)
    for _ in range(2):
        bench = Bench(rig)
        bench.stand_in.marks[BILLS] = Watermarks(start=7, end=10)
        bench.stand_in.unread_since = 10
        with pytest.raises(StateError, match="down_for_more_than"):
            bench.start()
        assert bench.stand_in.marked == {BILLS: 7}
        assert bench.pipeline.stop()


@pytest.mark.fault("an upgrade with messages that are in the old index alone")
def test_an_upgrade_that_would_lose_messages_is_refused_as_a_whole(rig: Rig) -> None:
    """The earlier version must be able to deliver them: no partition is committed before."""
    rig.stores.close()
    shutil.rmtree(rig.directory / "delay")
    (rig.directory / files.CHECKPOINT).write_text("{}")
    bench = Bench(rig)
    bench.stand_in.more[BILLS] = {"gone_below": 9}
    with pytest.raises(StateError, match="does not cover") as raised:
        bench.start()
    assert raised.value.code == "DB-4012" and "topic" not in raised.value.fields and "earlier" in raised.value.hint
    assert not bench.dispatcher.resume.called
    assert bench.pipeline.stop() and (rig.directory / files.CHECKPOINT).exists()


def test_a_partition_that_comes_after_an_upgrade_is_refused_alone(rig: Rig) -> None:
    """The earlier version could no longer take over, as this one has committed for others."""
    bench = running(rig)
    (rig.directory / files.CHECKPOINT).write_text("{}")
    assert bench.pipeline.give_up(frozenset({BILLS}), 1)
    shutil.rmtree(bench.store.directory.of(BILLS))
    bench.stand_in.more[BILLS] = {"gone_below": 9}
    with pytest.raises(StateError, match="does not cover") as raised:
        bench.pipeline.follow(BOTH, member(BOTH, 1))
    assert raised.value.fields["partition"] == BILLS[1]
    assert bench.pipeline.stop()


@pytest.mark.fault("an upgrade while a partition has no leader, or messages that are in the old index alone")
def test_the_old_index_stays_while_it_may_have_messages_that_are_nowhere_else(rig: Rig) -> None:
    """The old index goes once all partitions of this instance are read again, and Kafka lacks no records of others."""
    old = rig.directory / files.CHECKPOINT
    old.write_text("{}")
    bench = Bench(rig)
    lag, other = Lag(bench.pipeline._context.clock), ("delay", 2)
    bench.stand_in.marks[other] = Watermarks(start=0, end=0)
    bench.start()
    bench.pipeline._member = member(frozenset({*rig.states, other}))
    bench.store.sources = Sources([*rig.states, other])
    bench.pipeline.look_at_retention(lag)
    assert old.exists(), "not all is read again"
    bench.live()
    bench.pipeline.look_at_retention(lag)
    assert old.exists(), "a partition of this instance is held"
    bench.pipeline._member = member(frozenset(rig.states))
    bench.stand_in.more[other] = {"gone_below": 3}
    bench.pipeline.look_at_retention(lag)
    assert old.exists(), "another instance may need it"
    del bench.stand_in.more[other]
    bench.pipeline.look_at_retention(lag)
    assert not old.exists()
    assert bench.pipeline.stop()


@pytest.mark.fault("a partition without a leader for more than ten minutes")
def test_the_index_of_a_held_partition_stays(rig: Rig) -> None:
    """Only the index of another instance's partition leaves after ten minutes; a held one is ours."""
    bench = running(rig)
    assert bench.pipeline.give_up(frozenset({BILLS}), 1)
    path, later_ms = bench.store.directory.of(BILLS), NOW_MS + 2 * KEPT_MS
    assert not bench.store.remove_left(NOW_MS) and not bench.store.remove_left(later_ms) and path.exists()
    del rig.states[BILLS]
    bench.stand_in.more[BILLS] = {"gone_below": 2}
    assert not bench.store.remove_left(later_ms) and path.exists(), "Kafka has lost records of it"
    bench.stand_in.more.clear()
    assert bench.store.remove_left(later_ms) == 1 and not path.exists()
    assert bench.pipeline.stop()


@pytest.mark.fault("the directory of a partition that comes, of another topic of this name")
def test_a_foreign_index_holds_its_partition_alone(rig: Rig) -> None:
    """The partition is held, and the others go on."""
    bench = running(rig)
    assert bench.pipeline.give_up(frozenset({BILLS}), 1)
    path = bench.store.directory.of(BILLS)
    found = checkpoint.read(path)
    assert found is not None
    checkpoint.write(path, replace(found, identity=Identity(cluster_id="cluster", log_id="another/1")))
    with pytest.raises(StateError) as raised:
        bench.pipeline.follow(BOTH, member(BOTH, 1))
    assert raised.value.code == "DB-4015"
    watch = bench.pipeline._context.identity
    watch._ids = {"delay": "id of delay"}
    assert watch.refuse(raised.value, BOTH, {ORDERS}) and watch.without(BOTH) == {ORDERS}
    assert bench.pipeline.stop()


def test_a_damaged_segment_leaves_the_decision_where_it_was(rig: Rig) -> None:
    """Whether something is lost with it depends on what Kafka has deleted: that is asked at every start until the index
    covers the partition again."""
    [path] = rig.directory.glob("delay/0/*.parquet")
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    for _ in range(2):
        bench = Bench(rig)
        bench.stand_in.marks = {name: Watermarks(start=1, end=5) for name in (ORDERS, BILLS)}
        with pytest.raises(StateError, match="down_for_more_than"):
            bench.start()
        assert bench.pipeline.stop()
    bench = Bench(rig)
    bench.stand_in.marks = {name: Watermarks(start=1, end=2) for name in (ORDERS, BILLS)}
    bench.stand_in.unread_since = 2
    assert bench.start() == {ORDERS: 1, BILLS: 2}, "the other has its own index"
    assert bench.pipeline.stop()


def test_what_an_operator_has_given_up_is_given_up_here_too(rig: Rig) -> None:
    """The index may hold what lies below: it is set aside as a whole, and its files wait until ingest has caught up."""
    bench = Bench(rig)
    bench.stand_in.first_offset = 3
    rig.states = dict.fromkeys(rig.states, State(offset=3))
    bench.stand_in.marks = {name: Watermarks(start=3, end=3) for name in (ORDERS, BILLS)}
    assert bench.start() == {ORDERS: 3, BILLS: 3}
    assert bench.store.stats().pending == 0
    assert len(list(rig.directory.glob("delay/*/*.aside"))) == 2
    assert bench.pipeline.stop()


def test_what_was_given_up_on_another_machine_is_given_up_here_too(rig: Rig) -> None:
    """`reset-offsets --to latest` does not reach this directory. Its index ends just where these messages do, and all
    that it holds is below; with nothing below any more, it is kept."""
    bench = Bench(rig)
    bench.stand_in.first_offset = 2
    rig.states = dict.fromkeys(rig.states, State(offset=2))
    assert bench.start() == {ORDERS: 2, BILLS: 2}
    assert bench.store.stats().pending == 0
    rig.produce(ORDERS, FAR_MS)
    rig.stores = bench.store
    rig.ingest()
    bench.live()
    rig.deliver()
    rig.stores.flush(NOW_MS)
    assert bench.pipeline.stop()
    again = Bench(rig)
    again.stand_in.first_offset = 2
    assert again.start() == {ORDERS: 3, BILLS: 2}
    assert again.store.stats().pending == 1
    assert again.pipeline.stop()


def test_each_partition_is_delivered_once_it_is_read_up_to_its_committed_offset(rig: Rig) -> None:
    """A start does not wait for it: the dispatcher gets the store with the committed states, and partitions that are
    there already do not wait for others."""
    rig.produce(ORDERS, FAR_MS)
    rig.states[ORDERS] = replace(rig.states[ORDERS], offset=3)
    bench = Bench(rig)
    bench.stand_in.marks[ORDERS] = Watermarks(start=0, end=3)
    assert bench.start() == {ORDERS: 2, BILLS: 2}
    assert [call[0] for call in bench.ingest.method_calls] == ["begin_anew", "start"]
    [resumed] = bench.dispatcher.resume.call_args_list
    assert resumed.args[0] is bench.store and resumed.args[2:] == (0, {ORDERS: 3, BILLS: 2})
    assert {name: state.offset for name, state in resumed.args[1].items()} == {ORDERS: 3, BILLS: 2}
    assert bench.pipeline.is_catching_up() and bench.store.arrive() == [BILLS]
    assert bench.pipeline._context.health.phase.progress == 0.0 and "delay/0" in bench.pipeline.alarms()[0]
    rig.stores = bench.store
    rig.ingest()
    assert not bench.pipeline.is_catching_up() and bench.store.arrive() == [ORDERS]
    assert not bench.pipeline.is_delivering()
    bench.store.go_live([BILLS])
    assert not bench.pipeline.is_delivering(), "a start is ready with all that can be read"
    bench.store.go_live([ORDERS])
    assert bench.pipeline.is_delivering()
    assert bench.pipeline.stop()


def test_a_start_is_ready_without_a_partition_that_has_lost_its_leader(rig: Rig) -> None:
    """It is an alarm, and nobody waits for it; without any answer of the brokers nothing is known."""
    rig.produce(ORDERS, FAR_MS)
    rig.states[ORDERS] = replace(rig.states[ORDERS], offset=3)
    bench = Bench(rig)
    bench.stand_in.marks[ORDERS] = Watermarks(start=0, end=3)
    bench.start()
    bench.live()
    lag, first = Lag(bench.pipeline._context.clock), bench.dispatcher.commands_first
    for silent, unreadable in (({ORDERS, BILLS}, set()), ({ORDERS}, {ORDERS}), (set(), set())):
        bench.stand_in.silent = silent
        bench.pipeline.look_at_identity(lag, is_told=True)
        assert first.unreadable == unreadable
        assert bench.pipeline.is_delivering() == bool(unreadable)
        assert bench.pipeline.is_catching_up() == (not unreadable)
        bench.pipeline._work = mock.Mock()
    assert bench.pipeline.stop()


@pytest.mark.fault("a corrupt batch below the committed offset")
def test_a_corrupt_batch_below_the_committed_offset_holds_up_no_start(rig: Rig) -> None:
    """A start delivers the other partitions; the partition joins when it can be read, and an alarm says so."""
    rig.produce(ORDERS, FAR_MS)
    rig.states[ORDERS] = replace(rig.states[ORDERS], offset=3)
    bench = Bench(rig)
    bench.stand_in.marks[ORDERS] = Watermarks(start=0, end=3)
    assert bench.start() == {ORDERS: 2, BILLS: 2}
    assert bench.pipeline._suspects is not None
    bench.pipeline._suspects._held = {ORDERS: CorruptBatch(offset=2, next=3, reason="its CRC is wrong")}
    bench.live()
    assert bench.store.in_life(Life.LIVE) == [BILLS] and not bench.pipeline.is_catching_up()
    assert bench.pipeline.is_delivering()
    assert bench.pipeline.corrupt_batches() == {ORDERS: 2} and "DB-4060" in " ".join(bench.pipeline.alarms())
    assert bench.pipeline.stop()


def test_a_start_that_is_cancelled_delivers_nothing(rig: Rig) -> None:
    """A revocation or a stop came while its stores were opened: the dispatcher gets nothing."""
    bench = Bench(rig)
    rig.stores.close()

    def begin(*_: object) -> mock.Mock:
        bench.pipeline.cancel()
        return mock.Mock()

    with mock.patch.object(module, "LongWork", begin):
        assert not bench.pipeline.start()
    assert not bench.dispatcher.resume.called
    assert not bench.ingest.start.called
    assert bench.pipeline.stop()


def test_a_rebuild_without_a_silent_partition_keeps_its_index(rig: Rig) -> None:
    """The messages of that partition wait in it for their leader."""
    rig.stores.close()
    bench = Bench(rig)
    owned, bench.stand_in.silent = frozenset(rig.states), {BILLS}
    with pytest.raises(SilentLogs):
        bench.pipeline.start()
    for expected in (frozenset({ORDERS}), owned):
        assert bench.pipeline.stop()
        bench.pipeline = Pipeline(bench.pipeline._context, expected, member(owned))
        assert bench.pipeline.start() and bench.store.next_offsets() == dict.fromkeys(expected, 2)
        bench.stand_in.silent.clear()
    assert bench.store.stats().pending == 4
    assert bench.pipeline.stop()


def test_committed_states_are_read_only_when_delivery_is_at_rest(rig: Rig) -> None:
    """A slow transaction of the pipeline before might be committed after they were read, and delivered again."""
    bench = Bench(rig)
    bench.dispatcher.state = Delivery.DELIVERING
    rig.stores.close()
    with mock.patch.object(bench.stand_in, "read_committed_states") as read:
        with pytest.raises(EnvironmentFailure, match="did not end") as raised:
            bench.pipeline.start()
        assert not read.called
    assert raised.value.code == "DB-3034" and bench.dispatcher.quiesce.called
    assert bench.pipeline.stop()


def test_the_checkpoint_is_read_once(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each partition, under the lock, and handed on as a value: a file is set aside once, or not at all."""
    read = mock.Mock(side_effect=checkpoint.read)
    monkeypatch.setattr(checkpoint, "read", read)
    bench = Bench(rig)
    assert bench.start() == {ORDERS: 2, BILLS: 2}
    assert read.call_count == 2
    assert bench.pipeline.stop()
    files.lock_directory(rig.directory)


def test_a_start_that_ends_early_gives_the_directory_back(rig: Rig) -> None:
    """The next pipeline of this process needs it."""
    bench = Bench(rig)
    rig.stores.close()
    bench.stand_in.assignment = lambda: frozenset()  # type: ignore[method-assign]
    assert not bench.pipeline.start()
    with pytest.raises(EnvironmentFailure, match="in use by another process"):
        Bench(rig).start()
    assert bench.pipeline.stop()
    assert Bench(rig).start() == {ORDERS: 2, BILLS: 2}


BOTH = frozenset({ORDERS, BILLS})


def running(rig: Rig) -> Bench:
    """A pipeline of both partitions that follows the assignment."""
    bench = Bench(rig)
    bench.start()
    bench.live()
    assert not bench.pipeline.is_catching_up()
    return bench


def test_a_partition_that_goes_leaves_the_others_where_they_are(rig: Rig) -> None:
    """It alone is flushed, the open transaction ends, and the dispatcher goes on without it from the same store; what
    was pending of it is counted no more."""
    bench = running(rig)
    order = mock.Mock()
    order.attach_mock(bench.maintenance.flush_now, "flush")
    order.attach_mock(bench.dispatcher.quiesce, "quiesce")
    order.attach_mock(bench.dispatcher.go_on_without, "go_on")
    order.reset_mock()
    store = bench.store
    assert bench.pipeline.give_up(frozenset({BILLS}), 1)
    assert [call[0] for call in order.mock_calls] == ["flush", "quiesce", "go_on"]
    bench.dispatcher.go_on_without.assert_called_once_with({BILLS}, 1)
    bench.ingest.begin_anew.assert_called_with({BILLS})
    bench.maintenance.flush_now.assert_called_once_with(module.FLUSH_S, {BILLS})
    assert bench.store is store and store.next_offsets() == {ORDERS: 2}
    assert store.stats().pending == 2
    assert bench.pipeline.follow(frozenset({ORDERS}), member(frozenset({ORDERS}), 1)), "that is what it has"
    assert bench.pipeline.stop()


def test_a_partition_that_comes_joins_the_open_store(rig: Rig) -> None:
    """It goes on from where the index ends, is nothing's until it is read up to its committed offset, and is the
    dispatcher's then."""
    bench = running(rig)
    assert bench.pipeline.give_up(frozenset({BILLS}), 1)
    rig.produce(BILLS, FAR_MS)
    rig.states[BILLS] = replace(rig.states[BILLS], offset=3)
    bench.stand_in.marks[BILLS] = Watermarks(start=0, end=3)
    bench.maintenance.pass_step.return_value = False
    assert bench.pipeline.follow(BOTH, member(BOTH, 1))
    assert bench.store.next_offsets() == {ORDERS: 2}, "a step of maintenance may still write to its directory"
    assert bench.pipeline._context.on_held.called  # type: ignore[attr-defined]
    bench.maintenance.pass_step.return_value = True
    assert bench.pipeline.follow(BOTH, member(BOTH, 1))
    assert bench.store.next_offsets() == {ORDERS: 2, BILLS: 2}
    bench.ingest.begin_anew.assert_called_with()
    [expected] = bench.dispatcher.expect.call_args_list
    assert {name: state.offset for name, state in expected.args[0].items()} == {BILLS: 3}
    assert bench.store.in_life(Life.CATCHING_UP) == [BILLS] and not bench.pipeline.is_catching_up()
    assert "delay/1" in bench.pipeline.alarms()[0]
    assert bench.store.stats().pending == 4
    assert bench.pipeline.follow(BOTH, member(BOTH, 1)) and bench.dispatcher.expect.call_count == 1, "once"
    assert bench.pipeline.stop()


@pytest.mark.fault("a large index that comes with an assignment")
def test_the_opening_of_an_index_shows_life_after_each_segment(rig: Rig) -> None:
    """A change of the assignment opens a large index for as long as that takes: each segment shows that it goes on, and
    the process stays."""
    for _ in range(2):
        rig.produce(BILLS, FAR_MS)
        rig.ingest()
        rig.deliver()
        rig.stores.flush(NOW_MS)
    bench = running(rig)
    segments = rig.stores.stats().segments
    assert bench.pipeline.give_up(frozenset({BILLS}), 1)
    beat = bench.pipeline._context.beat
    assert isinstance(beat, mock.Mock) and not beat.called
    assert bench.pipeline.follow(BOTH, member(BOTH, 1))
    assert segments == 4 and beat.call_args_list.count(mock.call(START_S)) >= segments - 1
    assert bench.pipeline.stop()


@pytest.mark.fault("a damaged segment of one of several partitions in a running bridge")
def test_a_damaged_segment_has_its_partition_alone_read_again(rig: Rig) -> None:
    """The other partitions are delivered meanwhile, without a pause; a pipeline with nothing else is replaced."""
    bench = running(rig)
    bench.live()
    [damaged] = (rig.directory / "delay" / "1").glob("segment-*.parquet")
    kept = bench.store
    kept.damage.set_aside(Corrupt("it fails its checksum", path=str(damaged)), NOW_MS)
    bench.pipeline._context.on_held.assert_called_once_with()  # type: ignore[attr-defined]
    assert bench.pipeline.follow(BOTH, member(BOTH, 1))
    assert bench.store is kept and bench.store.next_offsets() == {ORDERS: 2, BILLS: 0}
    assert bench.store.in_life(Life.LIVE) == [ORDERS] and bench.store.in_life(Life.CATCHING_UP) == [BILLS]
    assert [call.args for call in bench.dispatcher.go_on_without.call_args_list] == [({BILLS}, 1)]
    assert kept.damage.names == frozenset() and bench.pipeline.owned == BOTH
    kept.damage.names = BOTH
    assert not bench.pipeline.follow(BOTH, member(BOTH, 1))
    assert bench.pipeline.stop()


def test_a_partition_that_goes_again_before_it_has_come_does_not_come(rig: Rig) -> None:
    """It was planned on committed states that another instance moves on meanwhile."""
    bench = running(rig)
    assert bench.pipeline.give_up(frozenset({BILLS}), 1)
    prepare = bench.store.prepare

    def revoked(*args: Any) -> Any:
        assert bench.pipeline.give_up(frozenset({BILLS}), 2)
        return prepare(*args)

    with mock.patch.object(bench.store, "prepare", revoked):
        assert bench.pipeline.follow(BOTH, member(BOTH, 1))
    assert bench.store.next_offsets() == {ORDERS: 2} and not bench.dispatcher.expect.called
    assert bench.pipeline.follow(BOTH, member(BOTH, 1)), "sampled before the revocation: no news"
    assert bench.store.next_offsets() == {ORDERS: 2}
    assert bench.pipeline.follow(BOTH, member(BOTH, 2))
    assert bench.store.next_offsets() == {ORDERS: 2, BILLS: 2}
    assert bench.pipeline.stop()


def test_a_revocation_during_the_flush_for_another_one_stays_counted(rig: Rig) -> None:
    """The main thread leaves a partition out and waits for the flush, and meanwhile one is revoked. With the count of
    before, the dispatcher would take each of its transactions for one of an old assignment, and hold itself."""
    bench = running(rig)

    def revocation(*_: object) -> bool:
        bench.maintenance.flush_now.side_effect = None
        return bench.pipeline.give_up(frozenset({("delay", 2)}), 1)

    bench.maintenance.flush_now.side_effect = revocation
    assert bench.pipeline.follow(frozenset({ORDERS}), member(BOTH, 0))
    assert [call.args for call in bench.dispatcher.go_on_without.call_args_list] == [(set(), 1), ({BILLS}, 1)]
    assert bench.pipeline.stop()


def test_a_dispatcher_that_held_itself_goes_on_though_nothing_has_changed(rig: Rig) -> None:
    """It does so where it commits with an assignment that is out of date, and nothing else would resume it."""
    bench = running(rig)
    bench.dispatcher.resume.reset_mock()
    assert bench.pipeline.follow(BOTH, member(BOTH, 1))
    assert not bench.dispatcher.resume.called
    bench.dispatcher.is_held = True
    assert bench.pipeline.follow(BOTH, member(BOTH, 1))
    bench.dispatcher.resume.assert_called_once_with(bench.store, {}, 1)
    assert bench.pipeline.stop()


def test_a_store_that_failed_half_way_is_closed_as_it_is(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in memory may have gaps, which a last flush would make good for ever."""
    bench = running(rig)
    tell, clock = mock.Mock(), ManualClock(now_ms=NOW_MS)
    maintenance = MaintenanceThread(store=bench.store, clock=clock, metrics=tell, on_fatal=tell)
    bench.pipeline._maintenance = maintenance
    rig.produce(ORDERS, FAR_MS)
    rig.stores = bench.store
    with monkeypatch.context() as patch:
        patch.setattr(Memory, "take_in", mock.Mock(side_effect=MemoryError))
        with pytest.raises(MemoryError):
            rig.ingest()
    with suppress(Inconsistent):
        rig.deliver()
    directory = rig.directory / "delay" / "0"
    names = sorted(path.name for path in directory.iterdir())
    written = (directory / files.CHECKPOINT).read_bytes()
    maintenance.start()
    assert bench.pipeline.stop()
    assert (directory / files.CHECKPOINT).read_bytes() == written
    assert sorted(path.name for path in directory.iterdir()) == names
    assert Bench(rig).start() == {ORDERS: 2, BILLS: 2}, "the directory is free"


def test_a_pipeline_is_made_anew_where_it_cannot_follow(rig: Rig) -> None:
    """Nothing would be left, also of damaged and held partitions together; or the open transaction did not end."""
    bench = running(rig)
    bench.pipeline.give_up(BOTH, 1)
    assert not bench.pipeline.follow(frozenset(), member(frozenset(), 1))
    assert bench.pipeline.stop()
    bench = running(rig)
    bench.store.damage.names = frozenset({ORDERS})
    assert not bench.pipeline.follow(frozenset({ORDERS}), member(BOTH, 1))
    assert bench.pipeline.stop()
    bench = running(rig)
    bench.dispatcher.quiesce.return_value = False
    assert not bench.pipeline.give_up(frozenset({BILLS}), 1)
    assert not bench.pipeline.follow(frozenset({ORDERS}), member(frozenset({ORDERS}), 1))
    assert not bench.dispatcher.go_on_without.called
    assert bench.pipeline.stop()


def test_a_partition_that_comes_with_an_outdated_index_is_read_again(rig: Rig) -> None:
    """An operator has moved it back: its index is put aside, and the others go on."""
    bench = running(rig)
    assert bench.pipeline.give_up(frozenset({BILLS}), 1)
    rig.states[BILLS] = replace(rig.states[BILLS], offset=1)
    assert bench.pipeline.follow(BOTH, member(BOTH, 1))
    assert bench.store.next_offsets() == {ORDERS: 2, BILLS: 0}
    assert bench.store.stats().pending == 2
    assert bench.pipeline.stop()


@pytest.mark.parametrize(("consumer", "expected_s"), [({}, 300), ({"max.poll.interval.ms": 45_000}, 45)])
def test_a_rebalance_waits_for_a_slow_disk_as_long_as_the_group_does(
    rig: Rig, consumer: dict[str, int], expected_s: float
) -> None:
    """A flush that takes a minute is no reason to end the process; its end, which has nine seconds, waits less."""
    settings = Settings.of({"kafka": {"common": {"bootstrap.servers": "127.0.0.1:1"}, "consumer": consumer}})
    assert settings.budgets.poll_interval_s == expected_s
    maintenance = mock.Mock()
    maintenance.stop.side_effect = lambda timeout_s: timeout_s >= 40
    application = Application(settings, ManualClock(), lambda: settings, Redactor(), Restart(ManualClock()))
    pipeline = application._pipeline = Bench(rig).pipeline
    pipeline._maintenance = maintenance
    application._stop_pipeline()
    assert not pipeline.stop()
    assert [call.args for call in maintenance.stop.call_args_list] == [(expected_s,), (5.0,)]


def test_a_log_that_was_cut_is_read_again_beside_the_others(rig: Rig) -> None:
    """The others go on before that partition is read up to its committed offset."""
    rig.cut(BILLS, 1)
    bench = Bench(rig)
    bench.stand_in.marks[BILLS] = Watermarks(start=0, end=1)
    assert bench.start() == {ORDERS: 2, BILLS: 0}
    assert bench.store.arrive() == [ORDERS]
    assert bench.pipeline.stop()


@pytest.mark.fault("records of pending messages that are gone from a log that was cut as well")
def test_what_is_gone_of_a_log_that_was_cut_is_no_reason_to_refuse(rig: Rig) -> None:
    """The index has the messages, also at the next start, even if few records were read in between."""
    rig.cut(BILLS, 1)
    for _ in range(2):
        bench = Bench(rig)
        bench.stand_in.marks[BILLS] = Watermarks(start=1, end=1)
        bench.stand_in.more[BILLS] = {"gone_below": 1}
        assert bench.start() == {ORDERS: 2, BILLS: 1}
        assert bench.store.stats().pending == 3
        assert bench.pipeline.stop()
    bench.stand_in.more[BILLS] = {"gone_below": 2}
    with pytest.raises(StateError, match="does not cover"):
        replace_pipeline(bench).start()


def replace_pipeline(bench: Bench) -> Bench:
    """The next one, over the same facts."""
    anew = Bench(bench.rig)
    anew.stand_in.more, anew.stand_in.marks = bench.stand_in.more, bench.stand_in.marks
    return anew


def test_a_partition_that_comes_back_with_a_cut_is_read_again(rig: Rig) -> None:
    """Another instance had it when the log was cut: what is here from above the cut is in no log any more."""
    bench = running(rig)
    assert bench.pipeline.give_up(frozenset({BILLS}), 1)
    rig.cut(BILLS, 1)
    rig.produce(BILLS, FAR_MS, FAR_MS)
    rig.states[BILLS] = replace(rig.states[BILLS], offset=3)
    bench.stand_in.marks[BILLS] = Watermarks(start=0, end=3)
    assert bench.pipeline.follow(BOTH, member(BOTH, 1))
    assert bench.store.next_offsets() == {ORDERS: 2, BILLS: 0}
    assert bench.store.stats().pending == 2, "what is here from above the cut is in no log any more"
    assert bench.pipeline.stop()


def test_a_log_that_was_cut_before_a_start_is_not_delivered_from(rig: Rig) -> None:
    """It is held, and the others are started without it."""
    bench = Bench(rig)
    rig.stores.close()
    bench.stand_in.marks[BILLS] = Watermarks(start=0, end=1, epoch=2)
    bench.stand_in.more[BILLS] = {"read_under": (2, 1)}
    assert not bench.pipeline.start()
    context = bench.pipeline._context
    assert context.identity.without(BOTH) == {ORDERS}
    assert context.on_held.called and not bench.dispatcher.resume.called  # type: ignore[attr-defined]
    assert bench.pipeline.stop()
