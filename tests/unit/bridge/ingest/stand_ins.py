"""Stand-ins for the store and the plain reader, as ingest sees them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pyarrow as pa

from bridge.errors import EnvironmentFailure
from bridge.ingest.batches.choices import BATCHES, Choices
from bridge.ingest.batches.reader import CorruptBatch, End, Found, Stretch
from bridge.ingest.batches.reading_mark import ReadingMark
from bridge.ingest.batches.suspects import Suspects
from bridge.ingest.decode_records import decode_records
from bridge.ingest.plain_reader import NOTHING, PlainReader, Read, by_source
from bridge.stores.names import SourceName
from bridge.stores.stores import Life
from bridge.wire.decode_epochs import DecodeEpoch, DecodeParameters
from bridge.wire.received import Record
from timerstore.clock import Clock
from timerstore.rows.position import Progress

A: SourceName = ("delay", 0)
B: SourceName = ("delay", 1)
PARAMETERS = DecodeParameters(max_delay_ms=10**9, roll_window_ms=10**9, has_default_target=True)
EPOCHS = dict.fromkeys((A, B), (DecodeEpoch(offset=0, parameters=PARAMETERS),))


def entries(name: SourceName, first: int, end: int) -> pa.Table:
    """The entries of the records [first, end)."""
    return decode_records([record(name, offset) for offset in range(first, end)], EPOCHS)


def record(name: SourceName, offset: int) -> Record:
    return Record(*name, offset, 0, True, None, None, [("delay-for", b"1s")])


class Store:
    """Keeps each record once, as the real one does; `refuses` is raised for the next rows."""

    def __init__(self, committed: Mapping[SourceName, int]) -> None:
        self.offsets = committed
        self.ends = dict.fromkeys(committed, 0)
        self.held: dict[SourceName, list[int]] = {name: [] for name in committed}
        self.refuses: Exception | None = None
        self.room = True
        self.beat: Callable[[], None] | None = None
        self.lock = threading.Lock()
        self.run = 1
        self.since = dict.fromkeys(committed, 1)
        """The run in which each partition has come."""
        self.delivers = False

    def next_offsets(self, run: int | None = None) -> dict[SourceName, int]:
        with self.lock:
            return {name: end for name, end in self.ends.items() if run is None or self.since[name] <= run}

    def append(
        self, rows: pa.Table, ends: Mapping[SourceName, int], _: int, beat: Callable[[], None], run: int = 1
    ) -> int:
        self.beat = beat
        if self.refuses is not None and len(rows):
            raise self.refuses
        with self.lock:
            here = {name for name in self.ends if self.since[name] <= run}
            for name, offsets in by_source(rows):
                if name in here:
                    self.held[name] += [o for o in offsets.tolist() if o >= self.ends[name]]
            for name in ends.keys() & here:
                self.ends[name] = max(self.ends[name], ends[name])
        return 0

    def change(self, *, come: Mapping[SourceName, int] | None = None, gone: SourceName | None = None) -> None:
        """Partitions come, to be read on from an offset, or go."""
        with self.lock:
            self.run += 1
            for name, offset in (come or {}).items():
                self.ends[name], self.since[name] = offset, self.run
            if gone is not None:
                del self.ends[gone]

    def in_life(self, *lives: Life) -> list[SourceName]:
        if Life.CATCHING_UP in lives:
            return [name for name, end in self.next_offsets().items() if end < self.offsets.get(name, 0)]
        return list(self.ends) if self.delivers else []

    def committed(self) -> dict[SourceName, Progress]:
        return {name: Progress(offset) for name, offset in self.offsets.items()}

    def has_room(self) -> bool:
        return self.room


class Plain:
    """A plain reader that reads what the test puts into `log`, the ends of the partitions."""

    def __init__(self) -> None:
        self.log = {A: 0, B: 0}
        self.markers: dict[SourceName, int] = {}
        self.fails: BaseException | None = None
        self.cannot_read: dict[SourceName, int] = {}
        """Records at which partitions are left."""
        self.at: dict[SourceName, int] = {}
        self.closed = False
        self.wakes = threading.Event()

    def assign(self, offsets: Mapping[SourceName, int]) -> None:
        self.at = dict(offsets)

    def poll(self) -> Read:
        if self.fails is not None:
            raise self.fails
        read, tables = Read(entries=NOTHING), []
        for name, at in self.at.items():
            if self.cannot_read.get(name, at + 1) == at:
                read.left[name] = "a test"
                continue
            end = min(self.log[name], self.cannot_read.get(name, self.log[name]))
            if at < end:
                tables.append(entries(name, at, end))
            else:
                read.at_end.add(name)
                end = max(end, self.markers.get(name, 0))
            read.ends[name] = self.at[name] = max(at, end)
        if tables:
            read.entries = pa.concat_tables(tables)
        else:
            self.wakes.wait(0.01)
        return read

    def ask(
        self, at: Mapping[SourceName, int], beat: Callable[[], None], is_over: Callable[[], bool]
    ) -> tuple[Mapping[SourceName, int], set[SourceName]]:
        return PlainReader.ask(self, at, beat, is_over)  # type: ignore[arg-type]

    def close(self) -> None:
        self.closed = True


class Batches:
    """A reader of batches: `finds` has what it finds in a partition after its records, or else reads `log`."""

    def __init__(self, log: Mapping[SourceName, int]) -> None:
        self.log = log
        self.finds: dict[SourceName, list[Found]] = {}
        self.stretches: list[Stretch] = []
        self.fails: Exception | None = None
        self.refuses: SourceName | None = None
        """A partition that cannot be asked."""

    def read(self, stretches: Sequence[Stretch], is_over: Callable[[], bool]) -> Iterator[tuple[SourceName, Found]]:
        assert not is_over()
        self.stretches += stretches
        if self.fails is not None:
            raise self.fails
        for name, begin, end in ((each.name, each.begin, each.end) for each in stretches):
            if name == self.refuses:
                raise EnvironmentFailure("failed", hint="", reason="no answer", code="DB-3060")
            found = [each for each in self.finds.get(name, []) if each.offset >= begin]
            at = begin
            for each in found:
                yield from ((name, record(name, offset)) for offset in range(at, each.offset))
                yield name, each
                at = each.offset + 1
            if not found or not isinstance(found[-1], CorruptBatch):
                yield from ((name, record(name, offset)) for offset in range(at, min(end, self.log[name])))
                yield name, End(offset=max(at, min(end, self.log[name])))


def topic_id(topic: str, generation: int = 1) -> str:
    return f"{topic}-id-{generation}"


def suspects(batches: Batches, clock: Clock, directory: Path, topic_id: Callable[[str], str] = topic_id) -> Suspects:
    return Suspects(
        read=batches.read,
        skips=Choices(directory, BATCHES),
        topic_id=topic_id,
        mark=ReadingMark(directory),
        clock=clock,
    )
