"""What the bridge says of itself: its phase, and what makes a restart necessary. The parts of the bridge report
into `Health`; the management port (http.py) only reads it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Where the bridge is: a stable name, whether it is consuming and delivering, and why not (or what is wrong)."""

    name: str
    ready: bool = False
    reasons: tuple[str, ...] = ()
    progress: float | None = None  # 0..1 of long work, where its end is known
    reader: str | None = None  # which one serves while running: `spark` or `plain`


class Health:
    """The state behind the probes; safe to use from any thread.

    `alive` says whether every thread that must run does run, in words: what has died or hangs, empty if nothing.
    `on_enter` is called with every phase, and every report of progress.
    """

    def __init__(self, alive: Callable[[], list[str]] = list, on_enter: Callable[[], None] = lambda: None) -> None:
        self._lock = threading.Lock()
        self._phase = Phase(name="starting", reasons=("starting",))
        self._alive = alive
        self._on_enter = on_enter

    def enter(
        self,
        name: str,
        *,
        ready: bool = False,
        reasons: tuple[str, ...] = (),
        progress: float | None = None,
        reader: str | None = None,
    ) -> None:
        """The bridge is in this phase from now on."""
        self._on_enter()
        with self._lock:
            self._phase = Phase(name=name, ready=ready, reasons=reasons, progress=progress, reader=reader)

    @property
    def phase(self) -> Phase:
        """The current phase."""
        with self._lock:
            return self._phase

    def problems(self) -> list[str]:
        """What makes a restart necessary; empty while the process is alive."""
        return self._alive()
