"""Maintenance of a store: flush, reclaim, compact. One thread calls these, one after the other."""

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
    """What a flush did: rows and file bytes of the new segment (0: nothing pending had to be written)."""

    rows: int
    bytes: int


class Maintenance:
    def __init__(self, state: StoreState) -> None:
        self._state = state
        self._flushed_ms: int | None = None
        self._has_flushed = False
        self._repacked_ms = 0
        self._compaction: Compaction | None = None
        self._covered: dict[str, tuple[int, int]] = {}
        """By name of a segment: how many timers had been cancelled when it was counted, and how many of it were."""

    def flush_due(self, now_ms: int) -> bool:
        """Whether a flush is worth while: the memtable is full, the interval is over, or a restart would read much
        again, and O_c can move; or there are too many tombstones in memory."""
        state = self._state
        with state.lock:
            if state.budgets.tombstones.is_used(state, 0.5):
                return True
            covered, known, limits = state.resident.covered(), state.checkpoint.offset, state.limits
            if known == covered:
                return False
            if self._flushed_ms is None:
                self._flushed_ms = now_ms
            since_ms = now_ms - self._flushed_ms
            # What a start has read again is written as soon as all of it is read: the next start may come any time.
            is_rested = since_ms >= limits.flush_pause_ms or not self._has_flushed
            records = covered - (known or 0)
            return (
                not 0 <= since_ms < limits.flush_interval_ms
                or (records >= limits.flush_records and is_rested and state.is_caught_up())
                or state.is_memtable_full()
            )

    def flush(self, now_ms: int) -> Flushed:
        """Make every row below a committed O durable, and every tombstone, and move O_c there.

        Raises DiskFull (nothing has changed; try again later), DiskFailure, or Inconsistent after a change that failed.
        """
        state, resident, live = self._state, self._state.resident, self._state.cancels.tombstones
        # 1. Fix O_c at the committed O (where ingest has come so far); choose the rows below it that no segment holds.
        with state.changing():
            covered, is_full = resident.covered(), state.is_memtable_full()
            runs = [*resident.ready, *resident.memtable, state.rows_on_loan()]
            payloads = resident.chunks.all()
            number = state.next_segment
            merge = self._tombstone_merge(now_ms)
        rows = self._unstored(runs, covered)
        payloads = {chunk: payloads[chunk] for chunk in np.unique(rows.chunk).tolist()}
        # 2. Write them as one segment, and the indexes beside it: temporary file, fsync, rename, fsync of the folder.
        #    A crash until here leaves files that no checkpoint names; opening removes them.
        written = segment.write(state.directory, number, state.identity, rows.sorted(), payloads)
        merged, absorbed = None, () if merge is None else merge.absorbed
        try:
            # 3. Write the tombstones that are in memory only, merged with files that are not much larger. As 2.
            if merge is not None:
                path = state.directory / files.tombstones_name(state.next_tombstones - 1)
                merged = tombstones.write(path, merge)
            # 4. Replace the checkpoint: it names all that and moves O_c in one step.
            #    A crash before it reads rows and cancels from Kafka again, after it from the files.
            named = tuple(s.named for s in state.timerlog) + ((written.named,) if written else ())
            left = tuple(t for t in live.files if t not in absorbed)
            self._write_checkpoint(covered, named, (*left, merged) if merged else left, now_ms)
        except DiskFull:
            if written is not None:
                segment.remove(written.path)
            if merged is not None:
                files.remove(merged.file.path)
            raise
        # 5. Only now may memory let go of what the files hold.
        with state.changing():
            state.next_segment = number + 1
            if written is not None:
                state.timerlog.add(written)
            resident.mark_stored(covered)
            state.cancels.forget_stored(resident)
            if merge is not None:
                live.stored(absorbed, merged)
            self._flushed_ms, self._has_flushed = now_ms, True
            # It looks at every row under the lock: not again as soon as many records have been read.
            if is_full or not 0 <= now_ms - self._repacked_ms < state.limits.flush_interval_ms:
                self._repacked_ms = now_ms
                resident.repack(state.limits.repacked_bytes)
            state.changed.notify_all()
        # 6. A crash before it leaves files that no checkpoint names.
        for gone in absorbed:
            files.remove(gone.file.path)
        if state.aside and state.is_caught_up():
            self.drop_aside()
        files.keep_reserve(state.directory)
        for file in live.files:
            file.file.drop_pages()
        return Flushed(rows=len(rows), bytes=written.named.bytes if written else 0)

    def reclaim(self, now_ms: int) -> int:
        """Remove segments of which every row is finished; returns how many.

        The checkpoint goes first: a file that it names must be there, one that it does not name is removed by the next
        opening at the latest.
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
        """What to read for the compaction that is under way, or that is worth while now; None when there is nothing to
        do, after the last window has been written down.

        1. The new segment is made durable. A crash until here leaves a file that no checkpoint names.
        2. The checkpoint names it instead of the old ones, in one step. A crash after it leaves those.
        3. The old ones are removed.

        Raises DiskFull (nothing has changed; try again later) or DiskFailure.
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
        """Take in what was read for a window of the compaction. Raises as `compaction_window`."""
        if self._compaction is None:
            raise Misuse("no compaction is under way", code="DB-7003")
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
        aside, self._state.aside = self._state.aside, ()
        for path in aside:
            files.remove(path)
        return len(aside)

    def _unstored(self, runs: Sequence[RowRefs], covered: int) -> RowRefs:
        """The rows of `runs` below `covered` that no segment holds. Needs no lock: only a flush
        changes what is stored.

        Finished rows are not in memory, and the offsets of overtaken rows are not below the committed O.
        """
        resident = self._state.resident
        return concat([run[~resident.is_stored(run) & (run.offset < covered)] for run in runs])

    def _tombstone_merge(self, now_ms: int) -> TombstoneMerge | None:
        """The tombstones that are to be written."""
        state = self._state
        expired_before_ms = state.cancels.expired_before_ms(state.resident, state.rows_on_loan(), now_ms)
        merge = state.cancels.tombstones.merge(expired_before_ms)
        if merge is not None:
            state.next_tombstones += 1
        return merge

    def _dead_rows(self, each: Segment) -> int:
        """About how many rows of a segment are finished or cancelled."""
        state = self._state
        passed = compaction.passed_rows(each, state.resident.position)
        if not len(state.cancels.tombstones):
            return passed
        # Counting takes a while: again only when an eighth of the segment may have been cancelled since.
        cancelled, known = state.cancels.cancelled, self._covered.get(each.named.name)
        if known is None or cancelled - known[0] > each.rows // 8:
            covered = covered_in(state, each)
            known = self._covered[each.named.name] = (cancelled, int(covered.counts.sum()))
        return min(each.rows, passed + known[1])

    def _replace(self, old: Sequence[Segment], new: Segment | None, now_ms: int) -> None:
        """Let a segment, or none, take the place of others: first in the checkpoint, then in memory, then on disk."""
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
