"""Corrupt batches that an operator gives up, by the offset at which each begins.

They are in a file beside the index, which `delay-bridge skip-batch` writes and the bridge looks at while it holds a
partition. An offset that is skipped already does no harm: no other batch begins there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from bridge.errors import EnvironmentFailure
from timerstore.disk import files
from timerstore.errors import TimerStoreError
from timerstore.rows.sources import SourceName

FILE: Final = "skipped-batches.json"
SKIPS_MAX: Final = 10_000


class Skips:
    """The skips of a directory. Any thread, and any process."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE

    def has(self, name: SourceName, offset: int) -> bool:
        """Whether the batch that begins there is to be skipped. Raises EnvironmentFailure."""
        return _text(name, offset) in self._read()

    def add(self, name: SourceName, offset: int) -> bool:
        """Skip it; whether that is new. 1 write, 2 fsync, 3 rename: a crash leaves the old file or the new one. Raises
        EnvironmentFailure where nothing was written."""
        found, text = self._read(), _text(name, offset)
        if text in found:
            return False
        try:
            with files.writing(self._path) as temporary:
                temporary.write_text(json.dumps({"skipped": [*found, text][-SKIPS_MAX:]}) + "\n")
            files.publish(self._path)
        except (OSError, TimerStoreError) as error:
            raise EnvironmentFailure(
                f"cannot write {FILE} in store.directory",
                hint="Run the command where the bridge runs, as its user, and look at the volume. Nothing has changed.",
                reason=str(error),
                code="DB-3062",
            ) from None
        return True

    def _read(self) -> list[str]:
        try:
            found = json.loads(self._path.read_bytes())["skipped"]
            return [str(text) for text in found]
        except FileNotFoundError:
            return []
        except (OSError, AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise EnvironmentFailure(
                f"cannot read {FILE} in store.directory",
                hint="Remove the file, and no batch is skipped.",
                reason=str(error),
                code="DB-3061",
            ) from None


def _text(name: SourceName, offset: int) -> str:
    return f"{name[0]}/{name[1]}/{offset}"
