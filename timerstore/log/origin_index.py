"""The origin index: the places of the timers of an original, for searches by origin.

Beside each segment there is a column file of its timers' origins, in sorted runs, with the row of each: twelve bytes a
timer. It is derived from the segment, and made again if it is missing or damaged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from timerstore.disk import column_file as columns
from timerstore.disk import files, row_groups
from timerstore.disk.column_file import Column, ColumnFile, Runs
from timerstore.rows.entry import Kind
from timerstore.rows.position import Int64s

SCHEMA: Final = {"origin": "<i8", "row": "<i4"}
READ: Final = ["kind", "origin"]


class OriginIndex:
    """The open origin index of a segment."""

    def __init__(self, file: ColumnFile) -> None:
        self._file = file
        self._runs = tuple(file.runs())

    def rows_of(self, origins: Int64s) -> Int64s:
        """The rows of originals and of their copies, counted from the segment's beginning, in order, each once."""
        wanted, found = np.unique(origins), [np.empty(0, np.int32)]
        for run in self._runs:
            origin, row = self._file["origin"][run], self._file["row"][run]
            inside = wanted[np.searchsorted(wanted, origin[0]) : np.searchsorted(wanted, origin[-1], side="right")]
            if len(inside) > len(origin):
                at = np.minimum(np.searchsorted(inside, origin), len(inside) - 1)
                found.append(row[inside[at] == origin])
            else:
                first, end = np.searchsorted(origin, [inside, inside + 1])
                lengths = end - first
                begins = np.cumsum(lengths) - lengths
                found.append(row[np.repeat(first - begins, lengths) + np.arange(lengths.sum())])
        return np.unique(np.concatenate(found)).astype(np.int64)

    def drop_pages(self) -> None:
        self._file.drop_pages()


def open_or_make(segment: Path, crc: int, rows: int) -> OriginIndex:
    """The origin index of a segment file of `rows` rows whose footer has this CRC. Raises as `column_file.derived`."""
    path = segment.with_suffix(files.ORIGINS_SUFFIX)
    return columns.derived(path, crc, OriginIndex, partial(_make, segment, path, crc, rows))


def _make(segment: Path, path: Path, crc: int, rows: int) -> None:
    runs = Runs(_pieces(segment), lambda run: np.argsort(run["origin"], kind="stable"))
    columns.write(path, SCHEMA, rows, runs, lambda: {"of_segment": crc, "runs": runs.ends})


def _pieces(segment: Path) -> Iterator[Mapping[str, Column]]:
    begin = 0
    for table in row_groups.tables(segment, READ):
        timers = np.flatnonzero(table.column("kind").to_numpy() == Kind.TIMER)
        yield {"origin": table.column("origin").to_numpy()[timers], "row": (begin + timers).astype(np.int32)}
        begin += len(table)
