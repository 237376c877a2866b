"""Which threads hang. A thread that has ended tells the main thread; one that hangs tells nothing.

Each long-lived thread *beats*: it shows that it is alive, and says by when it will beat again. When that time is over,
/livez fails and names the thread; the metrics have the age of each beat. The process itself goes on, since a thread
that comes back is as good as new.

Each budget is longer than any legitimate wait: it follows from the time-outs of the thread's calls. Long work beats in
its loops, and an unbounded wait (for a due message, room in the store, brokers that are down) is interrupted to beat.
The thread of the management port needs no heartbeat: while it hangs, no probe is answered.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol, Self

import structlog

from bridge.settings.time_budgets import TimeBudgets
from timerstore.clock import Clock

CALLS_S: Final = 120.0
"""No call of librdkafka's takes longer between two beats: three attempts of a look-up are 35 s, and 60 s is what the
client waits for an answer by default."""
READ_S: Final = 60.0
"""Reading committed offsets, twice."""
SPARK_S: Final = 300.0
"""A trigger of the query, or a window that is gathered. Java's client gives up a look at the ends of the logs after
three times 60 s, and reading a record after 120 s; both end the query."""
START_S: Final = 600.0
"""Each piece of the start (Spark's session, one slice of what is read again) and of the end of a pipeline."""
LOOK_S: Final = 30.0
"""A thread that only looks at the clock."""
DISK_BYTES_PER_S: Final = 1 << 20
"""A disk that is slower than that has failed."""
FRAMES: Final = 4
"""Of a thread's stack in the log."""

log = structlog.get_logger("bridge.telemetry.heartbeats")


def dispatcher_s(budgets: TimeBudgets) -> float:
    """The end of a transaction, one beat away from its beginning: records are acknowledged, offsets sent, it is
    committed, and, as that fails, aborted."""
    return max(CALLS_S, budgets.acknowledge_s + 3 * budgets.step_s + READ_S)


class Beat(Protocol):
    """Called by a thread: it is there, and will be so again `within_s` (its usual time if that is None)."""

    def __call__(self, within_s: float | None = None) -> None: ...


def unwatched(within_s: float | None = None) -> None:
    """A `Beat` that nothing listens to."""


@dataclass(slots=True)
class _Heart:
    ident: int | None = None
    last: tuple[float, float] | None = None


class Heartbeats:
    """The hearts of the process; any thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._hearts: dict[str, _Heart] = {}
        self._told: set[str] = set()

    def watch(self, thread: str, budget_s: float) -> Beat:
        """What `thread` is to call. From the first time on it must do so every `budget_s`. One of that name that was
        watched before is forgotten."""
        heart = self._hearts[thread] = _Heart()

        def beat(within_s: float | None = None) -> None:
            heart.ident = threading.get_ident()
            heart.last = (self._clock.monotonic_s(), within_s or budget_s)

        return beat

    def forget(self, *threads: str) -> None:
        """They have ended, or are about to."""
        for thread in threads:
            self._hearts.pop(thread, None)

    def ages(self) -> dict[str, tuple[float, float]]:
        """By thread: seconds since its last beat, and how many there may be."""
        now_s = self._clock.monotonic_s()
        lasts = [(thread, heart.last) for thread, heart in list(self._hearts.items())]
        return {thread: (max(0.0, now_s - last[0]), last[1]) for thread, last in lasts if last is not None}

    def problems(self) -> list[str]:
        """The threads that stand still, in words. Each is logged once, with where it stands."""
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
    """Calls `look` again and again, on a thread of its own, while it is entered; it returns the seconds in between."""

    def __init__(self, name: str, look: Callable[[], float], beat: Beat, wait_s: float) -> None:
        """It begins after `wait_s`."""
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
