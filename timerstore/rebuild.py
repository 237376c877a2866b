"""Rebuild: an index that is brought up to the committed state with rows in the order of position.

A batch job has all records from the index's end to the committed O at once. So it can sort them, with all commands in
front of the first timer, and cancelled timers never reach a segment:

    commands   in the order of offset    -> tombstones, in memory and in files
    timers     in the order of position  -> segments, without finished and cancelled rows

Steps, each with the cost of a crash right after it:

    1. Segments and files of tombstones are made durable. The checkpoint does not name them. The old index counts. The
       next rebuild removes them, by a note of their first numbers (`remove_unfinished`). The next start removes them,
       too; without an index it keeps them aside until it has caught up.
    2. The checkpoint names them beside the old segments and moves O_c to the committed O, in one step. The new index
       counts.
    3. Merged files of tombstones are removed. No cost: the next start removes them.

Memory has one row group, about `Limits.tombstone_rows` tombstones, and 8 bytes for each timer that is too large for a
copy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa

from timerstore.cancels import tombstones
from timerstore.disk import checkpoint as checkpoints
from timerstore.disk import files
from timerstore.disk.checkpoint import Checkpoint
from timerstore.errors import Corrupt, DiskFull, Misuse
from timerstore.log import segment
from timerstore.log.segment import ROW_GROUP_ROWS, Segment, SegmentWriter
from timerstore.memory.batch import RowBatch
from timerstore.memory.sorted_runs import EMPTY, RowRefs, concat, select
from timerstore.operations.by_origin import pending_of, uncopyable_of
from timerstore.operations.recovery import Found
from timerstore.rows.entry import UNCOPYABLE, Kind, payload_of
from timerstore.rows.position import AT_MIN, ORIGIN, Int64s
from timerstore.store import TimerStore

NOTE: Final = f"rebuild{files.TEMPORARY_SUFFIX}"
"""A file with the first numbers of segments and of tombstones. As a temporary one it ends with the next opening."""
ROW_GROUP_BYTES: Final = 8 << 20
"""Rows of this size become a row group, however few they are."""


def remove_unfinished(found: Found) -> None:
    """Remove the files that a killed rebuild has left, before the index is opened. Raises DiskFailure."""
    note, checkpoint = found.directory / NOTE, found.checkpoint
    try:
        with files.reading(note):
            segments, cancels = (int(number) for number in note.read_text(encoding="utf-8").split())
    except Corrupt:  # no rebuild was killed
        return
    named = {each.name for each in (*checkpoint.segments, *checkpoint.tombstones)} if checkpoint else set()
    for path in files.unreferenced(found.directory, named):
        first = cancels if path.suffix == files.TOMBSTONES_SUFFIX else segments
        if path.suffix != files.TEMPORARY_SUFFIX and files.number_of(path.name) >= first:
            files.remove(path)


class Rebuild:
    """See the module. For one thread, over an open store that nothing else uses. All methods raise Corrupt, DiskFull or
    DiskFailure."""

    def __init__(self, store: TimerStore, now_ms: int) -> None:
        self._state = store.state
        self._store = store
        self._now_ms = now_ms
        self._offset = store.committed.offset
        self._uncopyable: list[Int64s] = []
        """The offsets of originals that are too large for a copy."""
        self._segments: list[Segment] = []
        self._cancels: list[Path] = []
        """The new files of tombstones."""
        self._merged: list[Path] = []
        self._writer: SegmentWriter | None = None
        self._written_bytes = 0
        self._last = ORIGIN
        self._waiting: list[tuple[RowRefs, pa.RecordBatch]] = []
        self.rows = 0
        """The number of timers in the new segments."""
        self._note = store.state.directory / NOTE
        files.write_durably(self._note, self._write_note)

    def _write_note(self, path: Path) -> None:
        path.write_text(f"{self._state.next_segment} {self._state.next_tombstones}", encoding="utf-8")

    def commands(self, entries: pa.Table) -> None:
        """Take in cancels, finished commands, and timers that replace or that no command can copy; in the order of
        offset, before all timers. `at` of the rows has no meaning."""
        batch = RowBatch.of(entries)
        state, fresh, payload = self._state, batch.rows, batch.payload
        if not len(batch):
            return
        is_fixed = payload.column("kind").to_numpy() == Kind.TIMER
        is_fixed &= payload.column("rolls").to_numpy() == UNCOPYABLE
        if is_fixed.any():
            self._uncopyable.append(fresh.offset[is_fixed])
        with state.lock:
            known = state.cancels.known([each.ids for each in state.timerlog if each.ids is not None])
        judged = state.cancels.judge(
            known, payload, fresh, np.zeros(len(fresh), np.bool_), state.finished, pending_of(state), self._fixed,
            self._now_ms,
        )  # fmt: skip
        if judged is not None:
            with state.changing():
                state.cancels.take_in(judged, state.resident, EMPTY.offset)
            if state.cancels.tombstones.memory_rows >= state.limits.tombstone_rows:
                self._store_tombstones()

    def timers(self, entries: pa.Table) -> None:
        """Take in timers, in the order of position, after all commands. Raises Misuse for another order."""
        state, rows, payload = self._state, select(entries), payload_of(entries)
        if not len(rows):
            return
        if rows[:1].last() <= self._last:
            raise Misuse("timers of a rebuild are out of order", code="DB-7003")
        self._last = rows.last()
        kept = ~state.finished(rows)
        covered = state.cancels.covered(state.cancels.tombstones.lookup(), rows.offset, payload)
        if covered is not None:
            kept &= ~covered
        if not kept.all():
            rows, payload = rows[kept], payload.filter(pa.array(kept))
        if len(rows):
            self._waiting.append((rows, payload))
            self._write_groups(at_end=False)

    def write(self) -> None:
        """Make all files durable: step 1."""
        self._write_groups(at_end=True)
        self._end_segment()
        self._store_tombstones()

    def publish(self) -> None:
        """Let the index end at the committed O: steps 2 and 3."""
        state, kept = self._state, [each.named for each in self._state.timerlog]
        new = Checkpoint(
            identity=state.identity,
            offset=self._offset,
            progress=state.resident.committed,
            cut=state.cut,
            segments=(*kept, *(each.named for each in self._segments)),
            tombstones=tuple(file.named for file in state.cancels.tombstones.files),
        )
        files.remove(self._note)
        new_files, self._segments, self._cancels = (self._segments, self._cancels), [], []
        try:
            checkpoints.write(state.directory, new)
        except DiskFull:  # after any other error the checkpoint may be the new one, on a disk that does not say so
            self._segments, self._cancels = new_files
            raise
        for path in self._merged:
            files.remove(path)
        self._store.maintenance.drop_aside()
        files.sync_directory(state.directory)
        files.keep_reserve(state.directory)

    def begin_again(self) -> None:
        """Drop all timers: commands and timers come once more, from the first one. The tombstones stay, and the same
        commands add none to them."""
        if self._writer is not None:
            self._writer.abandon()
        for each in self._segments:
            segment.remove(each.path)
        self._writer, self._segments, self._waiting, self._uncopyable = None, [], [], []
        self._written_bytes = self.rows = 0
        self._last = ORIGIN

    def abandon(self) -> None:
        """Remove the new files, unless a checkpoint may name them."""
        self.begin_again()
        for path in (*self._cancels, self._note):
            files.remove(path)

    def _fixed(self, origins: Int64s) -> Int64s:
        """The originals among these that are too large for a copy."""
        here = [origins[np.isin(origins, part)] for part in self._uncopyable]
        return np.concatenate([uncopyable_of(self._state, origins), *here])

    def _store_tombstones(self) -> None:
        state, live = self._state, self._state.cancels.tombstones
        if not live.memory_rows:
            return
        merge = live.merge(AT_MIN)
        assert merge is not None, "there are tombstones"
        number, state.next_tombstones = state.next_tombstones, state.next_tombstones + 1
        self._cancels.append(state.directory / files.tombstones_name(number))
        file = tombstones.write(self._cancels[-1], merge)
        live.stored(merge.absorbed, file)
        self._merged += [each.file.path for each in merge.absorbed]

    def _write_groups(self, *, at_end: bool) -> None:
        """Write full row groups; the rest, too, `at_end`."""
        count, size = sum(len(rows) for rows, _ in self._waiting), sum(part.nbytes for _, part in self._waiting)
        while count and (at_end or count >= ROW_GROUP_ROWS or size >= ROW_GROUP_BYTES):
            rows = concat([rows for rows, _ in self._waiting])
            payload = pa.concat_batches([part for _, part in self._waiting])
            here = min(count, ROW_GROUP_ROWS)
            self._write_group(rows[:here], payload.slice(0, here))
            self._waiting = [(rows[here:], payload.slice(here))] if here < count else []
            count, size = count - here, size if at_end else 0

    def _write_group(self, rows: RowRefs, payload: pa.RecordBatch) -> None:
        state = self._state
        if self._writer is None:
            self._writer = SegmentWriter(state.directory, state.next_segment, state.identity)
            state.next_segment += 1
        self._writer.add(rows, payload)
        self.rows += len(rows)
        self._written_bytes += payload.nbytes
        if self._written_bytes >= state.limits.segment_bytes_max:
            self._end_segment()

    def _end_segment(self) -> None:
        if self._writer is not None:
            with self._writer as writer:
                written = writer.close()
            self._writer, self._written_bytes = None, 0
            self._segments += [] if written is None else [written]
