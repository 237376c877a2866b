"""The demo's accounting: it must be unable to call a bad run good."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from demo.ledger import Account, Arrival, Lateness, Ledger, Plan, Verdict

PLAN = Plan(topic="orders", key=b"k", value=b"v")
ON_TIME = Arrival(topic="orders", key=b"k", value=b"v", at_ms=1_003, due_ms=1_000)


def ledger(*arrivals: Arrival) -> Ledger:
    """Books with one message, due at 1,000, that arrived like this."""
    books = Ledger()
    books.planned(0, PLAN)
    books.acknowledged(0, 1_000)
    for arrival in arrivals:
        books.arrived(0, arrival)
    return books


def test_once_and_on_time_is_good() -> None:
    """One arrival at or after its due time, as it was planned: nothing to complain of."""
    good = Verdict(sent=1, delivered=1, lost=0, doubled=0, early=0, altered=0, unknown=0)
    assert ledger(ON_TIME).verdict() == good
    assert ledger(replace(ON_TIME, at_ms=1_000)).verdict() == good
    assert good.good


@pytest.mark.parametrize(
    ("arrivals", "complaint"),
    [
        ((), "lost"),
        ((ON_TIME, ON_TIME), "doubled"),
        ((replace(ON_TIME, at_ms=999),), "early"),
        ((replace(ON_TIME, at_ms=1_500, due_ms=2_000),), "early"),
        ((replace(ON_TIME, due_ms=None),), "altered"),
        ((replace(ON_TIME, due_ms=1_001),), "altered"),
        ((replace(ON_TIME, topic="payments"),), "altered"),
        ((replace(ON_TIME, key=None),), "altered"),
        ((replace(ON_TIME, value=b""),), "altered"),
    ],
)
def test_each_way_to_go_wrong_is_named(arrivals: tuple[Arrival, ...], complaint: str) -> None:
    """Each kind of failure is counted under its own name, and none of them is good."""
    verdict = ledger(*arrivals).verdict()
    assert getattr(verdict, complaint) == 1
    assert not verdict.good


def test_a_forged_due_header_does_not_hide_an_early_arrival() -> None:
    """A header that claims an earlier due time than the producer asked for excuses nothing."""
    verdict = ledger(replace(ON_TIME, at_ms=900, due_ms=900)).verdict()
    assert (verdict.early, verdict.altered) == (1, 1)


def test_a_second_arrival_cannot_be_excused_by_a_good_first_one() -> None:
    """Every further arrival counts, and each must be what was planned."""
    verdict = ledger(ON_TIME, ON_TIME, replace(ON_TIME, value=b"other")).verdict()
    assert (verdict.delivered, verdict.doubled, verdict.altered) == (1, 2, 1)


def test_what_was_not_acknowledged_is_not_owed_but_may_arrive() -> None:
    """A refused message that never arrives is not lost; one that arrives before its acknowledgement is no stranger."""
    books = Ledger()
    books.planned(0, PLAN)
    books.planned(1, PLAN)
    books.arrived(1, ON_TIME)
    assert (books.pending, books.delivered) == (0, 1)
    books.acknowledged(1, 1_000)
    assert (books.pending, books.delivered) == (0, 1)
    assert books.verdict().good


def test_strangers_are_counted() -> None:
    """An arrival without a number, or with one that was never sent, is not good."""
    books = ledger(ON_TIME)
    books.arrived(None, ON_TIME)
    books.arrived(7, ON_TIME)
    assert books.verdict().unknown == 2
    assert not books.verdict().good


def test_an_empty_run_is_not_good() -> None:
    """Nothing sent proves nothing."""
    assert not Ledger().verdict().good


def test_a_number_is_used_once() -> None:
    """Two messages under one number would hide a loss behind a double."""
    with pytest.raises(ValueError, match="planned before"):
        ledger().planned(0, PLAN)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.booleans()), max_size=30))
def test_accounts_add_up(messages: list[tuple[str, int, bool]]) -> None:
    """Topic by topic and altogether: sent = pending + delivered, and the quick counters agree with the books."""
    books = Ledger()
    for number, (topic, arrivals, acknowledged_first) in enumerate(messages):
        books.planned(number, Plan(topic=topic, key=None, value=b""))
        if acknowledged_first:
            books.acknowledged(number, 1_000)
        for _ in range(arrivals):
            books.arrived(number, replace(ON_TIME, topic=topic))
        if not acknowledged_first:
            books.acknowledged(number, 1_000)
    *by_topic, everything = books.accounts()
    assert {each.topic: each.sent for each in by_topic} == dict(Counter(topic for topic, _, _ in messages))
    assert sum(each.delivered for each in by_topic) == everything.delivered == books.delivered
    assert everything.pending == books.pending == books.verdict().lost
    assert books.verdict().doubled == sum(max(0, arrivals - 1) for _, arrivals, _ in messages)


def test_lateness_is_told_apart_around_the_kill() -> None:
    """Arrived before the kill; due before the return and arrived later; due after the return."""
    books = Ledger()
    for number, (due_ms, at_ms) in enumerate([(100, 101), (150, 950), (290, 900), (920, 922)]):
        books.planned(number, PLAN)
        books.acknowledged(number, due_ms)
        books.arrived(number, replace(ON_TIME, due_ms=due_ms, at_ms=at_ms))
    around = books.lateness_around(down_from_ms=200, up_from_ms=900)
    assert [(each.count, each.max_ms) for each in around.values()] == [(1, 1), (2, 800), (1, 2)]


def test_percentiles_of_nothing_are_zero() -> None:
    """The view asks before anything has arrived."""
    assert Lateness.of([]) == Lateness(count=0, p50_ms=0, p99_ms=0, max_ms=0)
    assert Ledger().accounts() == [Account(topic="all", sent=0, delivered=0, lateness=Lateness.of([]))]
