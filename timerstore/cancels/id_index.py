"""The id index: the places of timers with ids. By it a cancel takes them out of the gauges when it is read.

Delivery does not need it: a due row has its id, and a tombstone covers it or not. Counts of pending timers need it, and
searches (find.py). It has two parts:

    unstored   timers that no segment has, in memory, as sorted runs; finished ones are dropped as the runs grow
    segments   a column file of runs, sorted by key, beside each segment that has timers with ids; a filter of each run
               (key_filter.py) saves most searches for absent keys

A segment's id index is derived from the segment, and made again if it is missing or damaged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from timerstore.cancels.digests import Digests, concat_digests, digest, find_all
from timerstore.cancels.key_filter import KeyProbe, filter_of
from timerstore.disk import column_file as columns
from timerstore.disk import files, row_groups
from timerstore.disk.column_file import Column, ColumnFile, Runs
from timerstore.memory.pending import label_of, labels
from timerstore.rows.entry import Kind
from timerstore.rows.position import Bools, Int64s, Positions

Int32s = npt.NDArray[np.int32]

SCHEMA: Final = {
    "hi": "<u8",
    "lo": "<u8",
    "at": "<i8",
    "offset": "<i8",
    "origin": "<i8",
    "target": "<i4",
    "filter": "<u2",
}
READ: Final = ["offset", "at", "kind", "target", "id", "origin", "schedule"]
FOUND_ROWS_MAX: Final = 1 << 18
"""The size of a piece, in timers."""
UNSTORED_SLACK: Final = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Timers(Positions):
    """Timers with `keys`: digests of their ids, or keys of their origins. `target` int32[n] is the index of the target
    in `names`; the name of the default target is ""."""

    keys: Digests
    origin: Int64s
    target: Int32s
    names: Sequence[str]

    def __getitem__(self, key: slice | Bools | npt.NDArray[Any]) -> Timers:
        return Timers(
            keys=self.keys[key], at=self.at[key], offset=self.offset[key], origin=self.origin[key],
            target=self.target[key], names=self.names,
        )  # fmt: skip

    def matches(self, wanted: Digests) -> Iterator[tuple[Int64s, Timers]]:
        """As `SegmentIds.matches`, for a run in memory."""
        return ((query, self[rows]) for query, rows in find_all(self.keys, wanted, FOUND_ROWS_MAX))


def concat_timers(parts: Sequence[Timers]) -> Timers:
    """All timers, in the order of `parts`; a name may occur twice in `names`."""
    if len(parts) == 1:
        return parts[0]
    bases = np.cumsum([0, *(len(p.names) for p in parts)])
    return Timers(
        keys=concat_digests([p.keys for p in parts]),
        at=np.concatenate([p.at for p in parts]),
        offset=np.concatenate([p.offset for p in parts]),
        origin=np.concatenate([p.origin for p in parts]),
        target=np.concatenate([p.target + np.int32(base) for p, base in zip(parts, bases, strict=False)]),
        names=[name for p in parts for name in p.names],
    )


def no_timers() -> Timers:
    none = np.empty(0, np.int64)
    return Timers(keys=concat_digests([]), at=none, offset=none, origin=none, target=none.astype(np.int32), names=())


class SegmentIds:
    """The open id index of a segment."""

    def __init__(self, file: ColumnFile) -> None:
        self._file = file
        self._runs = tuple(file.runs())
        self._targets: list[str] = file.note["targets"]

    def __len__(self) -> int:
        return len(self._file)

    def matches(self, wanted: Digests) -> Iterator[tuple[Int64s, Timers]]:
        """(index in `wanted`, timer) of all timers with these keys, in pieces of at most FOUND_ROWS_MAX."""
        for run, asked in KeyProbe(wanted).among(self._file["filter"], self._runs):
            keys = Digests(self._file["hi"][run], self._file["lo"][run])
            for query, rows in find_all(keys, wanted[asked], FOUND_ROWS_MAX):
                yield asked[query], self._timers(rows + run.start)

    def pieces(self) -> Iterator[Timers]:
        return (self._timers(part) for part in columns.slices(len(self), FOUND_ROWS_MAX))

    def drop_pages(self) -> None:
        self._file.drop_pages()

    def _timers(self, rows: slice | npt.NDArray[Any]) -> Timers:
        column = self._file
        return Timers(
            keys=Digests(column["hi"][rows], column["lo"][rows]),
            at=column["at"][rows],
            offset=column["offset"][rows],
            origin=column["origin"][rows],
            target=column["target"][rows],
            names=self._targets,
        )


def open_or_make(segment: Path, crc: int, timers: int) -> SegmentIds:
    """The id index of a segment file whose footer has this CRC, with this number of timers with ids. Raises as
    `column_file.derived`."""
    path = segment.with_suffix(files.IDS_SUFFIX)
    return columns.derived(path, crc, SegmentIds, partial(_make, segment, path, crc, timers))


def _make(segment: Path, path: Path, crc: int, timers: int) -> None:
    targets: dict[str, int] = {}
    parts = (_of_table(table, targets) for table in row_groups.tables(segment, READ))
    runs = Runs(parts, lambda run: _keys_of(run).order(), {"filter": lambda run: filter_of(_keys_of(run))})

    def note() -> dict[str, Any]:
        return {"targets": list(targets), "of_segment": crc, "runs": runs.ends}

    columns.write(path, SCHEMA, timers, runs, note)


def _keys_of(run: Mapping[str, Column]) -> Digests:
    return Digests(run["hi"], run["lo"])


def _of_table(table: pa.Table, targets: dict[str, int]) -> dict[str, Any]:
    table = table.filter(timers_with_ids(table.column("kind"), table.column("id")))
    keys = digest(table.column("id"))
    return {
        "hi": keys.hi,
        "lo": keys.lo,
        "at": table.column("at").to_numpy(),
        "offset": table.column("offset").to_numpy(),
        "origin": table.column("origin").to_numpy(),
        "target": target_codes(labels(table), targets),
    }


def timers_with_ids(kind: pa.ChunkedArray | pa.Array, id: pa.ChunkedArray | pa.Array) -> pa.Array:
    """Mask of the rows that the id index has: timers with ids."""
    mask = (kind.to_numpy() == Kind.TIMER) & id.is_valid().to_numpy(zero_copy_only=False)
    return pa.array(mask)


def target_codes(target: pa.ChunkedArray | pa.Array, codes: dict[str, int]) -> Int32s:
    """Codes of a column of targets (null: ""), int32[n]. New names get the next codes; all names beyond the first
    thousand share one."""
    column = target.combine_chunks() if isinstance(target, pa.ChunkedArray) else target
    encoded = column.fill_null("").dictionary_encode()
    name_codes = np.array([_code(name, codes) for name in encoded.dictionary.to_pylist()], dtype=np.int32)
    return name_codes[encoded.indices.to_numpy()] if len(name_codes) else np.empty(0, np.int32)


def timers_of(keys: Digests, rows: Positions, origin: Int64s, target: pa.ChunkedArray | pa.Array) -> Timers:
    """Timers with these keys, positions, origins and targets (null: the default)."""
    names: dict[str, int] = {}
    codes = target_codes(target, names)
    return Timers(keys=keys, at=rows.at, offset=rows.offset, origin=origin, target=codes, names=tuple(names))


def _code(name: str, codes: dict[str, int]) -> int:
    return codes.setdefault(label_of(name, codes), len(codes))


@dataclass(slots=True)
class Unstored:
    """Timers with ids that are in no segment. `runs` is a snapshot: it is replaced, never changed."""

    runs: tuple[Timers, ...] = ()
    _pruned_rows: int = field(default=0)

    def __len__(self) -> int:
        return sum(len(run) for run in self.runs)

    def add(self, timers: Timers, is_gone: Callable[[Timers], Bools]) -> None:
        """Add timers, sorted by key. Above twice the size after the last pruning, timers that are gone are dropped."""
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
        """Drop the timers that are gone: in a segment now, or finished."""
        left = (run[~is_gone(run)] for run in self.runs)
        self.runs = tuple(run for run in left if len(run))
        self._pruned_rows = len(self)


def _renamed(timers: Timers) -> Timers:
    """The same timers, with each name once."""
    codes: dict[str, int] = {}
    new_codes = np.array([_code(name, codes) for name in timers.names], dtype=np.int32)
    return Timers(
        keys=timers.keys, at=timers.at, offset=timers.offset, origin=timers.origin,
        target=new_codes[timers.target], names=tuple(codes),
    )  # fmt: skip
