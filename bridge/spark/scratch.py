"""Scratch directories: files that are useless after the end of their process.

Each directory is locked (flock) during the life of its process. A directory with a free lock was therefore left by a
killed process, and the next process removes it; process ids and containers do not matter. `systemd-tmpfiles` spares
locked directories. Other cleaners may not, so users call `is_there` before they rely on one.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Final

from bridge.errors import EnvironmentFailure

PREFIX: Final = "delay-bridge-scratch-"
ATTEMPTS: Final = 5
"""Attempts to create a directory: a sweeping process may remove it before it is locked."""
MEMORY: Final = Path("/dev/shm")
MEMORY_FREE_MIN: Final = 16 << 20
"""Free bytes that a tmpfs must have for Spark's own log, which is small."""
SOCKET_PATH_MAX: Final = 107
"""Bytes of a Unix domain socket's path (`sun_path` without its final NUL)."""


class Scratch:
    """A directory of this process below `parent`. Raises EnvironmentFailure if it cannot be created."""

    def __init__(self, parent: Path) -> None:
        sweep(parent)
        try:
            self.path, self._lock = _made(parent)
        except OSError as error:
            raise _refused(parent, error) from error

    def is_there(self) -> bool:
        """Whether the created directory still exists."""
        try:
            return self.path.stat().st_ino == os.fstat(self._lock).st_ino
        except OSError:
            return False

    def renew(self) -> None:
        """Create the directory again at the same path, which other processes know. Raises EnvironmentFailure."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = _locked(self.path)
        except OSError as error:
            raise _refused(self.path.parent, error) from error
        os.close(self._lock)
        self._lock = lock

    def close(self) -> None:
        """Remove the directory with its contents."""
        shutil.rmtree(self.path, ignore_errors=True)
        with suppress(OSError):
            os.close(self._lock)


def sweep(parent: Path) -> None:
    """Remove the scratch directories below `parent` whose processes have ended, except those of other users."""
    for path in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):
            lock = _locked(path)
            try:
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)


@contextmanager
def in_memory() -> Iterator[Path]:
    """A scratch directory in memory if the machine has a suitable tmpfs, else in the temporary directory. Raises
    EnvironmentFailure."""
    try:
        usable = os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > MEMORY_FREE_MIN
    except OSError:
        usable = False
    with closing(Scratch(MEMORY if usable else temporary())) as scratch:
        yield scratch.path


@contextmanager
def for_a_socket(name: str) -> Iterator[Path]:
    """The path of a Unix domain socket called `name`, in a scratch directory with a path of legal length. Raises
    EnvironmentFailure."""
    parents = [temporary(), Path("/tmp"), Path("/var/tmp"), MEMORY]
    longest = len(os.fsencode(f"/{PREFIX}12345678/{name}"))
    fitting = [path for path in parents if len(os.fsencode(path)) + longest <= SOCKET_PATH_MAX]
    refused: EnvironmentFailure | None = None
    for parent in fitting:
        try:
            scratch = Scratch(parent)
        except EnvironmentFailure as error:
            refused = refused or error
            continue
        with closing(scratch):
            yield scratch.path / name
            return
    raise refused or EnvironmentFailure(
        f"the path of {temporary()} is too long for a socket",
        hint="Set TMPDIR to a directory with a path of at most 80 characters.",
        code="DB-3086",
    )


def temporary() -> Path:
    """The temporary directory. Raises EnvironmentFailure if this user may not write to any."""
    try:
        return Path(tempfile.gettempdir())
    except OSError as error:
        raise EnvironmentFailure(
            "no temporary directory is writable",
            hint="Mount one at /tmp, or set TMPDIR to a writable directory with free space.",
            reason=error.strerror or errno.errorcode.get(error.errno or 0, "unknown"),
            code="DB-3085",
        ) from error


def _refused(parent: Path, error: OSError) -> EnvironmentFailure:
    return EnvironmentFailure(
        f"cannot create a scratch directory in {parent}: {error.strerror}",
        hint="Make room there, or set TMPDIR to a directory that this user may write.",
        code="DB-3085",
    )


def _made(parent: Path) -> tuple[Path, int]:
    """A new directory, and the descriptor of its lock. Raises OSError."""
    for _ in range(ATTEMPTS - 1):
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        with suppress(FileNotFoundError, BlockingIOError):
            lock = _locked(path)
            if path.exists():
                return path, lock
            os.close(lock)
    path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    return path, _locked(path)


def _locked(path: Path) -> int:
    """A descriptor of the locked directory. Raises OSError if another process has the lock."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
