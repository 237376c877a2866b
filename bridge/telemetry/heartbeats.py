"""Finds the threads that hang. A thread that ends tells the main thread; one that hangs tells nothing.

Each long-lived thread *beats*: it shows that it is alive, and names the time within which it will beat again. After
that time /livez fails and names the thread. The metrics have the age of each beat. The process itself goes on: a thread
that beats again is healthy.

Each budget is longer than any legitimate wait, since it follows from the time-outs of the thread's calls. Long work
beats in its loops. Unbounded waits (for a due message, room in the store, brokers that are down) are interrupted to
beat. The thread of the management port needs no heartbeat: while it hangs, no probe is answered.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Protocol, Self

import structlog

from bridge.settings.time_budgets import TimeBudgets
from timerstore.clock import Clock

CALLS_S: Final = 120.0
"""The longest call of librdkafka between two beats: three attempts of a look-up take 35 s, and the client's default
wait for an answer is 60 s."""
READ_S: Final = 60.0
"""Two reads of committed offsets."""
SPARK_S: Final = 300.0
"""A trigger of the query, or the load of a window. Java's client gives up a look at the ends of the logs after three
times 60 s, and the read of a record after 120 s; both end the query."""
START_S: Final = 600.0
"""Each piece of a start (Spark's session, one slice of the records to read again) and of the end of a pipeline."""
LOOK_S: Final = 30.0
"""A round of a thread that only looks at the clock."""
DISK_BYTES_PER_S: Final = 1 << 20
"""The lowest speed of a working disk."""
FRAMES: Final = 4
"""Frames of a hanging thread's stack in the log."""

log = structlog.get_logger("bridge.telemetry.heartbeats")


def dispatcher_s(budgets: TimeBudgets) -> float:
    """The budget of a transaction's end, which has no beat: acknowledgement of records, offsets, commit and, after its
    failure, abort."""
    return max(CALLS_S, budgets.acknowledge_s + 3 * budgets.step_s + READ_S)


class Beat(Protocol):
    """A thread calls it: the thread is alive, and will call again within `within_s` (None: its usual budget)."""

    def __call__(self, within_s: float | None = None) -> None: ...


def unwatched(within_s: float | None = None) -> None:
    """A `Beat` without a listener."""


@dataclass(slots=True)
class _Heart:
    ident: int | None = None
    last: tuple[float, float] | None = None


class Heartbeats:
    """The heartbeats of the process's threads; any thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._hearts: dict[str, _Heart] = {}
        self._told: set[str] = set()

    def watch(self, thread: str, budget_s: float) -> Beat:
        """The `Beat` of `thread`. From its first call on it is due every `budget_s`. An earlier thread of this name is
        forgotten."""
        heart = self._hearts[thread] = _Heart()

        def beat(within_s: float | None = None) -> None:
            heart.ident = threading.get_ident()
            heart.last = (self._clock.monotonic_s(), within_s or budget_s)

        return beat

    @contextmanager
    def watching(self, thread: str, budget_s: float) -> Iterator[Beat]:
        """As `watch`, for a thread that ends, as long as this is entered."""
        beat = self.watch(thread, budget_s)
        heart = self._hearts[thread]
        beat()
        try:
            yield beat
        finally:
            if self._hearts.get(thread) is heart:
                self.forget(thread)

    def forget(self, *threads: str) -> None:
        """Stop watching threads that have ended, or are about to end."""
        for thread in threads:
            self._hearts.pop(thread, None)

    def ages(self) -> dict[str, tuple[float, float]]:
        """By thread: the seconds since its last beat, and their limit."""
        now_s = self._clock.monotonic_s()
        lasts = [(thread, heart.last) for thread, heart in list(self._hearts.items())]
        return {thread: (max(0.0, now_s - last[0]), last[1]) for thread, last in lasts if last is not None}

    def problems(self) -> list[str]:
        """The hanging threads, in words. Each is logged once, with its stack."""
        late = {thread: age_s for thread, (age_s, within_s) in self.ages().items() if age_s > within_s}
        new, self._told = late.keys() - self._told, set(late)
        for thread in new:
            log.error("thread-stands-still", thread=thread, seconds=round(late[thread]), at=self._place(thread))
        return [f"thread {thread} has stood still for {age_s:.0f} s" for thread, age_s in late.items()]

    def _place(self, thread: str) -> list[str]:
        heart = self._hearts.get(thread)
        frame = None if heart is None or heart.ident is None else sys._current_frames().get(heart.ident)
        calls = [] if frame is None else traceback.extract_stack(frame)[-FRAMES:]
        return [f"{call.filename.rpartition('/')[2]}:{call.lineno} {call.name}" for call in calls]


class Repeating:
    """Calls `look` repeatedly on a thread of its own, inside `with`. `look` returns the seconds until the next call."""

    def __init__(self, name: str, look: Callable[[], float], beat: Beat, wait_s: float) -> None:
        """The first call comes after `wait_s`."""
        self._look = look
        self._beat = beat
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(wait_s,), name=name, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()

    def _run(self, wait_s: float) -> None:
        while not self._closed.wait(wait_s):
            self._beat()
            wait_s = self._look()
