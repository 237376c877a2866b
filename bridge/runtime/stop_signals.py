"""SIGTERM and SIGINT, answered on a thread of their own.

A handler runs in the main thread, between any two of its steps: it must not take a lock that may be held there, and it
does not run while that thread waits inside a client library. So the handlers do nothing. The interpreter
writes the signal's number into a socket as soon as it comes, and the thread reads it there.
"""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable
from typing import Final, Self

NUMBERS: Final = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """A context in which `on_signal` is called for each signal that asks to stop. To be entered in the main thread."""

    def __init__(self, on_signal: Callable[[], None]) -> None:
        self._on_signal = on_signal
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)

    def __enter__(self) -> Self:
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self.install()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, NUMBERS)  # after a restart in place they are blocked until now
        threading.Thread(target=self._run, name="signals", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        # The handlers stay: another signal must not cut the end of the process short.
        signal.set_wakeup_fd(-1)
        self._writer.close()

    @staticmethod
    def install() -> None:
        """Take the signals; once more after Spark has started, which takes SIGINT for itself."""
        for number in NUMBERS:
            signal.signal(number, lambda *_: None)

    def _run(self) -> None:
        while number := self._reader.recv(1):
            if number[0] in NUMBERS:
                self._on_signal()
        self._reader.close()
