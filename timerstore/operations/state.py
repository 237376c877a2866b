"""StoreState: what the operations of a store share, and the one lock that guards it.

    store -> transaction, timer_wheel, ingest, maintenance, compaction, stats -> StoreState -> log, cancels, memory

No IO happens under the lock. An operation takes what it needs under it, works on immutable values (row references,
batches, segments, tombstones), and comes back for the result. The state reads no clock: time is an argument.

A change is made in `changing`, as a whole. After an exception in the middle of one, rows may be nowhere in memory, and
a commit or a flush would finish them unseen. So neither is possible any more: the process ends and starts again from
its files, as after a crash, which loses nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from timerstore.cancels.cancels import Cancels
from timerstore.cancels.commands import Commands
from timerstore.disk.checkpoint import Checkpoint, Identity
from timerstore.errors import Inconsistent, Misuse
from timerstore.limits import DAY_MS, Limits
from timerstore.log.timerlog import TimerLog
from timerstore.memory.pending import Pending, Tally
from timerstore.memory.resident import Resident
from timerstore.memory.sorted_runs import EMPTY, RowRefs, concat
from timerstore.rows.position import AT_MIN, Bools, Int64s, Position, Positions, Progress
from timerstore.rows.sources import SourceName, Sources


@dataclass(slots=True)
class Loan:
    """The rows that the open transaction has taken: until it ends they are nowhere else. `position` is P as its commit
    will leave it, `acted` are rows that its commands act on, `cancelled` counts timers, on loan or acted on, whose
    cancel was read meanwhile. `copies_read` are the originals, packed, of copies that were read meanwhile and may be
    the transaction's own: it was committed, and does not know it yet."""

    position: Position
    taken: list[RowRefs] = field(default_factory=list)
    acted: set[int] = field(default_factory=set)
    cancelled: list[Tally] = field(default_factory=list)
    copies_read: list[Int64s] = field(default_factory=list)

    def rows(self) -> RowRefs:
        """References of everything taken so far, cancelled rows too."""
        self.taken = [concat(self.taken)]
        return self.taken[0]


class StoreState:
    """See the module. `committed` has the committed state of every owned source."""

    def __init__(
        self,
        directory: Path,
        identity: Identity,
        sources: Sources,
        committed: Mapping[int, Progress],
        limits: Limits,
        now_ms: int,
    ) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        """Notified when there may be room, when a nearer row has come, and at the end."""
        self.has_news = False
        self.is_intake_closed = False
        self.is_closed = False
        self.failed_change: BaseException | None = None
        """What ended a change half-way."""
        self.directory = directory
        self.identity = identity
        self.sources = sources
        self.limits = limits
        self.assigned_ms = now_ms
        """Since when the owned sources are these."""
        self.assignments = 0
        """How often they have changed."""
        self.resident = Resident(len(sources), committed)
        self.pending = Pending(now_ms - DAY_MS)
        self.cancels = Cancels(sources, limits.window_ms)
        self.commands = Commands(sources)
        self.timerlog = TimerLog()
        self.loan: Loan | None = None
        self.checkpoint = Checkpoint(identity=identity, offsets={})
        self.checkpoint_ms: int | None = None
        self.cuts: Mapping[SourceName, int] = {}
        """The numbers of the last cuts of the sources' logs."""
        self.next_segment = 1
        self.next_tombstones = 1
        self.aside: tuple[Path, ...] = ()
        """Files that a rebuild has replaced or given up, kept until ingest has caught up."""
        self.reports: tuple[str, ...] = ()
        """What was found wrong in the directory, and mended: sentences for the operator."""

    def finished(self, rows: Positions) -> Bools:
        """`Resident.finished`, for a caller without the lock."""
        with self.lock:
            return self.resident.finished(rows)

    def rows_on_loan(self) -> RowRefs:
        """The rows of the open transaction; the caller holds the lock."""
        return EMPTY if self.loan is None else self.loan.rows()

    def timers_in_hand(self) -> Int64s:
        """The timers, packed, that the open transaction has taken or acts on: it counts them out; the caller holds the
        lock."""
        if self.loan is None:
            return EMPTY.seq
        rows, acted = self.loan.rows(), self.loan.acted
        return np.concatenate([rows.seq[rows.at > AT_MIN], np.fromiter(acted, np.int64, len(acted))])

    def is_unread(self, source: int) -> bool:
        """Whether copies that an earlier process wrote may still be unread; the caller holds the lock."""
        inherited = self.cancels.inherited
        return inherited is None or bool(self.resident.ends[source] < inherited.get(source, 0))

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Hold the lock for a change. When it fails half-way, no other follows. Raises Inconsistent where one has."""
        with self.lock:
            self.must_be_consistent()
            try:
                yield
            except BaseException as error:
                self.failed_change = error
                raise

    @contextmanager
    def changing_between_transactions(self) -> Iterator[None]:
        """As `changing`. Raises Misuse while a transaction is open."""
        with self.lock:
            self.must_be_consistent()
            if self.loan is not None:
                raise Misuse("a transaction is open", code="DB-7003")
            with self.changing():
                yield

    def must_be_consistent(self) -> None:
        """Raises Inconsistent where a change has failed; the caller holds the lock."""
        if self.failed_change is not None:
            raise Inconsistent(
                f"a change of the timer store failed half-way: {self.failed_change!r}",
                hint="Start the bridge again: it continues where it was, and nothing is lost.",
                code="DB-7005",
            ) from self.failed_change

    def is_caught_up(self) -> bool:
        """Whether every owned source is ingested up to its committed O (invariant I6), but for those that join: of
        these nothing is dispatched."""
        with self.lock:
            resident = self.resident
            return bool((resident.ends >= resident.offset)[resident.owned & ~resident.joining].all())

    def offsets_behind(self) -> bool:
        """Whether ingest is ahead of the committed O, so that a transaction would move it without rows (overtaken rows
        in front stop it)."""
        with self.lock:
            resident = self.resident
            is_ahead = resident.offsets_reachable() > resident.offset
            return bool(is_ahead[resident.owned & ~resident.joining].any())

    def needs_offset_commit(self) -> bool:
        """Whether O should be committed at once: the memtable has to be flushed, and only rows below O can be."""
        with self.lock:
            return self.resident.memtable_bytes >= self.limits.flush_bytes // 2 and self.offsets_behind()

    def elsewhere(self, offsets: Mapping[SourceName, int] | None = None) -> Bools:
        """By source: whether another instance owns it, and the index (`offsets` of its checkpoint) covers it, or has
        what Kafka may have lost of it, so that it can go on from here when it comes back."""
        covered = {*self.checkpoint.kept, *(self.checkpoint.offsets if offsets is None else offsets)}
        return np.array([name in covered for name in self.sources], dtype=np.bool_) & ~self.resident.owned

    def floor(self) -> Position:
        """The frontier never moves below what is delivered or being delivered."""
        return self.resident.position if self.loan is None else max(self.resident.position, self.loan.position)

    def bound_ready_rows(self) -> None:
        """Move the frontier back where ingest has brought more ready rows than may be (invariant I8)."""
        if self.resident.ready.bytes > self.limits.ready_rows_bytes:
            self.resident.retreat_frontier(self.limits.loaded_bytes_max, self.floor())

    def wake(self) -> None:
        """End the dispatcher's wait now, and that of an `append` without room."""
        with self.lock:
            self.has_news = True
            self.changed.notify_all()
