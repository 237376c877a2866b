"""The account of a run: it must be unable to call a bad run good."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dev.harness.kafka import ReadRecord
from dev.harness.ledger import Account, Balance, Expected, LatenessSummary, Ledger

ORIGIN = "delay/0/7"


def headers(number: int | None = 0, due_ms: int | None = 1_000) -> tuple[tuple[str, bytes | None], ...]:
    """Of an arrival."""
    given = {"n": number, "delay-due": due_ms}
    return (
        *((name, b"%d" % value) for name, value in given.items() if value is not None),
        ("delay-origin", ORIGIN.encode()),
    )


PLAN = Expected(topic="orders", key=b"k", value=b"v", headers=(("n", b"0"),))
ON_TIME = ReadRecord(
    topic="orders",
    partition=0,
    offset=3,
    timestamp_ms=1_003,
    timestamp_type=2,
    key=b"k",
    value=b"v",
    headers=headers(),
)


def plan(number: int, topic: str = "orders") -> Expected:
    """Another message."""
    return replace(PLAN, topic=topic, headers=(("n", b"%d" % number),))


def ledger(*arrivals: ReadRecord) -> Ledger:
    """Books with one message, due at 1,000, that arrived like this."""
    books = Ledger()
    books.planned(0, PLAN)
    books.acknowledged(0, 1_000, ORIGIN)
    for arrival in arrivals:
        books.arrived(arrival)
    return books


def test_once_and_on_time_is_good() -> None:
    """One arrival at or after its due time, according to the plan: no complaint."""
    for at_ms in (1_000, 1_003):
        balance = ledger(replace(ON_TIME, timestamp_ms=at_ms)).balance()
        assert balance == Balance()
        assert (balance.sent, balance.delivered, balance.good) == (1, 1, True)


@pytest.mark.parametrize(
    ("arrivals", "complaint"),
    [
        ((), "lost"),
        ((ON_TIME, ON_TIME), "doubled"),
        ((replace(ON_TIME, timestamp_ms=999),), "early"),
        ((ON_TIME, replace(ON_TIME, timestamp_ms=999)), "early"),
        ((replace(ON_TIME, timestamp_ms=1_500, headers=headers(due_ms=2_000)),), "early"),
        ((replace(ON_TIME, headers=headers(due_ms=None)),), "altered"),
        ((replace(ON_TIME, headers=headers(due_ms=1_001)),), "altered"),
        ((replace(ON_TIME, headers=(*headers(), ("x", b"1"))),), "altered"),
        ((replace(ON_TIME, headers=(*headers()[:-1], ("delay-origin", b"delay/0/8"))),), "altered"),
        ((replace(ON_TIME, topic="payments"),), "altered"),
        ((replace(ON_TIME, key=None),), "altered"),
        ((replace(ON_TIME, value=b""),), "altered"),
    ],
)
def test_each_way_to_go_wrong_is_named(arrivals: tuple[ReadRecord, ...], complaint: str) -> None:
    """Each kind of failure is counted under its own name, and none of them is good."""
    balance = ledger(*arrivals).balance()
    assert getattr(balance, complaint) == [0]
    assert not balance.good


def test_a_forged_due_header_does_not_hide_an_early_arrival() -> None:
    """A header that claims an earlier due time than the producer asked for excuses nothing."""
    balance = ledger(replace(ON_TIME, timestamp_ms=900, headers=headers(due_ms=900))).balance()
    assert (balance.early, balance.altered) == ([0], [0])


def test_a_second_arrival_cannot_be_excused_by_a_good_first_one() -> None:
    """Every further arrival counts, and each must match the plan."""
    balance = ledger(ON_TIME, ON_TIME, replace(ON_TIME, value=b"other")).balance()
    assert (balance.delivered, balance.doubled, balance.altered) == (1, [0, 0], [0])


def test_a_dead_letter_is_expected_for_its_reason() -> None:
    """A message that must be rejected arrives in the dead-letter topic, at any time, with that reason and no other."""
    books = Ledger()
    books.planned(0, replace(PLAN, topic="dlt", reason=b"bad-for"))
    books.acknowledged(0, None, ORIGIN)
    letter = replace(ON_TIME, topic="dlt", headers=(*headers(due_ms=None), ("delay-reason", b"bad-for")))
    assert books.against([letter]).balance().good
    assert books.against([replace(letter, headers=letter.headers[:-1])]).balance().altered == [0]
    assert books.against([]).balance().lost == [0]


def test_what_is_read_again_is_a_new_account() -> None:
    """`against` knows all that was sent, and of arrivals only those that it is given."""
    books = ledger(ON_TIME)
    assert books.against([ON_TIME]).balance().good
    assert books.against([ON_TIME, ON_TIME]).balance().doubled == [0]


def test_what_was_not_acknowledged_is_not_owed_but_may_arrive() -> None:
    """A refused message that never arrives is not lost; one that arrives before its acknowledgement is known."""
    books = Ledger()
    books.planned(0, PLAN)
    books.planned(1, plan(1))
    books.arrived(replace(ON_TIME, headers=headers(1)))
    assert (books.pending, books.delivered) == (0, 1)
    books.acknowledged(1, 1_000, ORIGIN)
    assert (books.pending, books.delivered) == (0, 1)
    assert books.balance().good


def test_what_was_never_sent_is_counted() -> None:
    """An arrival without a number, or with one that was never sent, is not good."""
    books = ledger(ON_TIME)
    books.arrived(replace(ON_TIME, headers=headers(None)))
    books.arrived(replace(ON_TIME, headers=headers(7), offset=4))
    assert books.balance().unknown == ["orders/0/3", "orders/0/4"]
    assert not books.balance().good


def test_an_empty_run_is_not_good() -> None:
    """Nothing sent proves nothing."""
    assert not Ledger().balance().good


def test_a_number_is_used_once() -> None:
    """Two messages under one number would hide a loss behind a double."""
    with pytest.raises(ValueError, match="planned before"):
        ledger().planned(0, PLAN)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.booleans()), max_size=30))
def test_accounts_add_up(messages: list[tuple[str, int, bool]]) -> None:
    """Topic by topic and altogether: sent = pending + delivered, and the quick counters agree with the books."""
    books = Ledger()
    for number, (topic, arrivals, acknowledged_first) in enumerate(messages):
        books.planned(number, plan(number, topic))
        if acknowledged_first:
            books.acknowledged(number, 1_000)
        for _ in range(arrivals):
            books.arrived(replace(ON_TIME, topic=topic, headers=headers(number)))
        if not acknowledged_first:
            books.acknowledged(number, 1_000)
    *by_topic, everything = books.accounts()
    assert {each.topic: each.sent for each in by_topic} == dict(Counter(topic for topic, _, _ in messages))
    assert sum(each.delivered for each in by_topic) == everything.delivered == books.delivered
    assert everything.pending == books.pending == len(books.balance().lost)
    assert len(books.balance().doubled) == sum(max(0, arrivals - 1) for _, arrivals, _ in messages)


def test_lateness_is_told_apart_around_the_kill() -> None:
    """Arrived before the kill; due before the return and arrived later; due after the return."""
    books = Ledger()
    for number, (due_ms, at_ms) in enumerate([(100, 101), (150, 950), (290, 900), (920, 922)]):
        books.planned(number, plan(number))
        books.acknowledged(number, due_ms)
        books.arrived(replace(ON_TIME, headers=headers(number, due_ms), timestamp_ms=at_ms))
    around = books.lateness_around(down_from_ms=200, up_from_ms=900)
    assert [(each.count, each.max_ms) for each in around.values()] == [(1, 1), (2, 800), (1, 2)]


def test_percentiles_of_nothing_are_zero() -> None:
    """The view asks before anything has arrived."""
    assert LatenessSummary.of([]) == LatenessSummary(count=0, p50_ms=0, p99_ms=0, max_ms=0)
    assert Ledger().accounts() == [Account(topic="all", sent=0, delivered=0, lateness=LatenessSummary.of([]))]
