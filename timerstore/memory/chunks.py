"""Chunks: the Arrow batches of resident rows, and the number of live rows of each.

A row in memory is a reference (chunk, row); a move between memtable, ready rows and overtaken rows moves two integers.
A chunk is dropped with its last row. Facts about all chunks are vectors, so that the bytes of many rows are one
indexing operation.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from timerstore.rows.entry import NO_PAYLOAD
from timerstore.rows.position import Bools, Int64s

ROW_REFERENCE_BYTES = 28
"""The memory of a row beside its payload: at, offset (8 bytes each), chunk, row (4 each), and slack for merges."""
SPARSE_SHARE = 4
"""A chunk is sparse if less than this fraction (1 / 4) of its rows is left."""

FEW_STRETCHES = 32
"""Up to this number of stretches (successive rows of one chunk) are read one by one, in their order. For more, their
whole chunks are joined, and read at once."""

JOINED_BYTES_MAX = 8 << 20
"""Larger chunks are not joined: their rows are read chunk by chunk, and put in order afterwards. That costs as much for
a chunk as a join of a thousand rows."""

ID_BYTES = 52
"""The additional memory of a row with an id: its entry in the index of ids (id_index.py), until a segment holds it."""


class Chunks:
    """The live chunks. The id of an empty chunk is used again."""

    def __init__(self) -> None:
        self._payload: dict[int, pa.RecordBatch] = {}
        self._bytes: dict[int, int] = {}
        self._free: list[int] = []
        self.row_bytes: Int64s = np.zeros(64, dtype=np.int64)
        self._live: Int64s = np.zeros(64, dtype=np.int64)
        self.physical_bytes = 0

    def __len__(self) -> int:
        return len(self._payload)

    def add(self, payload: pa.RecordBatch, row_bytes: int | None = None) -> int:
        """Register a payload whose rows are all live; returns the chunk's id. `row_bytes` is the size of a row, if
        known."""
        chunk = self._free.pop() if self._free else len(self._payload)
        if chunk >= len(self.row_bytes):
            self.row_bytes, self._live = (np.r_[v, np.zeros_like(v)] for v in (self.row_bytes, self._live))
        self._payload[chunk] = payload
        count = payload.num_rows
        own = payload.nbytes if row_bytes is None else row_bytes * count
        size = own + (count - payload.column("id").null_count) * ID_BYTES
        self.row_bytes[chunk] = -(-size // max(1, count)) + ROW_REFERENCE_BYTES
        self._live[chunk] = count
        self._bytes[chunk] = own
        self.physical_bytes += own
        return chunk

    def release(self, chunk: npt.NDArray[np.int32]) -> None:
        """Rows with these chunk ids have left memory; empty chunks are dropped."""
        if len(chunk) == 0:
            return
        gone = np.bincount(chunk)
        ids = np.flatnonzero(gone)
        self._live[ids] -= gone[ids]
        for empty in ids[self._live[ids] == 0].tolist():
            del self._payload[empty]
            self.physical_bytes -= self._bytes.pop(empty)
            self._free.append(empty)

    def sparse(self, referenced: Int64s, gain_bytes_min: int, rows_max: int) -> Bools:
        """Mask, by chunk id, of the sparse chunks to copy, about `rows_max` rows together; of none if the gain is too
        small.

        `referenced` is the number of rows of each chunk that the caller can copy: chunks with other live rows stay.
        """
        ids = np.array([c for c in self._payload if 0 < self._live[c] == referenced[c]], dtype=np.int64)
        rows = np.array([self._payload[c].num_rows for c in ids.tolist()], dtype=np.int64)
        ids = ids[self._live[ids] * SPARSE_SHARE < rows]
        gains = np.array([self._bytes[c] for c in ids.tolist()], dtype=np.int64) // SPARSE_SHARE * 3
        mask = np.zeros(len(self._live), dtype=np.bool_)
        if gains.sum() >= gain_bytes_min:
            most_first = np.argsort(-gains, kind="stable")
            before = np.cumsum(self._live[ids[most_first]]) - self._live[ids[most_first]]
            mask[ids[most_first[before < rows_max]]] = True
        return mask

    def all(self) -> dict[int, pa.RecordBatch]:
        """Every payload; the caller may keep them."""
        return dict(self._payload)

    def payloads(self, chunk: npt.NDArray[np.int32]) -> dict[int, pa.RecordBatch]:
        """The payloads of these chunks; the caller may keep them."""
        return {c: self._payload[c] for c in set(chunk.tolist())}

    def timestamps(self, chunk: npt.NDArray[np.int32], row: npt.NDArray[np.int32]) -> Int64s:
        """The records' timestamps (ms, int64[n]) of row references."""
        result = np.empty(len(chunk), dtype=np.int64)
        by_chunk = np.argsort(chunk, kind="stable")
        for rows in np.split(by_chunk, np.flatnonzero(np.diff(chunk[by_chunk])) + 1):
            if len(rows):
                result[rows] = self._payload[int(chunk[rows[0]])].column("ts").to_numpy()[row[rows]]
        return result

    def bytes_of(self, chunk: npt.NDArray[np.int32]) -> int:
        """The bytes of rows with these chunk ids. Each row counts as the mean of its chunk, so sums and differences are
        exact."""
        return int(self.row_bytes[chunk].sum())


def materialize(
    payloads: dict[int, pa.RecordBatch], chunk: npt.NDArray[np.int32], row: npt.NDArray[np.int32]
) -> pa.RecordBatch:
    """The payload of row references, in their order, as one record batch of `PAYLOAD`."""
    return joined(pieces_of(payloads, chunk, row))


def joined(pieces: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """Batches of `PAYLOAD`, concatenated."""
    if len(pieces) == 1:
        return pieces[0]
    return pa.concat_batches(pieces) if pieces else NO_PAYLOAD


def pieces_of(
    payloads: dict[int, pa.RecordBatch], chunk: npt.NDArray[np.int32], row: npt.NDArray[np.int32]
) -> list[pa.RecordBatch]:
    """As `materialize`, in several batches."""
    if len(chunk) == 0:
        return []
    begins = [0, *(np.flatnonzero(chunk[1:] != chunk[:-1]) + 1).tolist()]
    if len(begins) <= FEW_STRETCHES:
        stretches = zip(begins, [*begins[1:], len(chunk)], strict=True)
        return [rows_of_payload(payloads[int(chunk[b])], row[b:e]) for b, e in stretches]
    ids, which = np.unique(chunk, return_inverse=True)
    whole = [payloads[each] for each in ids.tolist()]
    if sum(each.get_total_buffer_size() for each in whole) <= JOINED_BYTES_MAX:
        begin = np.cumsum([0, *map(len, whole)])
        return [pa.concat_batches(whole).take(pa.array(begin[which] + row))]
    by_chunk = np.argsort(which, kind="stable")
    rows = np.split(row[by_chunk], np.flatnonzero(np.diff(which[by_chunk])) + 1)
    gathered = pa.concat_batches(map(rows_of_payload, whole, rows))
    inverse = np.empty(len(by_chunk), dtype=np.int64)
    inverse[by_chunk] = np.arange(len(by_chunk))
    return [gathered.take(pa.array(inverse))]


def rows_of_payload(payload: pa.RecordBatch, row: npt.NDArray[np.int32]) -> pa.RecordBatch:
    """Rows of one batch. Successive rows, the usual case in sorted chunks, are a slice, not a copy."""
    first, last, n = int(row[0]), int(row[-1]), len(row)
    if last - first == n - 1 and bool((row[1:] > row[:-1]).all()):
        return payload.slice(first, n)
    return payload.take(pa.array(row))
