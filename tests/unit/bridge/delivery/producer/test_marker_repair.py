"""MarkerRepair: what is said to be forgotten. (Real brokers that lose a transaction's end: tests/broker.)"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import cast

import pytest
from confluent_kafka import Producer

from bridge.delivery.producer import transaction_markers
from bridge.delivery.producer.transaction_markers import MarkerRepair, Outcome, States
from bridge.settings.model import Settings


def each(states: dict[str, str | None]) -> States:
    """Answers for coordinators."""
    return lambda names: {name: states[name] for name in names}


def test_nothing_is_forgotten_while_another_id_is_being_initialised(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is pending may be of the id whose last transaction is just being ended; the other id never had one."""
    pending = False
    monkeypatch.setattr(transaction_markers, "are_offsets_pending", lambda *_: pending)
    monkeypatch.setattr(MarkerRepair, "_must_be_allowed", lambda _: None)
    repair = MarkerRepair(cast("Settings", None), each({"a": "Ongoing", "a.2": "Empty"}), answers_s=0)
    assert repair.outcome_of("a") is None
    pending = True
    assert repair.outcome_of("a.2") is None
    assert repair.explain() is None
    repair.concluded("a")
    explained = repair.explain()
    assert explained is not None and (explained.code, explained.fields["ids"]) == ("DB-4007", "a.2")
    pending = False
    assert repair.explain() is None


def test_nothing_is_forgotten_while_what_a_kill_left_open_is_being_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is what is pending, and nobody asks about its id a second time."""
    monkeypatch.setattr(transaction_markers, "are_offsets_pending", lambda *_: True)
    monkeypatch.setattr(MarkerRepair, "_must_be_allowed", lambda _: None)
    repair = MarkerRepair(cast("Settings", None), each({"a": "Empty", "a.2": "Ongoing"}), answers_s=0)
    assert repair.left_open(["a", "a.2"]) == "a.2"
    assert repair.outcome_of("a") is None
    assert repair.explain() is None
    repair.concluded("a.2")
    explained = repair.explain()
    assert explained is not None and explained.fields["ids"] == "a"


def test_the_verdict_waits_for_the_outcomes_of_all_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a slow machine the coordinators' answers take longer than the wait for committed offsets."""
    monkeypatch.setattr(transaction_markers, "are_offsets_pending", lambda *_: True)
    monkeypatch.setattr(MarkerRepair, "_must_be_allowed", lambda _: None)
    repair = MarkerRepair(cast("Settings", None), each({"a": "Empty", "a.2": "Ongoing"}))
    assert (repair.outcome_of("a.2"), repair.outcome_of("a")) == (Outcome.ABORTED, None)
    with ThreadPoolExecutor(1) as pool:
        explained = pool.submit(repair.explain)
        repair.concluded("a.2")
        found = explained.result()
    assert found is not None and found.fields["ids"] == "a"


def test_a_transaction_that_a_kill_left_open_is_ended_by_the_initialisation(monkeypatch: pytest.MonkeyPatch) -> None:
    """No start waits to see whether its offsets stay pending; only where they are afterwards is anything written."""
    looks_s: list[object] = []
    pending = True

    def look(_: object, *seconds: float) -> bool:
        looks_s.append(seconds)
        return pending

    monkeypatch.setattr(transaction_markers, "are_offsets_pending", look)
    settings = cast("Settings", None)
    repair = MarkerRepair(settings, each({"a": "Ongoing"}))
    assert repair.outcome_of("a") is Outcome.ABORTED
    assert looks_s == [(transaction_markers.SOON_S,)]
    pending = False
    repair.write("a", cast("Producer", None), Outcome.ABORTED)
