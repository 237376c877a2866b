"""Detection of repeated requests of a producer, whose first copy may arrive as a late request (invariant I9).

librdkafka silently repeats a request when a connection breaks, or when no answer comes in time. The first copy may
still be in transit. A late end of a transaction ends the next transaction of the same epoch prematurely (Jepsen on
Bufstream, 2024), and late offsets are committed with it. KIP-890 prevents the former for clients that change their
epoch with every end; librdkafka does not (its issue 5423). A new epoch fences every late copy. `init_transactions` of
another producer with the same transactional id gives a new epoch; librdkafka accepts that call once per producer.

The client's log shows both causes: `FAIL` for a connection, `REQTMOUT` for a request. The normal log suppresses
repetitions of a FAIL for 30 s, and the error callback gets only some; the debug context `broker` logs all of them,
before the request is repeated, and little else. A slow answer alone proves nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

from confluent_kafka import Producer

from bridge.kafka.construction import CLIENT_LOG

CONTEXT: Final = "broker"
FACTS: Final = frozenset({"FAIL", "REQTMOUT"})
_UNCONNECTED: Final = tuple(
    f" in state {state}" for state in ("INIT", "DOWN", "TRY_CONNECT", "CONNECT", "SSL_HANDSHAKE", "APIVERSION_QUERY")
)
"""States of a connection that has carried no request yet. They are frequent in an outage."""
_LEVELS: Final = (50, 50, 50, 40, 30, 20, 20, 10)
"""Python's levels by the client's `log_level`."""


class Repeats:
    """Watches one producer's log for repetitions, between the begin of a transaction and the answer to its end."""

    def __init__(self) -> None:
        self.are_possible = False
        """Whether a request may have been sent more than once since `forget`, by the log lines that `poll` has
        delivered."""
        self._level = logging.INFO

    def properties(self, user: Mapping[str, Any]) -> dict[str, Any]:
        """The properties of the watched producer; `user` are its other properties."""
        wanted = str(user.get("debug", ""))
        level = str(user.get("log_level", 6))  # the client refuses a wrong one
        self._level = logging.DEBUG if wanted else _LEVELS[min(7, int(level) if level.isdigit() else 6)]
        return {"logger": self, "debug": f"{wanted},{CONTEXT}" if wanted else CONTEXT}

    def forget(self) -> None:
        """Reset at the begin of a transaction."""
        self.are_possible = False

    def note(self) -> None:
        """Note that the caller has repeated a call."""
        self.are_possible = True

    def log(self, level: int, text: str, kind: str, *more: str) -> None:
        """Take a line of the client's log, during `poll`."""
        if kind in FACTS and not (kind == "FAIL" and any(state in more[-1] for state in _UNCONNECTED)):
            self.are_possible = True
        if level >= self._level:
            CLIENT_LOG.log(level, text, kind, *more)


class Epochs:
    """Consecutive transactions under one id. If a request of the last one may arrive late, another producer with a new
    epoch takes over. For one thread."""

    def __init__(
        self, properties: Mapping[str, Any], call_s: float, make: Callable[[dict[str, Any]], Producer] = Producer
    ) -> None:
        """`properties` with the transactional id; `call_s` is the time-out of `init_transactions`."""
        self._properties = dict(properties)
        self._call_s = call_s
        self._make = make
        self._producer: Producer | None = None
        self._repeats = Repeats()

    def producer(self) -> Producer:
        """The initialised producer for the next transaction; initialising aborts an open transaction of an earlier
        producer. Raises KafkaException."""
        if self._producer is not None:
            self._producer.poll(0)
        if self._producer is None or self._repeats.are_possible:
            self._repeats = Repeats()
            self._producer = self._make({**self._properties, **self._repeats.properties(self._properties)})
            self._producer.init_transactions(self._call_s)
        self._repeats.forget()
        return self._producer

    def renew(self) -> None:
        """Have another producer take over."""
        self._repeats.note()
