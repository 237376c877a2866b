"""Delivered rows, with consecutive numbers, over two partitions of the delay topic and two targets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from dev.harness.kafka import ReadRecord
from tests.entries import timer

PARTITIONS: Final = 2


def row(delay: str, targets: Sequence[str], number: int, due_ms: int) -> dict[str, Any]:
    """The entry with this number."""
    partition, offset = number % PARTITIONS, number // PARTITIONS
    target = targets[number // PARTITIONS % len(targets)]
    return timer(delay, partition, offset, due_ms, target, value=b"%d" % number)


def early(records: Iterable[ReadRecord]) -> int:
    """How many were written before they were due."""
    return sum(record.timestamp_ms < int(dict(record.headers)["delay-due"] or b"0") for record in records)
