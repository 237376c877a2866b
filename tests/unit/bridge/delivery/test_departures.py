"""Rows are taken ahead; each record leaves when it is due, and what goes to one topic in order."""

from __future__ import annotations

from typing import Any, cast

import hypothesis.strategies as st
import pytest
from hypothesis import given

import bridge.delivery.departures as departures_module
from bridge.delivery.departures import Departures
from bridge.delivery.plan.backoff import RetryPolicy
from bridge.delivery.plan.planner import Plan, Planner
from bridge.delivery.targets.cache import Targets
from tests.entries import reject, rows_of, timer
from tests.unit.bridge.delivery.plan.test_planner import NOW, SOURCES, Well
from timerstore.rows.entry import Kind

AHEAD_MS = 20


def planned(*entries: dict[str, Any]) -> Plan:
    """The plan of entries that were taken up to AHEAD_MS ahead."""
    planner = Planner(
        targets=cast("Targets", Well()),
        permitted=lambda _: True,
        default_targets={"delay": None},
        dead_letter_topics={"delay": "delay.dlt"},
        retry=RetryPolicy(),
    )
    return planner.plan(rows_of([(e["at"], 0, e["offset"], e) for e in entries]), SOURCES, NOW + AHEAD_MS)


def left(departures: Departures, now_ms: int) -> list[tuple[str, list[int]]]:
    """What leaves now: topics and rows."""
    return [(batch.topic, batch.ids.tolist()) for batch in departures.until(now_ms)]


def test_each_record_leaves_when_it_is_due() -> None:
    departures = Departures(
        planned(
            reject("delay", 0, 0, NOW + 60_000, "no-time"),  # the brokers' clock is ahead of ours
            timer("delay", 0, 1, NOW - 5, "orders"),
            timer("delay", 0, 2, NOW + 3, "bills"),
            timer("delay", 0, 3, NOW + 3, "orders"),
            {**timer("delay", 0, 4, NOW + 9_000, "orders"), "at": NOW + 4},  # is rolled
            timer("delay", 0, 5, NOW + 9, "orders"),
        )
    )
    assert left(departures, NOW) == [("orders", [1]), ("delay.dlt", [0])]
    assert departures.next_ms() == NOW + 3
    assert left(departures, NOW + 2) == []
    assert left(departures, NOW + 3) == [("orders", [3]), ("bills", [2])]
    assert left(departures, NOW + 8) == [("delay", [4])]
    assert departures.next_ms() == NOW + 9
    assert left(departures, NOW + 10) == [("orders", [5])]
    assert departures.next_ms() is None
    assert departures.lateness_ms().tolist() == [5, 0, 0, 1]


def test_what_waits_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large records are converted when those before them have left, and all leave in the end."""
    monkeypatch.setattr(departures_module, "WAITING_BYTES_MAX", 1)
    departures = Departures(planned(*(timer("delay", 0, i, NOW + i, "abc"[i % 3]) for i in range(6))))
    assert left(departures, NOW) == [("a", [0])]
    assert left(departures, NOW + 1) == []
    assert departures.next_ms() == NOW + 3
    assert left(departures, NOW + 3) == [("a", [3]), ("b", [1])]
    assert left(departures, NOW + 20) == [("b", [4]), ("c", [2, 5])]
    assert departures.next_ms() is None


@given(
    st.lists(st.tuples(st.integers(-5, AHEAD_MS), st.integers(0, 2), st.sampled_from("abc")), min_size=1, max_size=20),
    st.lists(st.integers(0, AHEAD_MS)),
    st.integers(0, 3),
)
def test_none_is_early_lost_or_out_of_order(
    drawn: list[tuple[int, int, str]], looks: list[int], overtaken: int
) -> None:
    """Whatever was taken: rows in the order of position, behind some that P had passed."""
    drawn = [*drawn[:overtaken], *sorted(drawn[overtaken:])]
    entries = [
        timer("delay", 0, offset, NOW + due, target, at=NOW + max(due, due + at - 1))
        for offset, (due, at, target) in enumerate(drawn)
    ]
    departures = Departures(planned(*entries))
    sent: dict[str, list[int]] = {}
    for look in [*sorted(looks), 2 * AHEAD_MS]:
        for batch in departures.until(NOW + look):
            sent.setdefault(batch.topic, []).extend(batch.ids.tolist())
            assert all(entries[i]["due"] <= NOW + look for i in batch.ids.tolist())
            assert len(batch) == len(batch.ids) == len(batch.dues or [])
    assert departures.next_ms() is None
    assert sent == {t: [i for i, e in enumerate(entries) if e["target"] == t] for t in sent}
    assert sum(map(len, sent.values())) == len(entries)
    assert (departures.lateness_ms() >= 0).all()


def test_a_plan_without_records_leaves_at_once() -> None:
    cancel = {**reject("delay", 0, 0, NOW, "", key=b"k", id="x"), "kind": int(Kind.CANCEL)}
    departures = Departures(planned(cancel))
    assert (left(departures, NOW), departures.next_ms(), len(departures.lateness_ms())) == ([], None, 0)
