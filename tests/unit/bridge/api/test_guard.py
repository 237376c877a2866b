"""bridge.api.guard: a name that a stranger could own is not answered without a password; what threads return."""

from __future__ import annotations

import asyncio
from concurrent.futures import CancelledError, ThreadPoolExecutor

import pytest

from bridge.api.guard import is_private
from bridge.http.workers import Workers

PRIVATE = [
    *("localhost", "localhost:8081", "LocalHost:1", "a.localhost:8081", "127.0.0.1", "10.2.3.4:8081", "[::1]:8081"),
    *("[fe80::1]", "bridge:8081", "delay-bridge-0", "delay-bridge.jobs.svc", "printer.local.", "db.internal:8081"),
    *("delay-bridge-0.delay-bridge.jobs.svc.cluster.local:8081", "own.example.com:8081", None),
]
FOREIGN = [
    *("evil.example", "evil.example:8081", "localhost.evil.example", "127.0.0.1.evil.example", "svc.evil.example"),
    *("delay-bridge.dev", "own.example.com.evil.example", "", ":8081", "a:b", "localhost:8081:1", "[evil.example]"),
    *("user@localhost.example", "evil.example/localhost", "10.2.3.4.5", "[::1", "1.2.3"),
]


@pytest.mark.parametrize("host", PRIVATE)
def test_private_names_addresses_and_our_own_are_answered(host: str | None) -> None:
    """What port-forwards, Kubernetes services, containers and people on the machine send."""
    assert is_private(host, {"own.example.com"})


@pytest.mark.parametrize("host", FOREIGN)
def test_names_that_may_be_strangers_are_not(host: str) -> None:
    """However they look, and whatever they contain."""
    assert not is_private(host, {"own.example.com"})


@pytest.mark.parametrize(
    ("raised", "told"),
    [(CancelledError, CancelledError), (StopIteration, RuntimeError), (TimeoutError, TimeoutError)],
)
def test_what_work_raises_is_not_taken_for_the_end_of_the_request(
    raised: type[Exception], told: type[Exception]
) -> None:
    """A future that it waits for was cancelled, say: the request is not, and is answered."""

    def work() -> None:
        raise raised

    # On a thread of its own: the browser of other tests may have left a loop running on this one.
    with ThreadPoolExecutor(1) as thread, pytest.raises(told):
        thread.submit(asyncio.run, Workers().run(work)).result()
