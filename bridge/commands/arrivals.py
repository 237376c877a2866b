"""Waits for the arrival of sent messages in their target or in the dead-letter topic.

A delivered message and a dead letter carry their origin (`delay-origin`); the sender knows it from the brokers'
acknowledgement. All other records of these topics are skipped, even unreadable ones.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass

from confluent_kafka import Message

from bridge.commands.tail import Tail
from bridge.errors import EnvironmentFailure
from bridge.wire.headers import DUE, NUMBER_PATTERN, ORIGIN, REASON, REASON_DETAIL
from bridge.wire.received import headers_of, record_place


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """The place of an arrived message, and its lateness by the timestamp of its record there."""

    origin: str
    place: str
    lateness_ms: int


def await_arrivals(
    tail: Tail, origins: Sequence[str], timeout_s: float, dead_letters: Collection[str] = ()
) -> list[Arrived]:
    """Wait for the arrival of all these messages; returns them in the order of arrival. `tail` reads their targets and
    the topics `dead_letters`.

    Raises EnvironmentFailure for a dead letter, with its reason, and at the end of the time.
    """
    wanted, arrived, records = set(origins), list[Arrived](), tail.records(timeout_s)
    while wanted:
        if (message := next(records, None)) is None:
            raise EnvironmentFailure(
                f"{len(wanted)} of {len(origins)} messages have not arrived after {timeout_s:g} s",
                hint="See /readyz and the log of the bridge; the messages stay pending.",
                first=min(wanted),
                code="DB-1008",
            )
        if (arrival := _read(message, wanted, dead_letters)) is not None:
            wanted.remove(arrival.origin)
            arrived.append(arrival)
    return arrived


def _read(message: Message, wanted: Container[str], dead_letters: Collection[str]) -> Arrived | None:
    """The arrival that this record proves, if it is one of `wanted`."""
    headers = dict(headers_of(message) or [])  # the bridge's headers come last
    origin, due = _text(headers.get(ORIGIN)), _text(headers.get(DUE))
    if origin not in wanted:
        return None
    if message.topic() in dead_letters:
        if REASON not in headers:
            return None
        raise EnvironmentFailure(
            f"{origin} is a dead letter in {message.topic()}: {_text(headers[REASON])}",
            hint=_text(headers.get(REASON_DETAIL)) or "See docs/errors.md for the reasons.",
            code="DB-1009",
        )
    if not re.fullmatch(NUMBER_PATTERN, due):
        return None
    return Arrived(origin=origin, place=record_place(message), lateness_ms=message.timestamp()[1] - int(due))


def _text(value: bytes | None) -> str:
    return (value or b"").decode(errors="replace")
