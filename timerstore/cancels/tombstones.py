"""Tombstones: what a cancel leaves behind (invariant I7).

A tombstone says: every unfinished timer with this id, or with this origin, and an origin offset below
`offset` is cancelled. There is one for a key; a later cancel moves its offset up. That of a command (commands.py) has a
key of its own for the same origin, and says: every row of this origin whose *own* offset lies below `offset`.

They are sorted runs, newest last: small ones in memory, the others in column files that a flush has written and the
checkpoint names. Memory runs of like size are merged, and so are files, so that a tombstone is written a logarithmic
number of times and a lookup asks few runs. Merging keeps the largest offset and the latest expiry of a key, so a key
in several runs does no harm, nor does a file with more in it than the checkpoint's offsets cover: what is read from
Kafka again makes the same tombstone again.

A tombstone is dropped, by a merge, when it has expired (see `Cancels.expired_before_ms` for when that may be).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from timerstore.cancels.digests import ORIGIN, Digests, are_commands, are_of, concat_digests, find
from timerstore.disk import column_file as columns
from timerstore.disk import files
from timerstore.disk.checkpoint import NamedFile
from timerstore.disk.column_file import ColumnFile
from timerstore.errors import Corrupt
from timerstore.rows.position import AT_MIN, OFFSET_MAX, Bools, Int64s

SCHEMA: Final = {"hi": "<u8", "lo": "<u8", "offset": "<i8", "expire_ms": "<i8"}
MERGE_STEP_ROWS: Final = 32_768
"""A merge of files holds this many rows of each in memory."""

NONE: Final = -1
"""In place of an offset, where there is no tombstone."""


@dataclass(frozen=True, slots=True)
class Highest:
    """The largest offsets of tombstones, -1 where there are none: of all (a timer of a higher origin cannot be
    covered), of cancels by origin, and of commands (a row of a higher offset cannot be covered by one)."""

    any: int = NONE
    by_origin: int = NONE
    by_command: int = NONE

    def raised(self, run: Run) -> Highest:
        """With the tombstones of a run."""
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
    """Tombstones in the order of their distinct keys; `offset` and `expire_ms` int64[n]."""

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
        self.expire_ms_max: int = file.note["expire_ms_max"]

    def __len__(self) -> int:
        return len(self.file)

    def run(self, part: slice = slice(None)) -> Run:
        """Rows of it; the columns stay where they are, on disk."""
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

    def runs(self) -> Iterator[Run]:
        """All of it; the columns of files stay on disk."""
        yield from self.memory
        yield from (file.run() for file in self.files)

    def look_up(self, wanted: Digests) -> tuple[Int64s, Int64s]:
        """(offset, expire_ms) of each wanted key's tombstone, int64[n] each; -1 where there is none."""
        offset, expire_ms = np.full(len(wanted), -1, np.int64), np.full(len(wanted), -1, np.int64)
        runs: tuple[Run | TombstoneFile, ...] = (*self.memory, *self.files)
        for each in runs:
            found = each.look_up(wanted)
            np.maximum(offset, found[0], out=offset)
            np.maximum(expire_ms, found[1], out=expire_ms)
        return offset, expire_ms

    def __len__(self) -> int:
        """How many runs there are."""
        return len(self.memory) + len(self.files)


class Tombstones:
    """See the module. One lock outside guards it; runs are immutable, so a `Lookup` stays what it is."""

    def __init__(self) -> None:
        self._frozen: tuple[Run, ...] = ()
        self._memory: tuple[Run, ...] = ()
        self._files: tuple[TombstoneFile, ...] = ()
        self._highest = Highest()

    def __len__(self) -> int:
        """Rows of all runs (a key in two of them counts twice)."""
        return self.memory_rows + sum(len(file) for file in self._files)

    @property
    def memory_rows(self) -> int:
        return sum(len(run) for run in (*self._frozen, *self._memory))

    @property
    def files(self) -> tuple[TombstoneFile, ...]:
        """What the checkpoint names, oldest first."""
        return self._files

    def lookup(self) -> Lookup:
        return Lookup(memory=(*self._frozen, *self._memory), files=self._files, highest=self._highest)

    def restore(self, files: Sequence[TombstoneFile]) -> None:
        self._files = tuple(files)
        for file in files:
            self._highest = self._highest.joined(file.highest)

    def add(self, run: Run) -> None:
        """New tombstones."""
        if not len(run):
            return
        runs = [*self._memory, run]
        while len(runs) > 1 and len(runs[-2]) < 2 * len(runs[-1]):
            newest = runs.pop()
            runs[-1] = merged([runs[-1], newest])
        self._memory = tuple(runs)
        self._highest = self._highest.raised(run)

    def merge(self, expired_before_ms: int) -> TombstoneMerge | None:
        """What no file holds yet, to be written (what comes from now on is kept apart from it), and the files to be
        merged with it: the newest, while they are not much larger, and those that have expired. None: nothing is to be
        done."""
        self._frozen, self._memory = (*self._frozen, *self._memory), ()
        absorbed, rows, is_growing = [], sum(map(len, self._frozen)), True
        for file in reversed(self._files):
            is_growing = is_growing and len(file) < 2 * rows
            if is_growing or file.expire_ms_max < expired_before_ms:
                absorbed.append(file)
                rows += len(file)
        if not rows:
            return None
        return TombstoneMerge(runs=self._frozen, absorbed=tuple(absorbed), expired_before_ms=expired_before_ms)

    def stored(self, absorbed: Sequence[TombstoneFile], file: TombstoneFile | None) -> None:
        """`file` (None: nothing was left) has taken the place of what was frozen and of the files `absorbed`."""
        self._frozen = ()
        kept = tuple(f for f in self._files if f not in absorbed)
        self._files = kept if file is None else (*kept, file)


def merged(runs: Sequence[Run]) -> Run:
    """One run of all: the largest offset and the latest expiry of each key."""
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
    """Tombstones on their way into one file: runs of memory and files, without what expires before a time. A tombstone
    at `above` or higher is lowered to `bound`."""

    runs: tuple[Run, ...]
    absorbed: tuple[TombstoneFile, ...]
    expired_before_ms: int
    above: int = OFFSET_MAX
    bound: int = OFFSET_MAX

    @classmethod
    def cut(cls, file: TombstoneFile, above: int, bound: int) -> TombstoneMerge:
        """All of one file, with those at `above` lowered to `bound`."""
        return cls(runs=(), absorbed=(file,), expired_before_ms=AT_MIN, above=above, bound=bound)

    def pieces(self) -> Iterator[Run]:
        """The merged rows of all, piece by piece: each piece ends where the first of the runs ends its next step, so
        that every key is in one piece only."""
        parts = [_Part(run.keys.hi, run.__getitem__) for run in self.runs]
        parts += [_Part(file.file["hi"], file.run) for file in self.absorbed]
        while begun := [part for part in parts if part.done < len(part.hi)]:
            until = min(part.hi[min(part.done + MERGE_STEP_ROWS, len(part.hi)) - 1] for part in begun)
            piece = merged([part.until(until) for part in begun])
            is_above = piece.offset >= self.above
            if is_above.any():
                piece = replace(piece, offset=np.where(is_above, self.bound, piece.offset))
            yield piece[piece.expire_ms >= self.expired_before_ms]


@dataclass(slots=True)
class _Part:
    """A run under way: its column `hi`, how to get rows of it, and how far it is merged."""

    hi: npt.NDArray[np.uint64]
    rows: Callable[[slice], Run]
    done: int = 0

    def until(self, hi: np.uint64) -> Run:
        start, self.done = self.done, self.done + int(np.searchsorted(self.hi[self.done :], hi, side="right"))
        return self.rows(slice(start, self.done))


def write(path: Path, merge: TombstoneMerge) -> TombstoneFile | None:
    """Write the file of a merge; None when nothing is left. Memory is bounded.

    Raises DiskFull (nothing was written) or DiskFailure.
    """
    highest, expire_ms_max = Highest(), 0

    def pieces() -> Iterator[dict[str, npt.NDArray[Any]]]:
        nonlocal highest, expire_ms_max
        for piece in merge.pieces():
            if len(piece):
                highest, expire_ms_max = highest.raised(piece), max(expire_ms_max, int(piece.expire_ms.max()))
                yield {"hi": piece.keys.hi, "lo": piece.keys.lo, "offset": piece.offset, "expire_ms": piece.expire_ms}

    def note() -> dict[str, Any]:
        return {"highest": astuple(highest), "expire_ms_max": expire_ms_max}

    columns.write(path, SCHEMA, sum(map(len, merge.runs)) + sum(map(len, merge.absorbed)), pieces(), note)
    written = columns.read(path)
    for file in merge.absorbed:
        file.file.drop_pages()
    if len(written):
        return TombstoneFile(written)
    files.remove(path)
    return None


def read(path: Path, expected: NamedFile) -> TombstoneFile:
    """Open a file that the checkpoint names. Raises Corrupt; DiskFailure when it cannot be read."""
    with files.reading(path):
        opened = TombstoneFile(columns.read(path))
    if opened.named != expected:
        raise Corrupt(f"{path.name} is not the file that the checkpoint names (size or checksum)", path=str(path))
    return opened


def _look_up(keys: Digests, offset: Int64s, expire_ms: Int64s, wanted: Digests) -> tuple[Int64s, Int64s]:
    at = find(keys, wanted)
    there = at >= 0
    first = np.where(there, at, 0)
    return np.where(there, offset[first], -1), np.where(there, expire_ms[first], -1)
