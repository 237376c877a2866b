"""MarkerRepair: forgotten outcomes. (Real brokers that lose a transaction's end: tests/broker.)"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
from confluent_kafka import KafkaException, Producer

from bridge.delivery.producer import transaction_markers
from bridge.delivery.producer.transaction_markers import MarkerRepair, Outcome, States
from bridge.settings.model import Settings
from tests.unit.bridge.delivery.producer.stubs import ABORTABLE, RETRIABLE


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
    """Its offsets are pending, and nobody asks about its id a second time."""
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


def test_a_question_without_an_answer_yet_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a slow machine Java's first answer takes longer than the wait for committed offsets."""
    monkeypatch.setattr(transaction_markers, "are_offsets_pending", lambda *_: True)
    monkeypatch.setattr(MarkerRepair, "_must_be_allowed", lambda _: None)
    asked, answered = threading.Event(), threading.Event()

    def ask(_: object) -> dict[str, str | None]:
        asked.set()
        assert answered.wait(60)
        return {"a": "Empty"}

    repair = MarkerRepair(cast("Settings", None), ask)
    with ThreadPoolExecutor(2) as pool:
        outcome = pool.submit(repair.outcome_of, "a")
        assert asked.wait(60)
        explained = pool.submit(repair.explain)
        assert not explained.done()
        answered.set()
        assert outcome.result() is None
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


class Repair:
    """Writes the end of a transaction again, with a producer that does as it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, leader: int = 1) -> None:
        self.producer = mock.Mock(spec=Producer)
        self.repeats = 0
        places = SimpleNamespace(partitions={0: SimpleNamespace(leader=leader)})
        admin = mock.Mock(**{"list_topics.return_value.topics": {"delay": places}})
        settings: Any = SimpleNamespace(delay_topics=["delay"], dead_letter_topic="{}.dlt".format)
        monkeypatch.setattr(transaction_markers, "are_offsets_pending", lambda *_: True)
        monkeypatch.setattr(transaction_markers, "_consumer", mock.Mock())
        monkeypatch.setattr(transaction_markers, "_admin", lambda _: admin)
        monkeypatch.setattr(MarkerRepair, "_must_be_allowed", lambda _: None)
        self._repair = MarkerRepair(settings, each({}))

    def write(self, outcome: Outcome) -> list[str]:
        """Returns the calls of the producer."""
        self._repair.write("a", self.producer, outcome, self._repeated)
        return [name for name, *_ in self.producer.mock_calls]

    def _repeated(self) -> None:
        self.repeats += 1


BEGIN, OFFSETS, RECORD = "begin_transaction", "send_offsets_to_transaction", "produce"


@pytest.mark.parametrize(("outcome", "end"), [(Outcome.COMMITTED, "commit"), (Outcome.ABORTED, "abort")])
def test_offsets_go_before_records(monkeypatch: pytest.MonkeyPatch, outcome: Outcome, end: str) -> None:
    """Aborted with its records alone, it would take copies back whose originals count as finished later."""
    assert Repair(monkeypatch).write(outcome) == [BEGIN, OFFSETS, RECORD, f"{end}_transaction"]


@pytest.mark.fault("a lost end of a commit, and no answer to the one that is written in its place")
def test_a_call_without_an_answer_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit whose end the brokers have lost is not taken back because one call of its repair gets no answer: that
    call is repeated."""
    repair = Repair(monkeypatch)
    repair.producer.send_offsets_to_transaction.side_effect = [RETRIABLE, None]
    repair.producer.commit_transaction.side_effect = [RETRIABLE, None]
    end = "commit_transaction"
    assert repair.write(Outcome.COMMITTED) == [BEGIN, OFFSETS, OFFSETS, RECORD, end, end]
    assert repair.repeats == 2


@pytest.mark.parametrize("answers", [[ABORTABLE], [RETRIABLE] * 2])
def test_one_that_cannot_be_made_is_told(monkeypatch: pytest.MonkeyPatch, answers: list[KafkaException]) -> None:
    """The repair ends; its id is initialised again."""
    repair = Repair(monkeypatch)
    repair.producer.commit_transaction.side_effect = answers
    with pytest.raises(KafkaException):
        repair.write(Outcome.COMMITTED)
    assert repair.producer.commit_transaction.call_count == len(answers)


def test_it_is_not_begun_while_a_partition_has_no_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own end would be lost there, or time would abort it together with the commit before."""
    repair = Repair(monkeypatch, leader=-1)
    with pytest.raises(KafkaException):
        repair.write(Outcome.COMMITTED)
    assert not repair.producer.mock_calls
