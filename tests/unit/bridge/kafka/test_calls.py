"""Calls that wait: what a call that failed, or was left, keeps alive."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator

import pytest

from bridge.kafka.calls import AbandonableCalls, OwnerThreadCalls, Unanswered
from dev.harness.waiting import wait_until

SEEN_S = 10.0


class Client:
    """One whose call waits to be told, and then fails."""

    def __init__(self) -> None:
        self.told = threading.Event()

    def fail(self) -> None:
        assert self.told.wait(SEEN_S)
        raise ConnectionError("the broker is gone")


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    """A client's threads and sockets must not wait for it: it may come along hours later."""
    gc.disable()
    yield
    gc.enable()


def test_a_client_whose_call_failed_is_let_go() -> None:
    """The error leads to the frames it has passed, those to the call, and that to the client."""
    calls, client = AbandonableCalls("test"), Client()
    gone = weakref.ref(client)
    client.told.set()
    with pytest.raises(ConnectionError):
        calls.result(calls.begin(client.fail), SEEN_S)
    del client
    wait_until(lambda: gone() is None, SEEN_S, "the client is gone")


def test_a_client_that_was_left_is_let_go_when_its_call_returns() -> None:
    calls, client = AbandonableCalls("test"), Client()
    gone, told = weakref.ref(client), client.told
    with pytest.raises(Unanswered):
        calls.result(calls.begin(client.fail), 0.01)
    del client
    assert gone() is not None, "the call is still under way"
    told.set()
    wait_until(lambda: gone() is None, SEEN_S, "the client is gone")


def test_an_owner_lets_go_of_a_client_too() -> None:
    calls, client = OwnerThreadCalls(), Client()
    gone = weakref.ref(client)
    client.told.set()
    owner = threading.Thread(target=calls.serve, args=(SEEN_S,))
    owner.start()
    with pytest.raises(ConnectionError):
        calls.call(client.fail, SEEN_S)
    owner.join()
    del client
    wait_until(lambda: gone() is None, SEEN_S, "the client is gone")
