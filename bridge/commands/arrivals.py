"""Waits for the arrival of sent messages in their target or in the dead-letter topic.

A delivered message and a dead letter carry their origin (`delay-origin`); the sender knows it from the brokers'
acknowledgement. All other records of these topics are skipped, even unreadable ones.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from confluent_kafka import Message

from bridge.commands.tail import Tail
from bridge.errors import EnvironmentFailure
from bridge.wire.headers import DUE, NUMBER_PATTERN, ORIGIN, REASON, REASON_DETAIL
from bridge.wire.received import headers_of
from timerstore.clock import Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """The place of an arrived message, and its lateness by the timestamp of its record there."""

    origin: str
    place: str
    lateness_ms: int


class Arrivals:
    """Reads topics from their present ends; make it before sending."""

    def __init__(
        self, properties: Mapping[str, Any], topics: Sequence[str], clock: Clock, dead_letters: Sequence[str] = ()
    ) -> None:
        """`properties` are a consumer's, with a group id; `topics` are targets, `dead_letters` dead-letter topics.
        Raises EnvironmentFailure for an unreadable topic.
        """
        self._clock = clock
        self._dead_letters = frozenset(dead_letters)
        self._tail = Tail(properties, [*topics, *dead_letters])

    def wait(self, origins: Sequence[str], timeout_s: float) -> list[Arrived]:
        """Wait for the arrival of all these messages; returns them in the order of arrival.

        Raises EnvironmentFailure for a dead letter, with its reason, and at the end of the time.
        """
        wanted, arrived = set(origins), list[Arrived]()
        deadline_s = self._clock.monotonic_s() + timeout_s
        while wanted:
            left_s = deadline_s - self._clock.monotonic_s()
            if left_s <= 0:
                raise EnvironmentFailure(
                    f"{len(wanted)} of {len(origins)} messages have not arrived after {timeout_s:g} s",
                    hint="See /readyz and the log of the bridge; the messages stay pending.",
                    first=min(wanted),
                    code="DB-1008",
                )
            message = self._tail.next(left_s)
            if message is not None and (arrival := self._read(message, wanted)) is not None:
                wanted.remove(arrival.origin)
                arrived.append(arrival)
        return arrived

    def _read(self, message: Message, wanted: Container[str]) -> Arrived | None:
        """The arrival that this record proves, if it is one of `wanted`."""
        headers = dict(headers_of(message) or [])  # the bridge's headers come last
        origin, due = _text(headers.get(ORIGIN)), _text(headers.get(DUE))
        if origin not in wanted:
            return None
        if message.topic() in self._dead_letters:
            if REASON not in headers:
                return None
            raise EnvironmentFailure(
                f"{origin} is a dead letter in {message.topic()}: {_text(headers[REASON])}",
                hint=_text(headers.get(REASON_DETAIL)) or "See docs/errors.md for the reasons.",
                code="DB-1009",
            )
        if not re.fullmatch(NUMBER_PATTERN, due):
            return None
        place = f"{message.topic()}/{message.partition()}/{message.offset()}"
        return Arrived(origin=origin, place=place, lateness_ms=message.timestamp()[1] - int(due))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._tail.__exit__()


def _text(value: bytes | None) -> str:
    return (value or b"").decode(errors="replace")
