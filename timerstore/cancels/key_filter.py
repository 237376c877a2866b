"""Filters: whether a run of keys may have a key, by one access to the disk.

A filter has sixteen bits for each key of its run, in blocks of 64. A key sets five bits of one block. An absent key
finds its five bits set in one case of 200. Blocks are in the order of the keys. (A Bloom filter in blocks, after Putze,
Sanders and Singler: "Cache-, Hash- and Space-Efficient Bloom Filters", 2007.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from timerstore.cancels.digests import Digests, Uint64s
from timerstore.rows.position import Int64s

Uint16s = npt.NDArray[np.uint16]

BLOCK_KEYS: Final = 4
KEY_BITS: Final = 5
PROBED_AT_ONCE: Final = 1 << 18
"""Keys times runs in one step."""
_32: Final = np.uint64(32)


def filter_of(keys: Digests) -> Uint16s:
    """The filter of sorted keys, uint16[n]."""
    result = np.zeros(len(keys), np.uint16)
    count = len(keys) // BLOCK_KEYS
    if count:
        block = _blocks(keys.hi, np.uint64(count))
        starts = np.flatnonzero(np.r_[True, block[1:] != block[:-1]])
        blocks = np.zeros(count, np.uint64)
        blocks[block[starts]] = np.bitwise_or.reduceat(_bits(keys), starts)
        result[: count * BLOCK_KEYS] = blocks.view(np.uint16)
    return result


class KeyProbe:
    """Keys that are looked up in filters."""

    def __init__(self, keys: Digests) -> None:
        self._hi = keys.hi
        self._bits = _bits(keys)

    def among(self, filters: Uint16s, runs: Sequence[slice]) -> Iterator[tuple[slice, Int64s]]:
        """The runs that may have any of the keys, each with the indices of these keys; `filters` has the filters of all
        runs."""
        at_once = max(1, PROBED_AT_ONCE // max(1, len(self._hi)))
        for start in range(0, len(runs), at_once):
            some = runs[start : start + at_once]
            begin = np.array([run.start for run in some])[:, None]
            count = np.array([(run.stop - run.start) // BLOCK_KEYS for run in some])[:, None]
            first = begin + BLOCK_KEYS * _blocks(self._hi, count.astype(np.uint64))
            parts = filters.take(first[..., None] + np.arange(BLOCK_KEYS), mode="clip")  # the last run may be too short
            may_be = (parts.view(np.uint64)[..., 0] & self._bits == self._bits) | (count == 0)
            for i in np.flatnonzero(may_be.any(axis=1)).tolist():
                yield some[i], np.flatnonzero(may_be[i])


def _blocks(hi: Uint64s, count: np.uint64 | Uint64s) -> Int64s:
    """The number of each key's block among `count` ones, in the order of the keys."""
    return ((hi >> _32) * count >> _32).astype(np.int64)


def _bits(keys: Digests) -> Uint64s:
    bits = np.zeros(len(keys), np.uint64)
    for part in range(KEY_BITS):
        bits |= np.uint64(1) << (keys.lo >> np.uint64(6 * part) & np.uint64(63))
    return bits
