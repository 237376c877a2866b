"""bridge.redrive: dead letters taken apart, and what is remembered of those that have gone back."""

from __future__ import annotations

import itertools
import struct
from typing import Any

import pytest
from confluent_kafka.admin import NewTopic  # type: ignore[attr-defined]  # public, but not marked as exported
from hypothesis import given
from hypothesis import strategies as st

from bridge import headers as h
from bridge.errors import ConfigurationError
from bridge.headers import RejectReason
from bridge.redrive import Choice, Done, Letter, Redrive, Report, decode_done, encode_done, read_letter
from bridge.redriving import redrive
from bridge.settings import Settings
from tests.bridge.rig import DEADLINE_S, settings_for
from tests.system.broker import Broker
from tests.system.kafka import Outgoing, Topics, produce, read_committed
from timerstore.clock import SystemClock

WHERE = h.Where("delay", 3, 17, 5, 99)
OWN: h.Headers = [("x", b"1"), ("delay-for", b"?"), ("delay-reason", b"mine"), ("x", None)]


@pytest.mark.parametrize("attempts", [0, 16])
def test_a_dead_letter_becomes_the_record_that_it_was(attempts: int) -> None:
    """Whatever headers it had, a reason of its own among them."""
    written = h.dead_letter_headers(OWN, RejectReason.BAD_FOR, "why", WHERE, attempts)
    letter = read_letter(written)
    assert letter == Letter(headers=OWN, reason="bad-for", topic="delay", partition=3, target="")


def test_a_letter_without_its_value_never_goes_back() -> None:
    """It would be another message."""
    cut = read_letter([*h.dead_letter_headers(OWN, RejectReason.TOO_LARGE, "why", WHERE), (h.OMITTED, b"value")])
    assert cut is not None and cut.headers == OWN
    assert not Choice(due_now=True, set_headers=[("x", b"1")]).mends(cut)


@pytest.mark.parametrize(
    "found", [None, [], OWN, [("delay-reason", b"x"), (h.DLT_TOPIC, b"t"), (h.DLT_PARTITION, b"?")]]
)
def test_what_the_bridge_did_not_write_is_no_dead_letter(found: h.Headers | None) -> None:
    """Somebody else's records in the topic stay where they are."""
    assert read_letter(found) is None


def letter(reason: str = "unknown-target", **more: object) -> Letter:
    """A dead letter of the target t."""
    own: h.Headers = [("delay-until", b"5"), ("delay-topic", b"t"), ("own", b"1")]
    return Letter(**{"headers": own, "reason": reason, "topic": "delay", "partition": 0, "target": "t", **more})  # type: ignore[arg-type]


def test_filters_choose_by_all_that_is_given() -> None:
    """Without any, everything is chosen."""
    assert Choice().chooses(letter())
    assert Choice(reasons=["unknown-target"], targets=["t", "u"], topics=["delay"]).chooses(letter())
    assert not Choice(reasons=["too-large"]).chooses(letter())
    assert not Choice(targets=["u"]).chooses(letter())
    assert not Choice(topics=["other"]).chooses(letter())


def test_a_record_with_a_bad_header_goes_back_only_when_that_is_put_right() -> None:
    """As it is it would only be rejected again."""
    assert not Choice().mends(letter("bad-for"))
    assert Choice(due_now=True).mends(letter("bad-for"))
    assert Choice(set_headers=[("delay-for", b"5s")]).mends(letter("bad-for"))
    assert Choice().mends(letter("beyond-max")), "the configuration may have changed"


def test_headers_are_replaced_and_all_else_stays() -> None:
    """`due_now` takes the place of every time, a set header that of all of its name."""
    assert Choice().headers(letter()) == letter().headers
    now = Choice(due_now=True).headers(letter())
    assert now == [("delay-topic", b"t"), ("own", b"1"), ("delay-for", b"0")]
    moved = Choice(set_headers=[("delay-topic", b"u")]).headers(letter())
    assert moved == [("delay-until", b"5"), ("own", b"1"), ("delay-topic", b"u")]


@given(st.lists(st.lists(st.booleans(), min_size=30, max_size=30), min_size=1, max_size=4), st.sets(st.integers(0, 29)))
def test_every_letter_goes_back_once_whatever_the_runs_choose(runs: list[list[bool]], gaps: set[int]) -> None:
    """Each run chooses some; what is committed after any of its records, and read again, is what has gone back."""
    offsets = [offset for offset in range(30) if offset not in gaps]
    back: set[int] = set()
    offset, metadata = 0, ""
    for chosen in runs:
        done = Done(decode_done("id", offset, metadata))
        for at in offsets:
            assert done.contains(at) == (at in back)
            if chosen[at]:
                back.add(at)
            done.note(at, is_back=at in back)
            offset, ranges = done.committed()
            metadata = encode_done("id", offset, ranges)
            again = Done(decode_done("id", offset, metadata))
            assert {o for o in offsets if again.contains(o)} == back


def test_the_offsets_of_another_topic_of_the_same_name_count_for_nothing() -> None:
    """It was deleted and made anew."""
    metadata = encode_done("old", 7, [(9, 12)])
    assert decode_done("old", 7, metadata) == [(0, 7), (9, 12)]
    assert decode_done("new", 7, metadata) == []
    assert decode_done("new", 7, "") == []


def test_what_cannot_be_remembered_is_refused() -> None:
    """Every other one of thousands does not fit into what Kafka keeps of an offset."""
    with pytest.raises(ConfigurationError, match="scattered"):
        encode_done("id", 0, [(i, i + 1) for i in range(1, 5_000, 2)])


def test_the_partition_is_read_as_it_is_written() -> None:
    """Big-endian, as Spring's."""
    assert dict(h.dead_letter_headers([], RejectReason.NO_TIME, "", WHERE))[h.DLT_PARTITION] == struct.pack(">i", 3)


# -- on a broker


def dead_letter_topic(topics: Topics, delay: str) -> None:
    """The dead-letter topic of a delay topic, with two partitions."""
    new = NewTopic(f"{delay}.dlt", num_partitions=2, replication_factor=1)
    topics.admin.create_topics([new])[f"{delay}.dlt"].result(DEADLINE_S)


def bury(broker: Broker, delay: str, count: int) -> None:
    """Dead letters 0 to `count` - 1 of partition i % 3, alternately of two reasons, and a stranger's record."""
    records = [Outgoing(topic=f"{delay}.dlt", value=b"stranger", headers=[("delay-reason", b"?")])]
    for i in range(count):
        own: h.Headers = [("delay-until", b"1800000000000"), ("delay-topic", b"t%d" % (i % 4)), ("own", b"%d" % i)]
        reason = RejectReason.UNKNOWN_TARGET if i % 2 else RejectReason.TOO_LARGE
        where = h.Where(delay, i % 3, i, i, 99)
        headers = h.dead_letter_headers(own, reason, "why", where, 16)
        records.append(Outgoing(topic=f"{delay}.dlt", key=b"k", value=b"%d" % i, headers=headers, partition=i % 2))
    produce(broker.bootstrap, records)


def back_in(broker: Broker, delay: str) -> list[int]:
    return sorted(int(record.value or b"") for record in read_committed(broker.bootstrap, delay))


def run(settings: Settings, *, execute: bool = True, **choice: Any) -> Report:
    everything: dict[str, Any] = {"topics": (), "reasons": (), "targets": (), "due_now": False, "set_headers": ()}
    return redrive(settings, SystemClock(), **{**everything, **choice}, execute=execute)


@pytest.mark.system
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


@pytest.mark.system
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_crash_puts_nothing_back_twice(
    broker: Broker, topics: Topics, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Around the commit of the second transaction; the next run goes on from what was committed."""
    delay = topics.delay(partitions=3)
    dead_letter_topic(topics, delay)
    bury(broker, delay, 60)
    settings = settings_for(broker.bootstrap, delay)
    monkeypatch.setattr("bridge.redrive.TRANSACTION_ROWS", 20)
    monkeypatch.setattr("bridge.redrive.POLL_RECORDS", 10)
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
