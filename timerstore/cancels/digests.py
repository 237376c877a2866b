"""Digests of ids: the keys of tombstones and of the id index.

An id is text of any length; its digest has 128 bits, MurmurHash3 (Austin Appleby's x64 variant). Among n ids, two
collide with a chance of about n^2 / 2^129: 10^-19 for ten thousand million ids, far below that of a disk's undetected
error. A producer that constructs a collision can only cancel messages in a topic to which it may write cancels anyway.

The key of an origin is the offset (`lo`), and a hash of offset and kind (`hi`); the kinds are cancels by origin, moves
and recalls. An id's digest equals such a key with a chance of 2^-64.

Whole columns are digested: ids of like length form one matrix of 64-bit words, without a loop over rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from timerstore.rows.position import Bools, Int64s

Uint64s = npt.NDArray[np.uint64]

_C1, _C2 = np.uint64(0x87C37B91114253D5), np.uint64(0x4CF5AD432745937F)
_M1, _M2 = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)
ORIGIN = np.uint64(0x165667B19E3779F9)
MOVE = np.uint64(0x9E3779B97F4A7C15)
RECALL = np.uint64(0xC2B2AE3D27D4EB4F)
"""Kinds of keys of origins: of cancels by origin, of moves, of recalls."""
_FIVE, _N1, _N2, _33 = np.uint64(5), np.uint64(0x52DCE729), np.uint64(0x38495AB5), np.uint64(33)


@dataclass(frozen=True, slots=True, eq=False)
class Digests:
    """128-bit keys as two uint64 vectors; they sort by (hi, lo)."""

    hi: Uint64s
    lo: Uint64s

    def __len__(self) -> int:
        return len(self.hi)

    def __getitem__(self, key: slice | Bools | npt.NDArray[np.intp]) -> Digests:
        return Digests(self.hi[key], self.lo[key])

    def order(self) -> npt.NDArray[np.intp]:
        order = np.argsort(self.hi, kind="stable")
        hi, lo = self.hi[order], self.lo[order]
        if ((hi[1:] == hi[:-1]) & (lo[1:] != lo[:-1])).any():
            return np.lexsort((self.lo, self.hi))
        return order

    def starts(self) -> npt.NDArray[np.intp]:
        """The first index of each distinct key; the keys are sorted."""
        new = (self.hi[1:] != self.hi[:-1]) | (self.lo[1:] != self.lo[:-1])
        return np.flatnonzero(np.r_[len(self) > 0, new][: len(self)])


NO_DIGESTS = Digests(np.empty(0, np.uint64), np.empty(0, np.uint64))


def concat_digests(parts: Sequence[Digests]) -> Digests:
    if len(parts) == 1:
        return parts[0]
    return (
        Digests(np.concatenate([p.hi for p in parts]), np.concatenate([p.lo for p in parts])) if parts else NO_DIGESTS
    )


def digest(ids: pa.ChunkedArray | pa.Array) -> Digests:
    """The digests of a string column without nulls."""
    ids = ids.combine_chunks() if isinstance(ids, pa.ChunkedArray) else ids
    offsets = np.frombuffer(ids.buffers()[1], dtype=np.int32)[ids.offset : ids.offset + len(ids) + 1].astype(np.int64)
    begin, end = (int(offsets[0]), int(offsets[-1])) if len(ids) else (0, 0)
    # Words reach beyond an id's end; the foreign bytes are masked out.
    data = np.zeros(end - begin + 16, dtype=np.uint8)
    if end > begin:
        data[: end - begin] = np.frombuffer(ids.buffers()[2], dtype=np.uint8)[begin:end]
    starts, lengths = offsets[:-1] - begin, np.diff(offsets)
    blocks = -(-lengths // 16)
    hi, lo = np.empty(len(ids), np.uint64), np.empty(len(ids), np.uint64)
    for count in np.unique(blocks).tolist():
        rows = np.flatnonzero(blocks == count)
        words = _words(data, starts[rows], lengths[rows], count)
        hi[rows], lo[rows] = _murmur(words, lengths[rows].astype(np.uint64))
    return Digests(hi, lo)


def digests_or_zeros(ids: pa.Array) -> Digests:
    """The digests of a string column; zeros for null."""
    digests = Digests(np.zeros(len(ids), np.uint64), np.zeros(len(ids), np.uint64))
    rows = np.flatnonzero(ids.is_valid().to_numpy(zero_copy_only=False))
    if len(rows):
        keys = digest(ids.take(pa.array(rows)))
        digests.hi[rows], digests.lo[rows] = keys.hi, keys.lo
    return digests


def keys_of(what: np.uint64, origins: Int64s) -> Digests:
    """The keys of origins; `what` is ORIGIN, MOVE or RECALL."""
    lo = origins.astype(np.uint64)
    return Digests(_final(lo ^ what), lo)


def are_of(what: np.uint64, keys: Digests) -> Bools:
    """Mask of the keys of origins of the kind `what`, bool[n]."""
    mask: Bools = keys.hi == _final(keys.lo ^ what)
    return mask


def are_commands(keys: Digests) -> Bools:
    """Mask of the keys of moves or recalls."""
    return are_of(MOVE, keys) | are_of(RECALL, keys)


def index_of(keys: Digests, wanted: Digests) -> Int64s:
    """The index of each wanted key among sorted, distinct `keys`; -1: absent."""
    result = np.full(len(wanted), -1, dtype=np.int64)
    at = np.searchsorted(keys.hi, wanted.hi)
    open_rows = np.flatnonzero(at < len(keys))
    # A second step is needed only for keys that share 64 bits.
    while len(open_rows):
        here = at[open_rows]
        open_rows = open_rows[keys.hi[here] == wanted.hi[open_rows]]
        here = at[open_rows]
        same = keys.lo[here] == wanted.lo[open_rows]
        result[open_rows[same]] = here[same]
        open_rows = open_rows[~same]
        at[open_rows] += 1
        open_rows = open_rows[at[open_rows] < len(keys)]
    return result


def find_all(keys: Digests, wanted: Digests, rows_max: int) -> Iterator[tuple[Int64s, Int64s]]:
    """All occurrences of the wanted keys among sorted `keys`: pairs of (index in `wanted`, index in `keys`), at most
    `rows_max` at a time, as one key may have millions of rows."""
    first = np.searchsorted(keys.hi, wanted.hi, side="left")
    candidates = np.flatnonzero(first < len(keys))
    candidates = candidates[keys.hi[first[candidates]] == wanted.hi[candidates]]
    first = first[candidates]
    ends = np.cumsum(np.searchsorted(keys.hi, wanted.hi[candidates], side="right") - first)
    for start in range(0, int(ends[-1]) if len(ends) else 0, rows_max):
        pair = np.arange(start, min(start + rows_max, int(ends[-1])))
        nth = np.searchsorted(ends, pair, side="right")
        query, row = candidates[nth], first[nth] + pair - np.where(nth > 0, ends[nth - 1], 0)
        same = keys.lo[row] == wanted.lo[query]
        yield query[same], row[same]


def _words(data: npt.NDArray[np.uint8], starts: Int64s, lengths: Int64s, blocks: int) -> Uint64s:
    """uint64[n, 2 * blocks], little-endian, zero beyond each row's length."""
    if not blocks:
        return np.zeros((len(starts), 0), dtype=np.uint64)
    width = 16 * blocks
    rows = np.lib.stride_tricks.sliding_window_view(data, width)[starts]
    rows[np.arange(width) >= lengths[:, None]] = 0
    return np.ascontiguousarray(rows).view("<u8")


def _murmur(words: Uint64s, length: Uint64s) -> tuple[Uint64s, Uint64s]:
    """MurmurHash3 x64 128 of rows with one block count. The last block is the tail, unless it is full."""
    h1, h2 = np.zeros_like(length), np.zeros_like(length)
    blocks = words.shape[1] // 2
    full = (length % np.uint64(16)) == 0
    for block in range(blocks):
        h1 ^= _rotl(words[:, 2 * block] * _C1, 31) * _C2
        # The tail has no second mixing step.
        body = True if block < blocks - 1 else full
        h1 = np.where(body, (_rotl(h1, 27) + h2) * _FIVE + _N1, h1)
        h2 ^= _rotl(words[:, 2 * block + 1] * _C2, 33) * _C1
        h2 = np.where(body, (_rotl(h2, 31) + h1) * _FIVE + _N2, h2)
    h1 ^= length
    h2 ^= length
    h1 += h2
    h2 += h1
    h1, h2 = _final(h1), _final(h2)
    h1 += h2
    h2 += h1
    return h1, h2


def _rotl(x: Uint64s, r: int) -> Uint64s:
    return (x << np.uint64(r)) | (x >> np.uint64(64 - r))


def _final(k: Uint64s) -> Uint64s:
    k = (k ^ (k >> _33)) * _M1
    k = (k ^ (k >> _33)) * _M2
    return k ^ (k >> _33)
