"""Maintenance of a store: flush, load the next window, reclaim. One thread calls these, one after the other.

That a flush and a gather never overlap is what makes both simple: a row that a window needs is either in a segment that the gather reads or still in
the memtable when the gather's result is admitted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from timerstore import checkpoint as checkpoints
from timerstore import files, segment
from timerstore.checkpoint import Checkpoint
from timerstore.entry import payload_of
from timerstore.position import Int64s, end_of, pack
from timerstore.runs import Selection, concat
from timerstore.timerlog import Window

if TYPE_CHECKING:
    from timerstore.store import TimerStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Flushed:
    """What a flush did: rows and file bytes of the new segment (0: nothing pending had to be written)."""

    rows: int
    bytes: int


class Maintenance:
    """The store's housekeeping; see the module for who may call it."""

    def __init__(self, store: TimerStore) -> None:
        self._store = store
        self._flushed_ms: int | None = None

    def flush_due(self, now_ms: int) -> bool:
        """Whether a flush is worth while: the memtable is full, or the interval is over and O_c can move."""
        store = self._store
        with store.lock:
            if not self._moves(store.covered()[1]):
                return False
            if self._flushed_ms is None:
                self._flushed_ms = now_ms
            aged = not 0 <= now_ms - self._flushed_ms < store.limits.flush_interval_ms
            return aged or store.resident.memtable_bytes >= store.limits.flush_bytes

    def flush(self, now_ms: int) -> Flushed:
        """Make every row below a committed O durable, and move O_c there.

        Raises DiskFull (nothing has changed; try again later) or DiskFailure.
        """
        store = self._store
        # 1. Fix O_c at the end of the last batch that the committed O covers; choose the rows below it that no segment holds.
        with store.lock:
            batch, ends = store.covered()
            rows = self._unstored(batch)
            payloads = store.resident.chunks.payloads(rows.chunk)
            offsets = dict(store.checkpoint.offsets) | {
                store.sources.name(source): int(ends[source]) for source in store.resident.committed
            }
            number = store.next_segment
        # 2. Write them as one segment: temporary file, fsync, rename, fsync of the directory.
        #    A crash until here leaves a file that no checkpoint names; opening removes it.
        written = None
        if len(rows):
            written = segment.write(store.directory, number, store.identity, store.sources, rows.sorted(), payloads)
        # 3. Replace the checkpoint: it names the segment and moves O_c in one step.
        #    A crash before it reads the rows from Kafka again, after it from the segment.
        with store.lock:
            named = tuple(s.named for s in store.timerlog) + ((written.named,) if written else ())
            progress = store.named_progress()
        self._write_checkpoint(
            Checkpoint(identity=store.identity, offsets=offsets, progress=progress, segments=named), now_ms
        )
        # 4. Only now may memory let go of what the segment holds.
        with store.lock:
            store.next_segment = number + 1
            if written is not None:
                store.timerlog.add(written)
            store.resident.mark_stored(batch)
            self._flushed_ms = now_ms
            store.notify()
        return Flushed(rows=len(rows), bytes=written.named.bytes if written else 0)

    def next_window(self, now_ms: int) -> Window | None:
        """The next window to gather, or None when the frontier is far enough ahead or the hot wheel has no room.

        A window without segments is admitted here at once: histograms and fences prove that no segment has a row in it (invariant I3).
        """
        store = self._store
        limits, resident = store.limits, store.resident
        with store.lock:
            if resident.frontier.at_ms >= now_ms + limits.horizon_ms // 2:
                return None
            target = end_of(now_ms + limits.horizon_ms)
            # Loading stops short of the budget: the rest is for what ingest brings, else each batch would push the window out again.
            room = min(limits.loaded_bytes_max - resident.hot_bytes, limits.window_bytes)
            empty = len(resident.hot) == 0
            if room < limits.window_bytes // 4 and not empty:
                return None
            window = store.timerlog.window(resident.frontier, target, room, at_least_one=empty)
            if window is None:
                return None
            upper = window.upper
            if resident.memtable_bytes > room:
                fits = resident.memtable.prefix_within(upper, resident.chunks.row_bytes, max(room, 1))
                upper = fits if fits is not None else upper
            if upper <= resident.frontier:
                return None
            segments = tuple(s for s in window.segments if s.groups_between(window.lower, upper).any())
            window = Window(lower=window.lower, upper=upper, segments=segments)
            if not window.segments:
                self._advance(window)
                return None
            return window

    def admit(self, window: Window, entries: pa.Table) -> bool:
        """Take in what was gathered for a window (rows of `entry.SEGMENT` or `entry.ENTRY`, any order; rows outside it are ignored).

        False when the frontier has moved back meanwhile: the window has to be asked for again.
        """
        store = self._store
        source = store.sources.of_columns(entries.column("topic"), entries.column("partition"))
        payload = payload_of(entries)
        known = np.flatnonzero(source >= 0)
        rows = Selection(
            entries.column("at").to_numpy()[known],
            pack(source[known], entries.column("offset").to_numpy()[known]),
            np.zeros(len(known), dtype=np.int32),
            known.astype(np.int32),
        ).sorted()
        with store.lock:
            if store.resident.frontier != window.lower:
                return False
            inside = rows.at_or_below(window.upper) & ~rows.at_or_below(window.lower)
            rows = rows[inside & ~store.resident.finished(rows)]
            self._advance(window)
            store.resident.add(rows, payload, batch=0, stored=True)
            return True

    def reclaim(self, now_ms: int) -> int:
        """Remove segments of which every row is finished; returns how many.

        The checkpoint goes first: a file that it names must be there, one that it does not name is removed by the next opening at the latest.
        """
        store = self._store
        with store.lock:
            finished = store.timerlog.finished(store.resident.committed)
            if not finished:
                return 0
            named = tuple(s.named for s in store.timerlog if s not in finished)
            progress = store.named_progress()
            offsets = store.checkpoint.offsets
        self._write_checkpoint(
            Checkpoint(identity=store.identity, offsets=offsets, progress=progress, segments=named), now_ms
        )
        with store.lock:
            store.timerlog.remove(finished)
        for gone in finished:
            gone.path.unlink(missing_ok=True)
        files.fsync(store.directory)
        return len(finished)

    def _unstored(self, batch: int) -> Selection:
        """Every row of the batches up to `batch`, memtable, hot or handed out, that no segment holds and that is not finished."""
        resident = self._store.resident
        open_rows = self._store.transaction_rows()
        rows = concat([resident.hot.all(), resident.memtable.all(), open_rows])
        chunks = resident.chunks
        wanted = ~chunks.stored[rows.chunk] & (chunks.batch[rows.chunk] <= batch)
        return rows[wanted & ~resident.finished(rows)]

    def _moves(self, ends: Int64s) -> bool:
        store = self._store
        return any(
            store.checkpoint.offsets.get(store.sources.name(source)) != int(ends[source])
            for source in store.resident.committed
        )

    def _advance(self, window: Window) -> None:
        store = self._store
        store.resident.advance_frontier(window.upper)
        store.wake()

    def _write_checkpoint(self, checkpoint: Checkpoint, now_ms: int) -> None:
        checkpoints.write(self._store.directory, checkpoint)
        with self._store.lock:
            self._store.checkpoint = checkpoint
            self._store.checkpoint_ms = now_ms
