"""Incoming rows: small batches that are placed together.

A batch of one row costs as much to place as one of a hundred, and later as much to take. So the rows of small batches
wait here, all of them above P, and are placed in one chunk: when there are enough of them, and before any step that
concerns their time (`Resident.settle`).
"""

from __future__ import annotations

from typing import Final

import numpy as np
import pyarrow as pa

from timerstore.memory.batch import Batch
from timerstore.memory.sorted_runs import RowRefs, concat
from timerstore.rows.position import AT_MAX, Bools, order_by_position

ENOUGH_ROWS: Final = 64
ENOUGH_BYTES: Final = 1 << 16


def are_enough(rows: int, bytes: int, bytes_max: int) -> bool:
    """Whether it pays to place this number of rows, or they take too much memory."""
    return rows >= ENOUGH_ROWS or bytes >= min(bytes_max, ENOUGH_BYTES)


class Incoming:
    """Batches in the order in which they came."""

    def __init__(self) -> None:
        self._batches: list[tuple[Batch, Bools | None]] = []
        self.rows = 0
        self.bytes = 0
        self.first_ms = AT_MAX
        """No row is due before."""

    def add(self, batch: Batch, uncounted: Bools | None) -> None:
        """Add a batch that has rows; `uncounted` is a mask of them."""
        self._batches.append((batch, uncounted))
        self.rows += len(batch)
        self.bytes += batch.bytes
        self.first_ms = min(self.first_ms, int(batch.rows.at[0]))

    def pop(self) -> tuple[RowRefs, pa.RecordBatch, int, Bools | None]:
        """All rows, in the order of position, with their payloads one by one, the size of a row, and a mask of those
        that are not counted; there must be some."""
        batches, size = self._batches, -(-self.bytes // self.rows)
        self._batches, self.rows, self.bytes, self.first_ms = [], 0, 0, AT_MAX
        if len(batches) == 1:
            [(batch, uncounted)] = batches
            return batch.rows, batch.payload, size, uncounted
        rows = concat([batch.rows for batch, _ in batches])
        order = order_by_position(rows.at, rows.offset)
        payload = pa.concat_batches([batch.payload for batch, _ in batches]).take(pa.array(order))
        if all(mask is None for _, mask in batches):
            return rows[order], payload, size, None
        masks = [np.zeros(len(batch), np.bool_) if mask is None else mask for batch, mask in batches]
        return rows[order], payload, size, np.concatenate(masks)[order]
