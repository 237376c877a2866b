"""What an operator has chosen for records of delay topics that hold up their partition, by the place of each.

A choice is in a file beside the index, which a command writes and the bridge looks at while it holds the partition:
`delay-bridge skip-batch` that a corrupt batch is given up, `delay-bridge resolve` what became of messages in doubt.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from bridge.errors import EnvironmentFailure
from timerstore.disk import files
from timerstore.errors import TimerStoreError
from timerstore.rows.sources import SourceName

SKIPPED: Final = "skipped-batches.json"
COMMITTED: Final = "committed-rows.json"
ABORTED: Final = "aborted-rows.json"
CHOICES_MAX: Final = 10_000


class Choices:
    """The places in one file of a directory. Any thread, and any process."""

    def __init__(self, directory: Path, file: str) -> None:
        self._path, self._word = directory / file, file.partition("-")[0]

    def has(self, name: SourceName, offset: int) -> bool:
        """Whether that is chosen there. Raises EnvironmentFailure."""
        return _text(name, offset) in self._read()

    def add(self, name: SourceName, offset: int) -> bool:
        """Choose it; whether that is new. 1 write, 2 fsync, 3 rename: a crash leaves the old file or the new one.
        Raises EnvironmentFailure where nothing was written."""
        found, text = self._read(), _text(name, offset)
        if text not in found:
            self._write([*found, text])
        return text not in found

    def follow(self, name: SourceName, offset: int) -> bool:
        """As `has`; what is chosen is chosen no more, as the same place may be in question once more."""
        found, text = self._read(), _text(name, offset)
        if text in found:
            self._write([each for each in found if each != text])
        return text in found

    def _write(self, texts: list[str]) -> None:
        try:
            with files.writing(self._path) as temporary:
                temporary.write_text(json.dumps({self._word: texts[-CHOICES_MAX:]}) + "\n")
            files.publish(self._path)
        except (OSError, TimerStoreError) as error:
            raise EnvironmentFailure(
                f"cannot write {self._path.name} in store.directory",
                hint="Run the command where the bridge runs, as its user, and look at the volume. Nothing has changed.",
                reason=str(error),
                code="DB-3062",
            ) from None

    def _read(self) -> list[str]:
        try:
            found = json.loads(self._path.read_bytes())[self._word]
            return [str(text) for text in found]
        except FileNotFoundError:
            return []
        except (OSError, AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise EnvironmentFailure(
                f"cannot read {self._path.name} in store.directory",
                hint="Remove the file, and nothing in it is chosen.",
                reason=str(error),
                code="DB-3061",
            ) from None


def _text(name: SourceName, offset: int) -> str:
    return f"{name[0]}/{name[1]}/{offset}"
