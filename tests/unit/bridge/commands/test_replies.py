"""bridge.commands.replies: what a command is told, whoever else writes into the topic of answers."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from bridge.commands.replies import await_answers, topic_of_answers
from bridge.commands.tail import Tail
from bridge.errors import ConfigurationError, EnvironmentFailure
from bridge.settings.model import Settings
from bridge.wire.answers import Answer, Outcome
from tests.manual_clock import ManualClock

COMMANDS = ("delay/0/7", "delay/1/9")


def record(headers: Sequence[tuple[str, bytes | None]], value: bytes | None = b"{}") -> Any:
    return SimpleNamespace(headers=lambda: list(headers), value=lambda: value, error=lambda: None)


def answer(command: tuple[str, int, int], outcome: Outcome, *offsets: int, count: int | None = None) -> Any:
    """As the bridge writes it."""
    topic, partition, _ = command
    told = Answer(
        command=command, outcome=outcome, count=len(offsets) if count is None else count,
        origins=tuple((topic, partition, offset) for offset in offsets),
    )  # fmt: skip
    return record(told.record_headers(), told.value())


class Scripted(Tail):
    """Reads these records, and then nothing; each look takes a second."""

    def __init__(self, *records: Any) -> None:
        self._clock, self._left = ManualClock(now_ms=0), list(records)
        self._consumer: Any = self

    def poll(self, _: float) -> Any:
        self._clock.advance(1_000)  # type: ignore[attr-defined]
        return self._left.pop(0) if self._left else None


def test_each_partition_answers_for_itself() -> None:
    """Answers to others, and records that are none, are passed over; of one command there may be several."""
    tail = Scripted(
        record([("delay-command", b"delay/0/8"), ("delay-outcome", b"cancelled")]),
        record([("delay-command", b"delay/0/7"), ("delay-outcome", b"eaten")]),
        record([("delay-command", b"delay/0/7")], None),
        answer(("delay", 0, 7), Outcome.NOT_PENDING),
        answer(("delay", 1, 9), Outcome.CANCELLED, 3, 4, count=150),
        answer(("delay", 1, 9), Outcome.DELIVERED, 5),
    )
    told = await_answers(tail, COMMANDS, 60)
    assert (told.counts["cancelled"], told.counts["delivered"]) == (150, 1)
    assert told.origins["cancelled"] == ["delay/1/3", "delay/1/4"]
    assert not told.has_changed and not told.is_nothing, "one has left before its turn"


def test_one_by_origin_is_answered_when_all_that_it_names_is() -> None:
    """By the counts of its answers."""
    records = answer(("delay", 0, 7), Outcome.MOVED, 1, 2), answer(("delay", 0, 7), Outcome.NOT_PENDING, 3)
    told = await_answers(Scripted(*records), COMMANDS[:1], 60, 3)
    assert told.counts == {"moved": 2, "not-pending": 1} and told.has_changed
    with pytest.raises(EnvironmentFailure, match="no answer of the bridge within 60 s"):
        await_answers(Scripted(records[0]), COMMANDS[:1], 60, 3)


def test_a_topic_that_the_bridge_may_not_use_is_refused() -> None:
    """Before the command is sent: its answer would be dropped."""
    with pytest.raises(ConfigurationError, match="may not answer in"):
        topic_of_answers(Settings.of({"targets": {"allow": ["orders"]}}), "delay")
