"""Reading marks: a reader's offsets when it ended its process, for the next start.

A batch of a megabyte may hold a gigabyte, and the machine ends the process that unpacks it before that can write
anything. So the present offsets are in a file while a consumer in this process reads. An orderly end removes it. A
start that finds it knows the progress of the process before. If the process before that had come as far, the next
batches are suspect:

    READ        of the plain reader: a separate process reads them batch by batch (suspects.py)
    LOOKED_UP   of a look-up of messages in doubt: the same (delivery/doubt/look_up.py)
    SEARCHED    of a search for a cut: the logs are searched one at a time (start/cut_search.py)
    UNSEARCHED  of the logs that such a search leaves out

The files are beside the index, and can be removed like it. They are not made durable: a loss of power has ended the
process for another reason.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from bridge.stores.names import Offsets, SourceName

READ: Final = "being-read.json"
LOOKED_UP: Final = "being-looked-up.json"
SEARCHED: Final = "being-searched.json"
UNSEARCHED: Final = "being-left-out.json"


class ReadingMark:
    """A mark in a directory, for any thread; no other process uses the directory."""

    def __init__(self, directory: Path, file: str = READ) -> None:
        self._path = directory / file
        self._lock = threading.Lock()
        self._is_final = False
        at, before = self._read()
        self._before = {name: max(offset, before.get(name, offset)) for name, offset in at.items()}
        self.suspects: Offsets = {name: offset for name, offset in at.items() if offset <= before.get(name, -1)}
        """Partitions in which two processes in a row have ended before they had read beyond these offsets."""

    def is_suspect(self, name: SourceName, at: int) -> bool:
        """Whether a reader at this offset has ended two processes in a row."""
        return at <= self.suspects.get(name, -1)

    def note(self, at: Offsets) -> None:
        """Note the next offsets to read."""
        with self._lock:
            if not self._is_final:
                self._write(at, self._before)

    def distrust(self, at: Offsets) -> None:
        """Mark the batches behind these offsets as suspect for the next start: they end this process."""
        with self._lock:
            self._is_final = True
            self._write(at, at)

    def clear(self) -> None:
        """Remove the mark: nothing is being read."""
        with self._lock:
            self._before = {}
            if not self._is_final:
                with suppress(OSError):
                    self._path.unlink(missing_ok=True)

    def _read(self) -> tuple[Offsets, Offsets]:
        """The file's offsets; an unreadable file marks nothing."""
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            content = json.loads(self._path.read_bytes())
            return _offsets(content["at"]), _offsets(content["before"])
        return {}, {}

    def _write(self, at: Offsets, before: Offsets) -> None:
        """Write the file. A full or broken disk has its own alarm."""
        made = self._path.with_suffix(".tmp")
        with suppress(OSError):
            made.write_text(json.dumps({"at": _texts(at), "before": _texts(before)}))
            made.replace(self._path)


def _texts(offsets: Offsets) -> dict[str, int]:
    return {f"{topic}/{partition}": offset for (topic, partition), offset in offsets.items()}


def _offsets(texts: Mapping[str, int]) -> Offsets:
    parts = [(*text.rpartition("/")[::2], int(offset)) for text, offset in texts.items()]
    return {(topic, int(partition)): offset for topic, partition, offset in parts}
