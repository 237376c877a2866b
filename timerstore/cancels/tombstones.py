"""Tombstones, the traces of cancels (invariant I7).

A tombstone covers all unfinished timers of an id, or of an origin, with origin offsets below `offset`. Each key has one
tombstone; a later cancel raises its offset. The tombstone of a command (commands.py) has another key for the origin,
and covers all rows of the origin whose *own* offsets are below `offset`.

Tombstones form sorted runs, the newest last: small runs in memory, the others in column files that flushes have
written, and the checkpoint names. Runs of like size are merged, in memory and on disk, so that a tombstone is written a
logarithmic number of times, and a look-up asks few runs. A merge keeps a key's largest offset and latest expiry, so a
key may be in several runs. A file may also have tombstones from above the checkpoint's offset: the cancels are read
from Kafka again, and make the same tombstones.

A merge drops expired tombstones (`Cancels.expired_before_ms` has the condition). It also takes in each file of any size
that has mostly expired. So one tombstone with a late expiry does not keep a file of expired ones, and for each
tombstone that is written again another one is dropped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from timerstore.cancels.digests import ORIGIN, Digests, are_commands, are_of, concat_digests, index_of
from timerstore.disk import column_file as columns
from timerstore.disk import files
from timerstore.disk.checkpoint import NamedFile
from timerstore.disk.column_file import ColumnFile, slices
from timerstore.errors import Corrupt
from timerstore.rows.position import AT_MIN, OFFSET_MAX, Bools, Int64s

SCHEMA: Final = {"hi": "<u8", "lo": "<u8", "offset": "<i8", "expire_ms": "<i8"}
MERGE_STEP_ROWS: Final = 32_768
"""A merge of files holds this many rows of each in memory."""

HOUR_MS: Final = 3_600_000

NONE: Final = -1
"""The offset without a tombstone."""


@dataclass(frozen=True, slots=True)
class Highest:
    """The largest offsets of tombstones: of all (no timer of a higher origin is covered), of cancels by origin, and of
    commands (these cover no row of a higher offset); -1: no tombstone."""

    any: int = NONE
    by_origin: int = NONE
    by_command: int = NONE

    def raised(self, run: Run) -> Highest:
        """The largest offsets with a run's tombstones added."""
        if not len(run):
            return self
        parts = (run.offset[are_of(ORIGIN, run.keys)], run.offset[are_commands(run.keys)])
        by_origin, by_command = (int(part.max(initial=NONE)) for part in parts)
        return self.joined(Highest(int(run.offset.max()), by_origin, by_command))

    def joined(self, other: Highest) -> Highest:
        return Highest(
            max(self.any, other.any), max(self.by_origin, other.by_origin), max(self.by_command, other.by_command)
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Run:
    """Tombstones sorted by their distinct keys; `offset` and `expire_ms` are int64[n]."""

    keys: Digests
    offset: Int64s
    expire_ms: Int64s

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, key: slice | Bools) -> Run:
        return Run(keys=self.keys[key], offset=self.offset[key], expire_ms=self.expire_ms[key])

    def look_up(self, wanted: Digests) -> tuple[Int64s, Int64s]:
        return _look_up(self.keys, self.offset, self.expire_ms, wanted)


class TombstoneFile:
    """A run on disk."""

    def __init__(self, file: ColumnFile) -> None:
        self.file = file
        self.named = NamedFile(name=file.path.name, bytes=file.bytes, crc=file.crc)
        self.highest = Highest(*file.note["highest"])
        self.half_expires_ms: int = file.note.get("half_expires_ms", file.note["expire_ms_max"])
        """Half of it or more expires before this time (all of it, in a file of an earlier version)."""

    def __len__(self) -> int:
        return len(self.file)

    def run(self, part: slice = slice(None)) -> Run:
        """Rows of the file; their columns stay on disk."""
        return Run(
            keys=Digests(self.file["hi"][part], self.file["lo"][part]),
            offset=self.file["offset"][part],
            expire_ms=self.file["expire_ms"][part],
        )

    def look_up(self, wanted: Digests) -> tuple[Int64s, Int64s]:
        return _look_up(Digests(self.file["hi"], self.file["lo"]), self.file["offset"], self.file["expire_ms"], wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """All tombstones of one moment."""

    memory: tuple[Run, ...]
    files: tuple[TombstoneFile, ...]
    highest: Highest

    def pieces(self) -> Iterator[Run]:
        """All tombstones, in pieces of bounded size."""
        yield from self.memory
        for file in self.files:
            yield from (file.run(part) for part in slices(len(file), MERGE_STEP_ROWS))

    def merged(self) -> Iterator[Run]:
        """All tombstones, each key once, in pieces of bounded size."""
        return TombstoneMerge(runs=self.memory, absorbed=self.files, expired_before_ms=AT_MIN).pieces()

    def look_up(self, wanted: Digests) -> tuple[Int64s, Int64s]:
        """(offset, expire_ms) of the tombstone of each wanted key, int64[n] each; -1: none."""
        offset, expire_ms = np.full(len(wanted), -1, np.int64), np.full(len(wanted), -1, np.int64)
        runs: tuple[Run | TombstoneFile, ...] = (*self.memory, *self.files)
        for run in runs:
            newest = run.look_up(wanted)
            np.maximum(offset, newest[0], out=offset)
            np.maximum(expire_ms, newest[1], out=expire_ms)
        return offset, expire_ms

    def __len__(self) -> int:
        """The number of runs."""
        return len(self.memory) + len(self.files)


class Tombstones:
    """See the module. The caller's lock guards it. Runs are immutable, so a `Lookup` never changes."""

    def __init__(self) -> None:
        self._frozen: tuple[Run, ...] = ()
        self._memory: tuple[Run, ...] = ()
        self._files: tuple[TombstoneFile, ...] = ()
        self._highest = Highest()

    def __len__(self) -> int:
        """Rows of all runs (a key in two of them counts twice)."""
        return self.memory_rows + sum(len(file) for file in self._files)

    @property
    def highest(self) -> Highest:
        """The largest offsets of all tombstones."""
        return self._highest

    @property
    def is_any(self) -> bool:
        """Whether there is a tombstone."""
        return bool(self._memory or self._files or self._frozen)

    @property
    def memory_rows(self) -> int:
        runs = self._frozen + self._memory
        return sum(map(len, runs)) if runs else 0

    @property
    def files(self) -> tuple[TombstoneFile, ...]:
        """The files that the checkpoint names, oldest first."""
        return self._files

    def lookup(self) -> Lookup:
        return Lookup(memory=(*self._frozen, *self._memory), files=self._files, highest=self._highest)

    def restore(self, files: Sequence[TombstoneFile]) -> None:
        self._files = tuple(files)
        for file in files:
            self._highest = self._highest.joined(file.highest)

    def add(self, run: Run) -> None:
        """Add new tombstones."""
        if not len(run):
            return
        runs = [*self._memory, run]
        while len(runs) > 1 and len(runs[-2]) < 2 * len(runs[-1]):
            newest = runs.pop()
            runs[-1] = merged_runs([runs[-1], newest])
        self._memory = tuple(runs)
        self._highest = self._highest.raised(run)

    def merge(self, expired_before_ms: int) -> TombstoneMerge | None:
        """The next merge: all tombstones in memory, which are frozen (later ones are kept apart), the newest files
        that are not much larger, and all mostly expired files. None: there is no tombstone to merge."""
        self._frozen, self._memory = (*self._frozen, *self._memory), ()
        absorbed, rows, is_growing = [], sum(map(len, self._frozen)), True
        for file in reversed(self._files):
            is_growing = is_growing and len(file) < 2 * rows
            if is_growing or file.half_expires_ms < expired_before_ms:
                absorbed.append(file)
                rows += len(file)
        if not rows:
            return None
        return TombstoneMerge(runs=self._frozen, absorbed=tuple(absorbed), expired_before_ms=expired_before_ms)

    def stored(self, absorbed: Sequence[TombstoneFile], file: TombstoneFile | None) -> None:
        """Put `file` in place of the frozen runs and of the files `absorbed`; None: no tombstone is left."""
        self._frozen = ()
        kept = tuple(f for f in self._files if f not in absorbed)
        self._files = kept if file is None else (*kept, file)


def merged_runs(runs: Sequence[Run]) -> Run:
    """One run of all runs, with the largest offset and the latest expiry of each key."""
    keys = concat_digests([run.keys for run in runs])
    order = keys.order()
    keys = keys[order]
    starts = keys.starts()
    if not len(starts):
        return Run(keys=keys, offset=np.empty(0, np.int64), expire_ms=np.empty(0, np.int64))
    return Run(
        keys=keys[starts],
        offset=np.maximum.reduceat(np.concatenate([run.offset for run in runs])[order], starts),
        expire_ms=np.maximum.reduceat(np.concatenate([run.expire_ms for run in runs])[order], starts),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TombstoneMerge:
    """A merge of runs in memory and of files into one file, without tombstones that expire before
    `expired_before_ms`. An offset of `above` or higher is lowered to `bound`."""

    runs: tuple[Run, ...]
    absorbed: tuple[TombstoneFile, ...]
    expired_before_ms: int
    above: int = OFFSET_MAX
    bound: int = OFFSET_MAX

    @classmethod
    def cut(cls, file: TombstoneFile, above: int, bound: int) -> TombstoneMerge:
        """All of one file, with offsets of `above` or higher lowered to `bound`."""
        return cls(runs=(), absorbed=(file,), expired_before_ms=AT_MIN, above=above, bound=bound)

    def pieces(self) -> Iterator[Run]:
        """The merged rows, piece by piece. Each run has a key at the end of its next step; a piece ends at the smallest
        of these keys, so that all rows of a key are in one piece."""
        parts = [_Part(run.keys.hi, run.__getitem__) for run in self.runs]
        parts += [_Part(file.file["hi"], file.run) for file in self.absorbed]
        while begun := [part for part in parts if part.done < len(part.hi)]:
            until = min(part.hi[min(part.done + MERGE_STEP_ROWS, len(part.hi)) - 1] for part in begun)
            piece = merged_runs([part.until(until) for part in begun])
            is_above = piece.offset >= self.above
            if is_above.any():
                piece = replace(piece, offset=np.where(is_above, self.bound, piece.offset))
            yield piece[piece.expire_ms >= self.expired_before_ms]


@dataclass(slots=True)
class _Part:
    """A run in a merge: its column `hi`, a function that returns its rows, and the number of merged rows."""

    hi: npt.NDArray[np.uint64]
    rows: Callable[[slice], Run]
    done: int = 0

    def until(self, hi: np.uint64) -> Run:
        start, self.done = self.done, self.done + int(np.searchsorted(self.hi[self.done :], hi, side="right"))
        return self.rows(slice(start, self.done))


def write(path: Path, merge: TombstoneMerge) -> TombstoneFile | None:
    """Write the file of a merge; None if no tombstone is left. Memory is bounded.

    Raises DiskFull (nothing was written) or DiskFailure.
    """
    highest, expire_ms_max, hours = Highest(), 0, Counter[int]()

    def pieces() -> Iterator[dict[str, npt.NDArray[Any]]]:
        nonlocal highest, expire_ms_max
        for piece in merge.pieces():
            if len(piece):
                highest, expire_ms_max = highest.raised(piece), max(expire_ms_max, int(piece.expire_ms.max()))
                found, counts = np.unique(piece.expire_ms // HOUR_MS, return_counts=True)
                hours.update(dict(zip(found.tolist(), counts.tolist(), strict=True)))
                yield {"hi": piece.keys.hi, "lo": piece.keys.lo, "offset": piece.offset, "expire_ms": piece.expire_ms}

    def note() -> dict[str, Any]:
        half_ms = min(expire_ms_max, _half(hours) * HOUR_MS)
        return {"highest": astuple(highest), "expire_ms_max": expire_ms_max, "half_expires_ms": half_ms}

    columns.write(path, SCHEMA, sum(map(len, merge.runs)) + sum(map(len, merge.absorbed)), pieces(), note)
    written = columns.read(path)
    for file in merge.absorbed:
        file.file.drop_pages()
    if len(written):
        return TombstoneFile(written)
    files.remove(path)
    return None


def _half(counts: Counter[int]) -> int:
    """The lowest number with at least half of the counts below it."""
    numbers = sorted(counts)
    below = np.cumsum([counts[number] for number in numbers])
    return numbers[int(np.searchsorted(below, (below[-1] + 1) // 2))] + 1 if numbers else 0


def read(path: Path, expected: NamedFile) -> TombstoneFile:
    """Open a file that the checkpoint names. Raises Corrupt, or DiskFailure if it cannot be read."""
    with files.reading(path):
        opened = TombstoneFile(columns.read(path))
    if opened.named != expected:
        raise Corrupt(f"{path.name} is not the file that the checkpoint names (size or checksum)", path=str(path))
    return opened


def _look_up(keys: Digests, offset: Int64s, expire_ms: Int64s, wanted: Digests) -> tuple[Int64s, Int64s]:
    at = index_of(keys, wanted)
    there = at >= 0
    first = np.where(there, at, 0)
    return np.where(there, offset[first], -1), np.where(there, expire_ms[first], -1)
