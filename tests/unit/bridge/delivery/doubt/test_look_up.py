"""What a look-up reads, and what it makes of answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka import KafkaError

from bridge.delivery.doubt import look_up
from bridge.delivery.doubt.look_up import BEHIND_MS, MISSING, NOT_READ, WHOLE, LookUp
from bridge.errors import EnvironmentFailure
from bridge.kafka.admin import Topic, Watermarks
from bridge.wire.headers import Headers
from tests.manual_clock import ManualClock

DENIED = KafkaError.TOPIC_AUTHORIZATION_FAILED
EOF = KafkaError._PARTITION_EOF
NO_LEADER = "cannot look up offsets: no leader"


class Message:
    """A record, or what the client says in place of one."""

    def __init__(self, topic: str | None, partition: int, offset: int, code: int | None = None) -> None:
        self.topic, self.partition, self.offset = lambda: topic, lambda: partition, lambda: offset
        self.error = lambda: None if code is None else KafkaError(code)
        self.headers = lambda: [("place", f"{topic}/{partition}/{offset}".encode())]


class Site:
    """A cluster with the topic `a` of two partitions and `b` of one, each with ten records; and a consumer."""

    def __init__(self) -> None:
        self.clock = ManualClock(now_ms=1_000_000)
        self.first: dict[tuple[str, int], int | None] = {}
        self.asked_ms = 0
        self.polls: Iterator[list[Message]] = iter(())
        self.assigned: dict[tuple[str, int], int] = {}
        self.seen: list[str] = []
        self.silent: set[tuple[str, int]] = set()
        self.is_over = False
        self.look_up = LookUp(self, lambda: self, self.clock)  # type: ignore[arg-type,return-value]

    def topics(self, names: list[str]) -> dict[str, Topic]:
        counts = {"a": 2, "b": 1}
        return {
            n: Topic(name=n, topic_id=n, partitions=counts[n], replicas=1, leaderless=()) for n in names if n in counts
        }

    def watermarks(self, places: list[tuple[str, int]]) -> dict[tuple[str, int], Watermarks]:
        if not self.silent.isdisjoint(places):
            raise EnvironmentFailure("cannot look up offsets: no leader", hint="Scripted.", code="DB-3002")
        return {place: Watermarks(start=0, end=10) for place in places}

    def first_after(self, places: list[tuple[str, int]], ms: int) -> dict[tuple[str, int], int | None]:
        self.asked_ms = ms
        return {place: self.first.get(place) for place in places}

    def assign(self, partitions: list[Any]) -> None:
        self.assigned = {(each.topic, each.partition): each.offset for each in partitions}

    def consume(self, _records: int, seconds: float) -> list[Message]:
        self.clock.advance(round(1_000 * seconds))
        return next(self.polls, [])

    def close(self) -> None:
        pass

    def see(self, _topic: str, _partition: int, _offset: int, headers: Headers) -> None:
        self.seen.append((headers[0][1] or b"").decode())

    def run(self, *topics: str, **since: int) -> dict[str, str]:
        own = {(name, 0): offset for name, offset in since.items()}
        told = list(
            self.look_up(dict.fromkeys(((n, WHOLE) for n in topics), 500_000) | own, self.see, lambda: self.is_over)
        )
        assert len(told) == len(dict(told)), "each is told once"
        return {topic: reason for (topic, _), reason in told}


def test_each_partition_is_read_from_its_first_record_to_its_end() -> None:
    """By time in targets, a minute earlier than the transaction; from an offset in delay topics. What is behind the
    end that there was is not looked at, and a partition without anything new is not read."""
    site = Site()
    site.first = {("a", 0): 8, ("a", 1): None}
    site.polls = iter([[Message("a", 0, 8), Message("d", 0, 9)], [Message("a", 0, 9), Message("a", 0, 10)]])
    assert site.run("a", d=9) == {"a": "", "d": ""}
    assert site.assigned == {("a", 0): 8, ("d", 0): 9} and site.asked_ms == 500_000 - BEHIND_MS
    assert sorted(site.seen) == ["a/0/8", "a/0/9", "d/0/9"]


def test_the_end_of_what_may_be_read_is_not_the_end() -> None:
    """While another producer's transaction is open, a consumer is told of an end before it."""
    site = Site()
    site.first = {("b", 0): 7}
    site.polls = iter(
        [[Message("b", 0, 7), Message("b", 0, 8, EOF)], [], [Message("b", 0, 8), Message("b", 0, 10, EOF)]]
    )
    assert site.run("b") == {"b": ""} and site.seen == ["b/0/7", "b/0/8"]


def test_a_topic_without_read_is_told_and_the_others_are_read() -> None:
    """Its records may be there or not. An error for each of its partitions says no more."""
    site = Site()
    site.first = {("a", 0): 5, ("a", 1): 5, ("b", 0): 9}
    site.polls = iter([[Message("a", 1, -1001, DENIED), Message("a", 0, -1001, DENIED), Message("b", 0, 9)]])
    unread = site.run("a", "b")
    assert unread["a"] and unread["b"] == "" and site.seen == ["b/0/9"]


@pytest.mark.fault("a broker that does not know a topic yet, during such a look-up")
def test_a_topic_is_gone_when_it_was_missing_for_a_minute() -> None:
    """The bridge asks for a missing topic for a minute, since its records may be there until then."""
    site = Site()
    assert site.run("gone") == {"gone": MISSING}
    site.clock.advance(1_000 * 60)
    assert site.run("gone") == {"gone": ""}


@pytest.mark.fault("a partition without a leader during such a look-up")
def test_a_topic_without_a_leader_is_told_and_the_others_are_read() -> None:
    """A partition without a leader holds the messages for its topic, and no others."""
    site = Site()
    site.first = {("a", 0): 5, ("a", 1): 5, ("b", 0): 9}
    site.silent = {("a", 1), ("d", 0)}
    site.polls = iter([[Message("b", 0, 9)]])
    assert site.run("a", "b", d=3) == {"a": NO_LEADER, "b": "", "d": NO_LEADER} and site.seen == ["b/0/9"]


@pytest.mark.parametrize("is_much", [True, False])
def test_a_look_up_is_bounded(monkeypatch: pytest.MonkeyPatch, is_much: bool) -> None:
    """In records, and in time without any."""
    site = Site()
    site.first = {("b", 0): 0}
    if is_much:
        monkeypatch.setattr(look_up, "RECORDS_MAX", 1)
        site.polls = iter([[Message("b", 0, 0), Message("b", 0, 1)], [Message("b", 0, 2)]])
    assert site.run("b") == {"b": NOT_READ}


def test_brokers_that_do_not_answer_are_told() -> None:
    """The look-up is made again."""
    site = Site()
    site.first = {("a", 0): 0, ("b", 0): 0}
    site.polls = iter([[Message(None, 0, 0, KafkaError._ALL_BROKERS_DOWN)]])
    assert all(site.run("a", "b").values())


def test_a_look_up_that_nobody_waits_for_ends() -> None:
    """After one poll at most."""
    site = Site()
    site.first, site.is_over = {("b", 0): 0}, True
    assert site.run("b") == {}
