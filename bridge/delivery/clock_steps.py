"""Steps back of the wall clock behind P: delivery goes on from the new time, if the step can be recorded (I4)."""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from bridge.stores.stores import Stores
from bridge.telemetry.metrics import Metrics
from bridge.wire.committed_state import CommittedState

log = structlog.get_logger("bridge.delivery.clock_steps")


class ClockSteps:
    """See the module. For the dispatcher's thread."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._is_out_of_steps = False

    def look(self, store: Stores, states: Sequence[CommittedState], now_ms: int) -> None:
        """Have the store step back if `now_ms` lies behind P. After too many steps, messages that are due before P wait
        until the clock has caught up."""
        if not store.is_clock_behind(now_ms):
            self._is_out_of_steps = False
            return
        steps = max(len(state.frozen) for state in states)
        if all(state.has_room_for_a_step() for state in states):
            store.step_back(now_ms)
            log.warning("clock-behind-position", now_ms=now_ms, steps=steps + 1)
        elif not self._is_out_of_steps:
            self._is_out_of_steps = True
            self._metrics.clock_steps_refused.inc()
            log.error("clock-steps-exhausted", now_ms=now_ms, steps=steps)
