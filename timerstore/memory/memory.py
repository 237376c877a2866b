"""Memory: shared by the stores of one process. A store alone has its own.

lock      one for all stores. No IO happens under it; each store notes its own failed changes
chunks    a batch of several logs is one chunk, to which rows of several stores refer
merged    the ready rows of the logs that are delivered, in one order (ready.py)
uncounted timers of one later count
budgets   bytes, with a guaranteed part for each store
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Protocol

import numpy as np

from timerstore.budget import Budgets
from timerstore.errors import Inconsistent
from timerstore.limits import Limits
from timerstore.memory.batch import LogPart, MergedBatch
from timerstore.memory.chunks import Chunks
from timerstore.memory.pending import Uncounted
from timerstore.memory.ready import MergedRows, plain
from timerstore.memory.resident import Resident
from timerstore.memory.sorted_runs import RowRefs, concat
from timerstore.rows.position import OFFSET_BITS, Int64s

REPACKED_ROWS_MAX: Final = 1 << 16
"""The limit of one step, which holds the lock."""


class Holder(Protocol):
    """A store; a retreat needs the lock. `log` is its number in the order of the logs."""

    log: int
    resident: Resident

    def retreat(self, bytes_max: int) -> None:
        """Keep at most these bytes of ready rows."""


class Memory:
    """See the module. The lock guards all of it."""

    def __init__(self, limits: Limits) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        """Notified when room may be free, and at the end of a store."""
        self.chunks = Chunks()
        self.merged = MergedRows(self.chunks)
        self.uncounted = Uncounted()
        self.budgets = Budgets(limits)
        self.failed_change: BaseException | None = None
        """The error that ended a change of several stores half-way."""
        self._stores: dict[int, Holder] = {}
        self._repacked_ms = 0

    @contextmanager
    def changing(self) -> Iterator[None]:
        """A context that holds the lock for a change of several stores. After a failed change it raises
        Inconsistent."""
        with self.lock:
            self.must_be_consistent()
            try:
                yield
            except BaseException as error:
                self.failed_change = error
                raise

    def must_be_consistent(self, failed_change: BaseException | None = None) -> None:
        """Raises Inconsistent after a failed change of several stores, or after `failed_change`, a store's own."""
        if (failed := failed_change or self.failed_change) is not None:
            raise Inconsistent(
                f"a change of the timer store failed half-way: {failed!r}",
                hint="Start the bridge again: it goes on from its last commit, without loss.",
                code="DB-7005",
            ) from failed

    def join(self, store: Holder) -> None:
        """Add a store."""
        with self.lock:
            self._stores[store.log] = store

    def bound_ready_rows(self) -> None:
        """Have all stores without room for ready rows keep fewer. They share the room, and run out of it together: one
        pass over the merged rows serves all."""
        with self.changing():
            full = self.budgets.ready.full()
            stores = [store for store in self._stores.values() if store in full]
            self.merged.give_back(store.resident.ready for store in stores)
            for store in stores:
                store.retreat(full[store] // 4 * 3)

    def take_in(self, batch: MergedBatch, parts: Sequence[tuple[Resident, LogPart, int]]) -> int:
        """Take in parts of a batch as one chunk. The first rows of each part, as many as is given, come to the merged
        ready rows, and the others to the memtable. Returns the number of rows."""
        count, near = sum(len(part.index) for _, part, _ in parts), sum(near for *_, near in parts)
        if not count:
            return 0
        every, left_out = batch.rows, None
        chunk = self.chunks.add(batch.payload, batch.row_bytes)
        every = RowRefs(every.at, every.offset, np.full(len(every), chunk, np.int32), every.row)
        if count < len(every):
            left_out = np.ones(len(every), np.bool_)
            left_out[np.concatenate([part.index for _, part, _ in parts])] = False
            self.chunks.release(every.chunk[left_out])
        if near < count:
            for resident, part, first in parts:
                resident.memtable.insert(plain(every[part.index[first:]]))
        if near == len(every):
            self.merged.insert(every)
        elif near:
            self.merged.insert(every[np.sort(np.concatenate([part.index[:first] for _, part, first in parts]))])
        self.uncounted.add(every.offset >> OFFSET_BITS, every.at, batch.payload, left_out)
        return count

    def leave(self, store: Holder) -> None:
        """Drop the rows of a closed store."""
        resident = store.resident
        if self._stores.get(store.log) is store:
            del self._stores[store.log]
            self.uncounted.leave(store.log)
            self.merged.give_back([resident.ready])
            for rows in (concat(resident.ready.pop_own()), resident.memtable.pop_all(), resident.overtaken.pop_all()):
                self.chunks.release(rows.chunk)

    def repack(self, now_ms: int, gain_bytes_min: int, *, every_ms: int) -> int:
        """Copy the rest of sparse chunks into new ones, unless it was done less than `every_ms` ago. Returns the number
        of rows, 0 if the gain is too small.

        One long delay in each batch would else keep all batches in memory.
        """
        if 0 <= now_ms - self._repacked_ms < every_ms:
            return 0
        holders = [
            self.merged,
            *(own for each in self._stores.values() for own in (each.resident.ready, each.resident.memtable)),
        ]
        referenced: Int64s = np.zeros(len(self.chunks.row_bytes), np.int64)
        for run in (run for holder in holders for run in holder.own_runs()):
            referenced += np.bincount(run.chunk, minlength=len(referenced))
        sparse = self.chunks.sparse(referenced, gain_bytes_min, REPACKED_ROWS_MAX)
        copied = sum(holder.copy_where(lambda run: sparse[run.chunk]) for holder in holders) if sparse.any() else 0
        if copied < REPACKED_ROWS_MAX:  # else the next call goes on
            self._repacked_ms = now_ms
        return copied
