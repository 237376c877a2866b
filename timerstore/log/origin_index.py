"""Where the timers of an original are: what a search by origin asks for.

Beside each segment lies a column file of the origins of its timers, sorted, with the row of each: twelve bytes a timer.
It is derived from the segment; one that is missing or damaged is made again.
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
from timerstore.rows.position import Int64s, offsets_of, pack, sources_of
from timerstore.rows.sources import Sources

SCHEMA: Final = {"origin": "<i8", "row": "<i4"}
PIECE_ROWS: Final = 1 << 18
READ: Final = ["topic", "partition", "kind", "origin"]


class OriginIndex:
    """The index of a segment, open. An origin in the file is packed with the number of its source there."""

    def __init__(self, file: ColumnFile, sources: Sources) -> None:
        self._file = file
        names = [(topic, partition) for topic, partition in file.note["sources"]]
        self._number: Int64s = np.full(len(sources), -1, dtype=np.int64)
        for number, name in enumerate(names):
            if name in sources:
                self._number[sources.index(*name)] = number

    def rows_of(self, origins: Int64s) -> Int64s:
        """The rows, counted from the segment's beginning, of originals and of their copies. `origins` are packed
        sources and offsets (`pack`)."""
        number = self._number[sources_of(origins)]
        keys = pack(number, offsets_of(origins))[number >= 0]
        first, end = np.searchsorted(self._file["origin"], [keys, keys + 1])
        found = [self._file["row"][a:b] for a, b in zip(first.tolist(), end.tolist(), strict=True) if a < b]
        return np.unique(np.concatenate(found)).astype(np.int64) if found else np.empty(0, np.int64)

    def drop_pages(self) -> None:
        self._file.drop_pages()


def open_or_make(segment: Path, crc: int, sources: Sources) -> OriginIndex:
    """The index beside a segment file whose footer has this CRC. Raises as `column_file.derived`."""
    path = segment.with_suffix(files.ORIGINS_SUFFIX)
    make = partial(_make, segment, path, crc, sources)
    return columns.derived(path, crc, lambda file: OriginIndex(file, sources), make)


def _make(segment: Path, path: Path, crc: int, sources: Sources) -> None:
    origins, rows, begin = [np.empty(0, np.int64)], [np.empty(0, np.int32)], 0
    with (
        files.reading(segment, pa.ArrowException),
        pq.ParquetFile(segment, page_checksum_verification=True) as parquet,
    ):
        for group in range(parquet.num_row_groups):
            table = parquet.read_row_group(group, columns=READ)
            source = sources.of_columns(table.column("topic"), table.column("partition"))
            timers = np.flatnonzero((table.column("kind").to_numpy() == Kind.TIMER) & (source >= 0))
            origins.append(pack(source[timers], table.column("origin").to_numpy()[timers]))
            rows.append((begin + timers).astype(np.int32))
            begin += len(table)
    origin, row = np.concatenate(origins), np.concatenate(rows)
    order = np.argsort(origin, kind="stable")
    pieces: Iterator[Mapping[str, Column]] = (
        {"origin": origin[order[part]], "row": row[order[part]]} for part in columns.slices(len(order), PIECE_ROWS)
    )
    note = {"sources": [list(name) for name in sources], "segment_crc": crc}
    columns.write(path, SCHEMA, len(order), pieces, lambda: note)
