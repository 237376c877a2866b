"""Departures: the time at which each record of a plan is handed to the client. Rows are taken some ms ahead, and none
leaves early.

Rows are in the order of position, so the times of departure rise from row to row, and the records for one topic stay in
that order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from bridge.delivery.plan.due_rows import Batch
from bridge.delivery.plan.fates import Fate
from bridge.delivery.plan.planner import Plan
from timerstore.rows.position import Int64s

WAITING_BYTES_MAX: Final = 16 << 20
"""The limit of waiting arguments of `produce`. The rest is converted after these have left, and is late by some ms."""


class Departures:
    """The batches of one plan, as they fall due. One thread."""

    def __init__(self, plan: Plan) -> None:
        rows, self._delivered = plan.rows, plan.fates.ids(Fate.DELIVER)
        at_ms = rows.at.copy()
        at_ms[self._delivered] = np.maximum(at_ms, rows.due)[self._delivered]
        # An overtaken row may be due later than the next row, by less than a commit interval.
        self._at_ms: Int64s = np.maximum.accumulate(at_ms)
        self._sent_ms: Int64s = np.zeros(len(rows), dtype=np.int64)
        self._due = rows.due
        self._fresh = plan.batches()
        self._sizes = rows.sizes
        self._waiting: list[tuple[Batch, int]] = []
        """Batches, with the first row of each that waits."""
        self._bytes = 0
        """Size of the waiting rows."""

    def until(self, now_ms: int) -> Iterator[Batch]:
        """The records that have fallen due since the last call; call it until `next_ms` is None."""
        waiting, self._waiting, self._bytes = self._waiting, [], 0
        for batch, start in waiting:
            yield from self._due_of(batch, start, now_ms)
        while self._bytes < WAITING_BYTES_MAX and (fresh := next(self._fresh, None)) is not None:
            yield from self._due_of(fresh, 0, now_ms)

    def _due_of(self, batch: Batch, start: int, now_ms: int) -> Iterator[Batch]:
        end = max(start, int(np.searchsorted(self._at_ms[batch.ids], now_ms, side="right")))
        if end > start:
            self._sent_ms[batch.ids[start:end]] = now_ms
            yield batch.part(start, end)
        if end < len(batch):
            self._waiting.append((batch, end))
            self._bytes += int(self._sizes[batch.ids[end:]].sum())

    def next_ms(self) -> int | None:
        """The departure of the next record; None: all have left."""
        return min((int(self._at_ms[batch.ids[start]]) for batch, start in self._waiting), default=None)

    def lateness_ms(self) -> Int64s:
        """Lateness of the deliveries, once all have left: from the due time to the hand-over to the client, int64[]."""
        return self._sent_ms[self._delivered] - self._due[self._delivered]
