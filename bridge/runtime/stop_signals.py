"""SIGTERM and SIGINT, handled in a separate thread.

A Python handler runs in the main thread between any two of its steps: it must not take a lock that the main thread may
hold, and it does not run while that thread waits inside a client library. The handlers therefore do nothing. The
interpreter writes the signal's number to a socket at once, and the thread reads it there.
"""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

NUMBERS: Final = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def stop_signals(on_signal: Callable[[], None]) -> Iterator[None]:
    """Call `on_signal` for each SIGTERM and SIGINT inside the context. Enter it in the main thread."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    for number in NUMBERS:
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, NUMBERS)  # blocked until now after a restart in place
    threading.Thread(target=_answer, args=(reader, on_signal), name="signals", daemon=True).start()
    try:
        yield
    finally:  # the handlers stay: another signal must not interrupt the end of the process
        signal.set_wakeup_fd(-1)
        writer.close()


def _answer(reader: socket.socket, on_signal: Callable[[], None]) -> None:
    with reader:
        while number := reader.recv(1):
            if number[0] in NUMBERS:
                on_signal()
