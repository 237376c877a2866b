"""The oldest records of logs, for the time that a retention by size amounts to.

The process that reads single batches (ingest/batches/reader.py) looks at them: a batch of a megabyte may hold a
gigabyte, and the log's first one is there again at each look and after each start. Bodies of records are passed over
there. A look costs a second, and the oldest records of a log change only with its start: others are not looked at
again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from bridge.errors import BridgeError
from bridge.ingest.batches.reader import BatchReader, CorruptBatch, End, Found, Stretch, TooLargeRecord
from bridge.kafka.admin import Watermarks
from bridge.settings.clients import java_client, system_properties
from bridge.settings.model import Settings
from bridge.stores.names import SourceName
from timerstore.clock import Clock

RECORDS: Final = 256
"""Records of a log in an estimate; of a shorter log a power of two, so that its growth causes few looks."""
LOOK_S: Final = 10.0
NO_BODIES: Final = 0
"""The size of the largest record that is read with its body."""

Read = Callable[[Sequence[Stretch], Callable[[], bool], int], Iterator[tuple[SourceName, Found]]]

log = structlog.get_logger("bridge.start.oldest")


@dataclass(frozen=True, slots=True, kw_only=True)
class Oldest:
    """The oldest records of a partition: the first one's timestamp, and their mean size in bytes."""

    timestamp_ms: int
    mean_bytes: float


class OldestRecords:
    """See the module. For one thread."""

    def __init__(self, read: Read, clock: Clock) -> None:
        """`read` is that of a `BatchReader`."""
        self._read, self._clock = read, clock
        self._known: dict[Stretch, Oldest | None] = {}

    @classmethod
    def of(cls, settings: Settings, jars: Callable[[], Sequence[Path]], clock: Clock) -> OldestRecords:
        """For a process with these settings; `jars` as for a `BatchReader`."""
        return cls(BatchReader(lambda: java_client(settings), jars, lambda: system_properties(settings)).read, clock)

    def of_logs(self, marks: Mapping[SourceName, Watermarks]) -> dict[SourceName, Oldest]:
        """The oldest records of non-empty logs, of those that are read within ten seconds."""
        wanted = [
            Stretch(name=name, begin=mark.start, end=mark.start + _sample(mark.end - mark.start))
            for name, mark in sorted(marks.items())
            if mark.start < mark.end
        ]
        self._known = {stretch: self._known[stretch] for stretch in wanted if stretch in self._known}
        if new := [stretch for stretch in wanted if stretch not in self._known]:
            try:
                self._look(new)
            except BridgeError as error:  # also of a log that has lost its beginning meanwhile
                log.warning("retention-unknown", reason=error.message)
        return {stretch.name: oldest for stretch in wanted if (oldest := self._known.get(stretch)) is not None}

    def _look(self, stretches: Sequence[Stretch]) -> None:
        deadline_s = self._clock.monotonic_s() + LOOK_S
        by_name = {stretch.name: stretch for stretch in stretches}
        found: dict[SourceName, list[TooLargeRecord]] = {name: [] for name in by_name}
        for name, item in self._read(stretches, lambda: self._clock.monotonic_s() > deadline_s, NO_BODIES):
            records, stretch = found[name], by_name[name]
            if isinstance(item, TooLargeRecord) and len(records) < RECORDS:
                records.append(item)
            is_over = isinstance(item, CorruptBatch) or (isinstance(item, End) and item.offset >= stretch.end)
            if is_over or len(records) >= RECORDS:
                self._known[stretch] = _estimate(records)


def _sample(records: int) -> int:
    return min(RECORDS, 1 << (records.bit_length() - 1))


def _estimate(records: Sequence[TooLargeRecord]) -> Oldest | None:
    if not records:
        return None
    return Oldest(timestamp_ms=records[0].ts, mean_bytes=sum(each.size for each in records) / len(records))
