"""bridge.redrive on a broker: each dead letter goes back once, and only to where it came from."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from confluent_kafka import Producer

from bridge.dead_letters.redrive import Redrive, redrive_letters
from bridge.errors import EnvironmentFailure, StateError
from bridge.settings.model import Settings
from bridge.wire import headers as h
from bridge.wire.letters import LetterChoice, RedriveReport, redriven
from bridge.wire.reasons import RejectReason
from dev.harness.kafka import Outgoing, Topics, produce, read_committed
from tests.broker.letters import bury, dead_letter_topic
from tests.broker.rig import DEADLINE_S, settings_for
from tests.system.broker import Broker
from tests.system.raw import RawRecord, produce_raw
from timerstore.clock import SystemClock

pytestmark = [pytest.mark.system]


def back_in(broker: Broker, delay: str) -> list[int]:
    return sorted(int(record.value or b"") for record in read_committed(broker.bootstrap, delay))


def run(settings: Settings, *, execute: bool = True, **choice: Any) -> RedriveReport:
    return redrive_letters(settings, SystemClock(), LetterChoice(**choice), execute=execute)


def test_letters_go_back_once_by_any_filters(broker: Broker, topics: Topics) -> None:
    """Into their own partitions, with their own headers only; several runs with several filters put back each once."""
    delay = topics.delay(partitions=3)
    dead_letter_topic(topics, delay)
    bury(broker, delay, 40)
    settings = settings_for(broker.bootstrap, delay)
    report = run(settings, execute=False)
    assert (sum(report.back.values()), report.foreign) == (40, 1)
    assert read_committed(broker.bootstrap, delay) == []
    assert run(settings, targets=["t1"]).back == {("unknown-target", "t1"): 10}
    assert back_in(broker, delay) == list(range(1, 40, 4))
    assert run(settings, targets=["t1"]).before == 10
    assert sum(run(settings, reasons=["unknown-target"]).back.values()) == 10
    bury(broker, delay, 4)
    last = run(settings)
    assert (sum(last.back.values()), last.before, last.foreign) == (24, 20, 2)
    assert back_in(broker, delay) == sorted([*range(40), *range(4)])
    assert sum(run(settings).back.values()) == 0
    for record in read_committed(broker.bootstrap, delay):
        i = int(record.value or b"")
        assert (record.partition, record.key) == (i % 3, b"k")
        assert record.headers == (
            ("delay-until", b"1800000000000"), ("delay-topic", b"t%d" % (i % 4)), ("own", b"%d" % i),
        )  # fmt: skip


class Crash(Exception):
    """The process ends here."""


@pytest.mark.fault("a crash of `redrive`")
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_crash_puts_nothing_back_twice(
    broker: Broker, topics: Topics, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """After a crash around the commit of the second transaction, the next run goes on from the committed letters."""
    delay = topics.delay(partitions=3)
    dead_letter_topic(topics, delay)
    bury(broker, delay, 60)
    settings = settings_for(broker.bootstrap, delay)
    monkeypatch.setattr("bridge.dead_letters.reading.BATCH_ROWS", 20)
    commit, commits = Redrive._commit, itertools.count(1)

    def crashing(self: Redrive, *arguments: Any) -> None:
        number = next(commits)
        if number == 2 and when == "before":
            producer = arguments[0]
            producer.begin_transaction()
            producer.produce(delay, value=b"1000", headers=[])
            producer.flush(DEADLINE_S)
            raise Crash
        commit(self, *arguments)
        if number == 2:
            raise Crash

    monkeypatch.setattr(Redrive, "_commit", crashing)
    with pytest.raises(Crash):
        run(settings)
    assert 1 <= sum(run(settings).back.values()) < 60
    assert back_in(broker, delay) == list(range(60))


@pytest.mark.fault("a dead letter that its delay topic does not take")
def test_a_letter_that_is_refused_stays_and_stops_no_other(broker: Broker, topics: Topics) -> None:
    """A letter that its delay topic refuses for its size stays, and all others go back, once."""
    delay = topics.delay(partitions=3, config={"max.message.bytes": "5000"})
    dead_letter_topic(topics, delay)
    bury(broker, delay, 6)
    own: h.Headers = [("delay-for", b"1d"), ("delay-topic", b"orders")]
    headers = h.dead_letter_headers(own, RejectReason.UNKNOWN_TARGET, "why", h.Where(delay, 1, 9, 9, 99))
    letters = [Outgoing(topic=f"{delay}.dlt", value=b"7" * 20_000, headers=headers, partition=i % 2) for i in range(2)]
    produce(broker.bootstrap, letters)
    bury(broker, delay, 6)
    settings = settings_for(broker.bootstrap, delay)
    for back in (12, 0):
        report = run(settings)
        assert (report.back.total(), report.broken) == (back, {("unknown-target", "orders"): 2})
    assert back_in(broker, delay) == sorted([*range(6), *range(6)])


def test_what_went_back_is_known_without_a_consumer_group(broker: Broker, topics: Topics) -> None:
    """Kafka forgets the offsets of a group without members after `offsets.retention.minutes`; here all groups of the
    bridge are gone at once, and it joins none."""
    delay = topics.delay(partitions=3)
    dead_letter_topic(topics, delay)
    bury(broker, delay, 12)
    settings = settings_for(broker.bootstrap, delay)
    assert sum(run(settings).back.values()) == 12
    groups = [group.group_id for group in topics.admin.list_consumer_groups().result(DEADLINE_S).valid]
    assert not [group for group in groups if group.startswith(settings.group_id)]
    assert run(settings).before == 12
    assert back_in(broker, delay) == list(range(12))


def test_what_an_open_transaction_hides_does_not_go_back_twice(
    broker: Broker, topics: Topics, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The note of an earlier run may lie behind the beginning of another producer's transaction: a run waits for its
    end, or ends itself."""
    delay = topics.delay(partitions=3)
    dead_letter_topic(topics, delay)
    bury(broker, delay, 12)
    settings = settings_for(broker.bootstrap, delay)
    other = Producer({"bootstrap.servers": broker.bootstrap, "transactional.id": f"other-{delay}"})
    other.init_transactions(DEADLINE_S)
    commit = Redrive._commit

    def behind(self: Redrive, *arguments: Any) -> None:
        other.begin_transaction()
        for partition in (0, 1):
            other.produce(f"{delay}.dlt", b"stranger", partition=partition)
        other.flush(DEADLINE_S)
        commit(self, *arguments)

    monkeypatch.setattr(Redrive, "_commit", behind)
    assert sum(run(settings).back.values()) == 12
    monkeypatch.setattr("bridge.dead_letters.reading.READ_TIMEOUT_S", 2.0)
    with pytest.raises(EnvironmentFailure, match="has stalled"):
        run(settings)
    other.abort_transaction(DEADLINE_S)
    assert run(settings).before == 12
    assert back_in(broker, delay) == list(range(12))


def test_letters_go_back_only_to_where_they_came_from(broker: Broker, topics: Topics) -> None:
    """A letter that names another delay topic, whose dead letters are elsewhere, or a topic that is none, stays; so
    does a record with headers that cannot be read."""
    mine, other, target = topics.delay(partitions=2), topics.delay(partitions=2), topics.create("orders")
    for delay in (mine, other):
        dead_letter_topic(topics, delay)
    own: h.Headers = [("delay-for", b"1d"), ("delay-topic", b"orders")]
    claims = [(mine, 1), (other, 0), (target, 0), (mine, 2), (mine, -1), (f"{mine}.dlt", 0), ("\x1b[2J", 0)]
    produce(
        broker.bootstrap,
        [
            Outgoing(
                topic=f"{mine}.dlt",
                value=b"%d" % number,
                headers=h.dead_letter_headers(own, RejectReason.UNKNOWN_TARGET, "why", h.Where(topic, p, 5, 5, 9)),
            )
            for number, (topic, p) in enumerate(claims)
        ],
    )
    produce_raw(broker.bootstrap, f"{mine}.dlt", 0, [RawRecord(headers=[(b"\xff", b"1"), (b"delay-reason", b"?")])])
    report = run(settings_for(broker.bootstrap, mine, other))
    assert (sum(report.back.values()), report.foreign) == (1, 7)
    assert [back_in(broker, topic) for topic in (mine, other, target)] == [[0], [], []]


def test_a_copied_dead_letter_topic_needs_a_time_to_begin_with(broker: Broker, topics: Topics) -> None:
    """Its notes refer to the original's offsets: nothing goes back before a time is chosen."""
    delay = topics.delay(partitions=3)
    dead_letter_topic(topics, delay)
    bury(broker, delay, 4)
    headers, value = redriven("another", [0, 1])
    produce(broker.bootstrap, [Outgoing(topic=f"{delay}.dlt", value=value, headers=headers, partition=0)])
    bury(broker, delay, 2)
    settings = settings_for(broker.bootstrap, delay)
    for execute in (False, True):
        with pytest.raises(StateError, match=f"is a copy.*record={delay}.dlt/0/"):
            run(settings, execute=execute)
    assert back_in(broker, delay) == []
    found = read_committed(broker.bootstrap, f"{delay}.dlt")
    since_ms = sorted(record.timestamp_ms for record in found if record.value in (b"0", b"1"))[-2]
    report = run(settings, since_ms=since_ms)
    assert sum(report.back.values()) + report.left == 6
    assert {0, 1} <= set(back_in(broker, delay))
    assert run(settings, since_ms=since_ms).before == sum(report.back.values())
