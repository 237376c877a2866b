"""Group membership, of a client that says what a broker does not say on demand. (The rest is in tests/broker.)"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from bridge.errors import BridgeError, EnvironmentFailure, FencedError, StateError
from bridge.kafka import membership
from bridge.kafka.membership import Ownership
from bridge.stores.names import SourceName
from timerstore.clock import SystemClock

MINE = [TopicPartition("delay", 0)]
FENCED = KafkaError(KafkaError.FENCED_INSTANCE_ID, fatal=True)


class Client:
    """A consumer that is given partitions, loses them or not, gets others or not, and is fenced."""

    steps: tuple[str, ...] = ()

    def __init__(self, config: dict[str, Any]) -> None:
        self._error_cb: Callable[[KafkaError], None] = config["error_cb"]
        self._left = iter(self.steps)
        self._callbacks: dict[str, Callable[..., None]] = {}

    def subscribe(self, _topics: list[str], **callbacks: Callable[..., None]) -> None:
        self._callbacks = callbacks

    def poll(self, _timeout_s: float) -> None:
        match next(self._left, None):
            case "fence":
                self._error_cb(FENCED)
            case str(name):
                self._callbacks[name](self, MINE)

    def __getattr__(self, _name: str) -> Callable[..., None]:
        return lambda *_: None


class Listener:
    def __init__(self) -> None:
        self.heard = threading.Event()
        self.failure: BridgeError | None = None

    def on_assigned(self, partitions: frozenset[SourceName]) -> None:
        pass

    def on_revoked(self, partitions: frozenset[SourceName], *, lost: bool, revocations: int) -> None:
        pass

    def on_fatal(self, error: BridgeError) -> None:
        self.failure = error
        self.heard.set()


@pytest.mark.parametrize(
    ("steps", "error"),
    [
        (("on_assign", "fence"), FencedError),
        (("on_assign", "on_revoke", "fence"), FencedError),
        (("on_assign", "on_lost", "fence"), EnvironmentFailure),
        (("on_assign", "on_lost", "on_assign", "fence"), FencedError),
    ],
)
def test_one_that_comes_back_after_its_session_may_be_fenced_by_itself(
    monkeypatch: pytest.MonkeyPatch, steps: tuple[str, ...], error: type[BridgeError]
) -> None:
    """That is no other instance: it is to be started again."""
    monkeypatch.setattr(membership, "Consumer", Client)
    monkeypatch.setattr(Client, "steps", steps)
    listener = Listener()
    ownership = Ownership(
        config={}, group_id="g", instance_id="i", topics=["delay"], listener=listener, clock=SystemClock()
    )
    ownership.start()
    assert listener.heard.wait(10)
    assert type(listener.failure) is error
    ownership.stop()


def test_a_commit_of_anothers_that_is_not_the_bridges_is_left_out() -> None:
    """Only a strict reader gets the error."""
    mine, others = ("delay", 0), ("delay", 1)
    answers = [TopicPartition(*mine, -1001), TopicPartition(*others, 5)]
    assert membership._states_of(answers, [mine]) == {mine: None}
    with pytest.raises(StateError) as raised:
        membership._states_of(answers, [mine, others])
    assert raised.value.code == "DB-4003"


@pytest.mark.parametrize(("timeout_s", "code"), [(0.0, "DB-3007"), (None, "DB-4007")])
@pytest.mark.fault("a short question about offsets that stay pending")
def test_only_a_whole_wait_for_pending_offsets_is_explained(timeout_s: float | None, code: str) -> None:
    """Delivery waits within its time budget for the brokers, and not for an explanation of their silence."""
    ownership = Ownership(
        config={}, group_id="g", instance_id="i", topics=["delay"], listener=Listener(), clock=SystemClock(),
        pending_s=0, explain=lambda: StateError("they have forgotten", hint="Choose.", code="DB-4007"),
    )  # fmt: skip
    pending = KafkaException(KafkaError(KafkaError.UNSTABLE_OFFSET_COMMIT, retriable=True))
    with mock.patch.object(ownership._mailbox, "call", side_effect=pending), pytest.raises(BridgeError) as raised:
        ownership.read_committed_states([("delay", 0)], timeout_s)
    assert raised.value.code == code


@pytest.mark.fault("a late answer about the outcome of a lost transaction")
def test_committed_offsets_are_read_once_more_after_the_explanation() -> None:
    """The explanation waits for repairs, which end open transactions."""
    repairs = []
    ownership = Ownership(
        config={}, group_id="g", instance_id="i", topics=["delay"], listener=Listener(), clock=SystemClock(),
        pending_s=0, explain=lambda: repairs.append("ended"),
    )  # fmt: skip
    pending = KafkaException(KafkaError(KafkaError.UNSTABLE_OFFSET_COMMIT, retriable=True))
    answers = [TopicPartition("delay", 0, -1001)]
    with mock.patch.object(ownership._mailbox, "call", side_effect=[pending, answers]):
        assert ownership.read_committed_states([("delay", 0)]) == {("delay", 0): None}
    assert repairs == ["ended"]
