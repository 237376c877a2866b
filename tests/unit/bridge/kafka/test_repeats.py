"""What the client's log says of requests that were sent more than once."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from bridge.kafka import repeats as repeats_module
from bridge.kafka.repeats import Epochs, Repeats

UP = "b:9092/1: Disconnected (after 7ms in state UP)"


@pytest.mark.parametrize(
    ("kind", "text", "is_fact"),
    [
        ("FAIL", UP, True),
        ("FAIL", "b:9092/1: 1 request(s) timed out: disconnect (after 9ms in state UP) (_TIMED_OUT)", True),
        ("FAIL", "b:9092/1: a cause that leaves no room for the state", True),
        ("FAIL", "b:9092/1: Connect to ipv4#127.0.0.1:9092 failed: refused (after 0ms in state CONNECT)", False),
        ("FAIL", "b:9092/1: Failed to resolve 'b:9092' (after 3ms in state TRY_CONNECT)", False),
        ("REQTMOUT", "b:9092/1: Timed out 1 in-flight, 0 retry-queued, 0 out-queue, 0 partially-sent requests", True),
        ("WAKEUP", "Wake-up sent to 3 broker threads in state >= UP: flush", False),
    ],
)
def test_facts(kind: str, text: str, is_fact: bool) -> None:
    """A connection that carried requests and broke, or a request without an answer in time."""
    repeats = Repeats()
    repeats.log(logging.DEBUG, "%s [%s] %s", kind, "x#producer-1", text)
    assert repeats.are_possible is is_fact
    repeats.forget()
    assert not repeats.are_possible


@pytest.mark.parametrize(
    ("user", "debug", "logged"),
    [
        ({}, "broker", [20, 30]),
        ({"log_level": "3"}, "broker", []),
        ({"debug": "eos"}, "eos,broker", [10, 20, 30]),
    ],
)
def test_the_log_is_as_it_was(
    user: dict[str, Any],
    debug: str,
    logged: list[int],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the rule needs to read is not for people to read."""
    # The client's own logger leaves out repeated lines, also those of earlier tests.
    monkeypatch.setattr(repeats_module, "CLIENT_LOG", logging.getLogger("test.repeats"))
    repeats = Repeats()
    assert repeats.properties(user) == {"logger": repeats, "debug": debug}
    with caplog.at_level(logging.DEBUG):
        for level in (10, 20, 30):
            repeats.log(level, "%s [%s] %s", "FAIL", "x#producer-1", UP)
    assert [record.levelno for record in caplog.records] == logged


class Scripted:
    """A producer; what its log says comes out of `poll`."""

    def __init__(self, properties: dict[str, Any]) -> None:
        self.logger = properties["logger"]
        self.lines: list[str] = []
        self.initialised = 0

    def init_transactions(self, _timeout: float) -> None:
        self.initialised += 1

    def poll(self, _timeout: float) -> int:
        for line in self.lines:
            self.logger.log(10, "%s [%s] %s", "FAIL", "x#producer-1", line)
        self.lines = []
        return 0


def test_one_transaction_after_the_other() -> None:
    """The producer stays while nothing is in doubt."""
    made: list[Any] = []

    def make(properties: dict[str, Any]) -> Any:
        made.append(Scripted(properties))
        return made[-1]

    epochs: Any = Epochs({"transactional.id": "x"}, 30, make)
    assert epochs.producer() is epochs.producer() is made[0]
    made[0].lines = [UP]
    assert epochs.producer() is epochs.producer() is made[1]
    assert [producer.initialised for producer in made] == [1, 1]
