"""Records, targets and partitions that only a real broker refuses: the cost, and the delivery of the others."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import pytest
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # public, but not marked as exported
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    ResourceType,
)
from structlog.testing import capture_logs

from bridge.delivery.plan.backoff import RetryPolicy
from bridge.delivery.plan.record_size import record_bytes
from bridge.settings.clients import HEADER_ALLOWANCE_BYTES
from bridge.wire import headers as h
from dev.harness.kafka import Topics, read_committed
from dev.harness.waiting import wait_until
from tests.broker.rig import DEADLINE_S, Rig
from tests.entries import reject, timer
from tests.system.broker import Broker
from timerstore.rows.entry import Kind
from timerstore.rows.position import AT_MIN

pytestmark = pytest.mark.system

ABORTS_MAX = 10


def delay_topic(topics: Topics, partitions: int = 1, config: Mapping[str, str] | None = None) -> str:
    """A delay topic with its dead-letter topic."""
    name = topics.delay(partitions=partitions, config=dict(config or {}))
    dead = NewTopic(f"{name}.dlt", num_partitions=1, replication_factor=1)
    topics.admin.create_topics([dead])[f"{name}.dlt"].result(DEADLINE_S)
    return name


def reconfigure(topics: Topics, topic: str, name: str, value: str) -> None:
    """Set one of a topic's properties."""
    entry = ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])
    for done in topics.admin.incremental_alter_configs([resource]).values():
        done.result(DEADLINE_S)


def due(rig: Rig, offset: int, target: str, *, ago_ms: int = 1_000, partition: int = 0, **more: Any) -> dict[str, Any]:
    """A timer that is due."""
    return timer(rig.delay_topic, partition, offset, rig.clock.now_ms() - ago_ms, target, **more)


def test_a_thousand_records_that_only_the_broker_refuses_cost_ten_aborts(broker: Broker, topics: Topics) -> None:
    """Compressed, only the broker can tell that they are too large: 1,000 among 10,000 good ones for two targets, all
    due at one instant. The good ones are delivered after ten aborts at most, those of the same target too, and none of
    them is put off. The bad ones are retried, and are dead letters in the end."""
    delay = delay_topic(topics)
    small, other = topics.create(config={"max.message.bytes": "2000"}), topics.create()
    with Rig(
        broker.bootstrap,
        delay,
        properties={"compression.type": "lz4"},
        retry=RetryPolicy(attempts=2, backoff_ms=60_000),
    ) as rig:
        rig.add(
            [
                due(rig, i, small, value=os.urandom(3_000)) if i % 11 == 5 else due(rig, i, small if i % 2 else other)
                for i in range(11_000)
            ]
        )
        rig.start()
        assert rig.dispatcher.wait_open(DEADLINE_S)
        began_s = rig.clock.monotonic_s()
        wait_until(lambda: sum(rig.tally.by_topic.values()) == 10_000, DEADLINE_S, lambda: str(rig.tally.by_topic))
        print(f"the good ones after {rig.clock.monotonic_s() - began_s:.1f} s, {rig.tally.aborted} aborts")
        assert rig.tally.aborted <= ABORTS_MAX
        assert rig.tally.by_retry == {"too-large": 1_000 - rig.tally.by_reason.get("too-large", 0)}
        assert not rig.fatal
    assert len(read_committed(broker.bootstrap, small)) + len(read_committed(broker.bootstrap, other)) == 10_000


def test_a_record_without_a_key_never_enters_a_transaction_to_a_compacted_target(
    broker: Broker, topics: Topics
) -> None:
    """The topic's policy is looked up with its size: no abort, and a dead letter that says so."""
    delay, target = delay_topic(topics), topics.create(config={"cleanup.policy": "compact"})
    with Rig(broker.bootstrap, delay) as rig:
        rig.add([due(rig, i, target, key=None if i % 3 else b"k") for i in range(300)])
        rig.start()
        rig.wait_delivered()
        assert rig.tally.aborted == 0
        assert rig.tally.by_reason == {"no-key": 200}
    assert len(read_committed(broker.bootstrap, target)) == 100


def test_records_that_the_broker_names_are_found_at_once(broker: Broker, topics: Topics) -> None:
    """Where the policy may not be looked up, or has just changed: a few aborts for a hundred bad records among a
    thousand, and every good one is delivered."""
    delay, target = delay_topic(topics), topics.create(partitions=1)
    with Rig(broker.bootstrap, delay) as rig:
        rig.targets.resolve([target])  # known as it was
        reconfigure(topics, target, "cleanup.policy", "compact")
        rig.add([due(rig, i, target, key=None if i % 10 == 5 else b"k") for i in range(1_000)])
        rig.start()
        rig.wait_delivered()
        assert 0 < rig.tally.aborted <= ABORTS_MAX
        assert sum(rig.tally.by_reason.values()) == 100
    assert len(read_committed(broker.bootstrap, target)) == 900


def test_sizes_are_exact_to_the_byte(broker: Broker, topics: Topics) -> None:
    """A record of the largest size is delivered, one with a byte more becomes a dead letter; no transaction is aborted
    for either."""
    delay, target = delay_topic(topics), topics.create(config={"max.message.bytes": "5000"})
    with Rig(broker.bootstrap, delay) as rig:
        now_ms = rig.clock.now_ms()
        own = [("own", b"x" * 130), ("empty", None)]
        headers = [*own, (h.ORIGIN, f"{delay}/0/0"), (h.DUE, str(now_ms))]
        fits = max(size for size in range(5_000) if record_bytes(b"key", bytes(size), headers) <= 5_000)
        entries = [
            timer(delay, 0, i, now_ms, target, key=b"key", headers=own, value=bytes(fits + i - 2)) for i in range(5)
        ]
        rig.add(entries)
        rig.start()
        rig.wait_delivered()
        assert rig.tally.aborted == 0
        assert rig.tally.by_reason == {"too-large": 2}
    assert [len(r.value or b"") for r in read_committed(broker.bootstrap, target)] == [fits - 2, fits - 1, fits]


def test_a_roll_that_no_longer_fits_is_a_dead_letter_without_an_abort(broker: Broker, topics: Topics) -> None:
    """The delay topic takes less than when the record was written: that is looked at before the roll is produced."""
    delay, target = delay_topic(topics), topics.create()
    with Rig(broker.bootstrap, delay) as rig:
        reconfigure(topics, delay, "max.message.bytes", "2000")
        now_ms = rig.clock.now_ms()
        rig.add([timer(delay, 0, i, now_ms + 10**9, target, at=now_ms, value=bytes(1_000 + 1_000 * i)) for i in (0, 1)])
        rig.start()
        wait_until(lambda: rig.tally.rolls + sum(rig.tally.by_reason.values()) == 2, DEADLINE_S, "both are written")
        assert (rig.tally.rolls, rig.tally.by_reason, rig.tally.aborted) == (1, {"too-large": 1}, 0)


def test_a_dead_letter_without_a_topic_holds_its_own_partition_only(broker: Broker, topics: Topics) -> None:
    """Neither its letter nor a copy of it can be written: it waits where it is, and the other partition goes on."""
    delay, target = delay_topic(topics, partitions=2), topics.create()
    with Rig(broker.bootstrap, delay) as rig:
        reconfigure(topics, f"{delay}.dlt", "max.message.bytes", "100")
        reconfigure(topics, delay, "max.message.bytes", "100")
        rig.add([reject(delay, 0, 0, rig.clock.now_ms(), "no-time", value=bytes(500))])
        rig.add([due(rig, i, target, partition=1) for i in range(3)])
        rig.start()
        wait_until(lambda: rig.tally.by_topic[target] == 3, DEADLINE_S, lambda: f"{rig.tally.by_topic} {rig.fatal}")
        wait_until(lambda: rig.tally.held == 1, DEADLINE_S, "its partition is held")
        reconfigure(topics, f"{delay}.dlt", "max.message.bytes", "1000000")
        rig.wait_delivered(2 * DEADLINE_S)
        wait_until(lambda: sum(rig.tally.by_reason.values()) == 1, 2 * DEADLINE_S, "the letter is written")
    [letter] = read_committed(broker.bootstrap, f"{delay}.dlt")
    assert letter.value == bytes(500)


def test_letters_that_together_are_more_than_a_batch_of_their_topic_cost_no_abort(
    broker: Broker, topics: Topics
) -> None:
    """The client would send them as one batch. They go out in parts, before due messages for a target."""
    delay, target = delay_topic(topics, config={"max.message.bytes": "20000"}), topics.create()
    reconfigure(topics, f"{delay}.dlt", "max.message.bytes", str(20_000 + HEADER_ALLOWANCE_BYTES))
    with Rig(broker.bootstrap, delay) as rig:
        rejects = [reject(delay, 0, i, rig.clock.now_ms(), "no-time", value=os.urandom(1_000)) for i in range(3_000)]
        rig.add([*rejects, due(rig, len(rejects), target)])
        rig.start()
        rig.wait_delivered()
        assert (rig.tally.aborted, rig.tally.by_reason) == (0, {"no-time": len(rejects)})


def test_letters_that_are_larger_than_their_topic_takes_cost_no_abort(broker: Broker, topics: Topics) -> None:
    """They are put off in the delay topic where that takes them, and are cut where it does not; the others are written
    whole, and due messages for a target are delivered."""
    delay, target = delay_topic(topics, config={"max.message.bytes": "40000"}), topics.create()
    reconfigure(topics, f"{delay}.dlt", "max.message.bytes", "10000")
    with capture_logs() as logged, Rig(broker.bootstrap, delay) as rig:
        sizes = [100, 20_000, 39_000] * 100
        now_ms = rig.clock.now_ms()
        rejects = [reject(delay, 0, i, now_ms, "no-time", value=bytes(size)) for i, size in enumerate(sizes)]
        rig.add([*rejects, due(rig, len(rejects), target)])
        rig.start()
        rig.wait_delivered()
        assert (rig.tally.aborted, rig.tally.by_reason) == (0, {"no-time": 200})
        assert rig.tally.by_retry == {"dead-letter-topic": 100}
    letters = read_committed(broker.bootstrap, f"{delay}.dlt")
    assert sorted(len(letter.value or b"") for letter in letters) == [0] * 100 + [100] * 100
    assert sum(each["records"] for each in logged if each["event"] == "dead-letter-cut") == 100


def test_cancels_that_together_are_more_than_a_batch_of_the_delay_topic_cost_no_abort(
    broker: Broker, topics: Topics
) -> None:
    """Those without a key are sent on in parts."""
    delay, target = delay_topic(topics, partitions=2, config={"max.message.bytes": "20000"}), topics.create()
    with Rig(broker.bootstrap, delay) as rig:
        cancels = [timer(delay, 0, i, 0, None, kind=int(Kind.CANCEL), id=f"id-{i}", key=None) for i in range(5_000)]
        rig.add([*({**each, "at": AT_MIN} for each in cancels), due(rig, len(cancels), target)])
        rig.start()
        rig.wait_delivered()
        assert (rig.tally.aborted, rig.tally.forwarded) == (0, len(cancels))
