"""Blocking calls of a client, and the threads that make them.

A call into the C library cannot be interrupted. `AbandonableCalls` makes calls in a separate thread and abandons the
thread, with the client, after a time-out: librdkafka 2.16 ignores the time-out of `send_offsets_to_transaction` if the
group's coordinator fails during the call (its issue 5456). `OwnerThreadCalls` passes calls to the thread that polls the
client: a consumer answers other threads only after its current callback has returned, and a revocation callback may be
waiting for the caller.
"""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")


class Unanswered(Exception):
    """The call has not returned in time. It may still take effect."""


class CallRefused(Exception):
    """The owner has ended; the call was not made."""


@dataclass(slots=True, eq=False)
class Call:
    """A call in progress. The first thread to take `claim` decides whether to run the call or to give it up."""

    run: Callable[[], Any]
    claim: threading.Lock = field(default_factory=threading.Lock)
    done: threading.Event = field(default_factory=threading.Event)
    result: Any = None
    error: Exception | None = None

    def serve(self) -> None:
        """Run the call, unless its caller has given up."""
        if not self.claim.acquire(blocking=False):
            return
        try:
            self.result = self.run()
        except Exception as error:  # noqa: BLE001 - raised again by the caller
            # A traceback refers to this frame, and would keep the client alive until the next garbage collection.
            self.error = error.with_traceback(None)
        self.done.set()

    def give_up(self) -> bool:
        """Prevent the call; False if it has already begun."""
        return self.claim.acquire(blocking=False)

    def refuse(self) -> None:
        if self.claim.acquire(blocking=False):
            self.error = CallRefused()
            self.done.set()

    def wait(self, timeout_s: float) -> Any:
        """The result of the call. Raises the call's exception, or Unanswered."""
        if not self.done.wait(timeout_s):
            self.claim.acquire(blocking=False)
            raise Unanswered(f"no answer within {timeout_s:g} s")
        if self.error is not None:
            try:
                raise self.error
            finally:
                self.error = None  # as in `serve`
        return self.result


class AbandonableCalls:
    """Runs calls one at a time in a thread that it reuses. For a single calling thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[Call | None] | None = None

    def begin(self, run: Callable[[], object]) -> Call:
        """Queue a call behind earlier ones; `result` waits for it."""
        if self._calls is None:
            self._calls = queue.SimpleQueue()
            threading.Thread(target=_serve, args=(self._calls,), name=self._name, daemon=True).start()
        call = Call(run)
        self._calls.put(call)
        return call

    def result(
        self,
        call: Call,
        timeout_s: float,
        meanwhile: Callable[[], None] = lambda: None,
        every_s: float = math.inf,
    ) -> Any:
        """Return or raise the result of a call from `begin`. Raises Unanswered after `timeout_s` from now; a later call
        gets a new thread.

        `meanwhile` is called every `every_s` of waiting; its exceptions end the wait, too.
        """
        waited_s = 0.0
        try:
            while not call.done.wait(slice_s := min(every_s, timeout_s - waited_s)) and waited_s + slice_s < timeout_s:
                waited_s += slice_s
                meanwhile()
            return call.wait(0)
        except Unanswered:
            self.close()
            raise Unanswered(f"no answer within {timeout_s:g} s") from None
        except BaseException:
            if not call.done.is_set():
                self.close()
            raise

    def close(self) -> None:
        """Let the thread end after its current call."""
        calls, self._calls = self._calls, None
        if calls is not None:
            calls.put(None)


class OwnerThreadCalls:
    """Calls for the thread that owns a client. Any thread may use `call` and `wake`, the owner `serve` and `close`."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Call] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_closed = False

    def call(self, run: Callable[[], T], timeout_s: float) -> T:
        """Return or raise the result of `run`. Raises Closed, or Unanswered; a call not begun by then never runs."""
        call = Call(run)
        with self._lock:
            if self._is_closed:
                raise CallRefused
            self._calls.put(call)
        result: T = call.wait(timeout_s)
        return result

    def wake(self) -> None:
        """End `serve` now."""
        self._calls.put(Call(lambda: None))

    def serve(self, timeout_s: float) -> None:
        """Run the queued calls; without any, wait up to `timeout_s` for the first."""
        try:
            call = self._calls.get(timeout=timeout_s)
            while True:
                call.serve()
                call = self._calls.get_nowait()
        except queue.Empty:
            return

    def close(self) -> None:
        """Refuse all queued and later calls."""
        with self._lock:
            self._is_closed = True
        while True:
            try:
                self._calls.get_nowait().refuse()
            except queue.Empty:
                return


def _serve(calls: queue.SimpleQueue[Call | None]) -> None:
    while True:
        call = calls.get()
        if call is None:
            return
        call.serve()
        del call  # a waiting thread must not keep the client of its last call alive
