"""What a look-up reads, and what it makes of answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from confluent_kafka import KafkaError

from bridge.delivery.doubt import look_up
from bridge.delivery.doubt.look_up import BEHIND_MS, MISSING, NOT_READ, WHOLE, LookUp
from bridge.errors import EnvironmentFailure
from bridge.ingest.batches.reader import CorruptBatch, End, Found, Stretch
from bridge.ingest.batches.reading_mark import LOOKED_UP, ReadingMark
from bridge.kafka.admin import Topic, Watermarks
from bridge.wire.headers import Headers
from bridge.wire.received import Record
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

    def __init__(self, directory: Path) -> None:
        self.clock, self.directory = ManualClock(now_ms=1_000_000), directory
        self.batches: list[Found] = []
        self.apart: list[Stretch] = []
        self.first: dict[tuple[str, int], int | None] = {}
        self.asked_ms = 0
        self.polls: Iterator[list[Message]] = iter(())
        self.hidden: Iterator[list[Message]] = iter(())
        """The polls of a consumer that reads aborted and open records, too."""
        self.sought: set[str] = set()
        self.late = 0
        """The records of each partition since the first read has begun."""
        self.assigned: dict[tuple[str, int], int] = {}
        self.seen: list[str] = []
        self.silent: set[tuple[str, int]] = set()
        self.is_over = False
        self.begin()

    def begin(self) -> None:
        """A process begins."""
        mark = ReadingMark(self.directory, LOOKED_UP)
        self.look_up = LookUp(self, self.make, self.clock, mark, self.read)  # type: ignore[arg-type]

    def make(self, isolation: str) -> Any:
        """A consumer."""
        if isolation == "read_uncommitted":
            self.polls = self.hidden
        self.late = 1
        return self

    def read(
        self, stretches: Sequence[Stretch], _is_over: Callable[[], bool]
    ) -> Iterator[tuple[tuple[str, int], Found]]:
        self.apart += stretches
        yield from ((stretches[0].name, each) for each in self.batches)

    def topics(self, names: list[str]) -> dict[str, Topic]:
        counts = {"a": 2, "b": 1}
        return {
            n: Topic(name=n, topic_id=n, partitions=counts[n], replicas=1, leaderless=()) for n in names if n in counts
        }

    def watermarks(self, places: list[tuple[str, int]], *, of_all: bool = True) -> dict[tuple[str, int], Watermarks]:
        if of_all and not self.silent.isdisjoint(places):
            raise EnvironmentFailure("cannot look up offsets: no leader", hint="Scripted.", code="DB-3002")
        return {place: Watermarks(start=0, end=10 + self.late) for place in places if place not in self.silent}

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

    def is_sought(self, _topic: str, _partition: int, _offset: int, headers: Headers) -> bool:
        return (headers[0][1] or b"").decode() in self.sought

    def run(self, *topics: str, **since: int) -> dict[str, str]:
        own, self.late = {(name, 0): offset for name, offset in since.items()}, 0
        since_when = dict.fromkeys(((name, WHOLE) for name in topics), 500_000) | own
        told = list(self.look_up(since_when, self.see, self.is_sought, lambda: self.is_over))
        assert len(told) == len(dict(told)), "each is told once"
        return {topic: reason for (topic, _), reason in told}


def test_each_partition_is_read_from_its_first_record_to_its_end(tmp_path: Path) -> None:
    """By time in targets, a minute earlier than the transaction; from an offset in delay topics. What is behind the
    end that there was is not looked at, and a partition without anything new is not read."""
    site = Site(tmp_path)
    site.first = {("a", 0): 8, ("a", 1): None}
    site.polls = iter([[Message("a", 0, 8), Message("d", 0, 9)], [Message("a", 0, 9), Message("a", 0, 10)]])
    assert site.run("a", d=9) == {"a": "", "d": ""}
    assert site.assigned == {("a", 0): 8, ("d", 0): 9} and site.asked_ms == 500_000 - BEHIND_MS
    assert sorted(site.seen) == ["a/0/8", "a/0/9", "d/0/9"]


def test_the_end_of_what_may_be_read_is_not_the_end(tmp_path: Path) -> None:
    """While another producer's transaction is open, a consumer is told of an end before it."""
    site = Site(tmp_path)
    site.first = {("b", 0): 7}
    site.polls = iter(
        [[Message("b", 0, 7), Message("b", 0, 8, EOF)], [], [Message("b", 0, 8), Message("b", 0, 10, EOF)]]
    )
    assert site.run("b") == {"b": ""} and site.seen == ["b/0/7", "b/0/8"]


@pytest.mark.parametrize(
    ("sought", "reason"),
    [({"b/0/8"}, NOT_READ), ({"b/0/10"}, NOT_READ), ({"b/0/7", "b/0/11"}, "")],
    ids=["hidden", "late", "not there"],
)
def test_a_transaction_that_stays_open_hides_no_record(tmp_path: Path, sought: set[str], reason: str) -> None:
    """It may be the bridge's own, which only the delivery of these messages ends. A record of one of them, behind its
    begin, may be aborted or committed, and may have come during the first read: then the partition is not read. Without
    one it is."""
    site = Site(tmp_path)
    site.first, site.sought = {("a", 0): 9, ("b", 0): 7}, sought
    site.polls = iter([[Message("a", 0, 9), Message("b", 0, 7), Message("b", 0, 8, EOF)]])
    site.hidden = iter([[Message("b", 0, 8), Message("b", 0, 9), Message("b", 0, 10), Message("b", 0, 11)]])
    assert site.run("a", "b") == {"a": "", "b": reason}
    assert site.assigned == {("b", 0): 8} and site.seen == ["a/0/9", "b/0/7"]


def test_a_topic_without_read_is_told_and_the_others_are_read(tmp_path: Path) -> None:
    """Its records may be there or not. An error for each of its partitions says no more."""
    site = Site(tmp_path)
    site.first = {("a", 0): 5, ("a", 1): 5, ("b", 0): 9}
    site.polls = iter([[Message("a", 1, -1001, DENIED), Message("a", 0, -1001, DENIED), Message("b", 0, 9)]])
    unread = site.run("a", "b")
    assert unread["a"] and unread["b"] == "" and site.seen == ["b/0/9"]


@pytest.mark.fault("a broker that does not know a topic yet, during such a look-up")
def test_a_topic_is_gone_when_it_was_missing_for_a_minute(tmp_path: Path) -> None:
    """The bridge asks for a missing topic for a minute, since its records may be there until then."""
    site = Site(tmp_path)
    assert site.run("gone") == {"gone": MISSING}
    site.clock.advance(1_000 * 60)
    assert site.run("gone") == {"gone": ""}


@pytest.mark.fault("a partition without a leader during such a look-up")
def test_a_topic_without_a_leader_is_told_and_the_others_are_read(tmp_path: Path) -> None:
    """A partition without a leader holds the messages for its topic, and no others."""
    site = Site(tmp_path)
    site.first = {("a", 0): 5, ("a", 1): 5, ("b", 0): 9}
    site.silent = {("a", 1), ("d", 0)}
    site.polls = iter([[Message("b", 0, 9)]])
    assert site.run("a", "b", d=3) == {"a": NO_LEADER, "b": "", "d": NO_LEADER} and site.seen == ["b/0/9"]


@pytest.mark.parametrize("is_much", [True, False])
def test_a_look_up_is_bounded(monkeypatch: pytest.MonkeyPatch, is_much: bool, tmp_path: Path) -> None:
    """In records, and in time without any."""
    site = Site(tmp_path)
    site.first = {("b", 0): 0}
    if is_much:
        monkeypatch.setattr(look_up, "RECORDS_MAX", 1)
        site.polls = iter([[Message("b", 0, 0), Message("b", 0, 1)], [Message("b", 0, 2)]])
    assert site.run("b") == {"b": NOT_READ}


def test_brokers_that_do_not_answer_are_told(tmp_path: Path) -> None:
    """The look-up is made again."""
    site = Site(tmp_path)
    site.first = {("a", 0): 0, ("b", 0): 0}
    site.polls = iter([[Message(None, 0, 0, KafkaError._ALL_BROKERS_DOWN)]])
    assert all(site.run("a", "b").values())


def test_a_look_up_that_nobody_waits_for_ends(tmp_path: Path) -> None:
    """After one poll at most."""
    site = Site(tmp_path)
    site.first, site.is_over = {("b", 0): 0}, True
    assert site.run("b") == {}


class Killed(BaseException):
    """The machine ends the process."""


def record(offset: int) -> Record:
    return Record("b", 0, offset, 0, True, None, None, [("place", f"b/0/{offset}".encode())])


@pytest.mark.fault("a batch that holds a thousand times its size, in a target of messages in doubt")
@pytest.mark.parametrize(
    ("batches", "reason"),
    [
        ([record(8), record(9), record(10), End(offset=11)], ""),
        ([record(8), End(offset=9)], NOT_READ),
        ([record(8), CorruptBatch(offset=9, next=10, reason="crc")], "crc"),
    ],
)
def test_a_place_that_has_ended_two_processes_is_read_apart(tmp_path: Path, batches: list[Found], reason: str) -> None:
    """A batch that ends the process at each look-up of its topic does so twice; then a separate process reads it."""
    site = Site(tmp_path)
    site.first = {("a", 0): 9, ("b", 0): 8}

    def ends() -> Iterator[list[Message]]:
        yield [Message("a", 0, 9)]
        raise Killed

    for _ in range(2):
        site.polls = ends()
        with pytest.raises(Killed), mock.patch.object(ReadingMark, "clear"):
            site.run("a", "b")
        site.begin()
    site.batches, site.seen = batches, []
    site.polls = iter([[Message("a", 0, 9)]])
    assert site.run("a", "b") == {"a": "", "b": reason}
    assert site.apart == [Stretch(name=("b", 0), begin=8, end=10)]
    found = [f"b/0/{each.offset}" for each in batches if isinstance(each, Record) and each.offset < 10]
    assert site.seen == [*found, "a/0/9"], "a place that was read to its end has ended no process"
    site.begin()
    assert not site.look_up._mark.suspects, "an orderly end trusts the place again"
