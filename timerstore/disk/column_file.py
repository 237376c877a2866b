"""Column files: sorted vectors of numbers on disk, searched in place.

    magic | column | column | ... | footer (JSON) | length of the footer (4 bytes) | its CRC-32 (4 bytes) | magic

The rows of a file may be several sorted runs, one behind the other, so that a sort of any number of rows takes the
memory of one run. A search asks each run.

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from timerstore.disk import files
from timerstore.errors import Corrupt

MAGIC: Final = b"DBCOLS01"
TAIL_BYTES: Final = 8 + len(MAGIC)
CRC_PIECE_BYTES: Final = 1 << 22
RUN_ROWS: Final = 1 << 19
"""Limit of a run, in rows; a run is sorted in memory."""

Column = npt.NDArray[Any]
Order = Callable[[Mapping[str, Column]], Column]
Added = Mapping[str, Callable[[Mapping[str, Column]], Column]]
NOTHING: Final[Added] = {}
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

    def runs(self) -> Iterator[slice]:
        """The rows of each sorted run of a file from `Runs`."""
        ends: list[int] = self.note["runs"]
        return (slice(begin, end) for begin, end in pairwise((0, *ends)))

    def drop_pages(self) -> None:
        """Release the touched pages from the process's memory; the kernel may keep them in its cache."""
        self._mapped.madvise(mmap.MADV_DONTNEED)


class SortedRun(Mapping[str, Column]):
    """The columns of pieces in one order, and `added` ones; each is made when it is asked for."""

    def __init__(self, pieces: Sequence[Mapping[str, Column]], order: Order, added: Added) -> None:
        self._pieces, self._added = pieces, added
        self._order: Column | None = None
        self._order = order(self)

    def __getitem__(self, name: str) -> Column:
        if name in self._added:
            return self._added[name](self)
        column = np.concatenate([piece[name] for piece in self._pieces])
        return column if self._order is None else column[self._order]

    def __iter__(self) -> Iterator[str]:
        return chain(self._pieces[0], self._added)

    def __len__(self) -> int:
        return len(self._pieces[0]) + len(self._added)


class Runs:
    """Puts pieces of columns, of at most RUN_ROWS rows each, into sorted runs, which are pieces for `write`. `ends` are
    the ends of the runs, for the note."""

    def __init__(self, pieces: Iterable[Mapping[str, Column]], order: Order, added: Added = NOTHING) -> None:
        """`order` returns the indices that sort an unsorted run. `added` columns are functions of a sorted run."""
        self.ends: list[int] = []
        self._pieces = pieces
        self._order, self._added = order, added

    def __iter__(self) -> Iterator[SortedRun]:
        waiting: list[Mapping[str, Column]] = []
        rows = 0
        for piece in self._pieces:
            new = len(next(iter(piece.values())))
            if rows + new > RUN_ROWS and rows:
                yield self._run(waiting, rows)
                waiting, rows = [], 0
            waiting.append(piece)
            rows += new
        if rows:
            yield self._run(waiting, rows)

    def _run(self, pieces: Sequence[Mapping[str, Column]], rows: int) -> SortedRun:
        self.ends.append(sum(self.ends[-1:]) + rows)
        return SortedRun(pieces, self._order, self._added)


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
                new = 0
                for name, dtype in schema.items():
                    column = np.ascontiguousarray(piece[name], dtype=dtype)
                    new, data = len(column), column.data.cast("B")
                    crc[name] = zlib.crc32(data, crc[name])
                    _put(descriptor, data, offsets[name] + rows * column.itemsize)
                rows += new
            columns = [[name, dtype, offsets[name], crc[name]] for name, dtype in schema.items()]
            footer = json.dumps({"rows": rows, "columns": columns, "note": note()}, separators=(",", ":")).encode()
            lengths = len(footer).to_bytes(4, "little") + zlib.crc32(footer).to_bytes(4, "little")
            _put(descriptor, footer + lengths + MAGIC, end)
        finally:
            os.close(descriptor)
    files.publish(path)


def _put(descriptor: int, data: bytes | memoryview, offset: int) -> None:
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
    damaged, or not of the segment whose footer has this CRC. Notes of earlier versions, whose files are one sorted run,
    have `segment_crc`: neither version takes a file of the other. Raises Corrupt (of the segment), DiskFull,
    DiskFailure."""
    try:
        file = read(path)
        if file.note["of_segment"] == segment_crc:
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
