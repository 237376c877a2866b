"""store.directory: one lock, and a directory for the index of each partition.

    lock
    <topic>/<partition>/checkpoint.json, segment-*, cancels-*

Small files of the bridge lie beside (bridge/json_file.py); no name of theirs begins as that of a file of an index.

Names of topics are safe as names of directories: Kafka allows letters, digits, dots, hyphens and underscores, and
neither `.` nor `..`.

If another instance takes a partition over, its index stays for ten minutes, as the partition may come back soon, and
until Kafka certainly has all records of its pending messages. Times are of the wall clock: if it is set forward, an
index is removed early, and rebuilt from Kafka.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from bridge.stores.names import SourceName
from timerstore.disk import checkpoint as checkpoints
from timerstore.disk import files
from timerstore.disk.checkpoint import Identity
from timerstore.errors import Corrupt, DiskFailure
from timerstore.operations import recovery
from timerstore.operations.recovery import Found

KEPT_MS: Final = 600_000
"""The time for which the index of another instance's partition stays."""
_BEGINNINGS: Final = tuple(name(0).partition("-")[0] + "-" for name in (files.segment_name, files.tombstones_name))

Spare = Callable[[Collection[SourceName]], Collection[SourceName]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreDirectory:
    """The directory, with its lock; `topic_ids` are the ids of the cluster's delay topics. `spare` returns the
    partitions, among some, whose indexes no instance needs."""

    path: Path
    descriptor: int
    cluster_id: str
    topic_ids: Mapping[str, str]
    spare: Spare
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    """An index between its look-up and the opening of its store is not removed."""
    _used_ms: dict[Path, int] = field(default_factory=dict, repr=False)
    """The last use of the index of each partition."""

    @classmethod
    def take(
        cls, path: Path, cluster_id: str, topic_ids: Mapping[str, str], spare: Spare = lambda _: ()
    ) -> StoreDirectory:
        """Lock the directory. Raises DirectoryInUse, DiskFailure."""
        descriptor = files.lock_directory(path)
        return cls(path=path, descriptor=descriptor, cluster_id=cluster_id, topic_ids=topic_ids, spare=spare)

    def of(self, name: SourceName) -> Path:
        """The directory of a partition's index."""
        topic, partition = name
        return self.path / topic / str(partition)

    def find(self, name: SourceName, now_ms: int) -> Found:
        """The index of a partition, if any. Raises WrongIdentity, DiskFailure."""
        with self._lock:
            self._used_ms[self.of(name)] = now_ms
        return recovery.find(self.of(name), self._identity(name), now_ms)

    def _identity(self, name: SourceName) -> Identity:
        return Identity(cluster_id=self.cluster_id, log_id=f"{self.topic_ids.get(name[0])}/{name[1]}")

    def known(self, names: Collection[SourceName]) -> set[SourceName]:
        """The partitions among `names` with an index here, owned or not, perhaps by an earlier version: the bridge has
        committed for them. Raises DiskFailure."""
        return {name for name in names if self._has_index(name)} | self._of_earlier_version().intersection(names)

    def _has_index(self, name: SourceName) -> bool:
        with suppress(Corrupt):
            checkpoint = checkpoints.read(self.of(name))
            return checkpoint is not None and checkpoint.identity == self._identity(name)
        return False

    def _of_earlier_version(self) -> set[SourceName]:
        path = self.path / files.CHECKPOINT
        with suppress(Corrupt), files.reading(path, AttributeError):
            body = json.loads(json.loads(path.read_bytes())["body"])
            ids = body["topic_ids"].items() & self.topic_ids.items() if body["cluster_id"] == self.cluster_id else ()
            topics = {topic for topic, _ in ids}
            return {(topic, int(partition)) for topic, partition, _ in body["offsets"] if topic in topics}
        return set()

    def remove_left(self, ours: Collection[SourceName], now_ms: int) -> int:
        """Remove the `spare` indexes of partitions that were not delivered here for `KEPT_MS`. Returns their number.
        Raises DiskFailure with all indexes that cannot be removed, after the removal of the others."""
        names = self._left(ours, now_ms)
        removed, free, kept = 0, self.spare(names) if names else (), list[DiskFailure]()
        with self._lock:
            for name in free:
                path = self.of(name)
                if now_ms - self._used_ms[path] >= KEPT_MS:  # no look-up meanwhile
                    try:
                        files.remove(path / files.CHECKPOINT)  # first, since the other files are useless without it
                        _remove_tree(path)
                    except DiskFailure as failure:
                        kept.append(failure)
                        continue
                    del self._used_ms[path]
                    removed += 1
        if kept:
            raise DiskFailure("; ".join(sorted(each.message for each in kept)), hint=kept[0].hint, code="DB-3025")
        return removed

    def _left(self, ours: Collection[SourceName], now_ms: int) -> list[SourceName]:
        """The partitions that other instances have had for `KEPT_MS`."""
        left, kept = [], set(map(self.of, ours))
        with self._lock:
            for path in self._partitions():
                used_ms = self._used_ms.setdefault(path, now_ms)
                if path in kept or used_ms > now_ms:
                    self._used_ms[path] = now_ms
                elif now_ms - used_ms >= KEPT_MS:
                    left.append((path.parent.name, int(path.name)))
        return left

    def _partitions(self) -> Iterator[Path]:
        directories = (path for path in self.path.glob("*/*") if path.name.isdecimal() and path.is_dir())
        return (path for path in directories if path.name == str(int(path.name)))

    def has_index_of_earlier_version(self) -> bool:
        """Whether the directory has the index of an earlier version, one for all partitions."""
        return (self.path / files.CHECKPOINT).exists()

    def drop_index_of_earlier_version(self) -> None:
        """Remove the index of an earlier version, the checkpoint last: after a crash the next start goes on. Raises
        DiskFailure."""
        for path in sorted(self.path.iterdir()):
            if path.name.startswith(_BEGINNINGS) and path.is_file():  # a topic may have such a name
                files.remove(path)
        for name in (files.RESERVE, files.temporary_of(self.path / files.CHECKPOINT).name, files.CHECKPOINT):
            files.remove(self.path / name)

    def release(self) -> None:
        """Give up the lock."""
        os.close(self.descriptor)


def _remove_tree(path: Path) -> None:
    try:
        shutil.rmtree(path)
    except OSError as error:
        hint = "check the volume of store.directory"
        raise DiskFailure(f"cannot remove {path}: {error}", hint=hint, code="DB-3025") from error
