"""Small JSON files in store.directory, for facts that must outlive the process and are not in Kafka.

    write     temporary name, fsync, rename, fsync of the directory: a crash leaves the old file or the new one
    read      a file that is damaged, too large or of another version never counts as an empty one: it is refused with
              an error that has the remedy, or set aside if going on without it is safe

Each file is a JSON object with a version (absent: 1).
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import structlog

from bridge.errors import EnvironmentFailure
from timerstore.disk import files
from timerstore.errors import TimerStoreError

VERSION: Final = 1
BYTES_MAX: Final = 64 << 20
DAMAGE: Final = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)

T = TypeVar("T")

log = structlog.get_logger("bridge.json_file")


class JsonFile:
    """A JSON file as in the module docstring. One writer at a time, or each within `changing`."""

    def __init__(self, directory: Path, name: str, without: str) -> None:
        """`without` describes the effect of going on without the file, for the operator's hint."""
        self.path = directory / name
        self._without = without

    def read(self, decode: Callable[[dict[str, Any]], T]) -> T | None:
        """The result of `decode`; None without a file. Raises EnvironmentFailure: DB-3061 for a damaged file, DB-3063
        for a file of another version, or an error of the volume."""
        try:
            with self.path.open("rb") as file:
                text = file.read(BYTES_MAX + 1)
            if len(text) > BYTES_MAX:
                raise ValueError(f"more than {BYTES_MAX} bytes")
            value = json.loads(text)
            version = value.get("version", VERSION)
            if version == VERSION:
                return decode(value)
            reason = f"version {version!r}, written by another version of the bridge"
        except FileNotFoundError:
            return None
        except OSError as error:
            reason = str(error)
        except DAMAGE as error:
            raise EnvironmentFailure(
                f"cannot parse {self.path.name} in store.directory",
                hint=f"Remove the file: {self._without}",
                reason=str(error) or repr(error),
                code="DB-3061",
            ) from None
        raise EnvironmentFailure(
            f"cannot read {self.path.name} in store.directory",
            hint=f"Check the volume, or remove the file: {self._without}",
            reason=reason,
            code="DB-3063",
        )

    def read_or_set_aside(self, decode: Callable[[dict[str, Any]], T]) -> T | None:
        """As `read`, but a damaged file is renamed and reported."""
        try:
            return self.read(decode)
        except EnvironmentFailure as failure:
            if failure.code != "DB-3061":
                raise
            reason = failure.fields["reason"]
        try:
            aside = files.set_aside(self.path, int(self.path.stat().st_mtime * 1000))
        except (OSError, TimerStoreError) as error:
            raise self._unwritten(str(error)) from None
        log.error("file-set-aside", code="DB-3061", file=aside.name, reason=reason, without=self._without)
        return None

    def write(self, value: dict[str, Any]) -> None:
        """Replace the contents. After EnvironmentFailure nothing has changed."""
        text = json.dumps({"version": VERSION, **value}, separators=(",", ":")) + "\n"
        try:
            if len(text) > BYTES_MAX:
                raise ValueError(f"{len(text)} bytes are too many")
            with files.writing(self.path) as temporary:
                temporary.write_text(text)
            files.publish(self.path)
        except (OSError, ValueError, TimerStoreError) as error:
            raise self._unwritten(str(error)) from None

    @contextmanager
    def changing(self) -> Iterator[None]:
        """For a read and the write that follows it: no other thread or process changes the file meanwhile. Raises
        EnvironmentFailure at once where one does, since it may have been stopped."""
        try:
            lock = self.path.with_suffix(".lock").open("a")
        except OSError as error:
            raise self._unwritten(str(error)) from None
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise self._unwritten(f"something else changes it now, repeat the command: {error}") from None
            yield

    def _unwritten(self, reason: str) -> EnvironmentFailure:
        return EnvironmentFailure(
            f"cannot write {self.path.name} in store.directory",
            hint="Check the volume. Run a command on the bridge's machine, as its user. Nothing has changed.",
            reason=reason,
            code="DB-3062",
        )
