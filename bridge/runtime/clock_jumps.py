"""Notices that the wall clock was set, on a thread of its own: the others may wait by that clock."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

from bridge.telemetry.heartbeats import Beat, unwatched
from timerstore.clock import Clock, ClockWatch

LOOK_S: Final = 1.0


class ClockJumps:
    """Looks once a second, while it is entered."""

    def __init__(self, clock: Clock, on_jump: Callable[[int], None], beat: Beat = unwatched) -> None:
        """`on_jump` is called with the milliseconds (negative: back)."""
        self._watch = ClockWatch(clock)
        self._on_jump = on_jump
        self._beat = beat
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="clock-jumps", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(LOOK_S):
            self._beat()
            if jump_ms := self._watch.jump_ms():
                self._on_jump(jump_ms)
