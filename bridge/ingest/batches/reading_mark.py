"""Where a reader was when it took the process with it, for the next start.

A batch of a megabyte may hold a gigabyte, and the machine ends the process that unpacks it before anything can be
written down. So the offsets that are being read are in a file for as long as the plain reader reads. An orderly end
removes it. A start that finds it knows how far the process before had come. Where the one before that had come no less
far, the next batches are suspect, and a process of its own reads them (suspects.py).

The file is beside the index, and can be removed like it. It is not made durable: a machine that loses power has ended
the process for another reason.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from timerstore.rows.sources import SourceName

FILE: Final = "being-read.json"
Offsets = Mapping[SourceName, int]


class ReadingMark:
    """The mark of a directory, for any thread; the process is the only one that has the directory."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE
        self._lock = threading.Lock()
        self._is_final = False
        at, before = self._read()
        self._before = {name: max(offset, before.get(name, offset)) for name, offset in at.items()}
        self.suspects: Offsets = {name: offset for name, offset in at.items() if offset <= before.get(name, -1)}
        """Partitions of which two processes in a row have ended before they had read beyond these offsets."""

    def note(self, at: Offsets) -> None:
        """These offsets are read next."""
        with self._lock:
            if not self._is_final:
                self._write(at, self._before)

    def distrust(self, at: Offsets) -> None:
        """Batches behind these offsets end this process: they are suspect at the next start."""
        with self._lock:
            self._is_final = True
            self._write(at, at)

    def clear(self) -> None:
        """Nothing is being read."""
        with self._lock:
            self._before = {}
            if not self._is_final:
                with suppress(OSError):
                    self._path.unlink(missing_ok=True)

    def _read(self) -> tuple[Offsets, Offsets]:
        """A file that cannot be read marks nothing."""
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            found = json.loads(self._path.read_bytes())
            return _offsets(found["at"]), _offsets(found["before"])
        return {}, {}

    def _write(self, at: Offsets, before: Offsets) -> None:
        """A disk that takes nothing has its own alarm."""
        made = self._path.with_suffix(".tmp")
        with suppress(OSError):
            made.write_text(json.dumps({"at": _texts(at), "before": _texts(before)}))
            made.replace(self._path)


def _texts(offsets: Offsets) -> dict[str, int]:
    return {f"{topic}/{partition}": offset for (topic, partition), offset in offsets.items()}


def _offsets(texts: Mapping[str, int]) -> Offsets:
    parts = [(*text.rpartition("/")[::2], int(offset)) for text, offset in texts.items()]
    return {(topic, int(partition)): offset for topic, partition, offset in parts}
