"""Stalls: whether a target that takes nothing explains a transaction without acknowledgements."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from bridge.delivery.targets.cache import Targets
from bridge.delivery.targets.liveness import Ping
from bridge.delivery.targets.target import Target
from timerstore.clock import Clock

LOOK_S: Final = 0.5
"""The time without an acknowledgement before each question to the brokers about the targets, beside the transaction."""


class StallWatch:
    """Looks at the targets of one transaction at a time. One thread."""

    def __init__(self, targets: Targets, clock: Clock, beat: Callable[[], None] = lambda: None) -> None:
        self._beat = beat
        self._targets = targets
        self._clock = clock
        self._ping: Ping | None = None
        self._refresh_s = LOOK_S

    def begin(self) -> None:
        self._refresh_s = LOOK_S

    def is_explained(self, stalled_s: float, believed: Mapping[str, Target]) -> bool:
        """Whether a target now takes less than was `believed` when records were sent to it: a leader is unresponsive
        (its breakers are opened), or the brokers say so. Called again and again without acknowledgements."""
        self._beat()
        now_s = self._clock.monotonic_s()
        self._refresh_s = min(self._refresh_s, stalled_s + LOOK_S)  # another stall starts anew
        if self._ping is None or now_s - stalled_s >= self._ping.asked_s:
            self._ping = self._targets.ping_leaders(doubtful=True)
        elif self._targets.trip_leaders(self._ping.unresponsive_leaders(now_s)):
            return True
        if stalled_s >= self._refresh_s:
            self._targets.request_refresh(believed)
            self._refresh_s = stalled_s + LOOK_S
        return self._targets.are_worse_than(believed)
