"""Segments: immutable Parquet files of entries, sorted by position.

The footer says everything that opening and planning need, so that neither scans: whose rows they are, the range of
offsets and of positions of every source, a histogram of slots, pending counts by target, and a fence for each row group
(its first position, its rows, its bytes in memory). Any tool that reads Parquet can look inside. Beside a segment lie
an index of its timers' origins (origin_index.py) and, where there are timers with ids, one of those (id_index.py).
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from timerstore.cancels.id_index import SegmentIds, open_or_make, timers_with_ids
from timerstore.disk import files
from timerstore.disk.checkpoint import Identity, NamedFile
from timerstore.errors import Corrupt, DiskFull
from timerstore.log import origin_index
from timerstore.log.origin_index import OriginIndex
from timerstore.memory.chunks import ROW_REFERENCE_BYTES, materialize
from timerstore.memory.pending import SLOT_MS, Tally, count_in, count_labels, labels
from timerstore.memory.sorted_runs import RowRefs, select
from timerstore.rows.entry import SEGMENT
from timerstore.rows.position import OFFSET_MAX, Bools, Int64s, Position, Positions, offsets_of, pack, sources_of
from timerstore.rows.sources import SourceName, Sources

FORMAT_VERSION = 2
METADATA_KEY = b"delay-bridge"
ROW_GROUP_ROWS = 16_384


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segment:
    """An open segment. `fences` (first positions) and the `group_*` vectors have one element a row group; `timers` is
    the histogram of all its rows by slot and target, `ids` the index of those that have ids, `origins` that of all."""

    path: Path
    named: NamedFile
    rows: int
    fences: Positions
    group_rows: Int64s
    group_bytes: Int64s
    first: Position
    last: Position
    largest: dict[int, Position]
    """The largest position by source."""
    begins: dict[int, int]
    """The smallest offset by source."""
    ends: dict[int, int]
    """The largest offset + 1 by source."""
    rows_of: dict[int, int]
    """How many rows are of each source."""
    timers: Tally
    ids: SegmentIds | None
    origins: OriginIndex

    def groups_of(self, rows: Int64s) -> Int64s:
        """The row groups of rows that are counted from the segment's beginning."""
        groups: Int64s = np.searchsorted(np.cumsum(self.group_rows), rows, side="right")
        return groups

    def groups_at(self, rows: Positions) -> Int64s:
        """The row groups in which some of its rows lie, each once; `rows` in any order, millions of them perhaps."""
        at, seq = np.r_[self.fences.at, rows.at], np.r_[self.fences.seq, rows.seq]
        order = np.lexsort((seq, at))  # stable: a first row comes behind its own fence
        is_row = order >= len(self.fences)
        groups: Int64s = np.unique(np.cumsum(~is_row)[is_row] - 1)
        return groups

    def groups_between(self, lower: Position, upper: Position) -> Bools:
        """Mask of the row groups that may hold rows in (lower, upper]; none where the histogram has nothing in its
        slots."""
        slots = slice(*np.searchsorted(self.timers.slots, [lower.at_ms // SLOT_MS, upper.at_ms // SLOT_MS + 1]))
        if not self.timers.counts[slots].any():
            return np.zeros(len(self.fences), dtype=np.bool_)
        after = Positions(np.r_[self.fences.at[1:], self.last.at_ms], np.r_[self.fences.seq[1:], self.last.seq])
        return self.fences.at_or_below(upper) & ~after.at_or_below(lower)


def write(
    directory: Path,
    number: int,
    identity: Identity,
    sources: Sources,
    rows: RowRefs,
    payloads: dict[int, pa.RecordBatch],
) -> Segment | None:
    """Write rows (in the order of position) as one durable segment, None if there are none; memory beside them is
    bounded by a row group (and by what the indexes hold).

    Raises DiskFull (nothing was written) or DiskFailure.
    """
    with Writer(directory, number, identity, sources) as writer:
        for start in range(0, len(rows), ROW_GROUP_ROWS):
            part = rows[start : start + ROW_GROUP_ROWS]
            writer.add(part, materialize(payloads, part.chunk, part.row))
        return writer.close()


def remove(path: Path) -> None:
    """Remove a segment, and the indexes beside it."""
    files.remove(path)
    for suffix in files.INDEX_SUFFIXES:
        files.remove(path.with_suffix(suffix))


@dataclass(frozen=True, slots=True, kw_only=True)
class Footer:
    """What a segment says of itself."""

    path: Path
    named: NamedFile
    content: dict[str, Any]

    @property
    def names(self) -> list[SourceName]:
        return [(topic, partition) for topic, partition in self.content["sources"]]


def read(path: Path, identity: Identity, sources: Sources, expected: NamedFile | None = None) -> Segment:
    """Open a segment by its footer, and the indexes beside it. Raises as `read_footer` and `of_footer`."""
    return of_footer(read_footer(path, identity, expected), sources)


def read_footer(path: Path, identity: Identity, expected: NamedFile | None = None) -> Footer:
    """A segment's footer.

    Raises Corrupt when the segment is damaged, missing, not the one expected, or of another cluster; DiskFailure when
    it cannot be read.
    """
    with files.reading(path, pa.ArrowException, zlib.error):
        size, crc = path.stat().st_size, _footer_crc(path)
        if expected is not None and (size, crc) != (expected.bytes, expected.crc):
            raise Corrupt(f"{path.name} is not the file that the checkpoint names (size or checksum)", path=str(path))
        metadata = pq.read_metadata(path).metadata or {}
        footer = json.loads(metadata[METADATA_KEY])
        if footer["version"] != FORMAT_VERSION or footer["cluster_id"] != identity.cluster_id:
            raise Corrupt(f"{path.name} is of another format version or cluster", path=str(path))
        return Footer(path=path, named=NamedFile(name=path.name, bytes=size, crc=crc), content=footer)


def of_footer(footer: Footer, sources: Sources) -> Segment:
    """A segment, and the indexes beside it, which are made if they are missing or damaged. Raises Corrupt; DiskFull,
    DiskFailure."""
    with files.reading(footer.path, pa.ArrowException, zlib.error):
        return _from_footer(footer.path, footer.named, footer.content, sources)


def read_rows(segment: Segment, groups: Sequence[int] | None = None, columns: Sequence[str] | None = None) -> pa.Table:
    """Rows of some row groups (all), some columns (all), pages verified by their checksums. Raises Corrupt, or
    DiskFailure when they cannot be read."""
    path = segment.path
    with files.reading(path, pa.ArrowException), pq.ParquetFile(path, page_checksum_verification=True) as parquet:
        wanted = range(parquet.num_row_groups) if groups is None else groups
        return parquet.read_row_groups(list(wanted), columns=None if columns is None else list(columns))


def open_file(segment: Segment) -> pa.NativeFile:
    """A segment's file: as long as it is open, it may be removed. Raises as `read_rows`."""
    with files.reading(segment.path, pa.ArrowException):
        return pa.OSFile(str(segment.path))


class Reader:
    """An open segment that is read row group by row group; a context. Its methods raise as `read_rows`."""

    def __init__(self, segment: Segment, file: pa.NativeFile | None = None) -> None:
        """`file` is of `open_file`; it is closed with the reader."""
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
        """Some columns of a row group; as long as it is open, the file may be removed."""
        with files.reading(self._path, pa.ArrowException):
            return self._parquet.read_row_group(group, columns=list(columns))

    def parts(self, group: int, columns: Sequence[str], rows_max: int) -> Iterator[pa.Table]:
        """Some columns of a row group, at most so many rows at a time."""
        parts = self._parquet.iter_batches(rows_max, row_groups=[group], columns=list(columns))
        while True:
            with files.reading(self._path, pa.ArrowException):
                part = next(parts, None)
            if part is None:
                return
            yield pa.Table.from_batches([part])


def references(segment: Segment, table: pa.Table, sources: Sources) -> RowRefs:
    """The positions of rows that were read. Raises Corrupt when one is of no source that the footer names: checksums
    cover the data of a page, but not its header."""
    rows = select(table, sources)
    if len(rows) != table.num_rows:
        raise Corrupt(f"{segment.path.name} has rows of unknown partitions", path=str(segment.path))
    return rows


class Writer:
    """A segment that is written row group by row group, in the order of position; what its footer will say is kept
    meanwhile, rows are not. It is a temporary file until `close`; as a context it is abandoned if it is not closed.

    `add` and `close` raise DiskFull (nothing was written) or DiskFailure.
    """

    def __init__(self, directory: Path, number: int, identity: Identity, sources: Sources) -> None:
        self._path = directory / files.segment_name(number)
        self._identity, self._sources = identity, sources
        self._parquet: pq.ParquetWriter | None = None
        self._groups: list[tuple[int, int, int, int]] = []
        self._slots: list[tuple[Int64s, Int64s]] = []
        self._targets: dict[str, int] = {}
        self._ids = 0
        n = len(sources)
        self._seen = np.zeros(n, dtype=np.bool_)
        self._rows_of = np.zeros(n, dtype=np.int64)
        self._smallest, self._largest = np.full(n, OFFSET_MAX), np.zeros(n, dtype=np.int64)
        self._first, self._last = np.zeros((n, 2), dtype=np.int64), np.zeros((n, 2), dtype=np.int64)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.abandon()

    def add(self, rows: RowRefs, payload: pa.RecordBatch) -> None:
        """One row group: rows after all rows before, and the payload of each."""
        topic, partition = self._sources.columns(rows.source)
        position = {"topic": topic, "partition": partition, "offset": pa.array(rows.offset), "at": pa.array(rows.at)}
        columns = position | {name: payload.column(name) for name in payload.schema.names}
        table = pa.table([columns[name] for name in SEGMENT.names], schema=SEGMENT)
        with files.writing(self._path) as temporary:
            if self._parquet is None:
                # A writer of the same number that a closed store has left open must not write into this file.
                temporary.unlink(missing_ok=True)
                self._parquet = pq.ParquetWriter(
                    temporary, SEGMENT, compression="lz4", use_dictionary=["topic", "target"], write_page_checksum=True
                )
            self._parquet.write_table(table)
            self._note(rows, payload)

    def close(self) -> Segment | None:
        """Make the segment durable, and open it; None when it has no rows."""
        if self._parquet is None:
            return None
        with files.writing(self._path):
            footer = json.dumps(self._footer(), separators=(",", ":"))
            self._parquet.add_key_value_metadata({METADATA_KEY.decode(): footer})
            self._parquet.close()
        self._parquet = None
        files.publish(self._path)
        try:
            return read(self._path, self._identity, self._sources)
        except DiskFull:
            remove(self._path)
            raise

    def abandon(self) -> None:
        """Remove what was written, unless it is closed."""
        if self._parquet is not None:
            with suppress(OSError):
                self._parquet.close()
            self._parquet.is_open = False  # else it is closed once more when it is collected
            self._parquet = None
            files.remove(files.temporary_of(self._path))

    def _note(self, rows: RowRefs, payload: pa.RecordBatch) -> None:
        source, offset, at = rows.source, rows.offset, rows.at
        size = payload.nbytes + len(rows) * ROW_REFERENCE_BYTES
        self._groups.append((int(at[0]), int(rows.seq[0]), len(rows), size))
        self._slots.append(np.unique(at // SLOT_MS, return_counts=True))
        for name, count in count_labels(labels(payload)).items():
            count_in(self._targets, name, count)
        self._ids += pc.sum(timers_with_ids(payload.column("kind"), payload.column("id"))).as_py()
        present, first = np.unique(source, return_index=True)
        last = len(rows) - 1 - np.unique(source[::-1], return_index=True)[1]
        new = ~self._seen[present]
        self._first[present[new]] = np.stack([at[first[new]], offset[first[new]]], axis=1)
        self._last[present] = np.stack([at[last], offset[last]], axis=1)
        np.minimum.at(self._smallest, source, offset)
        np.maximum.at(self._largest, source, offset)
        self._seen[present] = True
        self._rows_of += np.bincount(source, minlength=len(self._rows_of))

    def _footer(self) -> dict[str, Any]:
        present = np.flatnonzero(self._seen)
        offsets = np.stack([self._smallest[present], self._largest[present]], axis=1)
        extent = np.concatenate([offsets, self._first[present], self._last[present]], axis=1)
        slots, inverse = np.unique(np.concatenate([s for s, _ in self._slots]), return_inverse=True)
        counts = np.zeros(len(slots), dtype=np.int64)
        np.add.at(counts, inverse, np.concatenate([c for _, c in self._slots]))
        at, seq, rows, size = np.array(self._groups, dtype=np.int64).T
        return {
            "version": FORMAT_VERSION,
            "cluster_id": self._identity.cluster_id,
            "topic_ids": dict(self._identity.topic_ids),
            "rows": int(rows.sum()),
            "sources": [list(self._sources.name(source)) for source in present.tolist()],
            "extent": extent.tolist(),
            "source_rows": self._rows_of[present].tolist(),
            "slots": _pack_vector(slots),
            "counts": _pack_vector(counts),
            "targets": self._targets,
            "ids": self._ids,
            "groups": {
                "at": _pack_vector(at),
                "source": _pack_vector(np.searchsorted(present, sources_of(seq))),
                "offset": _pack_vector(offsets_of(seq)),
                "rows": _pack_vector(rows),
                "bytes": _pack_vector(size),
            },
        }


def _from_footer(path: Path, named: NamedFile, footer: dict[str, Any], sources: Sources) -> Segment:
    present = np.array([sources.index(topic, partition) for topic, partition in footer["sources"]], dtype=np.int64)
    groups = {name: _unpack_vector(text) for name, text in footer["groups"].items()}
    group_seq = pack(present[groups["source"]], groups["offset"])
    largest = {
        int(source): Position(extent[4], int(source), extent[5])
        for source, extent in zip(present, footer["extent"], strict=True)
    }
    return Segment(
        path=path,
        named=named,
        rows=footer["rows"],
        fences=Positions(groups["at"], group_seq),
        group_rows=groups["rows"],
        group_bytes=groups["bytes"],
        first=Position.of(int(groups["at"][0]), int(group_seq[0])),
        last=max(largest.values()),
        largest=largest,
        begins={int(s): extent[0] for s, extent in zip(present, footer["extent"], strict=True)},
        ends={int(s): extent[1] + 1 for s, extent in zip(present, footer["extent"], strict=True)},
        rows_of=dict(zip(present.tolist(), footer["source_rows"], strict=True)),
        ids=open_or_make(path, named.crc, sources) if footer["ids"] else None,
        origins=origin_index.open_or_make(path, named.crc, sources),
        timers=Tally(
            slots=_unpack_vector(footer["slots"]), counts=_unpack_vector(footer["counts"]), targets=footer["targets"]
        ),
    )


def _footer_crc(path: Path) -> int:
    """CRC-32 of the Parquet footer: its last 8 bytes give the length of what precedes them."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - 8))
        tail = file.read(8)
        length = int.from_bytes(tail[:4], "little")
        if tail[4:] != b"PAR1" or length + 12 > size:
            raise Corrupt(f"{path.name} has no Parquet footer", path=str(path))
        file.seek(-8 - length, 2)
        return zlib.crc32(file.read())


def _pack_vector(vector: npt.NDArray[Any]) -> str:
    return base64.b64encode(zlib.compress(np.ascontiguousarray(vector, dtype="<i8").tobytes(), 1)).decode()


def _unpack_vector(text: str) -> Int64s:
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype="<i8").astype(np.int64)
