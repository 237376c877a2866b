"""File names of a store's directory, and the one way to write files into it.

    temporary name -> write -> fsync -> rename -> fsync of the directory

After a crash before the rename there is a temporary file, which the next start removes; after the rename the file is
whole. A failed fsync leaves the disk's content unknown, so it is never retried (the lesson of PostgreSQL's "fsyncgate",
2018): it is a `DiskFailure`, and the process ends.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from timerstore.errors import Corrupt, DirectoryInUse, DiskFailure, DiskFull

CHECKPOINT = "checkpoint.json"
RESERVE = "reserve"
LOCK = "lock"
SEGMENT_SUFFIX = ".parquet"
IDS_SUFFIX = ".ids"
ORIGINS_SUFFIX = ".origins"
INDEX_SUFFIXES = (IDS_SUFFIX, ORIGINS_SUFFIX)
TOMBSTONES_SUFFIX = ".tombstones"
TEMPORARY_SUFFIX = ".tmp"
CORRUPT_SUFFIX = ".corrupt"
ASIDE_SUFFIX = ".aside"
RESERVE_BYTES = 1 << 16
FULL = (errno.ENOSPC, errno.EDQUOT)


_VOLUME = "check the volume of store.directory"


def segment_name(number: int) -> str:
    return f"segment-{number:010d}{SEGMENT_SUFFIX}"


def tombstones_name(number: int) -> str:
    return f"cancels-{number:010d}{TOMBSTONES_SUFFIX}"


def number_of(name: str) -> int:
    """The number in the name of a segment, or of a file of tombstones."""
    return int(name.partition("-")[2].partition(".")[0])


def lock_directory(directory: Path) -> int:
    """Make the directory, if it is missing, and take its lock. The lock is held until the descriptor is closed, or the
    process ends.

    Returns the descriptor. Raises DirectoryInUse or DiskFailure.
    """
    hint = "check store.directory: it must be a directory that this user may write to, on a file system with locks"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise DiskFailure(f"cannot use {directory}: {error}", hint=hint, code="DB-3023") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if not isinstance(error, BlockingIOError):
            raise DiskFailure(f"cannot lock {directory}: {error}", hint=hint, code="DB-3023") from error
        raise DirectoryInUse(
            f"{directory} is in use by another process",
            hint="give every instance a store.directory of its own, or end the other process",
            code="DB-3024",
        ) from error
    return descriptor


def make_directory(directory: Path) -> None:
    """Make a directory durably, if it is missing. Raises DiskFailure."""
    try:
        missing = [each for each in (directory, *directory.parents) if not each.is_dir()]
        directory.mkdir(parents=True, exist_ok=True)
        for each in missing:
            fsync(each.parent)
    except OSError as error:
        hint = "check store.directory: it must be a directory that this user may write to"
        raise DiskFailure(f"cannot use {directory}: {error}", hint=hint, code="DB-3023") from error


def temporary_of(path: Path) -> Path:
    """The temporary name of a file, until it is whole."""
    return path.with_name(path.name + TEMPORARY_SUFFIX)


def write_durably(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary file, then make it durable as `path`. On failure the temporary file is removed.
    Raises DiskFull or DiskFailure."""
    with writing(path) as temporary:
        write(temporary)
    publish(path)


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """A context that writes into the temporary file of `path`, which it gets. On failure that file is removed. Raises
    DiskFull or DiskFailure."""
    temporary = temporary_of(path)
    try:
        yield temporary
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        if not isinstance(error, OSError):
            raise
        if error.errno in FULL:
            raise DiskFull(
                f"no room to write {path.name} in {path.parent}",
                hint="free disk space or enlarge the volume; ingest then goes on by itself",
                code="DB-3028",
            ) from error
        raise DiskFailure(f"cannot write {path}: {error}", hint=_VOLUME, code="DB-3025") from error


@contextmanager
def reading(path: Path, *damages: type[Exception]) -> Iterator[None]:
    """A context that reads a file. Wrong content (`damages`, and pyarrow's OSErrors without an errno) raises Corrupt,
    and so does a missing file. An errno is a failure of the volume, not of the file: DiskFailure. A MemoryError passes
    through."""
    damage: tuple[type[Exception], ...] = (ValueError, LookupError, TypeError, *damages)
    try:
        yield
    except MemoryError:  # one of pyarrow's is an ArrowException, too
        raise
    except FileNotFoundError as error:
        raise Corrupt(f"{path.name} is missing", path=str(path)) from error
    except OSError as error:
        if error.errno is not None:
            raise DiskFailure(f"cannot read {path}: {error}", hint=_VOLUME, code="DB-3026") from error
        raise Corrupt(f"{path.name} cannot be read: {error}", path=str(path)) from error
    except damage as error:
        raise Corrupt(f"{path.name} cannot be parsed: {type(error).__name__}: {error}", path=str(path)) from error


def publish(path: Path) -> None:
    """Make the temporary file of `path` durable under its name. Raises DiskFailure."""
    try:
        fsync(temporary_of(path))
        os.replace(temporary_of(path), path)
        fsync(path.parent)
    except OSError as error:
        raise DiskFailure(
            f"cannot make {path} durable: {error}",
            hint="check the volume of store.directory; the index may be deleted: it is rebuilt from Kafka",
            code="DB-3025",
        ) from error


def keep_reserve(directory: Path) -> None:
    """Reserve room for one more checkpoint on a full disk: files can be removed after it. Without room now, no reserve
    is made."""
    path = directory / RESERVE
    try:
        wanted = max(RESERVE_BYTES, 2 * (directory / CHECKPOINT).stat().st_size)
        if path.exists() and path.stat().st_size >= wanted:
            return
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            os.posix_fallocate(descriptor, 0, wanted)
        finally:
            os.close(descriptor)
    except OSError:  # no room, or no support by the file system; the reserve is useful, not necessary
        with suppress(OSError):
            path.unlink()


def give_reserve(directory: Path) -> bool:
    """Free the reserve. Returns whether there was one. Raises DiskFailure."""
    path = directory / RESERVE
    there = path.exists()
    remove(path)
    return there


def remove(path: Path) -> None:
    """Remove a file, unless it is gone already; open readers of it can go on. Raises DiskFailure."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise DiskFailure(f"cannot remove {path}: {error}", hint=_VOLUME, code="DB-3025") from error


def fsync(path: Path) -> None:
    """Flush a file or a directory to the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_directory(directory: Path) -> None:
    """Make renames and removals in a directory durable. Raises DiskFailure."""
    try:
        fsync(directory)
    except OSError as error:
        raise DiskFailure(f"cannot sync {directory}: {error}", hint=_VOLUME, code="DB-3025") from error


def set_aside(path: Path, now_ms: int, suffix: str = CORRUPT_SUFFIX) -> Path:
    """Rename a file, so that no start reads it and an operator can examine it. Returns the new path. Raises
    DiskFailure."""
    aside = path.with_name(f"{path.name}.{now_ms}{suffix}")
    try:
        os.replace(path, aside)
    except OSError as error:
        raise DiskFailure(f"cannot rename {path}: {error}", hint=_VOLUME, code="DB-3025") from error
    return aside


def unreferenced(directory: Path, named: set[str]) -> list[Path]:
    """Temporary files; segments, with their indexes, and files of tombstones that are not in `named`; sorted."""
    paths = []
    for path in directory.iterdir():
        main = path.with_suffix(SEGMENT_SUFFIX) if path.suffix in INDEX_SUFFIXES else path
        orphan = main.suffix in (SEGMENT_SUFFIX, TOMBSTONES_SUFFIX) and main.name not in named
        if orphan or path.name.endswith(TEMPORARY_SUFFIX):
            paths.append(path)
    return sorted(paths)
