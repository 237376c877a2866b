"""The oldest records of logs, for the time that a retention by size amounts to.

The process that reads single batches (ingest/batches/reader.py) looks at them: a batch of a megabyte may hold a
gigabyte, and the log's first one is there again at each look and after each start. Bodies of records are passed over
there. A look takes a second, up to ten on a busy machine, so it has a thread of its own: no start and no rebalance
waits for it. The oldest records of a log change only with its start: others are not looked at again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from bridge.errors import BridgeError
from bridge.ingest.batches.reader import BatchReader, CorruptBatch, End, Found, Stretch, TooLargeRecord
from bridge.kafka.admin import Watermarks
from bridge.settings.model import Settings
from bridge.stores.names import SourceName
from timerstore.clock import Clock

RECORDS: Final = 256
"""Records of a log in an estimate; of a shorter log a power of two, so that its growth causes few looks."""
LOOK_S: Final = 10.0
NO_BODIES: Final = 0
"""The size of the largest record that is read with its body."""

Run = Callable[[Callable[[], None]], None]
Read = Callable[[Sequence[Stretch], Callable[[], bool], int], Iterator[tuple[SourceName, Found]]]

log = structlog.get_logger("bridge.start.oldest")


@dataclass(frozen=True, slots=True, kw_only=True)
class Oldest:
    """The oldest records of a partition: the first one's timestamp, and their mean size in bytes."""

    timestamp_ms: int
    mean_bytes: float


def _on_a_thread(look: Callable[[], None]) -> None:
    threading.Thread(target=look, name="oldest-records", daemon=True).start()


class OldestRecords:
    """See the module. One thread asks; each look runs by way of `run`."""

    def __init__(self, read: Read, clock: Clock, run: Run = _on_a_thread) -> None:
        """`read` is that of a `BatchReader`."""
        self._read, self._clock, self._run = read, clock, run
        self._known: Mapping[Stretch, Oldest | None] = {}
        """Replaced, never changed; by the thread of a look while that runs."""
        self._is_looking = False
        self._is_new = False

    @classmethod
    def of(
        cls, settings: Settings, jars: Callable[[], Sequence[Path]], clock: Clock, run: Run = _on_a_thread
    ) -> OldestRecords:
        """For a process with these settings; `jars` as for a `BatchReader`."""
        return cls(BatchReader.of(settings, jars).read, clock, run)

    def has_news(self) -> bool:
        """Whether a look has found something since the last `of_logs`."""
        return self._is_new

    def of_logs(self, marks: Mapping[SourceName, Watermarks]) -> dict[SourceName, Oldest]:
        """The known oldest records of non-empty logs; the others are looked at meanwhile."""
        self._is_new = False
        wanted = [
            Stretch(name=name, begin=mark.start, end=mark.start + _sample(mark.end - mark.start))
            for name, mark in sorted(marks.items())
            if mark.start < mark.end
        ]
        if not self._is_looking:
            self._known = {stretch: self._known[stretch] for stretch in wanted if stretch in self._known}
            if new := [stretch for stretch in wanted if stretch not in self._known]:
                self._is_looking = True
                self._run(lambda: self._look(new))
        known = self._known
        return {stretch.name: oldest for stretch in wanted if (oldest := known.get(stretch)) is not None}

    def _look(self, stretches: Sequence[Stretch]) -> None:
        try:
            self._find(stretches)
        except BridgeError as error:  # also of a log that has lost its beginning meanwhile
            log.warning("retention-unknown", reason=error.message)
        finally:
            self._is_looking = False

    def _find(self, stretches: Sequence[Stretch]) -> None:
        deadline_s = self._clock.monotonic_s() + LOOK_S
        by_name = {stretch.name: stretch for stretch in stretches}
        found: dict[SourceName, list[TooLargeRecord]] = {name: [] for name in by_name}
        for name, item in self._read(stretches, lambda: self._clock.monotonic_s() > deadline_s, NO_BODIES):
            records, stretch = found[name], by_name[name]
            if isinstance(item, TooLargeRecord) and len(records) < RECORDS:
                records.append(item)
            is_over = isinstance(item, CorruptBatch) or (isinstance(item, End) and item.offset >= stretch.end)
            if is_over or len(records) >= RECORDS:
                self._known, self._is_new = {**self._known, stretch: _estimate(records)}, True


def _sample(records: int) -> int:
    return min(RECORDS, 1 << (records.bit_length() - 1))


def _estimate(records: Sequence[TooLargeRecord]) -> Oldest | None:
    if not records:
        return None
    return Oldest(timestamp_ms=records[0].ts, mean_bytes=sum(each.size for each in records) / len(records))
