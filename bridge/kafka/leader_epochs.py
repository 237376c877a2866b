"""Where a log was cut: the first record that a later leader has written.

A partition's records carry the epochs of the leaders that wrote them, which rise along the log. A leader that has less
of the log than the one before it cuts the others off at its own end, and writes there under its own epoch. So records
of later epochs in a stretch that was read under an earlier one show that something else was there when it was read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from confluent_kafka import Consumer, KafkaError, TopicPartition

from bridge.errors import EnvironmentFailure
from timerstore.clock import SystemClock

PROBE_S: Final = 10.0
_POLL_S: Final = 0.1

Probe = Callable[[int], int | None]
"""The epoch of the first record from an offset on; None where there is none."""


def end_of_epoch(probe: Probe, epoch: int, start: int, end: int) -> int:
    """The first offset in [start, end] from which on nothing was written under `epoch` or an earlier one. `probe` looks
    at what lies below `end`; some of these offsets may hold no record."""

    def is_later(offset: int) -> bool:
        found = probe(offset)
        return found is None or found > epoch

    low, high, step = end, end, 1
    while low > start:
        low = max(start, end - step)
        if not is_later(low):
            break
        high, step = low, 2 * step
    else:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_later(middle) else (middle, high)
    return high


def is_cut(probe: Probe, epoch: int, cut: int, end: int) -> bool:
    """Whether there is a record of a later epoch between `cut`, as of `end_of_epoch`, and `end`."""
    found = probe(cut) if cut < end else None
    return found is not None and found > epoch


def probing(consumer: Consumer, place: tuple[str, int], end: int) -> Probe:
    """A probe that reads one record; `consumer` reads what is not committed, too, and tells of ends. Raises
    EnvironmentFailure."""
    clock = SystemClock()

    def probe(offset: int) -> int | None:
        consumer.assign([TopicPartition(*place, offset)])
        deadline_s = clock.monotonic_s() + PROBE_S
        while clock.monotonic_s() < deadline_s:
            message = consumer.poll(_POLL_S)
            error = None if message is None else message.error()
            if error is not None and error.code() == KafkaError._PARTITION_EOF:
                return None
            if message is not None and error is None:
                epoch = message.leader_epoch()
                return None if (message.offset() or 0) >= end else -1 if epoch is None else int(epoch)
        raise EnvironmentFailure(
            "cannot read a record of a delay topic",
            hint="Check the brokers that hold this partition.",
            topic=place[0],
            partition=place[1],
            offset=offset,
            code="DB-3050",
        )

    return probe
