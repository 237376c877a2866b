"""Threads for calls that block, beside an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, TypeVar

WORKERS_MAX: Final = 4
"""Threads for calls of the store; one whose time is over counts until it ends."""
REQUEST_S: Final = 20.0
"""The longest wait for a call: longer than a search of the most rows."""

T = TypeVar("T")


class Unavailable(Exception):
    """There is no free thread, or no answer in time; the text has advice for the client."""


class Workers:
    """Runs calls that may wait for locks and disks, on daemon threads: the process can end without them."""

    def __init__(self, threads_max: int = WORKERS_MAX, what: str = "searches") -> None:
        """`what` names the calls for clients."""
        self._max, self._what, self._free = threads_max, what, threading.Semaphore(threads_max)

    async def run(self, work: Callable[[], T], within_s: float = REQUEST_S) -> T:
        """The result or exception of `work`. Raises Unavailable if no thread is free, or `work` takes too long."""
        if not self._free.acquire(blocking=False):
            raise Unavailable(f"{self._max} {self._what} are under way. Try again.")
        outcome, done = Future[T](), Future[None]()  # two: asyncio would take some exceptions of `work` for its own
        done.set_running_or_notify_cancel()  # nobody can cancel it, only stop waiting

        def process() -> None:
            try:
                try:
                    result = work()
                finally:
                    self._free.release()
            except Exception as error:  # noqa: BLE001 - `run` raises it
                outcome.set_exception(error)
            else:
                outcome.set_result(result)
            done.set_result(None)

        try:
            threading.Thread(target=process, name="http-request", daemon=True).start()
        except RuntimeError:  # the machine has no more threads
            self._free.release()
            raise Unavailable("No thread is available. Try again.") from None
        try:
            await asyncio.wait_for(asyncio.wrap_future(done), within_s)
        except TimeoutError:
            detail = f"No answer within {within_s:.0f} s. Narrow the filters, or give a smaller limit."
            raise Unavailable(detail) from None
        return outcome.result()
