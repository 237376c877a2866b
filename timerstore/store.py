"""TimerStore: the index of pending timers, as the bridge sees it.

Four threads meet here, each with a few methods:

    ingest       append            a batch goes in; blocks while there is no room (the flow control)
    dispatcher   begin, wait       what is due comes out, with the (O, P) that finishes it
    maintenance  wheel.*           the next window is loaded (timer_wheel.py)
                 maintenance.*     flush, reclaim, compaction (maintenance.py)
    assignment.*                   sources come and go (assignment.py)
    http         stats, find, count_where, export

What they share is `StoreState`, with its one lock; no IO happens under it. The store reads no clock: time is an
argument. Every public method may be called from any thread unless it says otherwise.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import closing
from types import MappingProxyType

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from timerstore.assignment import Assignment
from timerstore.errors import Misuse
from timerstore.limits import DEFAULTS, Limits
from timerstore.operations import recovery, stats
from timerstore.operations.export import Export, export
from timerstore.operations.find import ORIGINALS_MAX, SCANNED_ROWS_MAX, Count, Find, Originals, Page, Query
from timerstore.operations.ingest import Ingest
from timerstore.operations.maintenance import Maintenance
from timerstore.operations.recovery import Found
from timerstore.operations.state import StoreState
from timerstore.operations.stats import Stats, Unstored
from timerstore.operations.timer_wheel import TimerWheel
from timerstore.operations.transaction import Transaction
from timerstore.rows.position import ORIGIN
from timerstore.rows.sources import Cuts, NamedPosition, NamedState, NamedStep, SourceName


class TimerStore:
    """See the module. Made by `open`."""

    def __init__(self, state: StoreState, lock_descriptor: int) -> None:
        self.state = state
        self.sources, self.limits, self.reports = state.sources, state.limits, state.reports
        self.wheel = TimerWheel(state)
        self.maintenance = Maintenance(state)
        self._ingest = Ingest(state)
        self._find = Find(state)
        self.assignment = Assignment(state)
        self._lock_descriptor = lock_descriptor

    @classmethod
    def open(
        cls,
        found: Found,
        *,
        partitions: Iterable[SourceName],
        committed: Mapping[SourceName, NamedState],
        frozen: Mapping[SourceName, Sequence[NamedStep]] = MappingProxyType({}),
        log_starts: Mapping[SourceName, int] = MappingProxyType({}),
        cuts: Mapping[SourceName, Cuts] = MappingProxyType({}),
        now_ms: int,
        limits: Limits = DEFAULTS,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> TimerStore:
        """Make a store of the directory that `recovery.find` has found, for the owned sources (the keys of `committed`,
        with their committed O and P; `frozen` are their frozen steps, where there are any). It has the directory's lock
        from now on.

        `partitions` are all partitions of the delay topics, `log_starts` the first offsets that Kafka still has of the
        owned ones (0 where it is not said), `cuts` where logs were cut.
        Raises DiskFull, DiskFailure.
        """
        starts = {name: log_starts.get(name, 0) for name in committed}
        try:
            return cls(
                recovery.restore(found, partitions, committed, frozen, starts, now_ms, limits, progress, cuts=cuts),
                found.descriptor,
            )
        except BaseException:
            found.release()
            raise

    def resume_offsets(self) -> dict[SourceName, int | None]:
        """Where ingest has to start for every owned source: O_c, or None when the index knows nothing of it (the log's
        start)."""
        known = self.state.checkpoint.offsets
        return {name: known.get(name) for name in map(self.sources.name, sorted(self.state.resident.committed))}

    def held_below(self, names: Iterable[SourceName]) -> dict[SourceName, int]:
        """Below which offset everything that is pending of a source is here, as far as Kafka has lost it."""
        known = {**self.state.checkpoint.kept, **self.state.checkpoint.offsets}
        return {name: known.get(name, 0) for name in names}

    def start_at(self, offsets: Mapping[SourceName, int], log_ends: Mapping[SourceName, int]) -> None:
        """Set the first expected offset of every owned source, before anything is appended. `log_ends` are where their
        logs ended after the committed states were read: below may lie copies that another process wrote."""
        with self.state.changing():
            for name, offset in offsets.items():
                self.state.resident.ends[self.sources.index(*name)] = offset
            self.state.cancels.inherited = {self.sources.index(*name): log_ends[name] for name in offsets}

    def next_offsets(self) -> dict[SourceName, int]:
        """The next expected offset of every owned source."""
        with self.state.lock:
            resident = self.state.resident
            return {self.sources.name(source): int(resident.ends[source]) for source in resident.committed}

    def committed_offsets(self) -> dict[SourceName, int]:
        """The committed O of every owned source."""
        with self.state.lock:
            committed = self.state.resident.committed.items()
            return {self.sources.name(source): each.offset for source, each in committed}

    # ---- ingest

    def append(
        self, entries: pa.Table, ends: Mapping[SourceName, int], now_ms: int, beat: Callable[[], None] = lambda: None
    ) -> int:
        """Take in a batch; see `Ingest.append`."""
        return self._ingest.append(entries, ends, now_ms, beat)

    def has_room(self) -> bool:
        """Whether `append` goes on at once."""
        return self._ingest.has_room()

    def blocked_by(self) -> frozenset[SourceName]:
        """Held sources that leave no room for what comes in: rows that wait to be output stop their O, so that nothing
        behind can be flushed. Empty where there is room."""
        if self.has_room():
            return frozenset()
        with self.state.lock:
            resident = self.state.resident
            waiting = resident.overtaken.first_offsets().keys()
            held = [source for source in resident.held_sources() if not resident.joining[source]]
            return frozenset(self.sources.name(source) for source in held if source in waiting)

    # ---- dispatcher

    def begin(self, *, only_output: bool = False) -> Transaction:
        """Start a transaction; one at a time, and only when every owned source is ingested up to its committed O
        (invariant I6). `only_output`: as far as it has output, it moves nothing but the sources of that. Raises
        Inconsistent after a change that failed, as all do that change something.
        """
        with self.state.lock:
            if not self.is_caught_up():
                raise Misuse(
                    "nothing may be dispatched before ingest has reached the committed offsets", code="DB-7003"
                )
            with self.state.changing_between_transactions():
                return Transaction(self.state, only_output=only_output)

    def is_caught_up(self) -> bool:
        return self.state.is_caught_up()

    def next_wakeup_ms(self) -> int | None:
        """When the next row in memory is due, or None. (In the past: at once.)"""
        return self.wheel.next_due_ms()

    def offsets_behind(self) -> bool:
        return self.state.offsets_behind()

    def needs_offset_commit(self) -> bool:
        return self.state.needs_offset_commit()

    def hold(self, sources: Collection[int]) -> None:
        """Deliver nothing of these sources from now on, and of all others again; between two transactions.

        For a partition of the delay topic that takes nothing of what must be written there: it keeps its own P, and
        holds up no other. A source that is released is delivered from its P on, as after a start.
        """
        with self.state.changing_between_transactions():
            held = np.zeros(len(self.sources), dtype=np.bool_)
            held[list(sources)] = True
            self.state.resident.hold(held)
            self.state.wake()

    def is_clock_behind(self, now_ms: int) -> bool:
        """Whether the clock has been set back behind P, further than is just waited for."""
        with self.state.lock:
            furthest_ms = int(self.state.resident.done.at.max(initial=ORIGIN.at_ms))
            return furthest_ms - now_ms > self.state.limits.clock_step_ms

    def step_back(self, now_ms: int) -> None:
        """Go on from a clock that was set back behind P (invariant I4); between two transactions.

        What is finished stays the same, so nothing need be committed: the next transaction carries it along.
        """
        with self.state.changing_between_transactions():
            self.state.resident.step_back(now_ms)
            self.state.bound_ready_rows()
            self.state.wake()

    def wait(self, timeout_s: float | None) -> None:
        """Sleep until something nearer was appended, `wake` was called, or the time is over."""
        state = self.state
        with state.lock:
            state.changed.wait_for(lambda: state.has_news or state.is_closed, timeout_s)
            state.has_news = False

    def wake(self) -> None:
        """End `wait` now."""
        self.state.wake()

    # ---- http, and the end

    def stats(self, edges_ms: Sequence[int] = ()) -> Stats:
        """A consistent look at everything; `pending_until` answers for each of `edges_ms` (epoch ms)."""
        return stats.look(self.state, edges_ms)

    def find(
        self, query: Query, now_ms: int, *, after: NamedPosition | None = None, limit: int = 100, bulky: bool = False
    ) -> Page:
        """The pending messages that fit, the soonest first, from behind the cursor `after` on; with their values,
        headers and whole keys if `bulky`. A page may have fewer rows than `limit` (1 to 1,000), or none, and others
        behind it.

        Raises KeyError for a cursor of an unknown partition, Corrupt, DiskFailure.
        """
        return self._find.page(query, now_ms, after, limit, bulky=bulky)

    def find_originals(
        self, query: Query, now_ms: int, *, after: NamedPosition | None = None, limit: int = ORIGINALS_MAX
    ) -> Originals:
        """As `find`, only where the messages came from and when they are due, of up to 10,000 (`limit`)."""
        return self._find.originals(query, now_ms, after, limit)

    def count_where(self, query: Query, now_ms: int, *, scanned_rows_max: int = SCANNED_ROWS_MAX) -> Count:
        """How many pending messages fit; at once for all of them and for a target. Raises Corrupt, DiskFailure."""
        return self._find.count(query, now_ms, scanned_rows_max)

    def pending_until(self, edges_ms: Sequence[int]) -> tuple[int, ...]:
        """How many messages come up before each of `edges_ms` (epoch ms); exact at whole ten seconds."""
        with self.state.lock:
            return self.state.pending.histogram.until(*edges_ms)

    def export(self, query: Query, now_ms: int, *, bulky: bool) -> Export:
        """All pending messages that fit at this moment, as Arrow batches of `export.SCHEMA`; with their values and
        headers if `bulky`. Raises Corrupt, DiskFailure."""
        return export(self.state, query, now_ms, bulky=bulky)

    def waits_since_ms(self) -> int | None:
        """Since when the oldest of what is pending waits; None where nothing is pending."""
        return stats.waits_since_ms(self.state)

    def pending_from(
        self, name: SourceName, offset: int, now_ms: int, is_over: Callable[[], bool] = lambda: False
    ) -> int:
        """How many pending messages of a source have records at this offset or above; at least so many, when it
        `is_over` before all are counted. Raises Corrupt, DiskFailure."""
        found = 0
        with closing(self.export(Query(), now_ms, bulky=False)) as batches:
            for batch in batches:
                if is_over():
                    break
                topic, partition, at = (batch.column(column) for column in ("topic", "partition", "offset"))
                mine = pc.and_(pc.equal(topic, name[0]), pc.equal(partition, name[1]))
                found += pc.sum(pc.and_(mine, pc.greater_equal(at, offset))).as_py() or 0
        return found

    def trimmed(self, log_starts: Mapping[SourceName, int]) -> list[SourceName]:
        """The owned sources with unfinished rows whose records are gone from Kafka, and are in this store alone."""
        return stats.trimmed(self.state, log_starts)

    def trimmed_in_memory(self, log_starts: Mapping[SourceName, int]) -> Unstored:
        """What of `trimmed` is in memory alone."""
        return stats.trimmed_in_memory(self.state, log_starts)

    def may_hold_below(self, bounds: Mapping[SourceName, int]) -> set[SourceName]:
        """The owned sources of which something below these offsets may be unfinished."""
        return stats.may_hold_below(self.state, bounds)

    def close_intake(self) -> None:
        """Take in nothing more: `append` raises Closed, also where it waits. Delivery and flushes go on."""
        with self.state.lock:
            self.state.is_intake_closed = True
            self.state.changed.notify_all()

    def close(self) -> None:
        """Give up the directory and end every wait; what is not flushed is read from Kafka again next time."""
        with self.state.lock:
            if not self.state.is_closed:
                self.state.is_closed = True
                os.close(self._lock_descriptor)
                self.state.changed.notify_all()
