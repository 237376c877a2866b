"""Suspect partitions: neither reader is trusted with their next batch, which has ended one, or may have.

    trusted ---- a reader fails there, or ended its process ----> suspect: left out by both readers, and read here
    suspect ---- read, or cannot be read here for a minute -----> trusted
    suspect ---- a batch is corrupt ----------------------------> held: left out by both readers, the others go on
    held ------- an operator skips the batch, or it is well ----> trusted

A separate process reads them batch by batch (reader.py). A record beyond the memory limit, and a corrupt batch that an
operator gives up, become dead letters without a body. The replacement of a broker may bring a batch back: a held
partition is read again from time to time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import structlog

from bridge.errors import BridgeError, EnvironmentFailure
from bridge.ingest.batches.choices import BATCHES, Choices, Place
from bridge.ingest.batches.reader import BatchReader, CorruptBatch, End, Found, Stretch, TooLargeRecord
from bridge.ingest.batches.reading_mark import ReadingMark
from bridge.settings.model import Settings
from bridge.spark.errors import JAVA_ENDED, is_about_records
from bridge.stores.names import Offsets, SourceName, texts_of
from bridge.wire.reasons import RejectReason
from bridge.wire.received import FRAMING_BYTES, Record, Unread, carried_bytes
from timerstore.clock import Clock

AHEAD: Final = 20_000
"""Offsets of a partition that are read here at a time: a reader that ended had not asked for many more."""
TAKEN_BYTES: Final = 8 << 20
TAKEN_RECORDS: Final = 2_000
AGAIN_S: Final = 60.0
"""Interval between looks at a held partition."""
PAUSE_S_MAX: Final = 16.0
FAILURES_MAX: Final = 6
"""The limit of the reading process's failures in a row, which take a minute; then the readers have to try."""
MARK_S: Final = 0.5
CODE: Final = "DB-4060"

Take = Callable[[list[Record] | Unread, Offsets], None]
"""Takes in records, or the substitute for unread ones, and the offsets up to which they reach."""

log = structlog.get_logger("bridge.ingest.batches.suspects")


class Suspects:
    """See the module. `look` is for one thread, the rest for any."""

    def __init__(
        self,
        *,
        read: Callable[[Sequence[Stretch], Callable[[], bool]], Iterator[tuple[SourceName, Found]]],
        skips: Choices,
        topic_id: Callable[[str], str],
        mark: ReadingMark,
        clock: Clock,
    ) -> None:
        """`read` is that of a `BatchReader`; `topic_id` returns the id of a delay topic, by which `skips` name it: a
        topic that is created again has other batches. Partitions in the mark of the process before are suspect."""
        self._read = read
        self._skips, self._topic_id = skips, topic_id
        self._mark, self._marked_s = mark, -MARK_S
        self._clock = clock
        self._lock = threading.Lock()
        self._suspect: dict[SourceName, int] = {}
        """The exclusive ends up to which partitions are read here."""
        self._held: dict[SourceName, CorruptBatch] = {}
        self._looked_s: dict[SourceName, float] = {}
        self.names: frozenset[SourceName] = frozenset()
        """The partitions that neither reader may read."""
        self._failures = 0
        self._failed_s = 0.0
        self.suspect(mark.suspects, "two processes have ended here")

    @classmethod
    def of(
        cls, settings: Settings, jars: Callable[[], Sequence[Path]], topic_id: Callable[[str], str], clock: Clock
    ) -> Suspects:
        """The suspects of a process with these settings; `jars` as for a `BatchReader`."""
        return cls(
            read=BatchReader.of(settings, jars).read,
            skips=Choices(settings.store.directory, BATCHES),
            topic_id=topic_id,
            mark=ReadingMark(settings.store.directory),
            clock=clock,
        )

    def suspect(self, at: Offsets, why: str) -> None:
        """Note that the batches behind these offsets must be read here. Nothing changes for partitions that are suspect
        or held already."""
        with self._lock:
            new = sorted(at.keys() - self.names)
            self._suspect |= {name: at[name] + AHEAD for name in new}
            self._changed()
        if new:
            log.warning("partitions-suspect", partitions=texts_of(new), reason=why)

    def judge(self, failure: BridgeError, failures: int, sent: Offsets) -> None:
        """The query has failed, for this many times in a row, at the offsets `sent`: the next batches may be the
        reason. If Java has ended, this process ends too, and the next one reads them here."""
        if failure.code == JAVA_ENDED:
            self._mark.distrust(sent)
        elif failures > 1 or is_about_records(failure):
            self.suspect(sent, str(failure.fields.get("reason", failure)))

    def reading(self, at: Offsets) -> None:
        """Note that the plain reader reads on from these offsets."""
        now_s = self._clock.monotonic_s()
        if now_s - self._marked_s >= MARK_S:
            self._marked_s = now_s
            self._mark.note({name: offset for name, offset in at.items() if name not in self.names})

    def rests(self) -> None:
        """Note that the plain reader has stopped reading."""
        self._marked_s = -MARK_S
        self._mark.clear()

    def forget(self, names: Collection[SourceName]) -> None:
        """Forget partitions of another instance."""
        with self._lock:
            self._suspect = {name: end for name, end in self._suspect.items() if name not in names}
            self._held = {name: batch for name, batch in self._held.items() if name not in names}
            self._changed()

    def trusted(self, at: Offsets) -> dict[SourceName, int]:
        """The partitions that both readers may read."""
        names = self.names  # it may change meanwhile
        return {name: offset for name, offset in at.items() if name not in names}

    def are_done(self, at: Offsets) -> bool:
        """Whether the query has something to read: no partition is suspect, and not all owned ones are held."""
        return not self._suspect and not (self._held and at.keys() <= self._held.keys())

    def held(self) -> Mapping[SourceName, CorruptBatch]:
        """Corrupt batches, by the partition that each blocks."""
        return self._held

    def alarms(self) -> tuple[str, ...]:
        """Texts for /readyz."""
        return tuple(
            f"{topic}/{partition} is not read: its batch at offset {batch.offset} is corrupt ({CODE})"
            for (topic, partition), batch in sorted(self._held.items())
        )

    def look(self, at: Offsets, take: Take, is_over: Callable[[], bool]) -> bool:
        """Read the suspects from these offsets on, and give `take` the records; less if `is_over`. Returns whether held
        partitions are trusted again, so that readers must begin anew. Raises EnvironmentFailure for an unreadable file
        of skips."""
        stretches = [Stretch(name=name, begin=at[name], end=end) for name, end in self._wanted(at)]
        if not stretches:
            return False
        first = self._failures % len(stretches)  # an unreachable partition does not block the others
        stretches = stretches[first:] + stretches[:first]
        held = set(self._held)
        try:
            self._read_stretches(stretches, take, is_over)
            self._failures = 0
        except EnvironmentFailure as failure:
            if failure.code != "DB-3060":
                raise
            self._failures, self._failed_s = self._failures + 1, self._clock.monotonic_s()
            names = texts_of(stretch.name for stretch in stretches)
            log.warning("batches-not-read", partitions=names, reason=failure.fields.get("reason"))
            if self._failures >= FAILURES_MAX:
                for name in [stretch.name for stretch in stretches if stretch.name not in self._held]:
                    self._trust(name)
        return bool(held - self.names)

    def _wanted(self, at: Offsets) -> list[tuple[SourceName, int]]:
        now_s = self._clock.monotonic_s()
        if self._failures and now_s < self._failed_s + min(PAUSE_S_MAX, 2.0**self._failures):
            return []
        skipped = self._skips.all() if self._held else {}
        with self._lock:
            for name, batch in self._held.items():
                if now_s >= self._looked_s[name] + AGAIN_S or self._place(name, batch) in skipped:
                    self._suspect[name] = batch.next
                    self._looked_s[name] = now_s
            self._suspect = {name: end for name, end in self._suspect.items() if name in at}
            self._changed()
            return sorted(self._suspect.items())

    def _read_stretches(self, stretches: Sequence[Stretch], take: Take, is_over: Callable[[], bool]) -> None:
        pile = _Pile(take)
        for name, item in self._read(stretches, is_over):
            if is_over():
                return
            if isinstance(item, Record):
                pile.add(name, item)
            elif isinstance(item, TooLargeRecord):
                pile.put(name, self._too_large(name, item), item.offset + 1)
            elif isinstance(item, CorruptBatch):
                entry = self._skipped(name, item)
                pile.put(name, entry, item.next)
                if entry is not None and not is_over():
                    self._trust(name)
            else:
                pile.end(name, item)
                if not is_over():  # otherwise it may not have been taken in
                    self._trust(name)

    def _too_large(self, name: SourceName, found: TooLargeRecord) -> Unread:
        log.error(
            "record-not-held", topic=name[0], partition=name[1], offset=found.offset, size=found.size, code="DB-4061"
        )
        return Unread(name, found.offset, found.ts, RejectReason.TOO_LARGE_TO_READ, f"record ({found.size} bytes)")

    def _skipped(self, name: SourceName, batch: CorruptBatch) -> Unread | None:
        """What stands in place of the batch; None if it is not skipped."""
        place = {"topic": name[0], "partition": name[1], "offset": batch.offset, "next": batch.next}
        if self._place(name, batch) not in self._skips.all():
            if name not in self._held:
                log.error("batch-corrupt", **place, reason=batch.reason, code=CODE)
            with self._lock:
                self._suspect.pop(name, None)
                self._held = {**self._held, name: batch}
                self._looked_s[name] = self._clock.monotonic_s()
                self._changed()
            return None
        log.warning("batch-skipped", **place)
        omitted = f"records from offset {batch.offset} to {batch.next - 1}"
        return Unread(name, batch.offset, self._clock.now_ms(), RejectReason.CORRUPT, omitted)

    def _place(self, name: SourceName, batch: CorruptBatch) -> Place:
        """The batch's place in the file of skips."""
        return (self._topic_id(name[0]), name[1]), batch.offset

    def _trust(self, name: SourceName) -> None:
        with self._lock:
            self._suspect.pop(name, None)
            self._held = {held: batch for held, batch in self._held.items() if held != name}
            self._changed()

    def _changed(self) -> None:
        self.names = frozenset(self._suspect | self._held.keys())


class _Pile:
    """Records on their way to `take`: in parts, in their order."""

    def __init__(self, take: Take) -> None:
        self._take = take
        self._records: list[Record] = []
        self._bytes = 0

    def add(self, name: SourceName, record: Record) -> None:
        self._records.append(record)
        size = len(record.key or b"") + len(record.value or b"") + FRAMING_BYTES
        self._bytes += size + carried_bytes(record.headers)
        if len(self._records) >= TAKEN_RECORDS or self._bytes >= TAKEN_BYTES:
            self._go(name, record.offset + 1)

    def put(self, name: SourceName, entry: Unread | None, end: int) -> None:
        """Take this one; None: the rest of this partition is unknown."""
        if self._records:
            self._go(name, self._records[-1].offset + 1)
        if entry is not None:
            self._take(entry, {name: end})

    def end(self, name: SourceName, end: End) -> None:
        self._go(name, end.offset)

    def _go(self, name: SourceName, end: int) -> None:
        records, self._records, self._bytes = self._records, [], 0
        self._take(records, {name: end})
