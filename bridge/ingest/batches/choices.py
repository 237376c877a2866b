"""An operator's choices for records of delay topics that block their partition, by the place of each.

A choice is in a file beside the index. A command writes it, and the bridge looks at it while it holds the partition:
`delay-bridge skip-batch` gives up a corrupt batch, `delay-bridge resolve` decides the outcome of messages in doubt.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

from bridge.json_file import JsonFile
from bridge.stores.names import SourceName

BATCHES: Final = "skipped-batches.json"
ENDS: Final = "chosen-ends.json"
SKIPPED, COMMITTED, ABORTED = "skipped", "committed", "aborted"
CHOICES_MAX: Final = 10_000

Place = tuple[SourceName, int]
"""A partition and an offset. The file BATCHES outlives a topic, so its places have the topic's id in place of the name.
Entries of earlier versions have the name, and match no topic."""


class Choices:
    """The choices in one file of a directory: a word for each place. Any thread, and any process."""

    def __init__(self, directory: Path, file: str) -> None:
        self._file = JsonFile(directory, file, "nothing in it is chosen any more; repeat the commands.")

    def all(self) -> Mapping[Place, str]:
        """Raises EnvironmentFailure."""
        return self._file.read_or_set_aside(_decoded) or {}

    def add(self, name: SourceName, offset: int, word: str) -> bool:
        """Choose a word for that place; returns whether it is new. Raises EnvironmentFailure if nothing was written."""
        with self._file.changing():
            choices = dict(self.all())
            if choices.pop((name, offset), None) == word:
                return False
            self._write({**choices, (name, offset): word})
        return True

    def take(self, names: Collection[SourceName]) -> Mapping[Place, str]:
        """The choices for these partitions, which are removed: each is followed once, since the same place may be in
        question again. Raises EnvironmentFailure, and then nothing is removed."""
        if all(name not in names for name, _ in self.all()):
            return {}
        with self._file.changing():
            choices = self.all()
            taken = {place: word for place, word in choices.items() if place[0] in names}
            self._write({place: word for place, word in choices.items() if place not in taken})
        return taken

    def _write(self, choices: Mapping[Place, str]) -> None:
        texts: dict[str, list[str]] = {}
        for ((topic, partition), offset), word in list(choices.items())[-CHOICES_MAX:]:
            texts.setdefault(word, []).append(f"{topic}/{partition}/{offset}")
        self._file.write(texts)


def _decoded(found: dict[str, Any]) -> dict[Place, str]:
    return {_place(text): word for word in (SKIPPED, COMMITTED, ABORTED) for text in found.get(word, ())}


def _place(text: str) -> Place:
    topic, partition, offset = text.rsplit("/", 2)
    return (topic, int(partition)), int(offset)
