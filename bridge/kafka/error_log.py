"""Throttled logging of a client's background errors: a dead broker causes twenty equal ones a second."""

from __future__ import annotations

from typing import Final

import structlog
from confluent_kafka import KafkaError

from timerstore.clock import Clock

REPEATED_AFTER_S: Final = 10.0


class ErrorLog:
    """Logs each kind of error at most once in an interval, with the number of suppressed ones. For one thread."""

    def __init__(self, logger: str, event: str, clock: Clock) -> None:
        self._log = structlog.get_logger(logger)
        self._event = event
        self._clock = clock
        self._logged_s: dict[int, float] = {}
        self._left_out: dict[int, int] = {}

    def warn(self, error: KafkaError) -> None:
        """Log the error, or count it. `All brokers down` is ignored: a broker that closes idle connections causes it,
        and in an outage each connection has its own errors."""
        if error.code() == KafkaError._ALL_BROKERS_DOWN:
            return
        code, now_s = error.code(), self._clock.monotonic_s()
        if now_s - self._logged_s.get(code, -REPEATED_AFTER_S) < REPEATED_AFTER_S:
            self._left_out[code] = self._left_out.get(code, 0) + 1
            return
        self._logged_s[code] = now_s
        left_out = self._left_out.pop(code, 0)
        self._log.warning(self._event, code=error.name(), reason=error.str(), left_out=left_out)
