"""Cancel and replace on a real broker: before and after, twice, unknown, through rolls, restarts, at the due time."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from datetime import timedelta
from typing import Final

import pytest
from confluent_kafka import Message

from bridge.client import DelayClient
from bridge.wire.commands import cancel_origin_headers
from dev.harness.kafka import ReadRecord, TopicReader, Topics
from dev.harness.waiting import wait_until
from tests.system.bridge import RunningBridge
from tests.system.broker import Broker
from timerstore.clock import Clock, SystemClock

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(600)]

DELIVERED_S_MAX: Final = 120
READ_S_MAX: Final = 60
DOWN_MS: Final = (8_000, 20_000, 50_000)
"""Within the first of them a bridge reads, stops and is written to; on a busy machine within a later one."""
WINDOW_MS: Final = 2_000
ROLLED_MS: Final = 300_000
"""The delay of messages that are cancelled after some rolls, also on a machine that stands still for a while."""
CONFIG: Final = {
    "roll": {"window": f"{WINDOW_MS}ms"},
    "store": {"flush_interval": "500ms"},
    "ready_rows": {"horizon": "1s"},
}


class Site:
    """A bridge that rolls every two seconds; each test has a target of its own."""

    def __init__(self, broker: Broker, topics: Topics, bridge: RunningBridge, delay: str) -> None:
        self.bootstrap = broker.bootstrap
        self.topics = topics
        self.bridge = bridge
        self.client = DelayClient({"bootstrap.servers": broker.bootstrap, "linger.ms": 0}, delay)
        self.target = ""

    def send(self, id: str | None, value: str, *, ms: int, key: str | None = "k", replace: bool = False) -> None:
        self.client.send(self.target, value, key, after=timedelta(milliseconds=ms), id=id, replace=replace)
        self.client.flush()

    def cancel(self, id: str, key: str | None = "k") -> None:
        self.client.cancel(id, key)
        self.client.flush()

    def cancelled(self) -> float:
        return self.bridge.metrics()["records_cancelled_total"]

    def wait_cancelled(self, count: float) -> None:
        """Wait for this number of cancelled messages since the start of the bridge."""
        wait_until(lambda: self.cancelled() == count, READ_S_MAX, lambda: f"cancelled; log:\n{self.bridge.tail()}")

    def receive(self, *values: str) -> list[ReadRecord]:
        """The target's records when no message is pending any more: exactly these values."""
        with TopicReader(self.bootstrap, [self.target]) as reader:
            reader.wait_for(len(values), DELIVERED_S_MAX)
            self.bridge.wait_idle(DELIVERED_S_MAX)
            records = reader.to_end()
        assert sorted((record.value or b"").decode() for record in records) == sorted(values)
        return records


@pytest.fixture(scope="module")
def running(broker: Broker, topics: Topics, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """One bridge for this module."""
    delay = topics.delay(partitions=3)
    with RunningBridge(tmp_path_factory.mktemp("cancel"), broker.bootstrap, delay, config=CONFIG) as bridge:
        bridge.start()
        yield Site(broker, topics, bridge, delay)


@pytest.fixture
def site(running: Site) -> Site:
    """A test that fails may have left the bridge down."""
    if not running.bridge.running:
        running.bridge.start()
    running.target = running.topics.create("orders")
    return running


def test_what_is_cancelled_is_not_delivered(site: Site) -> None:
    """A cancel finishes earlier messages of its id and key, for any number of cancels; it touches nothing else,
    and the gauge falls when it is read, while the others still wait."""
    clock, cancelled = SystemClock(), site.cancelled()
    due_ms = clock.now_ms() + 6_000
    site.cancel("after")
    site.cancel("nobody")
    for id in ("once", "twice", "after", "kept"):
        site.send(id, id, ms=6_000)
    site.send("once", "of another key", ms=6_000, key="another key")
    site.send(None, "without id", ms=6_000)
    site.send("keyless", "keyless", ms=6_000, key=None)
    site.send("replaced", "first", ms=5_000)
    site.send("replaced", "second", ms=6_000, replace=True)
    site.send("replaced twice", "first", ms=5_000)
    site.send("replaced twice", "second", ms=5_000, replace=True)
    site.send("replaced twice", "third", ms=6_000, replace=True)
    site.cancel("once")
    site.cancel("twice")
    site.cancel("twice")
    site.cancel("keyless", None)
    site.wait_cancelled(cancelled + 6)
    # A message in its roll is in the delay topic only, for a moment.
    wait_until(
        lambda: site.bridge.metrics()["pending_messages"] == 6 or clock.now_ms() > due_ms, READ_S_MAX, "the others wait"
    )
    site.receive("after", "kept", "of another key", "without id", "second", "third")
    metrics = site.bridge.metrics()
    assert metrics["early_deliveries_total"] == 0
    assert not any(count for name, count in metrics.items() if name.startswith("records_rejected_total"))


def test_a_message_is_cancelled_by_where_its_record_is(site: Site) -> None:
    """Without an id, from any partition, before and after it was rolled; nothing else is."""
    before, cancelled = site.bridge.metrics()["records_rolled_total"], site.cancelled()
    origins: dict[str, tuple[str, int, int]] = {}

    def send(value: str, key: str | None, ms: int = 6 * WINDOW_MS) -> None:
        def told(_: object, message: Message) -> None:
            origins[value] = (message.topic() or "", message.partition() or 0, message.offset() or 0)

        site.client.send(site.target, value, key, after=timedelta(milliseconds=ms), on_delivery=told)
        site.client.flush()

    for n in range(6):
        send(f"at home {n}", f"key {n}")
        send(f"elsewhere {n}", f"key {n}")
        send(f"rolled {n}", f"key {n}", ms=ROLLED_MS)
        send(f"kept {n}", f"key {n}")
    for n in range(6):
        site.client.cancel_origin(*origins[f"at home {n}"])
        topic, partition, offset = origins[f"elsewhere {n}"]
        headers = cancel_origin_headers(f"{topic}/{partition}/{offset}")
        site.client.producer.produce(topic, partition=(partition + 1) % 3, headers=[*headers])
    site.client.flush()
    site.wait_cancelled(cancelled + 12)
    wait_until(lambda: site.bridge.metrics()["records_rolled_total"] - before >= 24, READ_S_MAX, "rolls")
    for n in range(6):
        site.client.cancel_origin(*origins[f"rolled {n}"])
    site.client.flush()
    site.wait_cancelled(cancelled + 18)
    site.receive(*(f"kept {n}" for n in range(6)))


def test_a_cancel_reaches_copies_after_any_number_of_rolls(site: Site) -> None:
    """Odd or even (RocketMQ #7991); other messages go on and arrive."""
    before, cancelled = site.bridge.metrics()["records_rolled_total"], site.cancelled()

    def wait_rolls(count: int) -> None:
        wait_until(lambda: site.bridge.metrics()["records_rolled_total"] - before >= count, READ_S_MAX, "rolls")

    for id in ("one", "two"):
        site.send(id, id, ms=ROLLED_MS)
    site.send("kept", "kept", ms=8 * WINDOW_MS)
    wait_rolls(3)
    site.cancel("one")
    wait_rolls(5)
    site.cancel("two")
    site.wait_cancelled(cancelled + 2)
    site.receive("kept")


def test_a_cancel_at_the_due_time_wins_or_loses(site: Site) -> None:
    """Delivered or cancelled, never both, never neither: what arrived and what counts as cancelled are all together."""
    count = 300
    before = site.cancelled()
    clock = SystemClock()
    due_ms = clock.now_ms() + 4_000
    for i in range(count):
        site.client.send(site.target, str(i), "k", at=due_ms, id=f"race {i}")
    site.client.flush()
    wait_until(lambda: clock.now_ms() >= due_ms - 300, READ_S_MAX, "nearly due")
    for i in range(count):
        site.client.cancel(f"race {i}", "k")
        if i % 10 == 0:
            site.client.flush()
    site.client.flush()

    with TopicReader(site.bootstrap, [site.target]) as reader:

        def settled() -> bool:
            reader.poll()
            return len(reader.records) + site.cancelled() - before == count

        wait_until(settled, DELIVERED_S_MAX, lambda: f"{len(reader.records)} arrived; log:\n{site.bridge.tail()}")
        site.bridge.wait_idle(DELIVERED_S_MAX)
        arrived = [record.value for record in reader.to_end()]
    assert len(arrived) == len(set(arrived)) == count - (site.cancelled() - before)


def test_commands_that_were_written_in_time_while_the_bridge_was_down_take_effect(site: Site) -> None:
    """Cancels, with a key and without, a replace and a move, above the committed offset: their messages are due when
    the bridge starts, and none of them is delivered unchanged."""
    clock = SystemClock()
    for delay_ms in DOWN_MS:
        due_ms = clock.now_ms() + delay_ms
        stop_with_commands(site, due_ms, clock)
        if clock.now_ms() < due_ms:
            break
        site.bridge.start()
        site.bridge.wait_idle(DELIVERED_S_MAX)
        site.target = site.topics.create("orders")
    else:
        pytest.fail("the commands were never written in time")
    wait_until(lambda: clock.now_ms() > due_ms, READ_S_MAX, "all is due")
    site.bridge.start()
    records = site.receive("kept", "second", "moved")
    [moved] = [record for record in records if record.value == b"moved"]
    assert int(moved.header("delay-due") or b"") != due_ms


def stop_with_commands(site: Site, due_ms: int, clock: Clock) -> None:
    """Messages that are read before they are due, a stop, and then commands for them."""
    for id in ("cancelled", "replaced", "moved", "kept"):
        site.client.send(site.target, id, "k", at=due_ms, id=id)
    site.client.send(site.target, "keyless", None, at=due_ms, id="keyless")
    site.client.flush()
    pending = "pending_messages"
    wait_until(lambda: site.bridge.metrics()[pending] == 5 or clock.now_ms() > due_ms, READ_S_MAX, "all are read")
    assert site.bridge.stop() == 0
    site.cancel("cancelled")
    site.cancel("keyless", None)
    site.send("replaced", "second", ms=2_000, replace=True)
    site.client.move("moved", "k", after=timedelta(seconds=2))
    site.client.flush()


@pytest.mark.fault("a kill and a lost directory after a cancel")
def test_a_cancel_survives_restarts_and_the_loss_of_the_directory(site: Site) -> None:
    """After a graceful stop the index has the cancel; after a kill with the loss of the directory the topic has it."""
    bridge = site.bridge
    cancelled = site.cancelled()
    for id in ("a", "kept"):
        site.send(id, id, ms=15_000)
    site.cancel("a")
    site.wait_cancelled(cancelled + 1)
    assert bridge.stop() == 0
    bridge.start()
    wait_until(lambda: bridge.metrics()["pending_messages"] <= 1, READ_S_MAX, "the cancel is known")
    bridge.kill()
    bridge.wait_no_orphans()
    shutil.rmtree(bridge.data)
    bridge.start()
    site.receive("kept")
