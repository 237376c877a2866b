"""StoreState: the shared state of a store's operations. The lock of its memory guards it.

    store -> transaction, timer_wheel, ingest, maintenance, compaction, stats -> StoreState -> log, cancels, memory

No IO happens under the lock. An operation takes immutable values under it (row references, batches, segments,
tombstones), works on them without it, and takes it again for the result. The state reads no clock: time is an argument.

`changing` makes a change as a whole. After an exception in the middle, memory may have lost rows, and a commit or a
flush would finish these without output. So both are refused: the process ends and starts again from its files, as after
a crash, without loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa

from timerstore.budget import Budgets
from timerstore.cancels.cancels import Cancels
from timerstore.cancels.commands import Commands
from timerstore.disk.checkpoint import Checkpoint, Identity
from timerstore.errors import Misuse
from timerstore.limits import DAY_MS, Limits
from timerstore.log.timerlog import TimerLog
from timerstore.memory.chunks import joined
from timerstore.memory.memory import Memory
from timerstore.memory.pending import Pending, Tally
from timerstore.memory.resident import Resident
from timerstore.memory.sorted_runs import EMPTY, RowRefs, concat
from timerstore.rows.position import AT_MIN, OFFSET_MAX, Bools, Int64s, Position, Positions, Progress

FLUSH_PART: Final = 2 / 3
"""The used part of a memtable's allowance at which a flush is due."""


@dataclass(slots=True)
class RowsOnLoan:
    """The rows that the open transaction has taken; until its end the store has them only here. `acted` are the offsets
    of rows on which its commands act. `cancelled` counts timers, on loan or acted on, whose cancel was read meanwhile.
    `copies_read` are the origins of copies that were read meanwhile. They may be the transaction's own, if it is
    committed and waits for the answer."""

    taken: list[RowRefs] = field(default_factory=list)
    acted: set[int] = field(default_factory=set)
    cancelled: list[Tally] = field(default_factory=list)
    copies_read: list[Int64s] = field(default_factory=list)

    def rows(self) -> RowRefs:
        """References of all rows taken, with cancelled ones."""
        self.taken = [concat(self.taken)]
        return self.taken[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """Rows in the order of their output.

    `at` int64[n] (ms), `offset` int64[n]; `pieces` are record batches of `entry.PAYLOAD`, with n rows together. The
    first `overtaken` rows are in order of offset, the others in order of position.
    """

    at: Int64s
    offset: Int64s
    pieces: Sequence[pa.RecordBatch]
    overtaken: int

    @property
    def payload(self) -> pa.RecordBatch:
        return joined(self.pieces)

    def __len__(self) -> int:
        return len(self.at)


class Change:
    """Holds the lock for a change; entered thousands of times a second. When it fails half-way, no other follows.
    `must_be` raises where no change may begin."""

    def __init__(self, state: StoreState, must_be: Callable[[], None]) -> None:
        self._state = state
        self._must_be = must_be

    def __enter__(self) -> None:
        self._state.lock.acquire()
        try:
            self._must_be()
        except BaseException:
            self._state.lock.release()
            raise

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None:
            self._state.failed_change = error
        self._state.lock.release()


class StoreState:
    """See the module. `on_news` is called under the lock when a nearer row has come, or O should be committed."""

    def __init__(
        self,
        directory: Path,
        identity: Identity,
        committed: Progress,
        limits: Limits,
        now_ms: int,
        on_news: Callable[[], None] = lambda: None,
        memory: Memory | None = None,
        log: int = 0,
    ) -> None:
        """`memory` is shared with other stores; `log` is the number of this one's log there."""
        self.memory = memory = Memory(limits) if memory is None else memory
        self.log = log
        self.lock, self.changed = memory.lock, memory.changed
        self._change = Change(self, self.must_be_consistent)
        self._change_between_transactions = Change(self, self._must_be_between_transactions)
        self._on_news = on_news
        self.is_intake_closed = False
        self.is_closed = False
        self.failed_change: BaseException | None = None
        """The error that ended a change half-way."""
        self.directory = directory
        self.identity = identity
        self.limits = limits
        self.pending = Pending(now_ms - DAY_MS, memory.uncounted, log)
        self.resident = Resident(committed, memory.chunks, memory.merged, log)
        self.cancels = Cancels(limits.window_ms)
        self.commands = Commands()
        self.timerlog = TimerLog()
        self.loan: RowsOnLoan | None = None
        self.checkpoint = Checkpoint(identity=identity)
        self.checkpoint_ms: int | None = None
        self.cut = 0
        """The number of the log's last cut."""
        self.next_segment = 1
        self.next_tombstones = 1
        self.aside: tuple[Path, ...] = ()
        """Files that a rebuild has replaced or given up, kept until ingest has caught up."""
        self.reports: tuple[str, ...] = ()
        """Damage of the directory that the start has mended, as sentences for the operator."""

    def join(self) -> None:
        """Take part in the memory, once everything is restored."""
        self.share(self.memory.budgets)
        self.memory.join(self)  # from now on, another store's thread may ask for its room

    def share(self, budgets: Budgets) -> None:
        """Share the budgets with other stores."""
        resident, cancels, commands = self.resident, self.cancels, self.commands
        budgets.ready.join(self, lambda: resident.ready.bytes)
        budgets.memtable.join(self, lambda: resident.memtable.bytes)
        budgets.waiting.join(self, lambda: resident.overtaken.bytes + commands.bytes)
        budgets.tombstones.join(self, lambda: cancels.tombstones.memory_rows)
        self.budgets: Budgets = budgets

    def finished(self, rows: Positions) -> Bools:
        """`Resident.finished`, for a caller without the lock."""
        with self.lock:
            return self.resident.finished(rows)

    def rows_on_loan(self) -> RowRefs:
        """The rows of the open transaction; the caller holds the lock."""
        return EMPTY if self.loan is None else self.loan.rows()

    def timers_in_hand(self) -> Int64s:
        """The offsets of the timers that the open transaction counts out: those that it has taken, and those on which
        its commands act. The caller holds the lock."""
        if self.loan is None:
            return EMPTY.offset
        rows, acted = self.loan.rows(), self.loan.acted
        return np.concatenate([rows.offset[rows.at > AT_MIN], np.fromiter(acted, np.int64, len(acted))])

    def is_unread(self) -> bool:
        """Whether copies of an earlier process may be unread; the caller holds the lock."""
        inherited = self.cancels.inherited
        return inherited is None or self.resident.end < inherited

    def waiting_offset(self) -> int:
        """The offset of the first command by id that waits for unread copies: it is not delivered yet, nor is a row
        behind it. OFFSET_MAX: none waits. The caller holds the lock."""
        return self.commands.waiting_offset() if self.is_unread() else OFFSET_MAX

    def changing(self) -> Change:
        """A context that holds the lock for a change. After a failed change it raises Inconsistent."""
        return self._change

    def changing_between_transactions(self) -> Change:
        """As `changing`. Raises Misuse while a transaction is open."""
        return self._change_between_transactions

    def _must_be_between_transactions(self) -> None:
        self.must_be_consistent()
        if self.loan is not None:
            raise Misuse("a transaction is open", code="DB-7003")

    def must_be_consistent(self) -> None:
        """Raises Inconsistent after a failed change; the caller holds the lock."""
        self.memory.must_be_consistent(self.failed_change)

    def is_caught_up(self) -> bool:
        """Whether the log is ingested up to the committed O (invariant I6)."""
        return self.resident.end >= self.resident.committed.offset

    def offset_behind(self) -> bool:
        """Whether a transaction without rows would move O: ingest is ahead of it, and no overtaken row is in the
        way."""
        with self.lock:
            return self.resident.reachable() > self.resident.committed.offset

    def needs_offset_commit(self) -> bool:
        """Whether O should be committed at once: the memtable needs a flush, which takes only rows below O."""
        with self.lock:
            return self.budgets.memtable.is_used(self, FLUSH_PART / 2) and self.offset_behind()

    def is_memtable_full(self) -> bool:
        """Whether a flush is due; half as much again may come in during the flush."""
        return self.budgets.memtable.is_used(self, FLUSH_PART)

    @property
    def loaded_bytes_max(self) -> int:
        """The size up to which windows fill the ready rows, and down to which the frontier retreats when ingest has
        overfilled them."""
        return self.budgets.ready.allowed(self) // 4 * 3

    def floor(self) -> Position:
        """The lowest position of the frontier: P, or P after the open transaction."""
        return self.resident.passed

    def bound_ready_rows(self) -> None:
        """Move the frontier back if ingest has brought more ready rows than the budget allows (invariant I8)."""
        if not self.budgets.ready.has_room(self):
            self.memory.bound_ready_rows()

    def retreat(self, bytes_max: int) -> None:
        """Move the frontier back until the ready rows take these bytes at most."""
        self.resident.retreat_frontier(bytes_max, self.floor())

    def wake(self) -> None:
        """End the dispatcher's wait, and that of an `append` without room."""
        with self.lock:
            self._on_news()
            self.changed.notify_all()
