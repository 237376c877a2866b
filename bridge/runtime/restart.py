"""A restart in place: the process stops in order, then executes itself anew under the same process id, so that a
supervisor sees no end.

Kafka's clients read certificates and passwords only when they are made. They also wait by the wall clock: when it is
set back, a wait gets longer by as much, and nothing can interrupt it. Both need new clients, and a start, which takes
two seconds, is the only way to make them.
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
"""Reason and monotonic time of the last restart in place, for the process that it makes."""
INTERVAL_S: Final = 60.0
"""Between two restarts: a clock that is set back again and again must not keep the bridge restarting."""
CHILDREN_S: Final = 5.0
STANDARD_ERROR: Final = 2

log = structlog.get_logger("bridge.runtime.restart")


class Restart:
    """Make it first thing: libraries change the environment, and the next process is to have it as it was."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.reason, _, at_s = os.environ.pop(VARIABLE, "").partition(" ")
        self._allowed_s = float(at_s) + INTERVAL_S if at_s else clock.monotonic_s()
        self._environment = dict(os.environ)

    def wait_s(self) -> float:
        """Seconds until another restart is allowed."""
        return max(0.0, self._allowed_s - self._clock.monotonic_s())

    def await_children(self) -> None:
        """Wait until the JVM of the process before this one has ended; it does when the pipe to it is closed."""
        until_s, pause = self._clock.monotonic_s() + CHILDREN_S, threading.Event()
        with suppress(ChildProcessError):
            while self.reason and self._clock.monotonic_s() < until_s:
                if os.waitpid(-1, os.WNOHANG) == (0, 0):
                    pause.wait(0.05)

    def execute(self, reason: str) -> NoReturn:
        """Replace the process; any thread may call it. Only the standard streams stay open; a SIGTERM or SIGINT stays
        pending until the next process takes it. Raises EnvironmentFailure."""
        log.info("restarting-in-place", reason=reason)
        for descriptor in Path("/dev/fd").iterdir():
            with suppress(OSError):  # one of them is closed by now: that of the listing
                os.set_inheritable(int(descriptor.name), int(descriptor.name) <= STANDARD_ERROR)
        with suppress(OSError):
            sys.stdout.flush()
        signal.pthread_sigmask(signal.SIG_BLOCK, NUMBERS)
        told = {VARIABLE: f"{reason} {self._clock.monotonic_s():.3f}"}
        try:
            os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], self._environment | told)
        except OSError as error:
            raise EnvironmentFailure(
                f"could not execute {sys.executable} anew: {error.strerror}",
                hint="Start the bridge: it continues where it was.",
                code="DB-3018",
            ) from None


def set_back_again() -> EnvironmentFailure:
    """What ends the process when a restart in place does not help against the clock."""
    return EnvironmentFailure(
        "the wall clock was set back within a minute of a restart in place",
        hint="Repair the time synchronisation. Started again, the bridge continues where it was.",
        code="DB-3012",
    )
