"""store.directory: one lock, and a directory for the index of each partition.

    lock
    <topic>/<partition>/checkpoint.json, segment-*, cancels-*

Names of topics are safe as names of directories: Kafka allows letters, digits, dots, hyphens and underscores, and
neither `.` nor `..`.

The index of a partition that another instance has is kept for ten minutes, as the partition may come back soon. Times
are of the wall clock: where it is set forward an index goes early, and is read from Kafka again.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from bridge.stores.names import SourceName
from timerstore.disk import files
from timerstore.disk.checkpoint import Identity
from timerstore.errors import DiskFailure
from timerstore.operations import recovery
from timerstore.operations.recovery import Found

KEPT_MS: Final = 600_000
"""How long the index of a partition is kept that another instance has."""
_INDEX_SUFFIXES: Final = (
    files.SEGMENT_SUFFIX, files.TOMBSTONES_SUFFIX, *files.INDEX_SUFFIXES, files.ASIDE_SUFFIX, files.TEMPORARY_SUFFIX
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreDirectory:
    """A directory whose lock is held; `topic_ids` are those of the delay topics of the cluster."""

    path: Path
    descriptor: int
    cluster_id: str
    topic_ids: Mapping[str, str]
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    """An index between its look-up and the opening of its store is not removed."""
    _used_ms: dict[Path, int] = field(default_factory=dict, repr=False)
    """The last use of the index of each partition."""

    @classmethod
    def take(cls, path: Path, cluster_id: str, topic_ids: Mapping[str, str]) -> StoreDirectory:
        """Raises DirectoryInUse, DiskFailure."""
        return cls(path=path, descriptor=files.lock_directory(path), cluster_id=cluster_id, topic_ids=topic_ids)

    def of(self, name: SourceName) -> Path:
        """Where the index of a partition is."""
        topic, partition = name
        return self.path / topic / str(partition)

    def find(self, name: SourceName, now_ms: int) -> Found:
        """The index of a partition, as far as there is one. Raises WrongIdentity, DiskFailure."""
        log_id = f"{self.topic_ids[name[0]]}/{name[1]}"
        with self._lock:
            self._used_ms[self.of(name)] = now_ms
        return recovery.find(self.of(name), Identity(cluster_id=self.cluster_id, log_id=log_id), now_ms)

    def remove_left(self, ours: Collection[SourceName], now_ms: int) -> int:
        """Remove the indexes of partitions that others have had for `KEPT_MS`; returns how many. Raises DiskFailure."""
        removed, kept = 0, set(map(self.of, ours))
        with self._lock:
            for path in self._partitions():
                used_ms = self._used_ms.setdefault(path, now_ms)
                if path in kept or used_ms > now_ms:
                    self._used_ms[path] = now_ms
                elif now_ms - used_ms >= KEPT_MS:
                    files.remove(path / files.CHECKPOINT)  # first: the rest is nothing without it
                    _remove_tree(path)
                    del self._used_ms[path]
                    removed += 1
        return removed

    def _partitions(self) -> Iterator[Path]:
        return (path for path in self.path.glob("*/*") if path.name.isdecimal() and path.is_dir())

    def has_index_of_earlier_version(self) -> bool:
        """Whether there is one index of all partitions, as versions before had it."""
        return (self.path / files.CHECKPOINT).exists()

    def drop_index_of_earlier_version(self) -> None:
        """Remove it. Raises DiskFailure."""
        for path in sorted(self.path.iterdir()):
            if path.name in (files.CHECKPOINT, files.RESERVE) or path.suffix in _INDEX_SUFFIXES:
                files.remove(path)

    def release(self) -> None:
        """Give up the lock."""
        os.close(self.descriptor)


def _remove_tree(path: Path) -> None:
    try:
        shutil.rmtree(path)
    except OSError as error:
        hint = "check the volume of store.directory"
        raise DiskFailure(f"cannot remove {path}: {error}", hint=hint, code="DB-3025") from error
