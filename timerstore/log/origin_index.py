"""The origin index: the places of the timers of an original, for searches by origin.

Beside each segment there is a column file of its timers' origins, sorted, with the row of each: twelve bytes a timer.
It is derived from the segment, and made again if it is missing or damaged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from timerstore.disk import column_file as columns
from timerstore.disk import files
from timerstore.disk.column_file import Column, ColumnFile
from timerstore.rows.entry import Kind
from timerstore.rows.position import Int64s

SCHEMA: Final = {"origin": "<i8", "row": "<i4"}
PIECE_ROWS: Final = 1 << 18
READ: Final = ["kind", "origin"]


class OriginIndex:
    """The open origin index of a segment."""

    def __init__(self, file: ColumnFile) -> None:
        self._file = file

    def rows_of(self, origins: Int64s) -> Int64s:
        """The rows of originals and of their copies, counted from the segment's beginning, in order, each once."""
        first, end = np.searchsorted(self._file["origin"], [origins, origins + 1])
        pieces = [self._file["row"][a:b] for a, b in zip(first.tolist(), end.tolist(), strict=True) if a < b]
        return np.unique(np.concatenate(pieces)).astype(np.int64) if pieces else np.empty(0, np.int64)

    def drop_pages(self) -> None:
        self._file.drop_pages()


def open_or_make(segment: Path, crc: int) -> OriginIndex:
    """The origin index of a segment file whose footer has this CRC. Raises as `column_file.derived`."""
    path = segment.with_suffix(files.ORIGINS_SUFFIX)
    return columns.derived(path, crc, OriginIndex, partial(_make, segment, path, crc))


def _make(segment: Path, path: Path, crc: int) -> None:
    origins, rows, begin = [np.empty(0, np.int64)], [np.empty(0, np.int32)], 0
    with (
        files.reading(segment, pa.ArrowException),
        pq.ParquetFile(segment, page_checksum_verification=True) as parquet,
    ):
        for group in range(parquet.num_row_groups):
            table = parquet.read_row_group(group, columns=READ)
            timers = np.flatnonzero(table.column("kind").to_numpy() == Kind.TIMER)
            origins.append(table.column("origin").to_numpy()[timers])
            rows.append((begin + timers).astype(np.int32))
            begin += len(table)
    origin, row = np.concatenate(origins), np.concatenate(rows)
    order = np.argsort(origin, kind="stable")
    pieces: Iterator[Mapping[str, Column]] = (
        {"origin": origin[order[part]], "row": row[order[part]]} for part in columns.slices(len(order), PIECE_ROWS)
    )
    columns.write(path, SCHEMA, len(order), pieces, lambda: {"segment_crc": crc})
