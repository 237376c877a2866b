"""Where the timers of an id are: what a cancel asks for, so that they leave the gauges when it is read.

Delivery does not need this index: a row that is due shows its id, and a tombstone covers it or not. The counts of
pending timers do, and searches (find.py), and only for timers with an id. It has two parts:

    unstored   timers that no segment holds, in memory, as sorted runs; finished ones are dropped as the runs grow
    segments   beside each segment that has timers with ids, a column file sorted by key, made from the segment

A segment's index is derived from it: one that is missing or damaged is made again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from timerstore.cancels.digests import (
    MOVE,
    RECALL,
    Digests,
    Uint64s,
    are_origins,
    concat_digests,
    digest,
    find_all,
    origin_keys,
    seed,
)
from timerstore.disk import column_file as columns
from timerstore.disk import files
from timerstore.disk.column_file import ColumnFile
from timerstore.memory.pending import label_of, labels
from timerstore.rows.entry import Kind
from timerstore.rows.position import Bools, Int64s, Positions, pack
from timerstore.rows.sources import SourceName, Sources

Int32s = npt.NDArray[np.int32]

SCHEMA: Final = {
    "hi": "<u8",
    "lo": "<u8",
    "at": "<i8",
    "offset": "<i8",
    "origin": "<i8",
    "source": "<i4",
    "target": "<i4",
}
READ: Final = ["topic", "partition", "offset", "at", "kind", "target", "id", "origin", "schedule"]
FOUND_ROWS_MAX: Final = 1 << 18
"""How many timers are looked at at a time."""
UNSTORED_SLACK: Final = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Timers(Positions):
    """Timers, by the digest of their id or by their origin. `target` int32[n] is the index of the target in `names`
    (which has "" for the default)."""

    keys: Digests
    origin: Int64s
    target: Int32s
    names: Sequence[str]

    def __getitem__(self, key: slice | Bools | npt.NDArray[Any]) -> Timers:
        return Timers(
            keys=self.keys[key], at=self.at[key], seq=self.seq[key], origin=self.origin[key],
            target=self.target[key], names=self.names,
        )  # fmt: skip

    def matches(self, wanted: Digests) -> Iterator[tuple[Int64s, Timers]]:
        """As `SegmentIds.matches`, of a run in memory."""
        return ((query, self[found]) for query, found in find_all(self.keys, wanted, FOUND_ROWS_MAX))


def concat_timers(parts: Sequence[Timers]) -> Timers:
    """All rows, one after the other; names may occur twice."""
    if len(parts) == 1:
        return parts[0]
    bases = np.cumsum([0, *(len(p.names) for p in parts)])
    return Timers(
        keys=concat_digests([p.keys for p in parts]),
        at=np.concatenate([p.at for p in parts]),
        seq=np.concatenate([p.seq for p in parts]),
        origin=np.concatenate([p.origin for p in parts]),
        target=np.concatenate([p.target + np.int32(base) for p, base in zip(parts, bases, strict=False)]),
        names=[name for p in parts for name in p.names],
    )


def no_timers() -> Timers:
    none = np.empty(0, np.int64)
    return Timers(keys=concat_digests([]), at=none, seq=none, origin=none, target=none.astype(np.int32), names=())


class SegmentIds:
    """The index of a segment, open. Sources in the file are by name; here they are the store's numbers."""

    def __init__(self, file: ColumnFile, sources: Sources) -> None:
        self._file = file
        names: list[SourceName] = [(topic, partition) for topic, partition in file.note["sources"]]
        self._source = np.array([sources.index(*name) for name in names], dtype=np.int64)
        self._targets: list[str] = file.note["targets"]

    def __len__(self) -> int:
        return len(self._file)

    def matches(self, wanted: Digests) -> Iterator[tuple[Int64s, Timers]]:
        """(index in `wanted`, timer) of all timers with these keys, in pieces of bounded size."""
        keys = Digests(self._file["hi"], self._file["lo"])
        return ((query, self._timers(found)) for query, found in find_all(keys, wanted, FOUND_ROWS_MAX))

    def pieces(self) -> Iterator[Timers]:
        return (self._timers(part) for part in columns.slices(len(self), FOUND_ROWS_MAX))

    def drop_pages(self) -> None:
        self._file.drop_pages()

    def _timers(self, rows: slice | npt.NDArray[Any]) -> Timers:
        column = self._file
        return Timers(
            keys=Digests(column["hi"][rows], column["lo"][rows]),
            at=column["at"][rows],
            seq=pack(self._source[column["source"][rows]], column["offset"][rows]),
            origin=column["origin"][rows],
            target=column["target"][rows],
            names=self._targets,
        )


def open_or_make(segment: Path, crc: int, sources: Sources) -> SegmentIds:
    """The index beside a segment file whose footer has this CRC. Raises as `column_file.derived`."""
    path = segment.with_suffix(files.IDS_SUFFIX)
    make = partial(_make, segment, path, crc, sources)
    return columns.derived(path, crc, lambda file: SegmentIds(file, sources), make)


def _make(segment: Path, path: Path, crc: int, sources: Sources) -> None:
    targets: dict[str, int] = {}
    seeds = Seeds(sources)
    parts = []
    with (
        files.reading(segment, pa.ArrowException),
        pq.ParquetFile(segment, page_checksum_verification=True) as parquet,
    ):
        for group in range(parquet.num_row_groups):
            table = parquet.read_row_group(group, columns=READ)
            parts.append(_of_table(table, sources, seeds, targets))
    keys = Digests(np.concatenate([p["hi"] for p in parts]), np.concatenate([p["lo"] for p in parts]))
    order = keys.order()
    whole = {name: np.concatenate([p[name] for p in parts])[order] for name in SCHEMA}
    note = {"sources": [list(name) for name in sources], "targets": list(targets), "segment_crc": crc}
    columns.write(path, SCHEMA, len(order), [whole], lambda: note)


def _of_table(table: pa.Table, sources: Sources, seeds: Seeds, targets: dict[str, int]) -> dict[str, Any]:
    table = table.filter(timers_with_ids(table.column("kind"), table.column("id")))
    source = sources.of_columns(table.column("topic"), table.column("partition"))
    keys = seeds.digest(table.column("id"), source)
    return {
        "hi": keys.hi,
        "lo": keys.lo,
        "at": table.column("at").to_numpy(),
        "offset": table.column("offset").to_numpy(),
        "origin": table.column("origin").to_numpy(),
        "source": source,
        "target": target_codes(labels(table), targets),
    }


def timers_with_ids(kind: pa.ChunkedArray | pa.Array, id: pa.ChunkedArray | pa.Array) -> pa.Array:
    """Mask of the rows that an index holds."""
    mask = (kind.to_numpy() == Kind.TIMER) & id.is_valid().to_numpy(zero_copy_only=False)
    return pa.array(mask)


def target_codes(target: pa.ChunkedArray | pa.Array, codes: dict[str, int]) -> Int32s:
    """Codes of a column of targets (null: ""); new names get the next ones, and those beyond the first thousand the
    same one."""
    column = target.combine_chunks() if isinstance(target, pa.ChunkedArray) else target
    encoded = column.fill_null("").dictionary_encode()
    known = np.array([_code(name, codes) for name in encoded.dictionary.to_pylist()], dtype=np.int32)
    return known[encoded.indices.to_numpy()] if len(known) else np.empty(0, np.int32)


def timers_of(keys: Digests, rows: Positions, origin: Int64s, target: pa.ChunkedArray | pa.Array) -> Timers:
    """Timers, row by row; a target that is null is the default."""
    names: dict[str, int] = {}
    codes = target_codes(target, names)
    return Timers(keys=keys, at=rows.at, seq=rows.seq, origin=origin, target=codes, names=tuple(names))


def _code(name: str, codes: dict[str, int]) -> int:
    return codes.setdefault(label_of(name, codes), len(codes))


class Seeds:
    """The seeds of all sources, by number."""

    def __init__(self, sources: Sources) -> None:
        self._seeds: Uint64s = np.array([seed(name) for name in sources], dtype=np.uint64)

    def digest(self, ids: pa.ChunkedArray | pa.Array, source: Int64s) -> Digests:
        """Keys of ids (no nulls) of these sources."""
        column = ids.combine_chunks() if isinstance(ids, pa.ChunkedArray) else ids
        return digest(column, self._seeds[source])

    def of_origins(self, origin: Int64s, source: Int64s) -> Digests:
        """Keys of the original records at these offsets of these sources."""
        return origin_keys(origin, self._seeds[source])

    def of_moves(self, origin: Int64s, source: Int64s) -> Digests:
        """Keys of the originals that moves name: others than those of `of_origins`, and tell the same."""
        return origin_keys(origin, self._seeds[source] ^ MOVE)

    def of_recalls(self, origin: Int64s, source: Int64s) -> Digests:
        """Keys of the originals that recalls name."""
        return origin_keys(origin, self._seeds[source] ^ RECALL)

    def are_commands(self, keys: Digests, source: Int64s | Int32s) -> Bools:
        """Which keys, of these sources, are of `of_moves` or `of_recalls`."""
        seeds = self._seeds[source]
        return are_origins(keys, seeds ^ MOVE) | are_origins(keys, seeds ^ RECALL)

    def are_origins(self, keys: Digests, source: Int64s | Int32s) -> Bools:
        """Which keys, of these sources, are of original records."""
        return are_origins(keys, self._seeds[source])

    def digest_everywhere(self, id: str) -> Digests:
        """The keys of one id, source by source."""
        return digest(pa.array([id] * len(self._seeds)), self._seeds)


@dataclass(slots=True)
class Unstored:
    """Timers with ids that are in no segment. `runs` is replaced, never changed: it is a snapshot."""

    runs: tuple[Timers, ...] = ()
    _pruned_rows: int = field(default=0)

    def __len__(self) -> int:
        return sum(len(run) for run in self.runs)

    def add(self, timers: Timers, is_gone: Callable[[Timers], Bools]) -> None:
        """New timers, sorted by key. When there are twice as many as once remained, those that are gone are dropped."""
        if not len(timers):
            return
        runs = [*self.runs, timers]
        while len(runs) > 1 and len(runs[-2]) < 2 * len(runs[-1]) and len(runs[-2]) + len(runs[-1]) <= UNSTORED_SLACK:
            newest = runs.pop()
            both = concat_timers([runs[-1], newest])
            runs[-1] = _renamed(both[both.keys.order()])
        self.runs = tuple(runs)
        if len(self) > 2 * self._pruned_rows + UNSTORED_SLACK:
            self.prune(is_gone)

    def prune(self, is_gone: Callable[[Timers], Bools]) -> None:
        """Drop the timers that a segment holds now, or that are finished."""
        left = (run[~is_gone(run)] for run in self.runs)
        self.runs = tuple(run for run in left if len(run))
        self._pruned_rows = len(self)


def _renamed(timers: Timers) -> Timers:
    """Each name once."""
    codes: dict[str, int] = {}
    known = np.array([_code(name, codes) for name in timers.names], dtype=np.int32)
    return Timers(
        keys=timers.keys, at=timers.at, seq=timers.seq, origin=timers.origin,
        target=known[timers.target], names=tuple(codes),
    )  # fmt: skip
