"""The wall clock jumps, and clients wait by it.

librdkafka (its issue 2145) and Java's client wait until a time of the wall clock. What can be replaced after a jump is
(`on_jump`): the producer between two transactions, the query. But while a connection is made, or before a retry, a wait
that only its time-out ends gets longer by as much as the clock was set back. A thread in such a call cannot be woken.
When one has shown no life for a while after the jump, `on_stall` is called, and the process ends: nothing that it holds
is needed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Final, Self

from bridge.telemetry.heartbeats import Beat, unwatched
from timerstore.clock import Clock, ClockWatch

LOOK_S: Final = 1.0
STALL_S: Final = 20.0
"""Longer than a call that is answered takes. A jump back by less heals itself by then."""

Signs = Mapping[str, Callable[[], bool]]
"""By thread: whether it has shown life since the jump."""


class ClockJumps:
    """Looks once a second, on a thread of its own: the others may be what stalls."""

    def __init__(
        self,
        clock: Clock,
        on_jump: Callable[[int], Signs],
        on_stall: Callable[[Sequence[str]], None],
        beat: Beat = unwatched,
    ) -> None:
        """`on_jump` is called with the milliseconds (negative: back), `on_stall` with the threads that stay silent."""
        self._clock = clock
        self._watch = ClockWatch(clock)
        self._on_jump = on_jump
        self._on_stall = on_stall
        self._beat = beat
        self._waiting: list[tuple[float, Signs]] = []
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="clock-jumps", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()

    def look(self) -> None:
        """Has the clock jumped, and has every thread shown life since?"""
        jump_ms, now_s = self._watch.jump_ms(), self._clock.monotonic_s()
        if jump_ms:
            signs = self._on_jump(jump_ms)
            if jump_ms < -1_000 * STALL_S:
                self._waiting.append((now_s + STALL_S, signs))
        waiting, self._waiting = self._waiting, []
        for until_s, signs in waiting:
            silent = [name for name, is_alive in signs.items() if not is_alive()]
            if silent and now_s >= until_s:
                self._on_stall(silent)
            elif silent:
                self._waiting.append((until_s, signs))

    def _run(self) -> None:
        while not self._closed.wait(LOOK_S):
            self._beat()
            self.look()
