"""Column files: sorted vectors of numbers on disk, searched in place.

    magic | column | column | ... | footer (JSON) | length of the footer (4 bytes) | its CRC-32 (4 bytes) | magic

Each column is contiguous, so that a search touches few pages; the footer has the offset and the CRC-32 of each. Files
are written once, in pieces of a few thousand rows, and mapped for reading, as Kafka maps its index files: they take
only the kernel's page cache, and `drop_pages` gives even that back. `pwrite` does the writing, so that a full disk is
an error, not a signal.
"""

from __future__ import annotations

import json
import mmap
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from timerstore.disk import files
from timerstore.errors import Corrupt

MAGIC: Final = b"DBCOLS01"
TAIL_BYTES: Final = 8 + len(MAGIC)
CRC_PIECE_BYTES: Final = 1 << 22

Column = npt.NDArray[Any]
T = TypeVar("T")


class ColumnFile:
    """An open column file. `crc` is the footer's, `note` the writer's JSON value beside the columns."""

    def __init__(self, path: Path, size: int, crc: int, footer: Mapping[str, Any], mapped: mmap.mmap) -> None:
        self.path = path
        self.bytes = size
        self.crc = crc
        self.rows: int = footer["rows"]
        self.note: Mapping[str, Any] = footer["note"]
        self._mapped = mapped
        self._columns = {
            name: np.frombuffer(mapped, dtype=dtype, count=self.rows, offset=offset)
            for name, dtype, offset, _ in footer["columns"]
        }

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, name: str) -> Column:
        return self._columns[name]

    def drop_pages(self) -> None:
        """Release the touched pages from the process's memory; the kernel may keep them in its cache."""
        self._mapped.madvise(mmap.MADV_DONTNEED)


def write(
    path: Path,
    schema: Mapping[str, str],
    rows_max: int,
    pieces: Iterable[Mapping[str, Column]],
    note: Callable[[], Any],
) -> None:
    """Write pieces of columns, together at most `rows_max` rows, as one durable file. `note` is called after the last
    piece.

    `schema` is numpy type by name. Raises DiskFull (nothing was written) or DiskFailure.
    """
    offsets, end = {}, 64
    for name, dtype in schema.items():
        offsets[name] = end
        end += -(-rows_max * np.dtype(dtype).itemsize // 64) * 64
    crc = dict.fromkeys(schema, 0)
    rows = 0
    with files.writing(path) as temporary:
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            _put(descriptor, MAGIC, 0)
            for piece in pieces:
                for name, dtype in schema.items():
                    data = np.ascontiguousarray(piece[name], dtype=dtype).tobytes()
                    crc[name] = zlib.crc32(data, crc[name])
                    _put(descriptor, data, offsets[name] + rows * np.dtype(dtype).itemsize)
                rows += len(piece[next(iter(schema))])
            columns = [[name, dtype, offsets[name], crc[name]] for name, dtype in schema.items()]
            footer = json.dumps({"rows": rows, "columns": columns, "note": note()}, separators=(",", ":")).encode()
            lengths = len(footer).to_bytes(4, "little") + zlib.crc32(footer).to_bytes(4, "little")
            _put(descriptor, footer + lengths + MAGIC, end)
        finally:
            os.close(descriptor)
    files.publish(path)


def _put(descriptor: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def read(path: Path) -> ColumnFile:
    """Open a column file, and check every byte of it. Raises Corrupt if it is damaged or missing, DiskFailure if it
    cannot be read."""
    with files.reading(path):
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < 64 + TAIL_BYTES:
                raise Corrupt(f"{path.name} is too short", path=str(path))
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        tail = mapped[size - TAIL_BYTES :]
        length, crc = int.from_bytes(tail[:4], "little"), int.from_bytes(tail[4:8], "little")
        footer = mapped[size - TAIL_BYTES - length : size - TAIL_BYTES]
        if tail[8:] != MAGIC or mapped[: len(MAGIC)] != MAGIC or zlib.crc32(footer) != crc:
            raise Corrupt(f"{path.name} fails the checksum of its footer", path=str(path))
        opened = ColumnFile(path, size, crc, json.loads(footer), mapped)
        for name, _, _, expected in json.loads(footer)["columns"]:
            if _crc(opened[name]) != expected:
                raise Corrupt(f"{path.name} fails the checksum of its column {name}", path=str(path))
        opened.drop_pages()
        return opened


def derived(path: Path, segment_crc: int, wrap: Callable[[ColumnFile], T], make: Callable[[], None]) -> T:
    """The result of `wrap` for a file that is derived from a segment. `make` makes the file again if it is missing,
    damaged, or not of the segment whose footer has this CRC. Raises Corrupt (of the segment), DiskFull, DiskFailure."""
    try:
        file = read(path)
        if file.note["segment_crc"] == segment_crc:
            return wrap(file)
    except (Corrupt, LookupError, TypeError, ValueError):
        files.remove(path)
    make()
    return wrap(read(path))


def slices(rows: int, step: int) -> Iterator[slice]:
    """Consecutive slices of at most `step` rows."""
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def _crc(column: Column) -> int:
    crc = 0
    for part in slices(len(column), max(1, CRC_PIECE_BYTES // column.itemsize)):
        crc = zlib.crc32(np.ascontiguousarray(column[part]).data, crc)
    return crc
