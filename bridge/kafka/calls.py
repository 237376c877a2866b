"""Calls of a client that wait, and the threads that make them.

A call into the C library cannot be interrupted. `AbandonableCalls` makes one in a thread of its own, which is left
behind, with the client, when the time is over: librdkafka 2.16 ignores the time-out of `send_offsets_to_transaction`
when the group's coordinator goes away in the middle of it (its issue 5456). `OwnerThreadCalls` has one made by the
thread that polls the client: asked from another thread, a consumer answers only when the callback that it is in has
returned, and a revocation waits for just that thread.
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
    """The call has not returned in time. It may still do what it was to do."""


class Closed(Exception):
    """The owner has ended; the call was not made."""


@dataclass(slots=True, eq=False)
class Call:
    """A call on its way. The thread that takes `claim` first decides: it runs the call, or gives it up."""

    run: Callable[[], Any]
    claim: threading.Lock = field(default_factory=threading.Lock)
    done: threading.Event = field(default_factory=threading.Event)
    result: Any = None
    error: Exception | None = None

    def serve(self) -> None:
        """Run it, unless its caller has given up."""
        if not self.claim.acquire(blocking=False):
            return
        try:
            self.result = self.run()
        except Exception as error:  # noqa: BLE001 - raised again by the caller
            # A traceback leads back here: it would keep the client alive until the garbage collector comes along.
            self.error = error.with_traceback(None)
        self.done.set()

    def give_up(self) -> bool:
        """Whether it will never run: it has not begun."""
        return self.claim.acquire(blocking=False)

    def refuse(self) -> None:
        if self.claim.acquire(blocking=False):
            self.error = Closed()
            self.done.set()

    def wait(self, timeout_s: float) -> Any:
        """Its result. Raises what it raised, or Unanswered."""
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
    """Runs calls one at a time in a thread that is kept between calls. For one calling thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[Call | None] | None = None

    def begin(self, run: Callable[[], object]) -> Call:
        """Have it run, after those that were begun before; `result` is what came of it."""
        if self._calls is None:
            self._calls = queue.SimpleQueue()
            threading.Thread(target=_serve, args=(self._calls,), name=self._name, daemon=True).start()
        call = Call(run)
        self._calls.put(call)
        return call

    def call(
        self,
        run: Callable[[], T],
        timeout_s: float,
        meanwhile: Callable[[], None] = lambda: None,
        every_s: float = math.inf,
    ) -> T:
        """What `run` returns or raises; as `begin` and `result`."""
        result: T = self.result(self.begin(run), timeout_s, meanwhile, every_s)
        return result

    def result(
        self,
        call: Call,
        timeout_s: float,
        meanwhile: Callable[[], None] = lambda: None,
        every_s: float = math.inf,
    ) -> Any:
        """What a call that was begun returns or raises. Raises Unanswered when that takes `timeout_s` from now; a later
        call gets a new thread.

        `meanwhile` is called every `every_s` of waiting; what it raises ends the wait as well.
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
        """Let the thread end, when its call has returned."""
        calls, self._calls = self._calls, None
        if calls is not None:
            calls.put(None)


class OwnerThreadCalls:
    """Calls for the one thread that owns a client; `call` from any thread, `serve` and `close` from that one."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Call] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_closed = False

    def call(self, run: Callable[[], T], timeout_s: float) -> T:
        """What `run` returns or raises. Raises Unanswered (a call that was not begun by then never will be), Closed."""
        call = Call(run)
        with self._lock:
            if self._is_closed:
                raise Closed
            self._calls.put(call)
        result: T = call.wait(timeout_s)
        return result

    def wake(self) -> None:
        """End `serve` now."""
        self._calls.put(Call(lambda: None))

    def serve(self, timeout_s: float) -> None:
        """Run what is there; wait for something to run for up to `timeout_s` if that is nothing."""
        try:
            call = self._calls.get(timeout=timeout_s)
            while True:
                call.serve()
                call = self._calls.get_nowait()
        except queue.Empty:
            return

    def close(self) -> None:
        """Refuse every further call, and those that wait."""
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
        del call  # while this thread waits, nothing may keep the client of its last call alive
