"""Maintenance of a store: flush, reclaim, compaction. One thread calls them, one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from timerstore.cancels import tombstones
from timerstore.cancels.tombstones import TombstoneFile, TombstoneMerge
from timerstore.disk import checkpoint as checkpoints
from timerstore.disk import files
from timerstore.disk.checkpoint import Checkpoint, NamedFile
from timerstore.errors import DiskFull, Misuse
from timerstore.log import segment
from timerstore.log.segment import Segment
from timerstore.log.timerlog import Window
from timerstore.memory.sorted_runs import RowRefs, concat
from timerstore.operations import compaction
from timerstore.operations.by_origin import covered_in
from timerstore.operations.compaction import Compaction
from timerstore.operations.state import StoreState


@dataclass(frozen=True, slots=True, kw_only=True)
class Flushed:
    """The result of a flush: rows and file bytes of the new segment (0: no rows to write)."""

    rows: int
    bytes: int


class Maintenance:
    def __init__(self, state: StoreState) -> None:
        self._state = state
        self._flushed_ms: int | None = None
        self._has_flushed = False
        self._compaction: Compaction | None = None
        self._covered: dict[str, tuple[int, int]] = {}
        """By name of a segment: the store's count of cancelled timers at the time, and the cancelled ones in it."""

    def flush_due(self, now_ms: int) -> bool:
        """Whether a flush is due: O_c can move, and the memtable is full, the interval is over, or a restart would read
        many records again; or memory has too many tombstones."""
        state = self._state
        with state.lock:
            if state.budgets.tombstones.is_used(state, 0.5):
                return True
            covered, on_disk, limits = state.resident.covered(), state.checkpoint.offset, state.limits
            if on_disk == covered:
                return False
            if self._flushed_ms is None:
                self._flushed_ms = now_ms
            since_ms = now_ms - self._flushed_ms
            # The first flush comes as soon as a start has read all records again: the next start may come any time.
            is_rested = since_ms >= limits.flush_pause_ms or not self._has_flushed
            records = covered - (on_disk or 0)
            return (
                not 0 <= since_ms < limits.flush_interval_ms
                or (records >= limits.flush_records and is_rested and state.is_caught_up())
                or state.is_memtable_full()
            )

    def flush(self, now_ms: int) -> Flushed:
        """Make every row below the committed O, and every tombstone, durable, and move O_c there.

        Raises DiskFull (without a change; try again later), DiskFailure, or Inconsistent after a failed change.
        """
        state, resident, live = self._state, self._state.resident, self._state.cancels.tombstones
        # 1. Fix O_c at the committed O, or at ingest's end before it; choose the rows below that no segment holds.
        with state.changing():
            covered, is_full = resident.covered(), state.is_memtable_full()
            ready, others = resident.ready.of_now(), [*resident.memtable, state.rows_on_loan()]
            payloads = resident.chunks.all()
            number = state.next_segment
            merge = self._tombstone_merge(now_ms)
        rows = self._unstored([*ready(), *others], covered)
        payloads = {chunk: payloads[chunk] for chunk in np.unique(rows.chunk).tolist()}
        # 2. Write them as one segment, and the indexes beside it: temporary file, fsync, rename, fsync of the folder.
        #    A crash up to here leaves files that no checkpoint names; the next start removes them.
        written = segment.write(state.directory, number, state.identity, rows.sorted(), payloads)
        merged, absorbed = None, () if merge is None else merge.absorbed
        try:
            # 3. Write the tombstones of memory, merged with files that are not much larger. A crash costs as in 2.
            if merge is not None:
                path = state.directory / files.tombstones_name(state.next_tombstones - 1)
                merged = tombstones.write(path, merge)
            # 4. Replace the checkpoint: it names the new files and moves O_c in one step.
            #    After a crash before it, rows and cancels are read from Kafka again; after it, from the files.
            named = tuple(s.named for s in state.timerlog) + ((written.named,) if written else ())
            left = tuple(t for t in live.files if t not in absorbed)
            self._write_checkpoint(covered, named, (*left, merged) if merged else left, now_ms)
        except DiskFull:
            if written is not None:
                segment.remove(written.path)
            if merged is not None:
                files.remove(merged.file.path)
            raise
        # 5. Only now may memory drop the content of the files.
        with state.changing():
            state.next_segment = number + 1
            if written is not None:
                state.timerlog.add(written)
            resident.mark_stored(covered)
            state.cancels.forget_stored(resident)
            if merge is not None:
                live.stored(absorbed, merged)
            self._flushed_ms, self._has_flushed = now_ms, True
            state.changed.notify_all()
        # Repacking passes over every row under the lock. Flushes after many records would repeat it too often: hence
        # its interval.
        with state.memory.changing():
            every_ms = 0 if is_full else state.limits.flush_interval_ms
            state.memory.repack(now_ms, state.limits.repacked_bytes, every_ms=every_ms)
        # 6. Remove the merged files. A crash before it leaves files that no checkpoint names.
        for gone in absorbed:
            files.remove(gone.file.path)
        if state.aside and state.is_caught_up():
            self.drop_aside()
        files.keep_reserve(state.directory)
        for file in live.files:
            file.file.drop_pages()
        return Flushed(rows=len(rows), bytes=written.named.bytes if written else 0)

    def reclaim(self, now_ms: int) -> int:
        """Remove segments with finished rows only. Returns their number. Raises DiskFull, DiskFailure, Inconsistent.

        The checkpoint goes first, because the files that it names must exist. The next start removes the others at the
        latest.
        """
        state = self._state
        with state.lock:
            finished = state.timerlog.finished(state.resident.committed)
            if self._compaction is not None:
                finished = [s for s in finished if s not in self._compaction.segments]
        if finished:
            self._replace(finished, None, now_ms)
        return len(finished)

    def compaction_window(self, now_ms: int) -> Window | None:
        """The next window to read, of the current compaction or of one that is due now, or None. After the last window
        it ends the compaction:

        1. The new segment is made durable. A crash up to here leaves a file that no checkpoint names.
        2. The checkpoint names it in place of the old segments, in one step. A crash after it leaves their files.
        3. The old segments are removed.

        Raises DiskFull (without a change; try again later), DiskFailure, Inconsistent.
        """
        state = self._state
        if self._compaction is None:
            chosen = compaction.choose(list(state.timerlog), state.limits, now_ms, self._dead_rows)
            if not chosen:
                return None
            self._compaction = Compaction(state, chosen, state.next_segment)
            state.next_segment += 1
        done = self._compaction
        window = done.window()
        if window is not None:
            return window
        self._compaction = None
        written = done.close()
        try:
            self._replace(done.segments, written, now_ms)
        except DiskFull:
            if written is not None:
                segment.remove(written.path)
            raise
        return None

    def compact(self, window: Window, entries: pa.Table) -> None:
        """Take in the rows read for a window of the compaction. Raises as `compaction_window`; Misuse without one."""
        if self._compaction is None:
            raise Misuse("no compaction is under way", code="DB-7003")
        try:
            self._compaction.take(window, entries)
        except DiskFull:
            self.abandon_compaction()
            raise

    def abandon_compaction(self) -> None:
        """Give up the current compaction, if any."""
        if self._compaction is not None:
            self._compaction.abandon()
            self._compaction = None

    def drop_aside(self) -> int:
        """Remove the files that a rebuild has set aside. Returns their number. Their records are in Kafka, too, or were
        when the rebuild began."""
        aside, self._state.aside = self._state.aside, ()
        for path in aside:
            files.remove(path)
        return len(aside)

    def _unstored(self, runs: Sequence[RowRefs], covered: int) -> RowRefs:
        """The rows of `runs` below `covered` that no segment holds. It needs no lock: only a flush changes
        `Resident.stored`.

        Memory has no finished rows, and the offsets of overtaken rows are not below the committed O.
        """
        resident = self._state.resident
        return concat([run[~resident.is_stored(run) & (run.offset < covered)] for run in runs])

    def _tombstone_merge(self, now_ms: int) -> TombstoneMerge | None:
        """The next merge of tombstones, if any; the caller holds the lock."""
        state = self._state
        expired_before_ms = state.cancels.expired_before_ms(state.resident, state.rows_on_loan(), now_ms)
        merge = state.cancels.tombstones.merge(expired_before_ms)
        if merge is not None:
            state.next_tombstones += 1
        return merge

    def _dead_rows(self, each: Segment) -> int:
        """The estimated number of finished or cancelled rows in a segment."""
        state = self._state
        passed = compaction.passed_rows(each, state.resident.position)
        if not len(state.cancels.tombstones):
            return passed
        # A count takes long: the next one waits until the store has further cancels for an eighth of the segment's
        # rows.
        cancelled, counted = state.cancels.cancelled, self._covered.get(each.named.name)
        if counted is None or cancelled - counted[0] > each.rows // 8:
            covered = sum(int(part.counts.sum()) for part in covered_in(state, each))
            counted = self._covered[each.named.name] = (cancelled, covered)
        return min(each.rows, passed + counted[1])

    def _replace(self, old: Sequence[Segment], new: Segment | None, now_ms: int) -> None:
        """Replace segments by a new one, or by none: first in the checkpoint, then in memory, then on disk."""
        state = self._state
        named = tuple(s.named for s in state.timerlog if s not in old) + ((new.named,) if new else ())
        self._write_checkpoint(state.checkpoint.offset, named, state.cancels.tombstones.files, now_ms, frees=True)
        with state.changing():
            state.timerlog.remove(old)
            if new is not None:
                state.timerlog.add(new)
        for gone in old:
            self._covered.pop(gone.named.name, None)
            segment.remove(gone.path)
        files.sync_directory(state.directory)
        files.keep_reserve(state.directory)

    def _write_checkpoint(
        self,
        offset: int | None,
        segments: tuple[NamedFile, ...],
        cancels: Sequence[TombstoneFile],
        now_ms: int,
        *,
        frees: bool = False,
    ) -> None:
        state = self._state
        with state.lock:
            state.must_be_consistent()
            progress, cut = state.resident.committed, state.cut
        written = Checkpoint(
            identity=state.identity,
            offset=offset,
            progress=progress,
            cut=cut,
            kept=state.checkpoint.kept if offset is None else None,
            segments=segments,
            tombstones=tuple(file.named for file in cancels),
        )
        checkpoints.write(state.directory, written, frees=frees)
        with state.lock:
            state.checkpoint = written
            state.checkpoint_ms = now_ms
