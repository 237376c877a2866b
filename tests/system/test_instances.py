"""Several bridges at once: one takes over from another, two share the partitions."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest
from confluent_kafka import TopicPartition

from bridge.errors import FencedError
from dev.harness.kafka import Outgoing, TopicReader, Topics, produce
from dev.harness.ledger import Balance
from dev.harness.load import Load
from dev.harness.pace import scaled
from dev.harness.waiting import wait_until
from tests.system.bridge import RunningBridge
from tests.system.broker import Broker
from timerstore.clock import SystemClock

pytestmark = [pytest.mark.system, pytest.mark.slow]

PER_SECOND: Final = 100
DELIVERED_S_MAX: Final = 120
TAKEN_OVER_S_MAX: Final = 60
LATE_MS_MAX: Final = 30_000
"""The promise for an upgrade, in which an instance is away for some 15 s; on a machine that takes longer than 20 s to
start one beside the other, half as long again as that took."""
KEPT_LATE_MS_MAX: Final = 5_000
"""Of partitions that stay where they are; a second on a machine that does nothing else (`bench/on_time.py rolling`)."""
SESSION: Final = {"delivery": {"session_timeout": "6s"}}


@pytest.mark.fault("two instances of the same name")
@pytest.mark.timeout(600)
def test_a_second_instance_of_the_same_name_takes_over(broker: Broker, topics: Topics, tmp_path: Path) -> None:
    """A second bridge of the same name continues the first one's work; the first one logs that and ends with 5."""
    delay, target = topics.delay(partitions=2), topics.create("orders", partitions=2)
    load = Load(broker.bootstrap, delay, [target], seed=1, delay_ms_max=10_000)
    with (
        RunningBridge(tmp_path / "first", broker.bootstrap, delay, spark=False) as first,
        RunningBridge(tmp_path / "second", broker.bootstrap, delay, spark=False) as second,
    ):
        first.start()
        with load.running(PER_SECOND):
            second.launch()
            assert first.wait_end(TAKEN_OVER_S_MAX) == FencedError.exit_code
            assert "took over" in first.last_words()
            second.wait_ready()
        records = load.wait_delivered(broker.bootstrap, DELIVERED_S_MAX)
        assert load.balance(records) == Balance(), load.balance(records)
        second.wait_idle(30)
        assert second.stop() == 0
        first.wait_no_orphans()
        second.wait_no_orphans()


@pytest.mark.fault("instances that come, go and die")
@pytest.mark.timeout(600)
def test_instances_that_come_and_go_share_the_partitions(broker: Broker, topics: Topics, tmp_path: Path) -> None:
    """A second instance joins, takes its share and leaves, in order or killed: nothing is lost or doubled, and the
    partitions that the first one keeps are delivered meanwhile, from the same store."""
    delay, target = topics.delay(partitions=4), topics.create("orders", partitions=2)
    load = Load(broker.bootstrap, delay, [target], seed=2, delay_ms_max=10_000)
    name, clock, kept = f"bridge-{delay}", SystemClock(), list[tuple[int, int, set[str]]]()
    with (
        RunningBridge(tmp_path / "a", broker.bootstrap, delay, id=name, instance="a", config=SESSION) as a,
        RunningBridge(tmp_path / "b", broker.bootstrap, delay, id=name, instance="b", config=SESSION) as b,
    ):
        a.start()
        with load.running(PER_SECOND):
            for leave in (b.stop, b.kill):
                began_ms = clock.now_ms()
                b.start()
                wait_until(lambda: a.owned == 2 and b.owned == 2, 60, lambda: f"a {a.owned}, b {b.owned} of 4")
                load.send(200)
                leave()
                wait_until(lambda: a.owned == 4, 60, lambda: f"a has {a.owned} of 4; log:\n{a.tail()}")
                gone = a.events("partitions-given-up")[-1]["partitions"].split(", ")
                kept.append((began_ms, clock.now_ms(), {f"{delay}/{partition}" for partition in range(4)} - {*gone}))
        records = load.wait_delivered(broker.bootstrap, DELIVERED_S_MAX)
        assert load.balance(records) == Balance(), load.balance(records)
        assert len(a.events("index-opened")) == 1, "the store stays open"
        late_ms = [
            record.timestamp_ms - int(record.header("delay-due") or b"")
            for record in records
            for began_ms, ended_ms, names in kept
            if record.topic == target and began_ms <= record.timestamp_ms <= ended_ms
            if (record.header("delay-origin") or b"").decode().rpartition("/")[0] in names
        ]
        assert len(late_ms) > 500 and max(late_ms) <= scaled(KEPT_LATE_MS_MAX), (len(late_ms), max(late_ms))
        a.wait_idle(30)
        assert a.stop() == 0
        assert "StackOverflowError" not in a.logs, "Spark's own handling of a batch that is cut off"


@pytest.mark.fault("a rolling restart")
@pytest.mark.timeout(600)
def test_a_rolling_restart_is_a_pause_and_nothing_more(broker: Broker, topics: Topics, tmp_path: Path) -> None:
    """Two instances, restarted one after the other: no message is lost, doubled or very late, no partition moves, and
    no finished record is read again."""
    delay, target = topics.delay(partitions=4), topics.create("orders", partitions=2)
    load = Load(broker.bootstrap, delay, [target], seed=3, delay_ms_max=10_000)
    clock, pauses_ms = SystemClock(), list[int]()
    name = f"bridge-{delay}"
    with (
        RunningBridge(tmp_path / "a", broker.bootstrap, delay, id=name, instance="a", spark=False) as a,
        RunningBridge(tmp_path / "b", broker.bootstrap, delay, id=name, instance="b", spark=False) as b,
    ):
        a.launch()
        b.launch()
        for bridge in (a, b):
            bridge.wait_ready()
        wait_until(lambda: a.owned == 2 and b.owned == 2, 60, lambda: f"a {a.owned}, b {b.owned} of 4")
        load.send(1_000)
        load.wait_delivered(broker.bootstrap, DELIVERED_S_MAX)  # what a rebuild would read again
        with load.running(PER_SECOND):
            for bridge, other in ((b, a), (a, b)):  # a StatefulSet begins with the last pod
                wait_until(lambda bridge=bridge: bridge.metrics()["pending_messages"] > 0, 30, "something pending")  # type: ignore[misc]
                undisturbed = len(other.events("index-opened"))
                began_s = clock.monotonic_s()
                assert bridge.stop() == 0
                bridge.start()
                pauses_ms.append(int((clock.monotonic_s() - began_s) * 1000))
                assert_reused(bridge)
                assert len(other.events("index-opened")) == undisturbed, "partitions have moved"
        records = load.wait_delivered(broker.bootstrap, DELIVERED_S_MAX)
        assert load.balance(records) == Balance(), load.balance(records)
        late_ms = max(
            record.timestamp_ms - int(record.header("delay-due") or b"") for record in records if record.topic == target
        )
        most_ms = max(LATE_MS_MAX, 3 * max(pauses_ms) // 2)
        assert late_ms <= most_ms, f"{late_ms} ms late after pauses of {pauses_ms} ms"


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_an_instance_with_an_old_index_takes_over(broker: Broker, topics: Topics, tmp_path: Path) -> None:
    """An instance was away until the records from where its index ends were deleted. Another one has read and delivered
    them, so it goes on, with its older index and from the log's start; and the same way back."""
    delay, target, clock = topics.delay(), topics.create("orders"), SystemClock()
    name, sent, config = f"bridge-{delay}", 0, {**SESSION, "store": {"flush_interval": "1s"}}

    def send(count: int, due_ms: int) -> list[bytes]:
        nonlocal sent
        values = [b"%d" % number for number in range(sent, sent + count)]
        headers = [("delay-until", b"%d" % due_ms), ("delay-topic", target.encode())]
        produce(broker.bootstrap, [Outgoing(topic=delay, value=value, headers=headers) for value in values])
        sent += count
        return values

    with (
        RunningBridge(tmp_path / "a", broker.bootstrap, delay, id=name, instance="a", config=config) as a,
        RunningBridge(tmp_path / "b", broker.bootstrap, delay, id=name, instance="b", config=config) as b,
        TopicReader(broker.bootstrap, [target]) as reader,
    ):
        a.start()
        first_ms = clock.now_ms() + 150_000
        far = send(20, first_ms)
        wait_until(lambda: a.events("segment-written"), 60, lambda: f"all is read and written; {a.tail()}")
        assert a.stop() == 0
        near = send(20, clock.now_ms())
        b.start()
        wait_until(lambda: b.owned == 1, 60, lambda: f"b has the partition; {b.tail()}")
        reader.wait_for(20, DELIVERED_S_MAX)
        wait_until(lambda: b.metrics()["pending_messages"] == 20, 60, lambda: f"the rest is far; {b.tail()}")
        assert b.stop() == 0
        [deleted] = topics.admin.delete_records([TopicPartition(delay, 0, sent)]).values()
        deleted.result(30)
        a.start()
        wait_until(lambda: a.owned == 1, 60, lambda: f"a has the partition; {a.tail()}")
        opened = a.events("index-opened")[-1]
        assert (opened["without_index"], opened["segments"]) == (1, 1), opened
        assert "ends before the log's start" in opened["reports"][0]
        near += send(20, clock.now_ms())
        values = [record.value or b"" for record in reader.wait_for(60, DELIVERED_S_MAX + 150)]
        assert sorted(values) == sorted(far + near)
        a.wait_idle(30)
        assert a.stop() == 0


def assert_reused(bridge: RunningBridge) -> None:
    """The instance has found its partitions and its index again, whole: without a rebuild."""
    [opened] = bridge.events("index-opened")
    assert opened["partitions"] == 2, opened
    assert (opened["without_index"], opened["read_again"]) == (0, 0), opened
