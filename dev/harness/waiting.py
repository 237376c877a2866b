"""Waiting for a condition, with a deadline; for a fixed time only where the time itself is the subject."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, TypeVar

from dev.harness.pace import scaled
from timerstore.clock import SystemClock

POLL_S: Final = 0.05
POLL_S_MAX: Final = 0.2
"""Later looks are rarer: each one takes CPU from the work that it waits for."""
SLOWER: Final = 1.05

T = TypeVar("T")


def wait_until(condition: Callable[[], T], deadline_s: float, what: str | Callable[[], object] = "") -> T:
    """The first truthy value of `condition`. Raises AssertionError, with `what`, after `deadline_s`, which a slow
    machine extends (pace.py)."""
    deadline_s = scaled(deadline_s)
    clock, never = SystemClock(), threading.Event()
    end_s = clock.monotonic_s() + deadline_s
    pause_s = POLL_S
    while True:
        value = condition()
        if value:
            return value
        if clock.monotonic_s() >= end_s:
            detail = what() if callable(what) else what
            raise AssertionError(f"not within {deadline_s:g} s: {detail or condition}")
        never.wait(pause_s)
        pause_s = min(SLOWER * pause_s, POLL_S_MAX)


def pause(seconds: float) -> None:
    """Let time pass, where the time itself is the subject: ticks that nobody delivers, the moment of a kill."""
    threading.Event().wait(seconds)
