"""Maintenance of all stores: windows, flushes, reclaim, compaction, one partition at a time. For one thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pyarrow as pa

from timerstore.log.timerlog import Window, read_window
from timerstore.operations.maintenance import Flushed
from timerstore.store import TimerStore


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreWindow:
    """A window to read, and its store."""

    store: TimerStore
    window: Window

    def read(self) -> pa.Table:
        """The rows of the window, in no order. Raises Corrupt, DiskFailure."""
        return read_window(self.window)


class Upkeep:
    """See the module. `stores` returns the present stores. Each method raises as the one of `Maintenance` does."""

    def __init__(self, stores: Callable[[], Sequence[TimerStore]]) -> None:
        self._stores = stores
        self._compacted: TimerStore | None = None
        """The store with the current compaction, or the last one to be asked for one."""
        self._flushed = -1
        """The number of the last store whose flush was due, and succeeded."""

    def next_window(self, now_ms: int) -> StoreWindow | None:
        """The next window to read, of the store whose frontier is furthest behind."""
        behind = [each for each in self._stores() if each.wheel.is_behind(now_ms)]
        for store in sorted(behind, key=lambda each: each.state.resident.frontier):
            window = store.wheel.next_window(now_ms)
            if window is not None:
                return StoreWindow(store=store, window=window)
        return None

    def admit(self, reading: StoreWindow, entries: pa.Table) -> bool:
        """See `TimerWheel.admit`."""
        return reading.store.wheel.admit(reading.window, entries)

    def has_rows(self) -> bool:
        """Whether any store has rows beyond its ready rows."""
        return any(len(each.state.timerlog) or each.state.resident.memtable.bytes for each in self._stores())

    def segments(self) -> int:
        """The number of segments of all stores."""
        return sum(len(each.state.timerlog) for each in self._stores())

    def flush_due(self, now_ms: int) -> bool:
        """Whether a flush of any store is due."""
        return any(store.maintenance.flush_due(now_ms) for store in self._stores())

    def flush(self, now_ms: int, *, only_due: bool = False) -> Flushed:
        """Flush all stores; `only_due`: one whose flush is due, the next one in turn. Many are due together, and each
        flush takes tens of ms of the disk and of the processor."""
        stores = [each for each in self._stores() if not only_due or each.maintenance.flush_due(now_ms)]
        if only_due and stores:
            stores = [min(stores, key=lambda each: (each.state.log <= self._flushed, each.state.log))]
        flushed = [store.maintenance.flush(now_ms) for store in stores]
        if only_due and stores:  # a store without room keeps its turn: another one may need no room
            self._flushed = stores[0].state.log
        return Flushed(rows=sum(each.rows for each in flushed), bytes=sum(each.bytes for each in flushed))

    def reclaim(self, now_ms: int) -> int:
        """Remove segments with finished rows only. Returns their number."""
        return sum(store.maintenance.reclaim(now_ms) for store in self._stores())

    def next_compaction(self, now_ms: int) -> StoreWindow | None:
        """The next window of a compaction; a compaction ends before another store's begins."""
        stores = list(self._stores())
        if self._compacted in stores:
            at = stores.index(self._compacted)
            stores = stores[at:] + stores[:at]
        for store in stores:
            self._compacted = store
            window = store.maintenance.compaction_window(now_ms)
            if window is not None:
                return StoreWindow(store=store, window=window)
        return None

    def compact(self, reading: StoreWindow, entries: pa.Table) -> None:
        """See `Maintenance.compact`."""
        reading.store.maintenance.compact(reading.window, entries)

    def abandon_compaction(self) -> None:
        """Give up the current compaction, if any."""
        for store in self._stores():
            store.maintenance.abandon_compaction()

    def drop_aside(self) -> int:
        """Remove the files that rebuilds have set aside. Returns their number."""
        return sum(store.maintenance.drop_aside() for store in self._stores())
