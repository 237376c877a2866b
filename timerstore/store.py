"""TimerStore: the index of pending timers, as the bridge sees it.

Four threads meet here, each with a few methods:

    enqueue      append            a micro-batch goes in; blocks while there is no room (the flow control)
    dispatcher   begin, wait       what is due comes out, with the (O, P) that finishes it
    maintenance  maintenance.*     flush, windows, reclaim (maintenance.py)
    http         stats

One lock guards everything here; no IO happens under it. The store reads no clock: time is an argument.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from timerstore import files, recovery, segment
from timerstore.checkpoint import Checkpoint, Identity
from timerstore.entry import Kind, payload_of
from timerstore.errors import Closed, Misuse
from timerstore.maintenance import Maintenance
from timerstore.pending import Pending
from timerstore.position import Int64s, Position, Progress, pack
from timerstore.recovery import Recovered
from timerstore.resident import Resident
from timerstore.runs import EMPTY, Selection
from timerstore.segment import Segment
from timerstore.sources import NamedPosition, SourceName, Sources
from timerstore.timerlog import TimerLog
from timerstore.transaction import Transaction

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds and paces of a store; bytes are of rows in memory."""

    flush_bytes: int = 128 * MIB
    flush_interval_ms: int = 60_000
    hot_bytes: int = 256 * MIB
    horizon_ms: int = 60_000
    late_bytes: int = 64 * MIB
    window_bytes: int = 64 * MIB

    @property
    def loaded_bytes_max(self) -> int:
        """To where windows fill the hot wheel, and to where it shrinks when ingest has overfilled it."""
        return self.hot_bytes // 4 * 3

    @property
    def memtable_bytes_max(self) -> int:
        """Where ingest stops: a flush is under way and half of the next one has come in."""
        return self.flush_bytes + self.flush_bytes // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """A consistent look at the store. `pending_by_target` has "" for a delay topic's default target."""

    pending: int
    pending_by_target: dict[str, int]
    pending_until: tuple[int, ...]
    first_at_ms: int | None
    hot_rows: int
    hot_bytes: int
    memtable_rows: int
    memtable_bytes: int
    late_rows: int
    physical_bytes: int
    segments: int
    segment_bytes: int
    frontier_ms: int
    checkpoint_ms: int | None
    ingested: dict[SourceName, int]
    committed: dict[SourceName, int]


class TimerStore:
    """See the module. Made by `open`; every public method may be called from any thread unless it says otherwise."""

    def __init__(
        self, directory: Path, lock_descriptor: int, identity: Identity, sources: Sources, limits: Limits
    ) -> None:
        self.lock = threading.RLock()
        self.directory = directory
        self.sources = sources
        self.limits = limits
        self.identity = identity
        self.reports: tuple[str, ...] = ()
        self.resident = Resident(len(sources), {})
        self.timerlog = TimerLog()
        self.checkpoint = Checkpoint(identity=identity, offsets={})
        self.checkpoint_ms: int | None = None
        self.next_segment = 1
        self.maintenance = Maintenance(self)
        self._lock_descriptor = lock_descriptor
        self._changed = threading.Condition(self.lock)
        self._pending = Pending()
        self._transaction: Transaction | None = None
        self._batch = 0
        self._batches: deque[tuple[int, Int64s]] = deque()
        self._covered: tuple[int, Int64s] = (0, self.resident.ends)
        self._news = False
        self._closed = False
        self._intake_closed = False

    @classmethod
    def open(
        cls,
        directory: Path,
        *,
        identity: Identity,
        partitions: Iterable[SourceName],
        committed: Mapping[SourceName, tuple[int, NamedPosition | None]],
        now_ms: int,
        limits: Limits = Limits(),
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> TimerStore:
        """Open the index of a directory for the owned sources (the keys of `committed`, with their committed O and P).

        `partitions` are all partitions of the delay topics. What is found wrong and mended is told in `reports`.
        Raises WrongIdentity, DirectoryInUse, DiskFailure.
        """
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = files.lock_directory(directory)
        try:
            found, reports = recovery.read_checkpoint(directory, identity, now_ms)
            moved_back = [
                f"{topic}/{partition}"
                for (topic, partition), (offset, _) in committed.items()
                if found is not None and found.offsets.get((topic, partition), 0) > offset
            ]
            if moved_back:
                files.set_aside(directory / files.CHECKPOINT, now_ms)
                reports.append(f"committed offsets of {', '.join(moved_back)} lie before the index: it is rebuilt")
                found = None
            names = [*partitions, *committed, *(found.offsets if found is not None else ())]
            positions = [position for _, position in committed.values() if position is not None]
            sources = Sources([*names, *((topic, partition) for _, topic, partition, _ in positions)])
            recovered = recovery.open_segments(directory, found, identity, sources, now_ms, progress)
            store = cls(directory, descriptor, identity, sources, limits)
            store.reports = (*reports, *recovered.reports)
            store._restore(recovered, committed)
        except BaseException:
            os.close(descriptor)
            raise
        return store

    def resume_offsets(self) -> dict[SourceName, int | None]:
        """Where ingest has to start for every owned source: O_c, or None when the index knows nothing of it (the log's start)."""
        return {
            name: self.checkpoint.offsets.get(name) for name in map(self.sources.name, sorted(self.resident.committed))
        }

    def start_at(self, offsets: Mapping[SourceName, int]) -> None:
        """Set the first expected offset of every owned source, before anything is appended."""
        with self.lock:
            for name, offset in offsets.items():
                self.resident.ends[self.sources.index(*name)] = offset
            self._covered = (self._batch, self.resident.ends.copy())

    def next_offsets(self) -> dict[SourceName, int]:
        """The next expected offset of every owned source."""
        with self.lock:
            return {self.sources.name(source): int(self.resident.ends[source]) for source in self.resident.committed}

    # ---- enqueue

    def append(self, entries: pa.Table, ends: Mapping[SourceName, int]) -> int:
        """Take in a micro-batch of `entry.ENTRY` rows; `ends` are the exclusive end offsets it reaches, by source.

        Blocks while there is no room. Rows below the next expected offset (a batch seen before) and finished ones are dropped. Returns how many
        rows were new. Raises Closed when the store is closed meanwhile.
        """
        source = self.sources.of_columns(entries.column("topic"), entries.column("partition"))
        offset = entries.column("offset").to_numpy()
        at = entries.column("at").to_numpy()
        payload = payload_of(entries)
        with self.lock:
            self._wait_for_room()
            resident = self.resident
            new = (source >= 0) & (offset >= resident.ends[source])
            fresh = Selection(
                at[new],
                pack(source[new], offset[new]),
                np.zeros(int(new.sum()), dtype=np.int32),
                np.flatnonzero(new).astype(np.int32),
            )
            pending = fresh[~resident.finished(fresh)]
            self._batch += 1
            for name, end in ends.items():
                index = self.sources.index(*name)
                resident.ends[index] = max(int(resident.ends[index]), end)
            self._batches.append((self._batch, resident.ends.copy()))
            nearest = resident.hot.first_at_ms()
            resident.add(pending.sorted(), payload, batch=self._batch, stored=False)
            self._count_in(pending, payload)
            if resident.hot_bytes > self.limits.hot_bytes:
                resident.retreat_frontier(self.limits.loaded_bytes_max, self._floor())
            first = resident.hot.first_at_ms()
            if len(resident.late) or (first is not None and (nearest is None or first < nearest)) or self.is_pressed():
                self._news = True
            self._changed.notify_all()
            return len(fresh)

    # ---- dispatcher

    def begin(self) -> Transaction:
        """Start a transaction; one at a time, and only when every owned source is ingested up to its committed O (invariant I6)."""
        with self.lock:
            if self._transaction is not None:
                raise Misuse("a transaction is open")
            if not self.is_caught_up():
                raise Misuse("nothing may be dispatched before ingest has reached the committed offsets")
            self._transaction = Transaction(self)
            return self._transaction

    def is_caught_up(self) -> bool:
        """Whether every owned source is ingested up to its committed O."""
        with self.lock:
            return bool((self.resident.ends >= self.resident.offset)[self.resident.owned].all())

    def next_wakeup_ms(self) -> int | None:
        """When the next resident row is due, or None. (In the past: at once.)"""
        with self.lock:
            candidates = (self.resident.hot.first_at_ms(), self.resident.late.first_at_ms())
            return min((at for at in candidates if at is not None), default=None)

    def offsets_behind(self) -> bool:
        """Whether ingest is ahead of the committed O, so that a transaction without rows would move it."""
        with self.lock:
            return bool((self.resident.ends > self.resident.offset)[self.resident.owned].any())

    def is_pressed(self) -> bool:
        """Whether O should be committed at once: the memtable has to be flushed, and only rows below O can be."""
        with self.lock:
            return self.resident.memtable_bytes >= self.limits.flush_bytes // 2 and self.offsets_behind()

    def wait(self, timeout_s: float | None) -> None:
        """Sleep until something nearer was appended, `wake` was called, or the time is over."""
        with self.lock:
            if not self._news and not self._closed:
                self._changed.wait_for(lambda: self._news or self._closed, timeout_s)
            self._news = False

    def wake(self) -> None:
        """End `wait` now."""
        with self.lock:
            self._news = True
            self._changed.notify_all()

    def transaction_committed(
        self,
        rows: Selection,
        delivered: list[tuple[Int64s, pa.Array]],
        progress: Mapping[int, Progress],
        position: Position,
    ) -> None:
        """Called by Transaction.acknowledge; `delivered` are times and targets of the timers among `rows`."""
        with self.lock:
            for at, target in delivered:
                self._pending.remove(at, target)
            self.resident.commit(progress, position)
            self.resident.chunks.release(rows.chunk)
            self._transaction = None
            self._changed.notify_all()

    def transaction_rolled_back(self, rows: Selection) -> None:
        """Called by Transaction.rollback."""
        with self.lock:
            self.resident.replace_all(rows)
            self._transaction = None
            self._news = True
            self._changed.notify_all()

    # ---- maintenance (see maintenance.py)

    def covered(self) -> tuple[int, Int64s]:
        """The last batch whose ends the committed O covers, and these ends by source: where O_c may go."""
        with self.lock:
            while self._batches and (self._batches[0][1] <= self.resident.offset)[self.resident.owned].all():
                self._covered = self._batches.popleft()
            return self._covered

    def transaction_rows(self) -> Selection:
        """References of the rows that are handed out."""
        return EMPTY if self._transaction is None else self._transaction.rows()

    def named_progress(self) -> dict[SourceName, tuple[int, NamedPosition | None]]:
        """Committed (O, P) of the owned sources as files name them."""
        return {
            self.sources.name(source): (state.offset, self.sources.named(state.position))
            for source, state in self.resident.committed.items()
        }

    def notify(self) -> None:
        """There may be room again for who waits in `append`."""
        with self.lock:
            self._changed.notify_all()

    # ---- http, and the end

    def stats(self, edges_ms: Sequence[int] = ()) -> Stats:
        """A consistent look at everything; `pending_until` answers for each of `edges_ms` (epoch ms)."""
        with self.lock:
            resident = self.resident
            owned = [(self.sources.name(source), source) for source in resident.committed]
            return Stats(
                pending=len(self._pending),
                pending_by_target=self._pending.by_target(),
                pending_until=tuple(self._pending.wheel.until(edge) for edge in edges_ms),
                first_at_ms=self.next_wakeup_ms(),
                hot_rows=len(resident.hot),
                hot_bytes=resident.hot_bytes,
                memtable_rows=len(resident.memtable),
                memtable_bytes=resident.memtable_bytes,
                late_rows=len(resident.late),
                physical_bytes=resident.chunks.physical_bytes,
                segments=len(self.timerlog),
                segment_bytes=self.timerlog.bytes,
                frontier_ms=resident.frontier.at_ms,
                checkpoint_ms=self.checkpoint_ms,
                ingested={name: int(resident.ends[source]) for name, source in owned},
                committed={name: resident.committed[source].offset for name, source in owned},
            )

    def close_intake(self) -> None:
        """Take in nothing more: who waits in `append`, or calls it, gets Closed. Delivery and flushes go on."""
        with self.lock:
            self._intake_closed = True
            self._changed.notify_all()

    def close(self) -> None:
        """Give up the directory and wake everybody who waits; what is not flushed is read from Kafka again next time."""
        with self.lock:
            if not self._closed:
                self._closed = True
                os.close(self._lock_descriptor)
                self._changed.notify_all()

    # ---- inside

    def _restore(self, recovered: Recovered, committed: Mapping[SourceName, tuple[int, NamedPosition | None]]) -> None:
        """Become what the checkpoint and its segments describe."""
        self.resident = Resident(
            len(self.sources),
            {
                self.sources.index(*name): Progress(offset, self.sources.position(position))
                for name, (offset, position) in committed.items()
            },
        )
        self._covered = (0, self.resident.ends)
        if recovered.checkpoint is not None:
            self.checkpoint = recovered.checkpoint
        for opened in recovered.segments:
            self.timerlog.add(opened)
            self.next_segment = max(self.next_segment, files.segment_number(opened.path.name) + 1)
            self._count_segment(opened)

    def _count_segment(self, opened: Segment) -> None:
        """Count the pending rows of a segment: by its footer when all are, else by looking at its positions."""
        resident = self.resident
        if all(source in resident.committed for source in opened.largest) and opened.first > max(
            state.position for state in resident.committed.values()
        ):
            self._pending.add_segment(opened)
            return
        table = segment.read_rows(opened, columns=["topic", "partition", "offset", "at", "target"])
        source = self.sources.of_columns(table.column("topic"), table.column("partition"))
        at = table.column("at").to_numpy()
        nowhere = np.zeros(len(at), dtype=np.int32)
        rows = Selection(at, pack(source, table.column("offset").to_numpy()), nowhere, nowhere)
        pending = ~resident.finished(rows)
        self._pending.add(at[pending], table.column("target").filter(pa.array(pending)))

    def _count_in(self, rows: Selection, payload: pa.RecordBatch) -> None:
        """Count new timers; rejects and cancels are not pending deliveries."""
        timers = rows[payload.column("kind").to_numpy()[rows.row] == Kind.TIMER]
        if len(timers):
            target = payload.column("target")
            whole = len(timers) == payload.num_rows
            self._pending.add(timers.at, target if whole else target.take(pa.array(timers.row)))

    def _wait_for_room(self) -> None:
        limits = self.limits
        while not (self._closed or self._intake_closed):
            resident = self.resident
            full = resident.memtable_bytes >= limits.memtable_bytes_max
            flooded = resident.late_bytes >= limits.late_bytes and self.is_caught_up()
            if not full and not flooded:
                return
            self._changed.wait(1.0)
        raise Closed("the store was closed while a batch waited for room")

    def _floor(self) -> Position:
        """The frontier never moves below what is delivered or being delivered."""
        position = self.resident.position
        return position if self._transaction is None else max(position, self._transaction.position)
