"""Ingest: batches go into the store; the flow control of the stream."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import numpy as np
import pyarrow as pa

from timerstore.cancels.cancels import Judged, Known
from timerstore.cancels.commands import Effect
from timerstore.cancels.effects import NoRoom, effects_of
from timerstore.cancels.id_index import Timers
from timerstore.errors import Closed, Misuse
from timerstore.memory.batch import LogPart, MergedBatch, RowBatch
from timerstore.memory.ready import plain
from timerstore.operations.by_origin import pending_of, rows_of, uncopyable_of
from timerstore.operations.state import Change, StoreState
from timerstore.rows.entry import Kind
from timerstore.rows.position import AT_MAX, AT_MIN, OFFSET_MAX, Bools, Int64s, search

UNBOUNDED: Final = sys.maxsize


class StoreIngest:
    """See the module. It takes in one batch at a time."""

    def __init__(self, state: StoreState) -> None:
        self._state = state
        self._one_at_a_time = threading.Lock()
        self._changing = Change(state, self._must_take_in)

    def append(
        self,
        entries: pa.Table,
        end: int,
        now_ms: int,
        beat: Callable[[], None] = lambda: None,
    ) -> int:
        """Take in a batch of `entry.ENTRY` rows, read at `now_ms`; `end` is its exclusive end offset.

        Blocks while there is no room, and calls `beat` meanwhile, at least once a second. Rows below the next expected
        offset (of an earlier batch) and finished rows are dropped. Returns the number of new rows. Raises Closed if the
        store is closed meanwhile; Corrupt or DiskFailure if a cancel by origin needs segments; Inconsistent after a
        failed change.
        """
        self.wait_for_room(beat)
        return self.take_in(RowBatch.of(entries), end, now_ms, beat)

    def take_in(self, batch: RowBatch, end: int, now_ms: int, beat: Callable[[], None] = lambda: None) -> int:
        """As `append`, without its first wait for room (`wait_for_room`)."""
        taken = 0
        with self._one_at_a_time:
            while True:
                try:
                    return taken + self._take_in(batch, end, now_ms, None)
                except NoRoom as no_room:
                    is_below = batch.rows.offset < no_room.cut
                    taken += self._take_in(batch.where(is_below), min(end, no_room.cut), now_ms, UNBOUNDED)
                    batch = batch.where(~is_below)
                    self.wait_for_room(beat)

    def take_in_part(self, batch: MergedBatch, part: LogPart | None, timers: Timers | None, end: int) -> int | None:
        """Take in a part (None: no rows) of a batch without its rows; `timers` are those with ids, sorted by key.
        Returns the number of rows, the first ones, that the caller inserts into the merged ready rows; the others come
        to the memtable. None: `take_in` has to do it. The caller holds the lock of the memory, in a change."""
        state, resident = self._state, self._state.resident
        if state.failed_change or state.is_closed or state.is_intake_closed or state.waiting_offset() < OFFSET_MAX:
            return None
        if not self._one_at_a_time.acquire(False):
            return None
        self._one_at_a_time.release()
        near = 0
        if part is not None:
            if part.low < resident.end or part.high >= end or not (resident.ready.is_merged and state.is_caught_up()):
                return None
            passed, frontier = resident.passed, resident.frontier
            if part.first <= (passed.at_ms, passed.offset):
                return None
            if part.last <= (frontier.at_ms, frontier.offset):
                near = len(part.index)
            elif part.first <= (frontier.at_ms, frontier.offset):
                rows = plain(batch.rows[part.index])
                near = search(rows.at, rows.offset, frontier)
            if timers is not None and not state.cancels.take_in_originals(timers, part.low, resident):
                return None
        resident.end = max(resident.end, end)
        return near

    def _take_in(self, batch: RowBatch, end: int, now_ms: int, room_bytes: int | None) -> int:
        state, resident = self._state, self._state.resident
        if not len(batch):
            return self._advance(end)
        with state.lock:
            self._must_be_open()
            end = max(resident.end, end)
            batch = batch.where(batch.rows.offset >= resident.end)
            if not (batch.rows.offset < end).all():
                raise Misuse("a batch has rows at or above its end offset", code="DB-7003")
            if batch.is_plain:
                # No row above the committed O is finished.
                new = batch if state.is_caught_up() else batch.where(~resident.finished(batch.rows))
                self._place(batch, new, end, now_ms)
                return len(batch)
            # This stays true until the rows are placed: only ingested rows can become finished.
            unfinished = ~resident.finished(batch.rows)
        # Cancels are looked up without the lock, so that delivery goes on.
        judged, effects = self._judge(batch, unfinished, now_ms, room_bytes)
        covered = None if judged is None else judged.covered[unfinished]
        self._place(batch, batch.where(unfinished), end, now_ms, judged, covered, effects)
        return len(batch)

    def _place(
        self,
        batch: RowBatch,
        new: RowBatch,
        end: int,
        now_ms: int,
        judged: Judged | None = None,
        covered: Bools | None = None,
        effects: Sequence[Effect] = (),
    ) -> None:
        """Place the unfinished rows of a batch (`new`), and apply its cancels and commands. `covered` rows are not
        counted."""
        state, resident = self._state, self._state.resident
        with self._changing:
            nearest_ms, was_unread = resident.ready.nearest_ms(), state.is_unread()
            resident.end = end
            resident.take_in(new)
            state.pending.add_rows(new.rows.at, new.payload, covered)
            state.bound_ready_rows()
            if judged is not None:
                self._cancel(judged)
            if not batch.is_plain:
                copies = _copies(batch)
                origin = batch.payload.column("origin").to_numpy()[copies]
                read = state.commands.in_transit.remove(origin)
                if state.loan is not None:
                    state.loan.copies_read.append(read)
                state.commands.take_in(effects, resident.finished, now_ms, is_unread=state.is_unread())
                if len(copies) and state.commands.effects:
                    ids = batch.payload.column("id").take(pa.array(copies))
                    state.commands.note_read(batch.rows[copies], origin, ids)
            if was_unread:
                state.commands.give_up()
            first_ms = int(new.rows.at[0]) if len(new) else AT_MAX
            is_nearer = first_ms <= resident.frontier.at_ms and (nearest_ms is None or first_ms < nearest_ms)
            if is_nearer or len(resident.overtaken) or state.needs_offset_commit():
                state.wake()

    def _judge(
        self, batch: RowBatch, unfinished: Bools, now_ms: int, room_bytes: int | None
    ) -> tuple[Judged | None, list[Effect]]:
        """The judgement of a batch's new rows by cancels, and the effects of the commands among them."""
        state, fresh, payload = self._state, batch.rows, batch.payload
        with state.lock:
            known = state.cancels.known([s.ids for s in state.timerlog if s.ids is not None])
            if room_bytes is None:
                room_bytes = state.budgets.waiting.allowed(state) - state.commands.bytes
            waiting = state.commands.moved_ids()
        judged = state.cancels.judge(
            known, payload, fresh, unfinished, state.finished, pending_of(state), partial(uncopyable_of, state), now_ms
        )
        is_pending = unfinished if judged is None else unfinished & ~judged.covered[fresh.row]
        is_over, of_origins = partial(_is_over, state, known), partial(rows_of, state)
        effects = effects_of(known, payload, fresh, is_pending, is_over, of_origins, room_bytes, waiting)
        return judged, effects

    def _advance(self, end: int) -> int:
        """Move the next expected offset to `end`, without rows."""
        state = self._state
        with self._changing:
            waits = state.waiting_offset() < OFFSET_MAX
            state.resident.end = max(state.resident.end, end)
            if waits or state.needs_offset_commit():
                state.wake()
        return 0

    def has_room(self) -> bool:
        """Whether a batch may come in. A flush or a delivery makes room; if neither is possible, the batch need not
        wait.

        (Until ingest has caught up with the committed O, nothing is delivered, and only a flush can make room.) If
        neither a commit nor a flush can make room, commands by id no longer wait: the copies for which they wait could
        not come in.
        """
        state = self._state
        with state.lock:
            if self._has_room():
                return True
            can_flush = state.budgets.waiting.has_room(state) and state.resident.reachable() > state.resident.stored
            if state.waiting_offset() < OFFSET_MAX and not can_flush:
                state.commands.wait_until_ms = AT_MIN
                state.wake()
            return False

    def _has_room(self) -> bool:
        state, budgets, resident = self._state, self._state.budgets, self._state.resident
        if not budgets.tombstones.has_room(state):
            return False
        if not budgets.waiting.has_room(state) and state.is_caught_up():
            return False
        return budgets.memtable.has_room(state) or not (state.is_caught_up() or resident.covered() > resident.stored)

    def _cancel(self, judged: Judged) -> None:
        """Add tombstones; the timers that they cover leave the counts."""
        state = self._state
        hits, lent = state.cancels.take_in(judged, state.resident, state.timers_in_hand())
        state.pending.remove(hits)
        if state.loan is not None:
            state.loan.cancelled.append(lent)

    def wait_for_room(self, beat: Callable[[], None] = lambda: None) -> None:
        """Wait until a batch may come in, and call `beat` meanwhile, at least once a second. Raises Closed."""
        state = self._state
        with state.lock:
            while True:
                self._must_be_open()
                beat()
                if self.has_room():
                    return
                state.changed.wait(1.0)

    def _must_take_in(self) -> None:
        self._must_be_open()
        self._state.must_be_consistent()

    def _must_be_open(self) -> None:
        if self._state.is_closed or self._state.is_intake_closed:
            raise Closed("the store was closed while a batch waited for room")


def _is_over(state: StoreState, known: Known, timers: Timers) -> Bools:
    """Mask of the timers, by id, that are finished, or covered by known tombstones."""
    return state.finished(timers) | state.cancels.are_covered(known.lookup, timers)


def _copies(batch: RowBatch) -> Int64s:
    """The rows of a batch that are copies."""
    kind, origin = (batch.payload.column(name).to_numpy() for name in ("kind", "origin"))
    found: Int64s = np.flatnonzero((kind == Kind.TIMER) & (origin != batch.rows.offset))
    return found
