"""The record that answers a command."""

from __future__ import annotations

import json

import pytest

from bridge.wire.answers import ORIGINS_MAX, Answer, Outcome

COMMAND = ("delay", 0, 1207)


def test_an_answer_names_the_command_the_outcome_and_the_messages() -> None:
    """In headers what routes it, in its value all that is known."""
    answer = Answer(
        command=COMMAND, outcome=Outcome.MOVED, count=2, origins=(("delay", 0, 3),), due_ms=5, correlation="é"
    )
    assert answer.record_headers() == [
        ("delay-outcome", b"moved"),
        ("delay-command", b"delay/0/1207"),
        ("delay-count", b"2"),
        ("delay-correlation-id", "é".encode()),
    ]
    assert json.loads(answer.value()) == {
        "outcome": "moved",
        "count": 2,
        "command": "delay/0/1207",
        "origins": ["delay/0/3"],
        "due_ms": 5,
        "correlation_id": "é",
    }


def test_what_there_is_not_is_left_out() -> None:
    """No due time of a cancel, and no correlation id of a command without one."""
    answer = Answer(command=COMMAND, outcome=Outcome.NOT_PENDING)
    assert [name for name, _ in answer.record_headers()] == ["delay-outcome", "delay-command", "delay-count"]
    assert answer.value() == b'{"outcome":"not-pending","count":0,"command":"delay/0/1207","origins":[]}'


def test_an_answer_is_small() -> None:
    """However many messages a command is about."""
    with pytest.raises(ValueError, match="at most 100"):
        Answer(command=COMMAND, outcome=Outcome.CANCELLED, origins=(COMMAND,) * (ORIGINS_MAX + 1))
