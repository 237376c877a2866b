"""A restart in place: the process stops in order, then executes itself anew with the same process id, so a supervisor
notices no end.

Kafka's clients read certificates and passwords only at their creation. They also wait by the wall clock: if it is set
back, a wait becomes longer by as much and cannot be interrupted. Both cases need new clients, and only a start, which
takes two seconds, creates them.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Final, NoReturn

import structlog

from bridge.errors import EnvironmentFailure
from bridge.runtime.stop_signals import NUMBERS
from timerstore.clock import Clock

VARIABLE: Final = "DELAY_BRIDGE_RESTARTED"
"""Reason and monotonic time of the last restart in place, for the new process."""
INTERVAL_S: Final = 60.0
"""The shortest time between two restarts, for clocks that are set back repeatedly."""
CHILDREN_S: Final = 5.0
STANDARD_ERROR: Final = 2

log = structlog.get_logger("bridge.runtime.restart")


class Restart:
    """Create it first of all: libraries change the environment, and the next process needs the original one."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.reason, _, at_s = os.environ.pop(VARIABLE, "").partition(" ")
        self._allowed_s = float(at_s) + INTERVAL_S if at_s else clock.monotonic_s()
        self._environment = dict(os.environ)

    def wait_s(self) -> float:
        """Seconds until another restart is allowed."""
        return max(0.0, self._allowed_s - self._clock.monotonic_s())

    def await_children(self) -> None:
        """Wait for the end of the previous process's JVM, which ends when its pipe is closed."""
        until_s, pause = self._clock.monotonic_s() + CHILDREN_S, threading.Event()
        with suppress(ChildProcessError):
            while self.reason and self._clock.monotonic_s() < until_s:
                if os.waitpid(-1, os.WNOHANG) == (0, 0):
                    pause.wait(0.05)

    def execute(self, reason: str) -> NoReturn:
        """Replace the process; any thread may call it. Only the standard streams stay open. A SIGTERM or SIGINT stays
        pending for the next process. Raises EnvironmentFailure."""
        log.info("restarting-in-place", reason=reason)
        for descriptor in Path("/dev/fd").iterdir():
            with suppress(OSError):  # the descriptor of the listing itself is closed by now
                os.set_inheritable(int(descriptor.name), int(descriptor.name) <= STANDARD_ERROR)
        with suppress(OSError):
            sys.stdout.flush()
        signal.pthread_sigmask(signal.SIG_BLOCK, NUMBERS)
        reported = {VARIABLE: f"{reason} {self._clock.monotonic_s():.3f}"}
        try:
            os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], self._environment | reported)
        except OSError as error:
            raise EnvironmentFailure(
                f"cannot execute {sys.executable} anew: {error.strerror}",
                hint="Start the bridge: it continues from the same place.",
                code="DB-3018",
            ) from None


def set_back_again() -> EnvironmentFailure:
    """The error that ends the process if the clock is set back again soon after a restart in place."""
    return EnvironmentFailure(
        "the wall clock was set back within a minute of a restart in place",
        hint="Repair the time synchronisation. After a restart the bridge continues from the same place.",
        code="DB-3012",
    )
