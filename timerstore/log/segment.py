"""Segments: immutable Parquet files of entries, sorted by position.

Opening and planning need only the footer, and no scan: it has the owner of the rows, the ranges of offsets and of
positions, a histogram of slots, counts by target, and a fence for each row group (its first position, its rows, its
bytes in memory). Of the histogram an open segment keeps the stretches of slots with rows (stretches.py). Any Parquet
tool can read a segment. Beside it there is an origin index (origin_index.py) and, if it has timers with ids, an id
index (id_index.py).
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from timerstore.cancels import id_index
from timerstore.cancels.id_index import SegmentIds, timers_with_ids
from timerstore.disk import files
from timerstore.disk.checkpoint import Identity, NamedFile
from timerstore.errors import Corrupt, DiskFull
from timerstore.log import origin_index
from timerstore.log.origin_index import OriginIndex
from timerstore.log.packed import SlotCounts, pack_numbers, pieces_of_packed, unpack_numbers
from timerstore.log.stretches import Stretches
from timerstore.memory.chunks import ROW_REFERENCE_BYTES, materialize
from timerstore.memory.pending import SLOT_MS, Tally, count_in, count_labels, labels
from timerstore.memory.sorted_runs import RowRefs
from timerstore.rows.entry import ENTRY
from timerstore.rows.position import Bools, Int64s, Position, Positions

FORMAT_VERSION = 3
METADATA_KEY = b"delay-bridge"
ROW_GROUP_ROWS = 16_384


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segment:
    """An open segment. `fences` (first positions) and the `group_*` vectors have one element for each row group;
    `stretches` are those of slots with rows. `ids` is its id index, `origins` its origin index."""

    path: Path
    named: NamedFile
    rows: int
    fences: Positions
    group_rows: Int64s
    group_bytes: Int64s
    first: Position
    last: Position
    begin: int
    """The smallest offset."""
    end: int
    """The largest offset + 1."""
    stretches: Stretches
    ids: SegmentIds | None
    origins: OriginIndex

    def groups_of(self, rows: Int64s) -> Int64s:
        """The row group of each row; `rows` are counted from the segment's beginning."""
        groups: Int64s = np.searchsorted(np.cumsum(self.group_rows), rows, side="right")
        return groups

    def groups_at(self, rows: Positions) -> Int64s:
        """The row groups of some of its rows, each once; `rows` may be millions, in any order."""
        at, offset = np.r_[self.fences.at, rows.at], np.r_[self.fences.offset, rows.offset]
        order = np.lexsort((offset, at))  # stable: a first row comes behind its own fence
        is_row = order >= len(self.fences)
        groups: Int64s = np.unique(np.cumsum(~is_row)[is_row] - 1)
        return groups

    def groups_between(self, lower: Position, upper: Position) -> Bools:
        """Mask of the row groups that may have rows in (lower, upper]; no group if no stretch reaches into it."""
        if not self.stretches.meet(lower.at_ms // SLOT_MS, upper.at_ms // SLOT_MS):
            return np.zeros(len(self.fences), dtype=np.bool_)
        return self.fences.at_or_below(upper) & ~self.lasts().at_or_below(lower)

    def lasts(self) -> Positions:
        """For each row group, a position at or above its last row: the next fence."""
        fences, last = self.fences, self.last
        return Positions(np.r_[fences.at[1:], last.at_ms], np.r_[fences.offset[1:], last.offset])


def write(
    directory: Path, number: int, identity: Identity, rows: RowRefs, payloads: dict[int, pa.RecordBatch]
) -> Segment | None:
    """Write rows, in the order of position, as one durable segment; None without rows. Beside them memory holds one row
    group and the indexes.

    Raises DiskFull (nothing was written) or DiskFailure.
    """
    with SegmentWriter(directory, number, identity) as writer:
        for start in range(0, len(rows), ROW_GROUP_ROWS):
            part = rows[start : start + ROW_GROUP_ROWS]
            writer.add(part, materialize(payloads, part.chunk, part.row))
        return writer.close()


def remove(path: Path) -> None:
    """Remove a segment, and the indexes beside it."""
    files.remove(path)
    for suffix in files.INDEX_SUFFIXES:
        files.remove(path.with_suffix(suffix))


def read(path: Path, identity: Identity, expected: NamedFile | None = None) -> Segment:
    """Open a segment by its footer, with the indexes beside it, which are made again if they are missing or damaged.

    Raises Corrupt if the segment is damaged, missing, not the expected one, or of another log; DiskFailure if it cannot
    be read; DiskFull.
    """
    with files.reading(path, pa.ArrowException, zlib.error):
        size, crc = path.stat().st_size, _footer_crc(path)
        if expected is not None and (size, crc) != (expected.bytes, expected.crc):
            raise Corrupt(f"{path.name} is not the file that the checkpoint names (size or checksum)", path=str(path))
        footer = _read_footer(path)
        owner = footer["version"], footer["cluster_id"], footer["log_id"]
        if owner != (FORMAT_VERSION, identity.cluster_id, identity.log_id):
            raise Corrupt(f"{path.name} is of another format version, cluster or log", path=str(path))
        return _from_footer(path, NamedFile(name=path.name, bytes=size, crc=crc), footer)


def read_span(path: Path) -> tuple[int, Position]:
    """The smallest offset and the last position of a segment, from its footer. Raises Corrupt, DiskFailure."""
    with files.reading(path, pa.ArrowException):
        footer = _read_footer(path)
        return footer["offsets"][0], Position(*footer["last"])


def read_counts(segment: Segment) -> Iterator[Tally]:
    """A histogram of all its rows by slot, with counts by target, from the footer, in pieces of bounded size. Raises
    Corrupt, DiskFailure."""
    with files.reading(segment.path, pa.ArrowException, zlib.error):
        footer = _read_footer(segment.path)
        pieces = (pieces_of_packed(footer[name]) for name in ("slots", "counts"))
        for slots, counts in zip(*pieces, strict=True):
            yield Tally(slots=slots, counts=counts, targets=footer.pop("targets", {}))


def read_rows(segment: Segment, groups: Sequence[int] | None = None, columns: Sequence[str] | None = None) -> pa.Table:
    """The rows of row groups (None: all), with some columns (None: all); page checksums are verified. Raises Corrupt,
    or DiskFailure if they cannot be read."""
    path = segment.path
    with files.reading(path, pa.ArrowException), pq.ParquetFile(path, page_checksum_verification=True) as parquet:
        wanted = range(parquet.num_row_groups) if groups is None else groups
        return parquet.read_row_groups(list(wanted), columns=None if columns is None else list(columns))


def open_file(segment: Segment) -> pa.NativeFile:
    """A segment's file, open: it may be removed meanwhile. Raises as `read_rows`."""
    with files.reading(segment.path, pa.ArrowException):
        return pa.OSFile(str(segment.path))


class SegmentReader:
    """A context that reads a segment row group by row group. Its methods raise as `read_rows`."""

    def __init__(self, segment: Segment, file: pa.NativeFile | None = None) -> None:
        """`file` is a result of `open_file`; it is closed with the reader."""
        self._path = segment.path
        self._file = open_file(segment) if file is None else file
        with files.reading(self._path, pa.ArrowException):
            self._parquet = pq.ParquetFile(self._file, page_checksum_verification=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._parquet.close()
        self._file.close()

    def read(self, group: int, columns: Sequence[str]) -> pa.Table:
        """Some columns of a row group, even if the file was removed meanwhile."""
        with files.reading(self._path, pa.ArrowException):
            return self._parquet.read_row_group(group, columns=list(columns))

    def parts(self, group: int, columns: Sequence[str], rows_max: int) -> Iterator[pa.Table]:
        """Some columns of a row group, in parts of at most `rows_max` rows."""
        parts = self._parquet.iter_batches(rows_max, row_groups=[group], columns=list(columns))
        while True:
            with files.reading(self._path, pa.ArrowException):
                part = next(parts, None)
            if part is None:
                return
            yield pa.Table.from_batches([part])


class SegmentWriter:
    """Writes a segment row group by row group, in the order of position. Memory holds the footer's content, and no
    rows. The file is temporary until `close`; the end of the context abandons an unclosed one.

    `add` and `close` raise DiskFull (nothing was written) or DiskFailure.
    """

    def __init__(self, directory: Path, number: int, identity: Identity) -> None:
        self._path = directory / files.segment_name(number)
        self._identity = identity
        self._parquet: pq.ParquetWriter | None = None
        self._groups: list[tuple[int, int, int, int]] = []
        self._slots = SlotCounts()
        self._targets: dict[str, int] = {}
        self._ids = 0
        self._offsets: list[tuple[int, int]] = []
        self._last = (0, 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.abandon()

    def add(self, rows: RowRefs, payload: pa.RecordBatch) -> None:
        """Write one row group: `rows` above all earlier ones, and the payload of each."""
        position = {"offset": pa.array(rows.offset), "at": pa.array(rows.at)}
        columns = position | {name: payload.column(name) for name in payload.schema.names}
        table = pa.table([columns[name] for name in ENTRY.names], schema=ENTRY)
        with files.writing(self._path) as temporary:
            if self._parquet is None:
                # The abandoned writer of a closed store may have the file of this name open, and must not change this.
                temporary.unlink(missing_ok=True)
                self._parquet = pq.ParquetWriter(
                    temporary, ENTRY, compression="lz4", use_dictionary=["target"], write_page_checksum=True
                )
            self._parquet.write_table(table)
            self._note(rows, payload)

    def close(self) -> Segment | None:
        """Make the segment durable, and open it; None without rows. Raises as `read`, too."""
        if self._parquet is None:
            return None
        with files.writing(self._path):
            footer = json.dumps(self._footer(), separators=(",", ":"))
            self._parquet.add_key_value_metadata({METADATA_KEY.decode(): footer})
            self._parquet.close()
        self._parquet = None
        files.publish(self._path)
        try:
            return read(self._path, self._identity)
        except DiskFull:
            remove(self._path)
            raise

    def abandon(self) -> None:
        """Remove the temporary file, unless the segment is closed."""
        if self._parquet is not None:
            with suppress(OSError):
                self._parquet.close()
            self._parquet.is_open = False  # prevents a second close by the garbage collector
            self._parquet = None
            files.remove(files.temporary_of(self._path))

    def _note(self, rows: RowRefs, payload: pa.RecordBatch) -> None:
        offset, at = rows.offset, rows.at
        size = payload.nbytes + len(rows) * ROW_REFERENCE_BYTES
        self._groups.append((int(at[0]), int(offset[0]), len(rows), size))
        self._slots.add(at // SLOT_MS)
        for name, count in count_labels(labels(payload)).items():
            count_in(self._targets, name, count)
        self._ids += pc.sum(timers_with_ids(payload.column("kind"), payload.column("id"))).as_py()
        self._offsets.append((int(offset.min()), int(offset.max())))
        self._last = int(at[-1]), int(offset[-1])

    def _footer(self) -> dict[str, Any]:
        slots, counts = self._slots.texts()
        at, offset, rows, size = np.array(self._groups, dtype=np.int64).T
        return {
            "version": FORMAT_VERSION,
            "cluster_id": self._identity.cluster_id,
            "log_id": self._identity.log_id,
            "rows": int(rows.sum()),
            "offsets": [min(low for low, _ in self._offsets), max(high for _, high in self._offsets)],
            "last": self._last,
            "slots": slots,
            "counts": counts,
            "targets": self._targets,
            "ids": self._ids,
            "groups": {
                "at": pack_numbers(at),
                "offset": pack_numbers(offset),
                "rows": pack_numbers(rows),
                "bytes": pack_numbers(size),
            },
        }


def _from_footer(path: Path, named: NamedFile, footer: dict[str, Any]) -> Segment:
    groups = {name: unpack_numbers(text) for name, text in footer["groups"].items()}
    begin, largest = footer["offsets"]
    return Segment(
        path=path,
        named=named,
        rows=footer["rows"],
        fences=Positions(groups["at"], groups["offset"]),
        group_rows=groups["rows"],
        group_bytes=groups["bytes"],
        first=Position(int(groups["at"][0]), int(groups["offset"][0])),
        last=Position(*footer["last"]),
        begin=begin,
        end=largest + 1,
        ids=id_index.open_or_make(path, named.crc, footer["ids"]) if footer["ids"] else None,
        origins=origin_index.open_or_make(path, named.crc, footer["rows"]),
        stretches=Stretches.of(pieces_of_packed(footer["slots"]), footer["rows"]),
    )


def _read_footer(path: Path) -> dict[str, Any]:
    footer: dict[str, Any] = json.loads((pq.read_metadata(path).metadata or {})[METADATA_KEY])
    return footer


def _footer_crc(path: Path) -> int:
    """CRC-32 of the Parquet footer: the last 8 bytes of the file have the footer's length."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - 8))
        tail = file.read(8)
        length = int.from_bytes(tail[:4], "little")
        if tail[4:] != b"PAR1" or length + 12 > size:
            raise Corrupt(f"{path.name} has no Parquet footer", path=str(path))
        file.seek(-8 - length, 2)
        return zlib.crc32(file.read())
