"""TimerStore: the index of the pending timers of one log.

Four threads meet here, each with a few methods:

    ingest       append            takes a batch in; blocks while there is no room (the flow control)
    dispatcher   begin             hands out due rows, with the (O, P) that finishes them
    maintenance  wheel.*           loads the next window (timer_wheel.py)
                 maintenance.*     flush, reclaim, compaction (maintenance.py)
    http         stats, find, count_where, export

They share `StoreState`, and a lock, under which no IO happens. The store reads no clock: time is an argument.
Any thread may call every public method, unless its docstring says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import TypeVar

import pyarrow.compute as pc

from timerstore.errors import Misuse
from timerstore.limits import DEFAULTS, Limits
from timerstore.memory.memory import Memory
from timerstore.memory.sorted_runs import EMPTY, RowRefs
from timerstore.operations import recovery, stats
from timerstore.operations.export import Export, export
from timerstore.operations.find import (
    ORIGINALS_MAX,
    SCANNED_ROWS_MAX,
    Count,
    Find,
    FoundOriginals,
    FoundPage,
    LogQuery,
)
from timerstore.operations.ingest import StoreIngest
from timerstore.operations.maintenance import Maintenance
from timerstore.operations.recovery import Found
from timerstore.operations.state import StoreState
from timerstore.operations.stats import Stats, Trimmed
from timerstore.operations.timer_wheel import TimerWheel
from timerstore.operations.transaction import Transaction
from timerstore.rows.cuts import Cuts
from timerstore.rows.position import AT_MIN, ORIGIN, Position, Progress

T = TypeVar("T")


class TimerStore:
    """See the module. Made by `open`."""

    def __init__(self, state: StoreState) -> None:
        self.state = state
        self.limits, self.reports = state.limits, state.reports
        self.wheel = TimerWheel(state)
        self.maintenance = Maintenance(state)
        self._ingest = StoreIngest(state)
        self._find = Find(state)
        self.append, self.take_in = self._ingest.append, self._ingest.take_in
        self.take_in_part = self._ingest.take_in_part
        self.has_room = self._ingest.has_room
        self.wait_for_room = self._ingest.wait_for_room

    @classmethod
    def open(
        cls,
        found: Found,
        committed: Progress,
        *,
        log_start: int = 0,
        cuts: Cuts = (),
        now_ms: int,
        limits: Limits = DEFAULTS,
        progress: Callable[[int, int], None] = lambda done, total: None,
        on_news: Callable[[], None] = lambda: None,
        memory: Memory | None = None,
        log: int = 0,
    ) -> TimerStore:
        """Make a store of the directory that `recovery.find` has found. `log_start` is the log's first offset, `cuts`
        are its cuts; `memory` is shared with other stores, in whose order this one has the number `log`. `on_news` is
        called under the lock when a nearer row has come, or O should be committed. Raises DiskFull, DiskFailure."""
        return cls(recovery.restore(found, committed, log_start, cuts, now_ms, limits, progress, on_news, memory, log))

    def resume_offset(self) -> int | None:
        """The first offset that ingest reads: O_c; None, the log's start, if the index does not cover the log."""
        return self.state.checkpoint.offset

    def held_below(self) -> int:
        """The offset below which the index has all pending rows that the log has lost."""
        checkpoint = self.state.checkpoint
        return checkpoint.offset if checkpoint.offset is not None else checkpoint.kept or 0

    def start_at(self, offset: int, log_end: int) -> None:
        """Set the first expected offset, before the first `append`. `log_end` is the log's end after the read of the
        committed state: below it there may be copies that another process wrote."""
        with self.state.changing():
            self.state.resident.end = offset
            self.state.cancels.inherited = log_end

    @property
    def next_offset(self) -> int:
        """The next expected offset."""
        return self.state.resident.end

    @property
    def committed(self) -> Progress:
        """The committed state."""
        return self.state.resident.committed

    # ---- dispatcher

    def merge(self, is_merged: bool) -> None:
        """Let the ready rows be merged with those of other stores, or take them back; between two transactions."""
        with self.state.changing():
            self.state.resident.ready.is_merged = is_merged
            if not is_merged:
                self.state.resident.give_back()

    def begin(self, now_ms: int = AT_MIN) -> Transaction:
        """Start a transaction: one at a time, and only when the log is ingested up to its committed O (invariant I6).
        `now_ms` bounds the wait of commands by id; AT_MIN: no message waits for them.
        Raises Misuse before; after a failed change, as every method that changes the store, Inconsistent."""
        with self.state.lock:
            if not self.is_caught_up():
                raise Misuse("no transaction begins before ingest has reached the committed offset", code="DB-7003")
            with self.state.changing_between_transactions():
                if self.state.is_unread():
                    self.state.commands.give_up(now_ms)
                return Transaction(self.state)

    def is_caught_up(self) -> bool:
        return self.state.is_caught_up()

    def next_due_ms(self) -> int | None:
        """Due time of the next row in memory (ms), but for merged ones, or None. A past time means: at once."""
        return self.wheel.next_due_ms()

    def offset_behind(self) -> bool:
        return self.state.offset_behind()

    def needs_offset_commit(self) -> bool:
        return self.state.needs_offset_commit()

    def is_clock_behind(self, now_ms: int) -> bool:
        """Whether the clock has stepped back behind P by more than `clock_step_ms`."""
        return self.state.resident.position.at_ms - now_ms > self.state.limits.clock_step_ms

    def step_back(self, now_ms: int) -> None:
        """Go on after the clock has stepped back behind P (invariant I4); between two transactions.

        The finished set stays the same, so no commit is needed: the next transaction carries the new step.
        """
        with self.state.changing_between_transactions():
            self.state.resident.step_back(now_ms)
            self.state.bound_ready_rows()
            self.state.wake()

    # ---- http, and the end

    def stats(self, edges_ms: Sequence[int] = ()) -> Stats:
        """Consistent figures of one moment; `pending_until` has one count for each of `edges_ms` (epoch ms)."""
        return stats.look(self.state, edges_ms)

    def find(
        self, query: LogQuery, now_ms: int, *, after: Position = ORIGIN, limit: int = 100, bulky: bool = False
    ) -> FoundPage:
        """A page of the matching pending messages, the soonest first, behind the cursor `after`; with values, headers
        and whole keys if `bulky`. A page may have fewer rows than `limit` (1 to 1,000), even none, although others
        follow. Raises Corrupt, DiskFailure."""
        return self._find.page(query, now_ms, after, limit, bulky=bulky)

    def find_originals(
        self, query: LogQuery, now_ms: int, *, after: Position = ORIGIN, limit: int = ORIGINALS_MAX
    ) -> FoundOriginals:
        """As `find`, with origins and due times only, for up to 10,000 messages (`limit`)."""
        return self._find.originals(query, now_ms, after, limit)

    def count_where(self, query: LogQuery, now_ms: int, *, scanned_rows_max: int = SCANNED_ROWS_MAX) -> Count:
        """The number of matching pending messages; without IO for all messages, and for a target. Raises Corrupt,
        DiskFailure."""
        return self._find.count(query, now_ms, scanned_rows_max)

    def pending_until(self, edges_ms: Sequence[int]) -> tuple[int, ...]:
        """The number of messages that come up before each of `edges_ms` (epoch ms); exact at whole ten seconds."""
        with self.state.lock:
            return self.state.pending.histogram.until(*edges_ms)

    def export(self, query: LogQuery, now_ms: int, *, bulky: bool) -> Export:
        """All matching pending messages of this moment, as Arrow batches of `export.SCHEMA`; with values and headers
        if `bulky`. Raises Corrupt, DiskFailure."""
        return export(self.state, query, now_ms, bulky=bulky)

    def waits_since_ms(self) -> int | None:
        """The time since which the oldest pending message waits (epoch ms); None if no message is pending."""
        return stats.waits_since_ms(self.state)

    def pending_from(self, offset: int, now_ms: int, is_over: Callable[[], bool] = lambda: False) -> int:
        """The number of pending messages with a record at this offset or above; a lower bound, if `is_over` ends the
        count early. Raises Corrupt, DiskFailure."""
        pending = 0
        with closing(self.export(LogQuery(), now_ms, bulky=False)) as batches:
            for batch in batches:
                if is_over():
                    break
                pending += pc.sum(pc.greater_equal(batch.column("offset"), offset)).as_py() or 0
        return pending

    def trimmed(self, log_start: int) -> Trimmed:
        """Unfinished rows that this store alone has, because the log begins at `log_start` only; see there."""
        return self._below(log_start, stats.trimmed)

    def may_hold_below(self, bound: int) -> bool:
        """Whether rows below an offset may be unfinished; see `stats.may_hold_below`."""
        return self._below(bound, stats.may_hold_below)

    def _below(self, bound: int, look: Callable[[StoreState, int], Callable[[RowRefs], T]]) -> T:
        with self.state.lock:
            merged, examine = self.state.memory.merged.below({self.state.log: bound}), look(self.state, bound)
        return examine(merged().get(self.state.log, EMPTY))

    def close_intake(self) -> None:
        """Take in no more rows: `append` raises Closed, even while it waits. Delivery and flushes go on."""
        with self.state.lock:
            self.state.is_intake_closed = True
            self.state.changed.notify_all()

    def close(self) -> None:
        """End every wait, and drop the rows. The next start reads the rows that no segment has from the log again."""
        with self.state.lock:
            self.state.is_closed = True
            self.state.budgets.leave(self.state)
            self.state.memory.leave(self.state)
            self.state.changed.notify_all()
