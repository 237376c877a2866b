"""bridge.runtime.command_sender: each command gets its own answer, and none holds up the dispatcher."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from confluent_kafka import KafkaError, KafkaException

from bridge.api.source import NotOwnedError, Order
from bridge.errors import EnvironmentFailure
from bridge.runtime import command_sender
from bridge.runtime.command_sender import CommandSender
from bridge.wire.answers import Answer, Outcome
from tests.manual_clock import ManualClock

NOW_MS = 1_800_000_000_000
DEADLINE_S = 10.0


class Producer:
    """Keeps what it is given; fails as it is told."""

    def __init__(self) -> None:
        self.records: list[SimpleNamespace] = []
        self.refusal: KafkaError | None = None
        self.error: Exception | None = None
        self.fatal: KafkaError | None = None

    def produce(self, topic: str, *, partition: int, headers: Any, on_delivery: Callable[..., None]) -> None:
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        self.records.append(SimpleNamespace(place=(topic, partition), headers=dict(headers), on_delivery=on_delivery))
        if self.refusal is not None:
            on_delivery(self.refusal, None)

    def poll(self, _: float) -> int:
        fatal, self.fatal = self.fatal, None
        if fatal is not None:
            raise KafkaException(fatal)
        return 0

    def purge(self, **_: bool) -> None:
        """Nothing is queued here."""

    def answer(self, number: int, outcome: Outcome = Outcome.CANCELLED) -> Answer:
        correlation = self.records[number].headers["delay-correlation-id"].decode()
        return Answer(command=("delay", 0, 100 + number), outcome=outcome, count=1, correlation=correlation)


@pytest.fixture
def producer() -> Producer:
    return Producer()


@pytest.fixture
def sender(producer: Producer) -> CommandSender:
    return CommandSender(
        {"transaction.timeout.ms": 10_000},
        owned=lambda: {("delay", 0)},
        delay_max_ms=1_000,
        clock=ManualClock(NOW_MS),
        make=lambda _: cast(Any, producer),
    )


def order(offset: int, due_ms: int | None = None) -> Order:
    return Order(("delay", 0), (offset,), due_ms)


def test_each_command_gets_its_own_answer(sender: CommandSender, producer: Producer) -> None:
    """In whatever order they come; others' answers are left alone."""
    cancel, move = sender.send([order(7), order(8, NOW_MS + 500)])
    assert producer.records[0].place == ("delay", 0)
    assert producer.records[0].headers["delay-cancel-origin"] == b"delay/0/7"
    assert producer.records[1].headers["delay-move-origin"] == b"delay/0/8"
    assert producer.records[1].headers["delay-until"] == str(NOW_MS + 500).encode()
    strange = Answer(command=("delay", 0, 1), outcome=Outcome.UNKNOWN, correlation="x")
    sender.on_answers([strange, producer.answer(1, Outcome.MOVED)])
    sender.on_answers([Answer(command=("delay", 0, 1), outcome=Outcome.UNKNOWN), producer.answer(0)])
    assert cancel.result(DEADLINE_S)[0].outcome is Outcome.CANCELLED
    assert move.result(DEADLINE_S)[0].outcome is Outcome.MOVED
    sender.on_answers([producer.answer(0)])
    assert not sender._waiting


def test_a_command_that_names_several_has_all_its_answers(sender: CommandSender, producer: Producer) -> None:
    """They come one for each outcome, and their counts add up."""
    (several,) = sender.send([Order(("delay", 0), (7, 8, 9), None)])
    assert producer.records[0].headers["delay-cancel-origin"] == b"delay/0/7,8,9"
    sender.on_answers([replace(producer.answer(0), count=2)])
    (single,) = sender.send([order(1)])
    sender.on_answers([producer.answer(1)])
    assert single.result(DEADLINE_S) and not several.done()
    sender.on_answers([producer.answer(0, Outcome.NOT_PENDING)])
    answers = [(answer.outcome, answer.count) for answer in several.result(DEADLINE_S)]
    assert answers == [(Outcome.CANCELLED, 2), (Outcome.NOT_PENDING, 1)]


def test_what_is_not_ours_or_too_far_away_is_not_sent(sender: CommandSender, producer: Producer) -> None:
    """Nor is anything that was asked for with it."""
    with pytest.raises(NotOwnedError):
        sender.send([order(1), Order(("delay", 1), (2,), None)])
    with pytest.raises(ValueError, match=r"delay\.max"):
        sender.send([order(1), order(2, NOW_MS + 1_001)])
    assert producer.records == []


def test_a_command_that_cannot_be_written_says_so(sender: CommandSender, producer: Producer) -> None:
    """At once or later; a full queue is waited for."""
    producer.error = BufferError()
    assert not sender.send([order(1)])[0].done()
    producer.error = KafkaException(KafkaError(KafkaError._STATE))
    (at_once,) = sender.send([order(2)])
    producer.refusal = KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)
    (later,) = sender.send([order(3)])
    for future in (at_once, later):
        with pytest.raises(EnvironmentFailure, match="could not be written"):
            future.result(DEADLINE_S)


def test_a_command_that_is_answered_and_then_reported_lost_is_answered(
    sender: CommandSender, producer: Producer
) -> None:
    """The broker's answer never came, and the command is in the log; the thread that settles the others goes on."""
    first, second = sender.send([order(1), order(2)])
    sender.on_answers([producer.answer(0)])
    assert first.result(DEADLINE_S)[0].count == 1
    given_up, _ = sender.send([order(3), order(4)])
    given_up.cancel()
    for record in producer.records[0], producer.records[2]:
        record.on_delivery(KafkaError(KafkaError._MSG_TIMED_OUT), None)
    sender.on_answers([producer.answer(1)])
    assert second.result(DEADLINE_S)[0].count == 1


@pytest.mark.parametrize("is_told_by_produce", [True, False])
def test_a_fatal_error_fails_what_waits_and_the_next_command_has_another_producer(is_told_by_produce: bool) -> None:
    """The client raises it in whatever is called next. The thread that settles goes on."""
    producers: list[Producer] = []

    def make(_: dict[str, Any]) -> Any:
        producers.append(Producer())
        return producers[-1]

    sender = CommandSender({}, owned=lambda: {("delay", 0)}, delay_max_ms=1, clock=ManualClock(NOW_MS), make=make)
    fatal = KafkaError(KafkaError._FATAL, "out of order sequence number", fatal=True)
    lost = sender.send([order(1), order(2)])
    if is_told_by_produce:
        producers[0].error = KafkaException(fatal)
        lost = [*lost, *sender.send([order(3)])]
    else:
        producers[0].fatal = fatal
    for future in lost:
        with pytest.raises(EnvironmentFailure, match="could not be written"):
            future.result(DEADLINE_S)
    (again,) = sender.send([order(4)])
    sender.on_answers([producers[1].answer(0)])
    assert again.result(DEADLINE_S)[0].count == 1
    assert len(producers) == 2


def test_commands_under_way_are_bounded(producer: Producer, monkeypatch: pytest.MonkeyPatch) -> None:
    """One too many waits, then fails with those that were sent with it; one that is given up makes room."""
    monkeypatch.setattr(command_sender, "IN_FLIGHT_MAX", 3)
    monkeypatch.setattr(command_sender, "ROOM_S", 0.01)
    sender = CommandSender(
        {}, owned=lambda: {("delay", 0)}, delay_max_ms=1, clock=ManualClock(NOW_MS), make=lambda _: cast(Any, producer)
    )
    first = sender.send([order(1), order(2)])
    with pytest.raises(EnvironmentFailure, match="3 commands are not answered"):
        sender.send([order(3), order(4)])
    first[0].cancel()
    again = sender.send([order(5), order(6)])
    sender.on_answers([producer.answer(0), producer.answer(1)])
    assert first[1].result(DEADLINE_S)[0].count == 1 and not again[0].done()
    with pytest.raises(CancelledError):
        first[0].result(DEADLINE_S)
