"""Packed vectors: numbers in a segment's footer, as text, written and read piece by piece.

The longest ones are the slots of the histogram, three million for a year. Memory has them in the packed form only.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from timerstore.rows.position import Int64s

PIECE_NUMBERS: Final = 1 << 16


class Packing:
    """A vector that is being packed."""

    def __init__(self) -> None:
        self._deflate = zlib.compressobj(1)
        self._packed = bytearray()

    def add(self, numbers: npt.NDArray[Any]) -> None:
        self._packed += self._deflate.compress(np.ascontiguousarray(numbers, dtype="<i8").data)

    def text(self) -> str:
        """The packed vector; nothing can be added after it."""
        return base64.b64encode(self._packed + self._deflate.flush()).decode()


class SlotCounts:
    """A histogram that is being packed."""

    def __init__(self) -> None:
        self._slots, self._counts = Packing(), Packing()
        self._last: Int64s = np.empty(0, np.int64)
        self._last_count: Int64s = self._last
        """The last slot, which the next rows may share, and its count."""

    def add(self, slots: Int64s) -> None:
        """Count the slots of rows, in their order; none is below an earlier one."""
        distinct, counts = np.unique(slots, return_counts=True)
        if np.array_equal(self._last, distinct[:1]):
            counts[0] += self._last_count[0]
        else:
            self._put(self._last, self._last_count)
        self._put(distinct[:-1], counts[:-1])
        self._last, self._last_count = distinct[-1:], counts[-1:]

    def texts(self) -> tuple[str, str]:
        """The packed slots, and their counts; nothing can be added after it."""
        self._put(self._last, self._last_count)
        return self._slots.text(), self._counts.text()

    def _put(self, slots: Int64s, counts: Int64s) -> None:
        self._slots.add(slots)
        self._counts.add(counts)


def pack_numbers(numbers: npt.NDArray[Any]) -> str:
    packing = Packing()
    packing.add(numbers)
    return packing.text()


def unpack_numbers(text: str) -> Int64s:
    return np.concatenate([np.empty(0, np.int64), *pieces_of_packed(text)])


def pieces_of_packed(text: str) -> Iterator[Int64s]:
    """The numbers, in pieces of PIECE_NUMBERS. Raises zlib.error or ValueError for a text that is no packed vector."""
    inflate, left = zlib.decompressobj(), base64.b64decode(text)
    while not inflate.eof:
        piece = inflate.decompress(left, 8 * PIECE_NUMBERS)
        if not piece and not inflate.eof:
            raise ValueError("a packed vector is cut")
        if piece:
            yield np.frombuffer(piece, dtype="<i8").astype(np.int64)
        left = inflate.unconsumed_tail
