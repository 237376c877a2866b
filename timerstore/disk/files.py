"""File names of a store's directory, and the one way in which files get there.

    temporary name -> write -> fsync -> rename -> fsync of the directory

A crash before the rename leaves a temporary file, which opening removes; after it the file is whole. A failed fsync
says nothing about what is on the disk, so it is never retried (the lesson of PostgreSQL's "fsyncgate", 2018): it is a
`DiskFailure`, and the process ends.
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
    """Make the directory if need be and take its lock, held until the descriptor is closed (also by the process's
    death).

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
    """Make a directory if need be, durably. Raises DiskFailure."""
    try:
        if not directory.is_dir():
            directory.mkdir(parents=True, exist_ok=True)
            fsync(directory.parent)
    except OSError as error:
        hint = "check store.directory: it must be a directory that this user may write to"
        raise DiskFailure(f"cannot use {directory}: {error}", hint=hint, code="DB-3023") from error


def temporary_of(path: Path) -> Path:
    """The name under which a file is written."""
    return path.with_name(path.name + TEMPORARY_SUFFIX)


def write_durably(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary file, then make it durable under `path`; on failure the temporary file is
    removed."""
    with writing(path) as temporary:
        write(temporary)
    publish(path)


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """Something is written into the temporary file of `path`, which is given; on failure that file is removed. Raises
    DiskFull or DiskFailure."""
    temporary = temporary_of(path)
    try:
        yield temporary
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        if error.errno in FULL:
            raise DiskFull(
                f"no room to write {path.name} in {path.parent}",
                hint="free disk space or enlarge the volume; ingest goes on by itself when there is room",
                code="DB-3028",
            ) from error
        raise DiskFailure(f"cannot write {path}: {error}", hint=_VOLUME, code="DB-3025") from error


@contextmanager
def reading(path: Path, *damages: type[Exception]) -> Iterator[None]:
    """A file is read: what is wrong with its content (`damages`, and what pyarrow calls an OSError without a number) is
    Corrupt, and so is its absence. An errno is the volume's, and says nothing of the file: DiskFailure. Nor does a
    MemoryError, which is let through."""
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
        raise Corrupt(f"{path.name} cannot be understood: {type(error).__name__}: {error}", path=str(path)) from error


def publish(path: Path) -> None:
    """Make the temporary file of `path` durable under its name. Raises DiskFailure."""
    try:
        fsync(temporary_of(path))
        os.replace(temporary_of(path), path)
        fsync(path.parent)
    except OSError as error:
        raise DiskFailure(
            f"cannot make {path} durable: {error}",
            hint="check the volume of store.directory; the index can be deleted, it is rebuilt from Kafka",
            code="DB-3025",
        ) from error


def keep_reserve(directory: Path) -> None:
    """Keep room for one more checkpoint, after which more can be freed, when the disk is full; where there is none now,
    none is kept."""
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
    except OSError:  # no room, or a file system that cannot: what is kept would be worth having, not needed
        with suppress(OSError):
            path.unlink()


def give_reserve(directory: Path) -> bool:
    """Give the room up that was kept; whether there was any. Raises DiskFailure."""
    path = directory / RESERVE
    there = path.exists()
    remove(path)
    return there


def remove(path: Path) -> None:
    """Remove a file that may be gone already; what has it open can go on reading. Raises DiskFailure."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise DiskFailure(f"cannot remove {path}: {error}", hint=_VOLUME, code="DB-3025") from error


def fsync(path: Path) -> None:
    """Flush a file or a directory to the disk."""
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
    """Rename a file so that it is not read again, and can be looked at; returns the new path. Raises DiskFailure."""
    aside = path.with_name(f"{path.name}.{now_ms}{suffix}")
    try:
        os.replace(path, aside)
    except OSError as error:
        raise DiskFailure(f"cannot rename {path}: {error}", hint=_VOLUME, code="DB-3025") from error
    return aside


def unreferenced(directory: Path, named: set[str]) -> list[Path]:
    """Temporary files, and segments and tombstones that no checkpoint names, and what lies beside a segment."""
    found = []
    for path in directory.iterdir():
        main = path.with_suffix(SEGMENT_SUFFIX) if path.suffix in INDEX_SUFFIXES else path
        orphan = main.suffix in (SEGMENT_SUFFIX, TOMBSTONES_SUFFIX) and main.name not in named
        if orphan or path.name.endswith(TEMPORARY_SUFFIX):
            found.append(path)
    return sorted(found)
