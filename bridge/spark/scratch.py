"""Scratch directories: files that nobody needs after their process has ended.

Each is locked (flock) for as long as its process lives. So a directory whose lock is free was left by a process that
was killed, and the next process removes it, whatever its process id and container were. `systemd-tmpfiles` leaves
locked directories alone; other cleaners may not, so their users ask `is_there` before they rely on one.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Self

from bridge.errors import EnvironmentFailure

PREFIX: Final = "delay-bridge-scratch-"
ATTEMPTS: Final = 5
"""A process that sweeps may remove a directory between its making and its locking."""
MEMORY: Final = Path("/dev/shm")
MEMORY_FREE_MIN: Final = 16 << 20
"""Bytes that a tmpfs must have left for Spark's own log, which takes a few."""
SOCKET_PATH_MAX: Final = 107
"""Bytes of a Unix domain socket's path (`sun_path` less its end)."""


class Scratch:
    """A directory of this process below `parent`. Raises EnvironmentFailure where none can be made."""

    def __init__(self, parent: Path) -> None:
        sweep(parent)
        try:
            self.path, self._lock = _made(parent)
        except OSError as error:
            raise _refused(parent, error) from error

    def is_there(self) -> bool:
        """Whether the directory still exists, and is the one that was made."""
        try:
            return self.path.stat().st_ino == os.fstat(self._lock).st_ino
        except OSError:
            return False

    def renew(self) -> None:
        """Make it anew at the same path, for processes that know it by that. Raises EnvironmentFailure."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = _locked(self.path)
        except OSError as error:
            raise _refused(self.path.parent, error) from error
        os.close(self._lock)
        self._lock = lock

    def close(self) -> None:
        """Remove it with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        with suppress(OSError):
            os.close(self._lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def sweep(parent: Path) -> None:
    """Remove the scratch directories below `parent` whose processes have ended. One of another user stays."""
    for path in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):
            lock = _locked(path)
            try:
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)


@contextmanager
def in_memory() -> Iterator[Path]:
    """A scratch directory in memory where the machine has a tmpfs for it, else in the temporary directory. Raises
    EnvironmentFailure."""
    try:
        usable = os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > MEMORY_FREE_MIN
    except OSError:
        usable = False
    with Scratch(MEMORY if usable else temporary()) as scratch:
        yield scratch.path


@contextmanager
def for_a_socket(name: str) -> Iterator[Path]:
    """The path of a Unix domain socket called `name`, in a scratch directory whose path is short enough. Raises
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
        with scratch:
            yield scratch.path / name
            return
    raise refused or EnvironmentFailure(
        f"the path of {temporary()} is too long for a socket",
        hint="Let TMPDIR name a directory with a path of at most 80 characters.",
        code="DB-3086",
    )


def temporary() -> Path:
    """The temporary directory. Raises EnvironmentFailure where this user may write in none."""
    try:
        return Path(tempfile.gettempdir())
    except OSError as error:
        raise EnvironmentFailure(
            "there is no temporary directory that can be written",
            hint="Mount one at /tmp, or let TMPDIR name a directory with room that this user may write.",
            reason=error.strerror or errno.errorcode.get(error.errno or 0, "unknown"),
            code="DB-3085",
        ) from error


def _refused(parent: Path, error: OSError) -> EnvironmentFailure:
    return EnvironmentFailure(
        f"cannot make a scratch directory in {parent}: {error.strerror}",
        hint="Make room there, or let TMPDIR name a directory that this user may write.",
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
    """A descriptor of the directory, locked. Raises OSError where another process has it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
