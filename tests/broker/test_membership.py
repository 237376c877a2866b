"""Group membership on a real broker: who owns what, who is fenced, and what Kafka holds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import NewPartitions  # type: ignore[attr-defined]  # public, but not marked as exported

from bridge.errors import EnvironmentFailure, FencedError, StateError
from bridge.kafka.admin import Cluster
from bridge.kafka.membership import Ownership
from bridge.settings.clients import librdkafka
from bridge.settings.model import Settings
from bridge.start.facts import topic_facts
from bridge.start.reset_offsets import reset_committed_states
from bridge.stores.names import SourceName
from bridge.wire.committed_state import CommittedState, Pause, initial_state
from dev.harness.kafka import Outgoing, Topics, produce
from dev.harness.waiting import wait_until
from tests.broker.rig import DEADLINE_S, PARAMETERS, Listener, ownership_of, settings_for, states_of
from tests.system.broker import Broker
from timerstore.clock import SystemClock
from timerstore.disk import files

pytestmark = pytest.mark.system


@contextmanager
def member(settings: Settings, **config: Any) -> Iterator[tuple[Ownership, Listener]]:
    """A running membership."""
    listener = Listener()
    ownership = ownership_of(settings, listener, **config)
    ownership.start()
    try:
        yield ownership, listener
    finally:
        ownership.stop()


def settled(ownership: Ownership, settings: Settings) -> dict[SourceName, CommittedState]:
    """The owned partitions' states, as at a start without a local index."""
    return states_of(ownership, settings, SystemClock())


def wait_owned(ownership: Ownership, count: int) -> None:
    wait_until(lambda: len(ownership.assignment()) == count, DEADLINE_S, f"{count} partitions owned")


def test_first_use_commits_every_partition_before_anything_else(broker: Broker, topics: Topics) -> None:
    """After the plan, Kafka holds (0, minus infinity) of every partition; a second plan changes nothing."""
    delay = topics.delay(partitions=3)
    produce(broker.bootstrap, [Outgoing(topic=delay, value=b"x")])
    settings = settings_for(broker.bootstrap, delay)
    with member(settings) as (ownership, listener):
        wait_owned(ownership, 3)
        states = settled(ownership, settings)
        held = ownership.read_committed_states([(delay, p) for p in range(3)])
        assert held == states
        assert {(s.offset, s.position, s.partitions) for s in states.values()} == {(0, None, 3)}
        assert settled(ownership, settings) == states
        assert listener.fatal == []


def test_nothing_is_fetched_and_a_trimmed_log_is_no_error(broker: Broker, topics: Topics) -> None:
    """Paused from the start, the consumer's position never moves, and auto.offset.reset=error is never reached."""
    delay = topics.delay()
    produce(broker.bootstrap, [Outgoing(topic=delay, value=b"x") for _ in range(50)])
    [future] = topics.admin.delete_records([TopicPartition(delay, 0, 20)]).values()
    future.result(DEADLINE_S)
    with member(settings_for(broker.bootstrap, delay)) as (ownership, listener):
        wait_owned(ownership, 1)
        ownership.wait(0.5)
        assert ownership.membership().partitions == {(delay, 0)}
        assert listener.fatal == []


@pytest.mark.parametrize("strategy", ["roundrobin", "cooperative-sticky"])
def test_a_second_instance_of_the_same_name_fences_the_first(broker: Broker, topics: Topics, strategy: str) -> None:
    """The newer one owns everything; the older one hears that it was replaced, and owns nothing from then on."""
    delay = topics.delay(partitions=2)
    settings = settings_for(broker.bootstrap, delay)
    with member(settings, **{"partition.assignment.strategy": strategy}) as (first, heard):
        wait_owned(first, 2)
        with member(settings, **{"partition.assignment.strategy": strategy}) as (second, other):
            wait_owned(second, 2)
            wait_until(lambda: heard.fatal, DEADLINE_S, "the first one is told")
            assert isinstance(heard.fatal[0], FencedError)
            assert "another instance of the same name took over" in str(heard.fatal[0])
            assert first.assignment() == frozenset()
            assert other.fatal == []
            with pytest.raises((FencedError, EnvironmentFailure)):
                first.commit_states(
                    {(delay, 0): initial_state(offset=0, topic_id="x", partitions=1, parameters=PARAMETERS)},
                    frozenset({(delay, 0), (delay, 1)}),
                )


def test_first_commits_for_another_assignment_are_not_made(broker: Broker, topics: Topics) -> None:
    """They were decided on before partitions came or went: another instance may have committed progress since."""
    delay = topics.delay(partitions=2)
    first = initial_state(offset=0, topic_id="x", partitions=2, parameters=PARAMETERS)
    with member(settings_for(broker.bootstrap, delay)) as (ownership, _):
        wait_owned(ownership, 2)
        assert not ownership.commit_states({(delay, 0): first}, frozenset({(delay, 0)}))
        assert ownership.read_committed_states([(delay, 0)]) == {(delay, 0): None}
        assert ownership.commit_states({(delay, 0): first}, ownership.assignment())
        assert ownership.read_committed_states([(delay, 0)]) == {(delay, 0): first}


@pytest.mark.parametrize("strategy", ["roundrobin", "cooperative-sticky"])
def test_instances_of_different_names_share(broker: Broker, topics: Topics, strategy: str) -> None:
    """A partition moves only after its owner has answered the revocation, and every revocation is counted."""
    delay = topics.delay(partitions=4)
    config = {"partition.assignment.strategy": strategy}
    with member(settings_for(broker.bootstrap, delay), **config) as (first, heard):
        wait_owned(first, 4)
        before = first.membership().revocations
        overlap: list[frozenset[SourceName]] = []
        with member(settings_for(broker.bootstrap, delay, bridge={"instance": "two"}), **config) as (second, _):
            heard.quiesce = lambda: overlap.append(second.assignment())
            wait_until(
                lambda: len(second.assignment()) == 2 and len(first.assignment()) == 2, DEADLINE_S, "two and two"
            )
            assert first.assignment() | second.assignment() == {(delay, p) for p in range(4)}
            assert first.membership().revocations == heard.counted[-1] > before
            assert heard.revoked
            assert not any(lost for _, lost in heard.revoked)
            assert set(overlap) == {frozenset()}


def test_a_version_with_another_strategy_is_waited_for(broker: Broker, topics: Topics) -> None:
    """It stays in the group as a static member until its session is over, and the group takes no other strategy before
    that: an upgrade from it waits, and does not end."""
    delay = topics.delay(partitions=2)
    settings, session = settings_for(broker.bootstrap, delay), {"session.timeout.ms": "6000"}
    with member(settings, **session, **{"partition.assignment.strategy": "roundrobin"}) as (old, _):
        wait_owned(old, 2)
    with member(settings, **session) as (new, heard):
        wait_owned(new, 2)
        assert heard.fatal == []


def test_a_partition_that_is_added_starts_at_0(broker: Broker, topics: Topics) -> None:
    """It gets its first commit, and the others keep theirs."""
    delay = topics.delay()
    settings = settings_for(broker.bootstrap, delay)
    config = {"topic.metadata.refresh.interval.ms": 500, "metadata.max.age.ms": 1_000}
    with member(settings, **config) as (ownership, _):
        wait_owned(ownership, 1)
        [before] = settled(ownership, settings).values()
        assert before.partitions == 1
        topics.admin.create_partitions([NewPartitions(delay, 2)])[delay].result(DEADLINE_S)
        wait_owned(ownership, 2)
        states = settled(ownership, settings)
        assert {(s.offset, s.position, s.partitions) for s in states.values()} == {(0, None, 2)}


def test_offsets_that_an_admin_removed_are_refused(broker: Broker, topics: Topics) -> None:
    """With one partition's commit gone, or replaced by a bare offset, the start ends with a remedy."""
    delay = topics.delay(partitions=2)
    settings = settings_for(broker.bootstrap, delay)
    with member(settings) as (ownership, _):
        wait_owned(ownership, 2)
        settled(ownership, settings)
        ownership.commit_offsets([TopicPartition(delay, 1, 0)])  # as an offset reset leaves it: without metadata
        with pytest.raises(StateError, match="not written by the bridge") as refused:
            settled(ownership, settings)
        assert "reset-offsets" in refused.value.hint


def test_committed_states_are_read_stable(broker: Broker, topics: Topics) -> None:
    """While a transaction with an offset is open nothing is answered; after it, the outcome is."""
    delay = topics.delay()
    settings = settings_for(broker.bootstrap, delay)
    with member(settings) as (ownership, _):
        wait_owned(ownership, 1)
        [state] = settled(ownership, settings).values()
        producer = Producer({"bootstrap.servers": broker.bootstrap, "transactional.id": f"tx-{delay}"})
        producer.init_transactions(DEADLINE_S)
        producer.begin_transaction()
        producer.send_offsets_to_transaction(
            [TopicPartition(delay, 0, 0, state.metadata())], ownership.membership().metadata, DEADLINE_S
        )
        with pytest.raises(EnvironmentFailure, match="cannot read the committed offsets"):
            ownership.read_committed_states([(delay, 0)], timeout_s=1.0)
        producer.commit_transaction(DEADLINE_S)
        assert ownership.read_committed_states([(delay, 0)]) == {(delay, 0): state}


def test_a_stop_and_a_start_of_the_same_name_keep_the_partitions(broker: Broker, topics: Topics) -> None:
    """Static membership: the new process gets the old one's partitions, at once, and no others."""
    delay = topics.delay(partitions=2)
    settings = settings_for(broker.bootstrap, delay)
    with member(settings) as (ownership, _):
        wait_owned(ownership, 2)
        states = settled(ownership, settings)
    with member(settings) as (again, listener):
        wait_owned(again, 2)
        assert settled(again, settings) == states
        assert listener.fatal == []


@pytest.mark.fault("a reset of offsets while a target is paused")
def test_a_reset_keeps_pauses(broker: Broker, topics: Topics, tmp_path: Path) -> None:
    """A reset keeps the pauses of every readable state, also beside unreadable ones."""
    delay = topics.delay(partitions=3)
    settings = settings_for(broker.bootstrap, delay)
    pause = Pause(name="orders", changed_ms=7, why="repairs")
    state = initial_state(offset=0, topic_id="of a deleted topic", partitions=3, parameters=PARAMETERS)
    commits = [
        TopicPartition(delay, 0, 0, replace(state, pauses=(pause,)).metadata()),
        TopicPartition(delay, 1, 0, "written by another tool"),
    ]
    tool = Consumer({**librdkafka(settings, "admin"), "group.id": settings.group_id})
    tool.commit(offsets=commits, asynchronous=False)
    tool.close()
    states = reset_committed_states(
        consumer=librdkafka(settings, "consumer"),
        group_id=settings.group_id,
        topics=topic_facts(Cluster(settings), [delay]),
        parameters=lambda topic: PARAMETERS,
        to="earliest",
        directory=tmp_path,
        now_ms=1,
    )
    assert [state.pauses for state in states.values()] == [(pause,)] * 3


@pytest.mark.parametrize("start", ["earliest", "latest"])
def test_resetting_offsets_decides_what_a_start_refused(
    broker: Broker, topics: Topics, tmp_path: Path, start: Literal["earliest", "latest"]
) -> None:
    """While a member is there the group refuses; afterwards the start goes on from where the operator said."""
    delay = topics.delay()
    produce(broker.bootstrap, [Outgoing(topic=delay, value=b"x") for _ in range(9)])
    [future] = topics.admin.delete_records([TopicPartition(delay, 0, 4)]).values()
    future.result(DEADLINE_S)
    settings = settings_for(broker.bootstrap, delay, delivery={"session_timeout": "6s"})
    checkpoints = [tmp_path / delay / number / files.CHECKPOINT for number in ("0", "7")]
    for each in checkpoints:  # the topic had more partitions before it was made again
        each.parent.mkdir(parents=True)
        each.write_text("old")
    refusals: list[str] = []

    def decide() -> bool:
        try:
            reset_committed_states(
                consumer=librdkafka(settings, "consumer"),
                group_id=settings.group_id,
                topics=topic_facts(Cluster(settings), [delay]),
                parameters=lambda topic: PARAMETERS,
                to=start,
                directory=tmp_path,
                now_ms=1,
            )
        except EnvironmentFailure as refused:
            refusals.append(str(refused))
            return False
        return True

    with member(settings) as (ownership, _):
        wait_owned(ownership, 1)
        with pytest.raises(StateError, match="oldest records are gone"):
            settled(ownership, settings)
        assert not decide()
        assert "still a member" in refusals[0]
    wait_until(decide, DEADLINE_S, "the group is empty")
    assert not any(each.exists() for each in checkpoints)
    with member(settings) as (ownership, _):
        wait_owned(ownership, 1)
        [state] = settled(ownership, settings).values()
        expected = 4 if start == "earliest" else 9
        assert (state.offset, state.first_offset, state.position) == (expected, expected, None)


def test_resetting_to_committed_gives_up_only_what_is_gone(broker: Broker, topics: Topics, tmp_path: Path) -> None:
    """O, P and decode epochs stay; a partition whose log begins later goes on from there, and knows that it does."""
    delay = topics.delay(partitions=2)
    produce(broker.bootstrap, [Outgoing(topic=delay, value=b"x", partition=p) for p in (0, 1) for _ in range(9)])
    settings = settings_for(broker.bootstrap, delay, delivery={"session_timeout": "6s"})
    with member(settings) as (ownership, _):
        wait_owned(ownership, 2)
        states = settled(ownership, settings)
        done = {name: replace(state, offset=3, position=(7, 2)) for name, state in states.items()}
        assert ownership.commit_states(done, frozenset(done))
    [future] = topics.admin.delete_records([TopicPartition(delay, 0, 5)]).values()
    future.result(DEADLINE_S)

    def decide() -> bool:
        with suppress(EnvironmentFailure):
            reset_committed_states(
                consumer=librdkafka(settings, "consumer"),
                group_id=settings.group_id,
                topics=topic_facts(Cluster(settings), [delay]),
                parameters=lambda topic: PARAMETERS,
                to="committed",
                directory=tmp_path,
                now_ms=1,
            )
            return True
        return False

    wait_until(decide, DEADLINE_S, "the group is empty")
    with member(settings) as (ownership, _):
        wait_owned(ownership, 2)
        found = settled(ownership, settings)
    assert found[delay, 0] == replace(done[delay, 0], offset=5, first_offset=5)
    assert found[delay, 1] == done[delay, 1]
