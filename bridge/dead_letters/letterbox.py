"""What the API asks of dead letters: a page, one, and redrive; one redrive at a time."""

from __future__ import annotations

import threading

from bridge.dead_letters.listing import Listing
from bridge.dead_letters.redrive import redrive
from bridge.errors import EnvironmentFailure
from bridge.settings.model import Settings
from bridge.wire.letters import Choice, Report
from timerstore.clock import Clock


class Letterbox(Listing):
    """The dead-letter topics of a configuration. Any thread."""

    def __init__(self, settings: Settings, clock: Clock) -> None:
        super().__init__(settings, clock)
        self._redriving = threading.Lock()

    def redrive(self, choice: Choice, *, execute: bool) -> Report:
        """Put back what is chosen, or only count it. Raises BridgeError, also while another one goes on: it would be
        fenced."""
        if not self._redriving.acquire(blocking=False):
            raise EnvironmentFailure("another redrive is under way", hint="Wait for its end.", code="DB-3037")
        try:
            return redrive(self._settings, self._clock, choice, execute=execute)
        finally:
            self._redriving.release()
