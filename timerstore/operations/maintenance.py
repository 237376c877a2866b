"""Maintenance of a store: flush, load the next window, reclaim. One thread calls these, one after the other.

A row that a window needs is either in a segment that the gather reads, or still in the memtable when the gather's
result is admitted. A flush in between would take rows out of the memtable that the gather has not read, so `admit`
refuses a window that a newer segment reaches into.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from timerstore.cancels import tombstones
from timerstore.cancels.cancels import unfinished
from timerstore.cancels.tombstones import Run, TombstoneFile
from timerstore.disk import checkpoint as checkpoints
from timerstore.disk import files
from timerstore.disk.checkpoint import Checkpoint, NamedSegment
from timerstore.errors import DiskFull, Misuse
from timerstore.log import segment
from timerstore.log.segment import Segment
from timerstore.log.timerlog import Window
from timerstore.memory.chunks import ROW_REFERENCE_BYTES
from timerstore.memory.sorted_runs import RowRefs, concat, select
from timerstore.operations import compaction
from timerstore.operations.compaction import Compaction
from timerstore.rows.entry import payload_of
from timerstore.rows.position import ORIGIN, Bools, Int64s, Position, end_of
from timerstore.rows.sources import SourceName

if TYPE_CHECKING:
    from timerstore.store import TimerStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Flushed:
    """What a flush did: rows and file bytes of the new segment (0: nothing pending had to be written)."""

    rows: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Burial:
    """Tombstones on their way into a file: memory runs and files to be merged, and what is left out. `elsewhere` is
    as `Maintenance.elsewhere` will be."""

    number: int
    runs: tuple[Run, ...]
    absorbed: list[TombstoneFile]
    expired_before_ms: int
    elsewhere: Bools


class Maintenance:
    """The store's housekeeping; see the module for who may call it."""

    def __init__(self, store: TimerStore) -> None:
        self._store = store
        self._flushed_ms: int | None = None
        self._compaction: Compaction | None = None
        self._covered: dict[str, tuple[int, int]] = {}
        """By name of a segment: how many timers had been cancelled when it was counted, and how many of it were."""

    def elsewhere(self, offsets: Mapping[SourceName, int] | None = None) -> Bools:
        """By source: whether another instance owns it, and the index (`offsets` of its checkpoint) covers it, so that
        it can go on from here when it comes back."""
        store = self._store
        covered = store.checkpoint.offsets if offsets is None else offsets
        return np.array([name in covered for name in store.sources], dtype=np.bool_) & ~store.resident.owned

    def _lets_go(self, now_ms: int) -> bool:
        """Whether partitions have been with another instance for so long that their rows and their O_c leave."""
        store = self._store
        return now_ms - store.opened_ms >= store.limits.elsewhere_ms and bool(self.elsewhere().any())

    def flush_due(self, now_ms: int) -> bool:
        """Whether a flush is worth while: the memtable is full, or the interval is over, and O_c can move; or there are
        too many tombstones in memory."""
        store = self._store
        with store.lock:
            if store.cancels.tombstones.memory_rows >= store.limits.tombstone_rows or self._lets_go(now_ms):
                return True
            covered = store.resident.covered()
            known = store.checkpoint.offsets
            if all(known.get(store.sources.name(source)) == covered[source] for source in store.resident.committed):
                return False
            if self._flushed_ms is None:
                self._flushed_ms = now_ms
            aged = not 0 <= now_ms - self._flushed_ms < store.limits.flush_interval_ms
            return aged or store.resident.memtable_bytes >= store.limits.flush_bytes

    def flush(self, now_ms: int) -> Flushed:
        """Make every row below a committed O durable, and every tombstone, and move O_c there.

        Raises DiskFull (nothing has changed; try again later) or DiskFailure.
        """
        store = self._store
        # 1. Fix O_c at the committed O (where ingest has come so far); choose the rows below it that no segment holds.
        with store.lock:
            resident = store.resident
            covered = resident.covered()
            rows = self._unstored(covered)
            payloads = resident.chunks.payloads(rows.chunk)
            # The rows of a partition and its O_c leave together: without this, the rows count no more (recovery.py).
            kept = {} if self._lets_go(now_ms) else store.checkpoint.offsets
            offsets = {**kept, **{store.sources.name(s): int(covered[s]) for s in resident.committed}}
            number = store.next_segment
            burial = self._burial(now_ms, offsets)
        # 2. Write them as one segment, and the index beside it: temporary file, fsync, rename, fsync of the directory.
        #    A crash until here leaves files that no checkpoint names; opening removes them.
        written = None
        if len(rows):
            written = segment.write(store.directory, number, store.identity, store.sources, rows.sorted(), payloads)
        buried = None
        try:
            # 3. Write the tombstones that are in memory only, merged with files that are not much larger. As 2.
            if burial is not None:
                buried = self._bury(burial)
            # 4. Replace the checkpoint: it names all that and moves O_c in one step.
            #    A crash before it reads rows and cancels from Kafka again, after it from the files.
            named = tuple(s.named for s in store.timerlog) + ((written.named,) if written else ())
            left = tuple(t for t in store.cancels.tombstones.files if burial is None or t not in burial.absorbed)
            self._write_checkpoint(offsets, named, (*left, buried) if buried else left, now_ms)
        except DiskFull:
            if written is not None:
                segment.remove(written.path)
            if buried is not None:
                files.remove(buried.file.path)
            raise
        # 5. Only now may memory let go of what the files hold.
        with store.lock:
            store.next_segment = number + 1
            if written is not None:
                store.timerlog.add(written)
            store.resident.mark_stored(covered)
            store.cancels.forget_stored(store.resident)
            if burial is not None:
                store.cancels.tombstones.stored(burial.absorbed, buried)
            self._flushed_ms = now_ms
            store.resident.repack(store.limits.repacked_bytes)
            store.notify()
        # 6. A crash before it leaves files that no checkpoint names.
        for gone in burial.absorbed if burial is not None else ():
            files.remove(gone.file.path)
        if store.aside and store.is_caught_up():
            self.drop_aside()
        files.keep_reserve(store.directory)
        for file in store.cancels.tombstones.files:
            file.file.drop_pages()
        return Flushed(rows=len(rows), bytes=written.named.bytes if written else 0)

    def next_window(self, now_ms: int) -> Window | None:
        """The next window to gather, or None when the frontier is far enough ahead or the ready rows has no room.

        A window without segments is admitted here at once: histograms and fences prove that no segment has a row in it
        (invariant I3).
        """
        store = self._store
        limits, resident = store.limits, store.resident
        with store.lock:
            if resident.frontier.at_ms >= now_ms + limits.horizon_ms // 2:
                return None
            room = self._room()
            if room < limits.window_bytes // 4 and len(resident.ready):
                return None
            window = store.timerlog.window(resident.frontier, end_of(now_ms + limits.horizon_ms), room)
            upper = window.upper
            if resident.memtable_bytes > room:
                upper = self._upper_within(upper, room)
            window = Window(
                lower=window.lower, upper=upper, segments=store.timerlog.segments_between(window.lower, upper)
            )
            if not window.segments:
                self._advance(upper)
                return None
            return window

    def admit(self, window: Window, entries: pa.Table) -> bool:
        """Take in what was gathered for a window (rows of `entry.SEGMENT` or `entry.ENTRY`, any order; rows outside it
        are ignored).

        Where there is not enough room for all of it, the frontier moves to the last row that fits. False when the
        frontier has moved back meanwhile, or a new segment reaches into the window: it has to be asked for again.
        """
        store = self._store
        rows = select(entries, store.sources).sorted()
        rows = rows[rows.at_or_below(window.upper) & ~rows.at_or_below(window.lower)]
        payload = payload_of(entries)
        with store.lock:
            if not self._stands(window):
                return False
            # Nothing in the window can become finished meanwhile: it lies above P, and above O where its own P is
            # ahead.
            rows = rows[~store.resident.finished(rows)]
            row_bytes = payload.nbytes // max(1, payload.num_rows) + ROW_REFERENCE_BYTES
            fitting = max(1, self._room() // row_bytes)
        upper = window.upper
        if fitting < len(rows):
            rows = rows[:fitting]
            upper = rows.last()
        payload = payload.take(pa.array(rows.row))
        with store.lock:
            if not self._stands(window):
                return False
            self._advance(upper)
            store.resident.add(rows, payload)
            return True

    def reclaim(self, now_ms: int) -> int:
        """Remove segments of which every row is finished; returns how many.

        The checkpoint goes first: a file that it names must be there, one that it does not name is removed by the next
        opening at the latest.
        """
        store = self._store
        with store.lock:
            finished = store.timerlog.finished(store.resident.committed, self.elsewhere())
            if self._compaction is not None:
                finished = [s for s in finished if s not in self._compaction.segments]
            if not finished:
                return 0
        self._replace(finished, None, now_ms)
        return len(finished)

    def compaction_window(self, now_ms: int) -> Window | None:
        """What to gather for the compaction that is under way, or that is worth while now; None when there is nothing
        to do, after the last window has been written down.

        1. The new segment is made durable. A crash until here leaves a file that nobody names.
        2. The checkpoint names it instead of the old ones, in one step. A crash after it leaves those.
        3. The old ones are removed.

        Raises DiskFull (nothing has changed; try again later) or DiskFailure.
        """
        store = self._store
        if self._compaction is None:
            chosen = compaction.choose(list(store.timerlog), store.limits, now_ms, self._dead_rows)
            if not chosen:
                return None
            self._compaction = Compaction(store, chosen, store.next_segment)
            store.next_segment += 1
        window = self._compaction.window()
        if window is not None:
            return window
        done = self._compaction
        try:
            written = done.close()
            try:
                self._replace(done.segments, written, now_ms)
            except DiskFull:
                if written is not None:
                    segment.remove(written.path)
                raise
        except DiskFull:
            done.abandon()
            raise
        finally:
            self._compaction = None
        return None

    def compact(self, window: Window, entries: pa.Table) -> None:
        """Take in what was gathered for a window of the compaction. Raises as `compaction_window`."""
        if self._compaction is None:
            raise Misuse("no compaction is under way")
        try:
            self._compaction.take(window, entries)
        except DiskFull:
            self.abandon_compaction()
            raise

    def abandon_compaction(self) -> None:
        """Give up the compaction that is under way, if any."""
        if self._compaction is not None:
            self._compaction.abandon()
            self._compaction = None

    def drop_aside(self) -> int:
        """Remove what a rebuild has put aside; returns how many files. All of it is in Kafka too, or was when the
        rebuild began."""
        aside, self._store.aside = self._store.aside, ()
        for path in aside:
            files.remove(path)
        return len(aside)

    def _dead_rows(self, each: Segment) -> int:
        """About how many rows of a segment are finished, cancelled, or of partitions that have left."""
        store = self._store
        with store.lock:
            committed, offsets = store.resident.committed, store.checkpoint.offsets
            away = [source for source in each.largest if source not in committed]
            if any(store.sources.name(source) in offsets for source in away):
                return 0
            gone = sum(each.rows_of[source] for source in away)
            position = min((committed[s].position for s in each.largest if s in committed), default=ORIGIN)
            passed = compaction.passed_rows(each, position) * (each.rows - gone) // each.rows + gone
        if each.ids is None or not len(store.cancels.tombstones):
            return passed
        # Counting takes a while: again only when an eighth of the segment may have been cancelled since.
        cancelled, known = store.cancels.cancelled, self._covered.get(each.named.name)
        if known is None or cancelled - known[0] > each.rows // 8:
            covered = store.cancels.covered_in(each.ids, lambda timers: unfinished(store.resident, timers))
            known = self._covered[each.named.name] = (cancelled, int(covered.counts.sum()))
        return min(each.rows, passed + known[1])

    def _replace(self, old: Sequence[Segment], new: Segment | None, now_ms: int) -> None:
        """Let a segment, or none, take the place of others: first in the checkpoint, then in memory, then on disk."""
        store = self._store
        named = tuple(s.named for s in store.timerlog if s not in old) + ((new.named,) if new else ())
        self._write_checkpoint(store.checkpoint.offsets, named, store.cancels.tombstones.files, now_ms, frees=True)
        with store.lock:
            store.timerlog.remove(old)
            if new is not None:
                store.timerlog.add(new)
        for gone in old:
            self._covered.pop(gone.named.name, None)
            segment.remove(gone.path)
        files.sync_directory(store.directory)
        files.keep_reserve(store.directory)

    def _unstored(self, covered: Int64s) -> RowRefs:
        """Every row below `covered` (offsets by source), memtable, hot, withheld or handed out, that no segment holds.

        Finished rows are not in memory, and the offsets of late rows are not below the committed O.
        """
        resident = self._store.resident
        open_rows = self._store.transaction_rows()
        rows = concat([resident.ready.all(), resident.memtable.all(), resident.withheld.all(), open_rows])
        return rows[~resident.is_stored(rows) & (rows.offset < covered[rows.source])]

    def _burial(self, now_ms: int, offsets: Mapping[SourceName, int]) -> _Burial | None:
        """What there is to write of tombstones; `offsets` is O_c as it will be."""
        store = self._store
        cancels, resident = store.cancels, store.resident
        runs = cancels.tombstones.freeze()
        expired_before_ms = cancels.expired_before_ms(resident, store.transaction_rows(), now_ms)
        # A partition that another instance has: what is pending of it in our segments is not looked at here.
        present = np.zeros(len(store.sources), dtype=np.bool_)
        for each in store.timerlog:
            present[list(each.largest)] = True
        elsewhere = self.elsewhere(offsets) | (present & ~resident.owned)
        absorbed = tombstones.to_absorb(cancels.tombstones.files, sum(map(len, runs)), expired_before_ms, elsewhere)
        if not runs and not absorbed:
            return None
        number = store.next_tombstones
        store.next_tombstones += 1
        return _Burial(
            number=number, runs=runs, absorbed=absorbed, expired_before_ms=expired_before_ms, elsewhere=elsewhere
        )

    def _bury(self, burial: _Burial) -> TombstoneFile | None:
        store = self._store

        def is_gone(run: Run) -> Bools:
            gone: Bools = (run.expire_ms < burial.expired_before_ms) & ~burial.elsewhere[run.source]
            return gone

        path = store.directory / files.tombstones_name(burial.number)
        return tombstones.write(path, store.sources, burial.runs, burial.absorbed, is_gone)

    def _room(self) -> int:
        """Bytes that a window may load.

        Loading stops short of the budget: the rest is for what ingest brings, else each batch would push the window out
        again.
        """
        limits = self._store.limits
        return min(limits.loaded_bytes_max - self._store.resident.ready_rows_bytes, limits.window_bytes)

    def _upper_within(self, upper: Position, room: int) -> Position:
        """How far the memtable's rows fit into `room`; at least to its first row."""
        resident = self._store.resident
        fits = resident.memtable.largest_within(upper, resident.chunks.row_bytes, room)
        if fits is None:
            return upper
        return max(fits, min(upper, resident.memtable.first()))

    def _stands(self, window: Window) -> bool:
        """Whether what was gathered for a window is still all that segments have in it."""
        store = self._store
        reaching = store.timerlog.segments_between(window.lower, window.upper)
        return store.resident.frontier == window.lower and all(s in window.segments for s in reaching)

    def _advance(self, upper: Position) -> None:
        self._store.resident.advance_frontier(upper)
        self._store.wake()

    def _write_checkpoint(
        self,
        offsets: Mapping[SourceName, int],
        segments: tuple[NamedSegment, ...],
        cancels: Sequence[TombstoneFile],
        now_ms: int,
        *,
        frees: bool = False,
    ) -> None:
        store = self._store
        with store.lock:
            sources, states = store.sources, store.resident.committed
            progress = {sources.name(s): (state.offset, sources.named(state.position)) for s, state in states.items()}
            frozen = {sources.name(s): sources.named_steps(state.frozen) for s, state in states.items() if state.frozen}
        written = Checkpoint(
            identity=store.identity,
            offsets=offsets,
            progress=progress,
            frozen=frozen,
            segments=segments,
            tombstones=tuple(file.named for file in cancels),
        )
        checkpoints.write(store.directory, written, frees=frees)
        with store.lock:
            store.checkpoint = written
            store.checkpoint_ms = now_ms
