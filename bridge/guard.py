"""Calls of a client that may never return.

librdkafka 2.16 ignores the time-out of `send_offsets_to_transaction` when the group's coordinator goes away in the
middle of it (its issue 5456), and a consumer's synchronous commit has none. A C call cannot be interrupted, so it runs
in a thread of its own, which is left behind, with the client, when the time is over. The next client fences the one
that was left behind.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")


class Unanswered(Exception):
    """The call has not returned in time; nothing is known of it, and its client must not be used any more."""


@dataclass(slots=True, eq=False)
class _Call:
    run: Callable[[], Any]
    done: threading.Event = field(default_factory=threading.Event)
    result: Any = None
    error: Exception | None = None


class Guard:
    """Runs calls one at a time in a thread that is kept between calls. For one calling thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[_Call | None] | None = None

    def call(self, run: Callable[[], T], timeout_s: float) -> T:
        """What `run` returns or raises. Raises Unanswered after `timeout_s`; a later call gets a new thread."""
        if self._calls is None:
            self._calls = queue.SimpleQueue()
            threading.Thread(target=_serve, args=(self._calls,), name=self._name, daemon=True).start()
        call = _Call(run)
        self._calls.put(call)
        if not call.done.wait(timeout_s):
            self.close()
            raise Unanswered(f"no answer within {timeout_s:g} s")
        if call.error is not None:
            raise call.error
        result: T = call.result
        return result

    def close(self) -> None:
        """Let the thread end, when its call has returned."""
        calls, self._calls = self._calls, None
        if calls is not None:
            calls.put(None)


def _serve(calls: queue.SimpleQueue[_Call | None]) -> None:
    while True:
        call = calls.get()
        if call is None:
            return
        try:
            call.result = call.run()
        except Exception as error:  # noqa: BLE001 - raised again by the caller
            call.error = error
        call.done.set()
        del call  # while this thread waits, nothing may keep the client of its last call alive
