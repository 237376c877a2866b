"""Partitions with a damaged index file, which must be closed and opened anew. Any thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from pathlib import Path

import structlog

from bridge.stores.names import SourceName
from timerstore.errors import Corrupt
from timerstore.operations import recovery

log = structlog.get_logger("bridge.stores.damage")


class Damage:
    """See the module. A file is set aside when a step of maintenance, or a cancel by origin, finds it damaged. The
    partition's next opening goes on from the other files and Kafka; until then each look at the file fails again."""

    def __init__(self, on_new: Callable[[], None]) -> None:
        """`on_new` is called for each new partition, once its file is set aside."""
        self._on_new = on_new
        self._lock = threading.Lock()
        self.names: frozenset[SourceName] = frozenset()
        """Replaced, never changed."""

    def set_aside(self, corrupt: Corrupt, now_ms: int) -> None:
        """Set a damaged file aside. Raises DiskFailure."""
        topic, partition = Path(corrupt.path).parts[-3:-1]
        name = topic, int(partition)
        with self._lock:
            if name in self.names:
                return
            log.error("segment-corrupt", report=recovery.set_aside(corrupt, now_ms))
            self.names |= {name}
        self._on_new()

    def forget(self, names: Collection[SourceName]) -> None:
        """These partitions are closed, and no step of maintenance for them is under way."""
        with self._lock:
            self.names -= frozenset(names)
