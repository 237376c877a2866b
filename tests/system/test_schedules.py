"""Recurring messages on a real broker: once each through kills, policies after a downtime, cancel, replace, retry."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import pytest

from bridge.client import DelayClient
from bridge.wire.headers import copy_headers
from dev.harness.kafka import ReadRecord, TopicReader, Topics, read_committed
from dev.harness.waiting import pause, wait_until
from tests.system.bridge import RunningBridge
from tests.system.broker import Broker
from timerstore.clock import SystemClock

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(600)]

DELIVERED_S_MAX: Final = 120
LATE_MS_MAX: Final = 20_000
CONFIG: Final = {
    "roll": {"window": "2s"},
    "store": {"flush_interval": "500ms"},
    "ready_rows": {"horizon": "1s"},
    "delivery": {"retry": {"attempts": 3, "backoff": "200ms", "backoff_max": "400ms"}},
}


class Site:
    """A bridge that rolls every two seconds; each test has a target of its own."""

    def __init__(self, broker: Broker, topics: Topics, bridge: RunningBridge, delay: str) -> None:
        self.bootstrap = broker.bootstrap
        self.topics = topics
        self.bridge = bridge
        self.delay = delay
        self.client = DelayClient({"bootstrap.servers": broker.bootstrap, "linger.ms": 0}, delay)
        self.target = ""

    def schedule(self, value: str, *, key: str | None = "k", target: str | None = None, **schedule: Any) -> None:
        self.client.schedule(target or self.target, value, key, **schedule)
        self.client.flush()

    def wait_received(self, count: int) -> list[ReadRecord]:
        """At least `count` records."""
        with TopicReader(self.bootstrap, [self.target]) as reader:
            return list(reader.wait_for(count, DELIVERED_S_MAX))

    def receive(self, count: int) -> list[ReadRecord]:
        """The records when `count` have come and no message is pending."""
        self.wait_received(count)
        self.bridge.wait_idle(DELIVERED_S_MAX)
        return read_committed(self.bootstrap, self.target)

    def receive_cancelled(self, count: int, before: float) -> list[ReadRecord]:
        """The records once `count` more messages than `before` are cancelled."""
        wait_until(lambda: self.cancelled() - before >= count, DELIVERED_S_MAX, "cancelled")
        self.bridge.wait_idle(DELIVERED_S_MAX)
        return read_committed(self.bootstrap, self.target)

    def cancelled(self) -> float:
        return self.bridge.metrics()["records_cancelled_total"]


def number(record: ReadRecord, name: str) -> int:
    return int(record.header(name) or b"")


def assert_ticks(records: list[ReadRecord], every_ms: int | None) -> None:
    """Of each origin: once each, numbered without gaps, none early, and one interval apart."""
    by_origin: dict[bytes | None, list[ReadRecord]] = defaultdict(list)
    for record in records:
        by_origin[record.header("delay-origin")].append(record)
    for mine in by_origin.values():
        assert [number(record, "delay-tick") for record in mine] == list(range(1, len(mine) + 1))
        dues = [number(record, "delay-due") for record in mine]
        assert all(record.timestamp_ms >= due for record, due in zip(mine, dues, strict=True))
        if every_ms is not None:
            assert {b - a for a, b in pairwise(dues)} <= {every_ms}


@pytest.fixture(scope="module")
def running(broker: Broker, topics: Topics, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """One bridge for this module."""
    delay = topics.delay(partitions=2)
    directory = tmp_path_factory.mktemp("schedules")
    with RunningBridge(directory, broker.bootstrap, delay, config=CONFIG, spark=False) as bridge:
        bridge.start()
        yield Site(broker, topics, bridge, delay)


@pytest.fixture
def site(running: Site) -> Site:
    running.target = running.topics.create("orders")
    return running


def test_so_many_times(site: Site) -> None:
    """Each tick once, with key, value and number; an interval is from due time to due time; then nothing is left."""
    site.schedule("again", every=timedelta(seconds=1), times=4, headers={"own": "1"})
    site.schedule("later", every=timedelta(seconds=3), times=2, after=timedelta(0), key=None)  # rolled
    records = site.receive(6)
    assert_ticks([record for record in records if record.value == b"again"], 1_000)
    assert_ticks([record for record in records if record.value == b"later"], 3_000)
    assert sorted(record.value or b"" for record in records) == [b"again"] * 4 + [b"later"] * 2
    assert {dict(record.headers).get("own") for record in records} == {b"1", None}
    assert site.bridge.metrics()["ticks_delivered_total"] >= 6
    names = {name for record in records for name, _ in record.headers or ()}
    assert names == {"own", "delay-origin", "delay-due", "delay-tick"}


def test_cancel_by_id_and_by_origin_end_a_schedule(site: Site) -> None:
    """Any part of it: the next tick is not delivered."""
    site.schedule("by id", every=timedelta(seconds=1), id="cancelled")
    site.schedule("by origin", every=timedelta(seconds=1))
    records = site.wait_received(4)
    (origin,) = {record.header("delay-origin") for record in records if record.value == b"by origin"}
    assert origin is not None
    topic, partition, offset = origin.decode().split("/")
    before = site.cancelled()
    site.client.cancel("cancelled", "k")
    site.client.cancel_origin(topic, int(partition), int(offset))
    site.client.flush()
    records = site.receive_cancelled(2, before)
    assert_ticks(records, None)
    assert {record.value for record in records} == {b"by id", b"by origin"}


def test_pause_resume_and_run_now(site: Site) -> None:
    """A paused schedule delivers nothing, also through a kill; it goes on in its rhythm, without making up for skipped
    ticks. To run it now is a tick more. Numbers have no gaps."""
    answers = site.topics.create("answers")
    site.schedule("again", every=timedelta(seconds=1), id="paused")
    site.wait_received(2)
    site.client.pause("paused", "k", reply_to=answers, correlation="pause")
    site.client.flush()
    with TopicReader(site.bootstrap, [answers]) as reader:
        assert [(r.header("delay-outcome"), r.header("delay-count")) for r in reader.wait_for(1, DELIVERED_S_MAX)] == [
            (b"moved", b"1")
        ]
        before = read_committed(site.bootstrap, site.target)
        wait_until(lambda: site.bridge.metrics()["recurring_messages"] == 1, DELIVERED_S_MAX, "the copy is read")
        pause(3)
        site.bridge.kill()
        site.bridge.start()
        assert read_committed(site.bootstrap, site.target) == before
        site.client.resume("paused", "k", reply_to=answers)
        site.client.flush()
        assert [r.header("delay-outcome") for r in reader.wait_for(2, DELIVERED_S_MAX)] == [b"moved"] * 2
        site.wait_received(len(before) + 2)
        site.client.move("paused", "k", after=timedelta(0), reply_to=answers)
        site.client.flush()
        assert [r.header("delay-outcome") for r in reader.wait_for(3, DELIVERED_S_MAX)] == [b"moved"] * 3
    site.wait_received(len(before) + 5)
    cancelled = site.cancelled()
    site.client.cancel("paused", "k")
    site.client.flush()
    records = site.receive_cancelled(1, cancelled)
    assert [number(record, "delay-tick") for record in records] == list(range(1, len(records) + 1))
    assert all(record.timestamp_ms >= number(record, "delay-due") for record in records)
    dues = [number(record, "delay-due") for record in records]
    assert sorted(set(dues)) == dues
    irregular = [due for due in dues if (due - dues[0]) % 1_000]
    assert len(irregular) <= 1, "only what was run now is beside the rhythm"
    gaps = [b - a for a, b in pairwise(dues) if b - a > 1_000]
    assert len(gaps) == 1, "only the pause leaves ticks out"
    assert gaps[0] > 3_000


def test_what_ended_while_it_was_paused_is_over(site: Site) -> None:
    """It is cancelled when it is resumed; both leave other messages unchanged."""
    answers = site.topics.create("answers")
    end_ms = SystemClock().now_ms() + 4_000
    site.schedule("ends", every=timedelta(seconds=1), end=end_ms, id="ending")
    site.client.send(site.target, "plain", "k", after=timedelta(seconds=6), id="plain")
    site.wait_received(1)
    for id in ("ending", "plain"):
        site.client.pause(id, "k", reply_to=answers, correlation=id)
    site.client.flush()
    with TopicReader(site.bootstrap, [answers]) as reader:
        found = {r.header("delay-correlation-id"): r.header("delay-outcome") for r in reader.wait_for(2, 60)}
        assert found == {b"ending": b"moved", b"plain": b"not-pending"}
        wait_until(lambda: SystemClock().now_ms() > end_ms, 20)
        site.client.resume("ending", "k", reply_to=answers)
        site.client.flush()
        assert [r.header("delay-outcome") for r in reader.wait_for(3, DELIVERED_S_MAX)][2:] == [b"cancelled"]
    site.bridge.wait_idle(DELIVERED_S_MAX)
    assert sum(r.value == b"plain" for r in read_committed(site.bootstrap, site.target)) == 1


def test_a_replace_changes_a_schedule(site: Site) -> None:
    """The new one begins with its first tick, and nothing more is delivered of the old one."""
    site.schedule("old", every=timedelta(seconds=1), id="replaced")
    site.wait_received(2)
    site.schedule("new", every=timedelta(seconds=2), times=2, id="replaced", replace=True)
    with TopicReader(site.bootstrap, [site.target]) as reader:
        wait_until(lambda: sum(r.value == b"new" for r in reader.to_end()) == 2, DELIVERED_S_MAX, "the new ones")
    site.bridge.wait_idle(DELIVERED_S_MAX)
    records = read_committed(site.bootstrap, site.target)
    assert_ticks(records, None)
    values = [record.value or b"" for record in records]
    assert values == sorted(values, reverse=True) and values[-2:] == [b"new"] * 2


def test_dead_letters_of_ticks_do_not_end_a_schedule(site: Site) -> None:
    """Each is retried by itself until it is given up; the others keep their times."""
    gone = f"{site.target}-missing"
    site.schedule("lost", every=timedelta(seconds=1), times=3, target=gone)
    wait_until(lambda: len(letters(site, gone)) == 3, DELIVERED_S_MAX, "three dead letters")
    found = letters(site, gone)
    assert {record.header("delay-reason") for record in found} == {b"unknown-target"}
    assert {record.header("delay-attempts") for record in found} == {b"3"}
    dues = sorted(number(record, "delay-until") for record in found)
    assert [b - a for a, b in pairwise(dues)] == [1_000, 1_000]


def letters(site: Site, target: str) -> list[ReadRecord]:
    dead = read_committed(site.bootstrap, f"{site.delay}.dlt")
    return [record for record in dead if record.header("delay-topic") == target.encode()]


def test_what_is_no_schedule_is_a_dead_letter_at_once(site: Site) -> None:
    """Though it asks for a time that is far away."""
    site.client.producer.produce(
        site.delay,
        b"wrong",
        headers=[
            ("delay-topic", site.target.encode()),
            ("delay-cron", b"0 9 * * FOO"),
            ("delay-for", b"30d"),
        ],
    )
    site.client.flush()
    wait_until(lambda: bool(letters(site, site.target)), DELIVERED_S_MAX, "a dead letter")
    (letter,) = letters(site, site.target)
    assert (letter.header("delay-reason"), letter.header("delay-cron")) == (b"bad-schedule", b"0 9 * * FOO")


@pytest.mark.fault("a downtime while recurring messages fall due")
def test_after_a_downtime_each_policy_is_kept(broker: Broker, topics: Topics, tmp_path: Path) -> None:
    """`last` delivers one tick for all missed ones, `all` each of them in order, `none` only the next one."""
    delay, target = topics.delay(), topics.create("orders")
    client, clock = DelayClient({"bootstrap.servers": broker.bootstrap, "linger.ms": 0}, delay), SystemClock()
    with RunningBridge(tmp_path, broker.bootstrap, delay, spark=False) as bridge:
        bridge.start()
        for missed in ("last", "all", "none"):
            client.schedule(target, missed, "k", every=timedelta(seconds=1), missed=missed, id=missed)
        client.flush()
        with TopicReader(broker.bootstrap, [target]) as reader:
            reader.wait_for(6, DELIVERED_S_MAX)
        bridge.kill()
        down_ms = clock.now_ms()
        pause(6)
        up_ms = clock.now_ms()
        bridge.start()
        ready_ms = clock.now_ms()
        with TopicReader(broker.bootstrap, [target]) as reader:

            def is_through() -> bool:
                records = reader.to_end()
                return all(
                    sum(record.value == value and record.timestamp_ms > ready_ms + 2_000 for record in records) >= 2
                    for value in (b"last", b"all", b"none")
                )

            wait_until(is_through, DELIVERED_S_MAX, "ticks after the downtime")
        for missed in ("last", "all", "none"):
            client.cancel(missed, "k")
        client.flush()
        bridge.wait_idle(DELIVERED_S_MAX)
        assert bridge.stop() == 0
    records = read_committed(broker.bootstrap, target)
    found = {value: [r for r in records if r.value == value] for value in (b"last", b"all", b"none")}
    for mine in found.values():
        assert_ticks(mine, None)
    assert_ticks(found[b"all"], 1_000)
    down = range(down_ms + 1_500, up_ms - 1_500)
    missed_dues = {
        value: [due for r in mine if (due := number(r, "delay-due")) in down] for value, mine in found.items()
    }
    assert len(missed_dues[b"all"]) >= 3
    assert missed_dues[b"last"] == missed_dues[b"none"] == []
    for value in (b"last", b"none"):
        dues = [number(record, "delay-due") for record in found[value]]
        gaps = [b - a for a, b in pairwise(dues)]
        assert max(gaps) >= 5_000 and all(gap % 1_000 == 0 for gap in gaps)


def test_after_a_downtime_of_an_hour(site: Site) -> None:
    """With ticks every ten seconds, `last` delivers one for the hour, `all` its 360 in order, `none` the next one.

    The records are those of a bridge before it went down: copies for ticks that were due an hour ago.
    """
    now_ms, producer = SystemClock().now_ms(), site.client.producer
    due_ms, policies = now_ms - 3_600_000 - 5_000, [*(["last"] * 10), *(["none"] * 10), *(["all"] * 5)]
    originals: list[int] = []
    for _ in policies:
        headers: list[tuple[str, str | bytes | None]] = [("delay-topic", site.target.encode()), ("delay-for", b"0")]
        producer.produce(
            site.delay,
            b"original",
            partition=0,
            headers=headers,
            on_delivery=lambda _, sent: originals.append(sent.offset() or 0),
        )
    site.client.flush()
    for origin, missed in zip(originals, policies, strict=True):
        copy = copy_headers(
            origin=origin,
            due_ms=due_ms,
            rolls=0,
            attempt=0,
            target=site.target,
            tick=1,
            schedule={"delay-every": "10s", "delay-missed": missed, "delay-end": str(due_ms + 3_635_000)},
        )
        producer.produce(site.delay, missed.encode(), partition=0, headers=[*copy])
    site.client.flush()
    received = site.receive(len(originals) + 5 * 364 + 20)  # those of "all", and one each of the others
    records = [record for record in received if record.value != b"original"]
    assert_ticks(records, None)
    by_origin: dict[bytes | None, list[int]] = defaultdict(list)
    for record in records:
        by_origin[record.header("delay-origin")].append(number(record, "delay-due") - due_ms)
    first = {
        missed: [dues[0] for origin, dues in by_origin.items() if int((origin or b"").split(b"/")[2]) in mine]
        for missed in ("last", "none", "all")
        if (mine := {o for o, policy in zip(originals, policies, strict=True) if policy == missed})
    }
    assert set(first["all"]) == {0}
    assert all(dues == [*range(0, 3_635_001, 10_000)] for dues in by_origin.values() if dues[0] == 0)
    assert len(first["last"]) == len(first["none"]) == 10
    assert all(3_590_000 <= due <= 3_640_000 for due in first["last"] + first["none"])
    assert all(b - a == 10_000 for dues in by_origin.values() for a, b in pairwise(dues))


@pytest.mark.fault("kills amid recurring messages")
@pytest.mark.crash
@pytest.mark.timeout(2400)
@pytest.mark.parametrize(
    ("schedules", "every_s", "times", "kills"),
    [(100, 1, 30, 6), pytest.param(10_000, 10, 60, 20, marks=pytest.mark.nightly)],
)
def test_no_kill_loses_or_doubles_a_tick(
    broker: Broker, topics: Topics, tmp_path: Path, schedules: int, every_s: int, times: int, kills: int
) -> None:
    """After any number of kills every tick of every schedule arrives once, numbered without gaps, not early."""
    delay, target = topics.delay(partitions=2), topics.create("orders", partitions=2)
    client = DelayClient({"bootstrap.servers": broker.bootstrap, "linger.ms": 0}, delay)
    chance = random.Random(7)
    with RunningBridge(
        tmp_path, broker.bootstrap, delay, config={"store": {"flush_interval": "1s"}}, spark=False
    ) as bridge:
        bridge.launch()
        for i in range(schedules):
            client.schedule(target, f"v{i}", f"k{i}", every=timedelta(seconds=every_s), times=times, missed="all")
        client.flush()
        for _ in range(kills):
            bridge.wait_ready()
            pause(chance.uniform(0, 3 * every_s))
            bridge.kill()
            bridge.launch()
        bridge.wait_ready()
        with TopicReader(broker.bootstrap, [target]) as reader:
            reader.wait_for(schedules * times, 300 + every_s * times)
            metrics = bridge.wait_idle(DELIVERED_S_MAX)
            records = reader.to_end()
        assert metrics["early_deliveries_total"] == 0
        assert bridge.stop() == 0
    assert len(records) == schedules * times
    assert_ticks(records, 1_000 * every_s)
