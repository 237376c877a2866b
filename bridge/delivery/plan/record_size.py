"""The exact size of a record for a broker, in bytes. Pure.

A topic's max.message.bytes limits a record batch as the client sends it. `DueRows.sizes` and `copy_sizes` are upper
bounds in whole columns, and enough for nearly all records. For records near a limit, this module counts the bytes of a
batch of that record alone (format 2: 61 bytes, then lengths as zigzag varints).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from bridge.delivery.plan.due_rows import BATCH_BYTES, Batch, DueRows, TargetRows, chunks
from bridge.delivery.targets.target import Target
from bridge.wire.headers import HeaderList
from timerstore.rows.position import Bools, Int64s

_FIXED_BYTES: Final = 3
"""Attributes, and the record's differences of timestamp and offset, which are zero in a batch of one."""
_MORE_BYTES: Final = 6
"""The largest growth of those differences in a batch of several records."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeLimits:
    """The producer's limits: its message.max.bytes, its batch.size, and whether it compresses. With compression, only
    the brokers can tell whether a record is too large for its topic."""

    record_bytes_max: int = 64 << 20
    batch_bytes_max: int = 1_000_000
    compressed: bool = False

    def record_bytes(self, target: Target) -> int:
        """Bytes of the largest record for a target."""
        if target.bytes_max is None or self.compressed:
            return self.record_bytes_max
        return min(self.record_bytes_max, target.bytes_max)

    def chunk_bytes(self, targets: Iterable[Target]) -> int | None:
        """Bytes of the largest batch that all targets take; None: no less than the producer's own limit. With
        compression more would fit, but only the broker knows the number."""
        least = min((t.bytes_max for t in targets if t.bytes_max is not None), default=self.batch_bytes_max)
        return least if least < self.batch_bytes_max else None


def exact_bytes(batches: Iterable[Batch], size: int) -> Int64s:
    """The records' sizes by row, int64[size]; 0 for rows without a record."""
    result: Int64s = np.zeros(size, dtype=np.int64)
    for batch in batches:
        result[batch.ids] = _record_sizes(batch)
    return result


def _record_sizes(batch: Batch) -> list[int]:
    return [record_bytes(*record) for record in zip(batch.keys, batch.values, batch.all_headers(), strict=True)]


def parted(batches: Iterable[Batch], chunk_bytes: int | None) -> Iterator[Batch]:
    """The batches in parts of up to `chunk_bytes` (at least one record), each sent alone. With None, the batches
    unchanged."""
    if chunk_bytes is None:
        yield from batches
        return
    for batch in batches:
        sizes = np.array(_record_sizes(batch), dtype=np.int64) - BATCH_BYTES + _MORE_BYTES
        for chunk in chunks(sizes, chunk_bytes - BATCH_BYTES):
            yield replace(batch.part(chunk.start, chunk.stop), alone=True)


def larger(rows: DueRows, name: str, mine: Bools, limit: int) -> Bools:
    """The deliveries of `mine` bool[n] that exceed `limit` bytes: exact where the upper bound exceeds it."""
    large: Bools = mine & (rows.sizes > limit)
    if large.any():
        large &= exact_bytes(rows.batches(TargetRows(topic=name, ids=np.flatnonzero(large))), len(rows)) > limit
    return large


def record_bytes(key: bytes | None, value: bytes | None, headers: HeaderList) -> int:
    """The size of one record in a batch of its own, uncompressed."""
    body = _FIXED_BYTES + _field(key) + _field(value) + _varint(len(headers))
    body += sum(
        _field(name.encode()) + _field(text.encode() if isinstance(text, str) else text) for name, text in headers
    )
    return BATCH_BYTES + _varint(body) + body


def _field(data: bytes | None) -> int:
    return 1 if data is None else _varint(len(data)) + len(data)


def _varint(number: int) -> int:
    """Bytes of a non-negative number as a zigzag varint."""
    return max(1, -(-(2 * number).bit_length() // 7))
