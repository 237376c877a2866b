"""Moves, and answers to commands, on a real broker: earlier, later, now, through rolls and retries, and a kill."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Final

import pytest
from confluent_kafka import Message, Producer
from typer.testing import CliRunner

from bridge.client import DelayClient
from bridge.commands.cli import app
from bridge.wire import headers as h
from dev.harness.kafka import ReadRecord, TopicReader, Topics
from dev.harness.waiting import wait_until
from tests.system.bridge import RunningBridge
from tests.system.broker import Broker
from timerstore.clock import SystemClock

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(600)]

DELIVERED_S_MAX: Final = 120
READ_S_MAX: Final = 60
WINDOW_MS: Final = 2_000
FAR_MS: Final = 600_000
LATE_MS: Final = 2_000
"""More than a delivery on this machine is late: it tells a moved one from one that was not."""
CONFIG: Final = {
    "roll": {"window": f"{WINDOW_MS}ms"},
    "store": {"flush_interval": "500ms"},
    "ready_rows": {"horizon": "1s"},
    "delivery": {"retry": {"backoff": "3s", "backoff_max": "3s"}},
}
Origin = tuple[str, int, int]


class Site:
    """A bridge that rolls every two seconds; each test has a target and a topic of answers of its own."""

    def __init__(self, broker: Broker, topics: Topics, bridge: RunningBridge, delay: str) -> None:
        self.bootstrap = broker.bootstrap
        self.topics = topics
        self.bridge = bridge
        self.client = DelayClient({"bootstrap.servers": broker.bootstrap, "linger.ms": 0}, delay)
        self.clock = SystemClock()
        self.target = self.answers = ""

    def send(self, value: str, *, ms: int, id: str | None = None, target: str | None = None) -> Origin:
        """Returns where the record is."""
        told: list[Origin] = []

        def on_delivery(_: object, message: Message) -> None:
            told.append((message.topic() or "", message.partition() or 0, message.offset() or 0))

        to, after = target or self.target, timedelta(milliseconds=ms)
        self.client.send(to, value, "k", after=after, id=id, on_delivery=on_delivery)
        self.client.flush()
        return told[0]

    def move(self, origin: Origin, *, ms: int, **more: Any) -> None:
        self.client.move_origin(*origin, after=timedelta(milliseconds=ms), **more)
        self.client.flush()

    def metric(self, name: str) -> float:
        return self.bridge.metrics()[name]

    def arrive(self, *values: str, topic: str | None = None) -> list[ReadRecord]:
        """A topic's records when all of these have come."""
        with TopicReader(self.bootstrap, [topic or self.target]) as reader:
            reader.wait_for(len(values), DELIVERED_S_MAX)
            records = reader.to_end()
        assert sorted((record.value or b"").decode() for record in records) == sorted(values)
        return records

    def answered(self, count: int) -> dict[str, dict[str, str]]:
        """The answers' headers, by correlation id, as a `read_committed` consumer has them."""
        with TopicReader(self.bootstrap, [self.answers]) as reader:
            reader.wait_for(count, DELIVERED_S_MAX)
            records = reader.to_end()
        told = [{name: (value or b"").decode() for name, value in record.headers} for record in records]
        assert len(told) == count, told
        return {each["delay-correlation-id"]: each for each in told}


@pytest.fixture(scope="module")
def running(broker: Broker, topics: Topics, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """One bridge for this module."""
    delay = topics.delay(partitions=3)
    directory = tmp_path_factory.mktemp("commands")
    with RunningBridge(directory, broker.bootstrap, delay, config=CONFIG, spark=False) as bridge:
        bridge.start()
        yield Site(broker, topics, bridge, delay)


@pytest.fixture
def site(running: Site) -> Site:
    running.target, running.answers = running.topics.create("orders"), running.topics.create("answers")
    return running


def test_a_message_is_moved_earlier_later_and_to_now(site: Site) -> None:
    """Each arrives once, when the move says; one that is not moved arrives when it was due."""
    sent_ms = site.clock.now_ms()
    earlier, now = site.send("earlier", ms=FAR_MS), site.send("now", ms=FAR_MS)
    later = site.send("later", ms=5_000)
    site.send("kept", ms=6_000)
    site.send("by id", ms=FAR_MS, id="by id")
    site.move(earlier, ms=4_000)
    site.move(now, ms=0)
    site.move(later, ms=12_000)
    site.client.move("by id", "k", after=timedelta(0))
    site.client.flush()
    records = site.arrive("earlier", "now", "later", "kept", "by id")
    due_ms = {(r.value or b"").decode(): int(dict(r.headers)["delay-due"] or b"0") - sent_ms for r in records}
    assert due_ms["earlier"] >= 4_000 and due_ms["earlier"] < FAR_MS // 2
    assert due_ms["now"] < FAR_MS // 2 and due_ms["by id"] < FAR_MS // 2
    assert due_ms["later"] >= 12_000
    origins = {(r.value or b"").decode(): dict(r.headers)["delay-origin"] for r in records}
    assert origins["now"] == "/".join(map(str, now)).encode()
    assert site.metric("early_deliveries_total") == 0


def test_answers_say_what_became_of_it(site: Site) -> None:
    """Moved, cancelled, not pending, and of a foreign topic, each under its correlation id."""
    moved, cancelled = site.send("moved", ms=FAR_MS), site.send("cancelled", ms=FAR_MS)
    site.move(moved, ms=1_000, reply_to=site.answers, correlation="m")
    site.client.cancel_origin(*cancelled, reply_to=site.answers, correlation="c")
    site.client.flush()
    site.arrive("moved")
    site.client.cancel_origin(*moved, reply_to=site.answers, correlation="gone")
    site.client.cancel_origin("not-ours", 0, 1, reply_to=site.answers, correlation="f")
    site.client.flush()
    told = site.answered(4)
    outcomes = {name: each["delay-outcome"] for name, each in told.items()}
    assert outcomes == {"m": "moved", "c": "cancelled", "gone": "not-pending", "f": "forbidden"}
    assert told["m"]["delay-count"] == "1"


@pytest.mark.fault("a cancel whose producer had another partitioner")
def test_the_command_finds_what_another_partitioner_has_placed(site: Site) -> None:
    """A cancel by id finds its message in any partition, with or without the key; `--wait` prints the outcome, also for
    an unknown id, and for an origin."""
    elsewhere = Producer({"bootstrap.servers": site.bootstrap, "partitioner": "consistent_random", "linger.ms": 0})
    for n in range(9):
        headers: list[tuple[str, str | bytes | None]] = [
            (h.TOPIC, site.target.encode()),
            (h.FOR, b"600s"),
            (h.ID, f"other-{n}".encode()),
        ]
        elsewhere.produce(site.client.delay_topic, value=b"-", key=f"key-{n}", headers=headers)
    elsewhere.flush()
    common = ["--bootstrap", site.bootstrap, "--delay-topic", site.client.delay_topic, "--wait", "60s"]

    def invoke(*words: str) -> tuple[int, str, str]:
        result = CliRunner().invoke(app, [*words, *common])
        return result.exit_code, result.stdout, result.stderr

    for n in range(9):
        key = ["--key", f"key-{n}"] if n % 2 else []
        status, out, err = invoke("cancel", f"other-{n}", *key)
        assert (status, out.count(": cancelled\n"), out.count("\n")) == (0, 1, 1), (out, err)
    status, out, err = invoke("cancel", "other-1")
    assert (status, out) == (1, "") and "no pending message has the id other-1" in err
    status, out, err = invoke("schedules", "pause", "nosuch")
    assert (status, out) == (1, "") and "nosuch" in err
    place = "/".join(map(str, site.send("moved", ms=FAR_MS)))
    assert invoke("move", "--origin", place, "--after", "0s")[:2] == (0, f"{place}: moved\n")
    site.arrive("moved")
    assert invoke("cancel", "--origin", place)[:2] == (1, f"{place}: not-pending\n")


def test_a_message_is_moved_after_it_was_rolled(site: Site) -> None:
    """The copy that stands in for it is."""
    before = site.metric("records_rolled_total")
    origin = site.send("rolled", ms=FAR_MS)
    wait_until(lambda: site.metric("records_rolled_total") - before >= 2, READ_S_MAX, "rolls")
    site.move(origin, ms=0, reply_to=site.answers, correlation="r")
    site.arrive("rolled")
    assert site.answered(1)["r"]["delay-outcome"] == "moved"


def test_a_message_is_moved_while_it_waits_for_a_retry(site: Site) -> None:
    """Later than its next attempt; by then its target is there."""
    target = f"late-{uuid.uuid4().hex[:8]}"
    origin = site.send("retried", ms=100, target=target)

    def retries() -> float:
        return sum(n for name, n in site.bridge.metrics().items() if name.startswith("records_retried_total"))

    before = retries()
    wait_until(lambda: retries() > before, READ_S_MAX, "a retry")
    site.move(origin, ms=10_000, reply_to=site.answers, correlation="r")
    assert site.answered(1)["r"]["delay-outcome"] == "moved"
    site.topics.create(exactly=target)
    site.arrive("retried", topic=target)


@pytest.mark.fault("a kill between a move and its delivery")
def test_moves_survive_a_kill(site: Site) -> None:
    """A moved message arrives once, at the new time, after a kill at any point."""
    origins = [site.send(f"{n}", ms=FAR_MS) for n in range(100)]
    for origin in origins:
        site.client.move_origin(*origin, after=timedelta(seconds=8), reply_to=site.answers, correlation=f"{origin}")
    site.client.flush()
    site.bridge.kill()
    site.bridge.wait_no_orphans()
    site.bridge.start()
    site.arrive(*(f"{n}" for n in range(100)))
    told = site.answered(100)
    assert {each["delay-outcome"] for each in told.values()} == {"moved"}
    assert set(told) == {f"{origin}" for origin in origins}
