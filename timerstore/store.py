"""TimerStore: the index of pending timers, as the bridge sees it.

Four threads meet here, each with a few methods:

    enqueue      append            a micro-batch goes in; blocks while there is no room (the flow control)
    dispatcher   begin, wait       what is due comes out, with the (O, P) that finishes it
    maintenance  maintenance.*     flush, windows, reclaim (maintenance.py)
    http         stats

One lock guards everything here; no IO happens under it. The store reads no clock: time is an argument.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pyarrow as pa

from timerstore.cancels.cancels import Cancels, Judged, unfinished
from timerstore.cancels.id_index import Timers
from timerstore.disk import files
from timerstore.disk.checkpoint import Checkpoint, Identity
from timerstore.errors import Closed, Corrupt, Misuse
from timerstore.limits import DAY_MS, DEFAULTS, Limits
from timerstore.log.timerlog import TimerLog
from timerstore.memory import overdue
from timerstore.memory.pending import Pending, Tally, tally_timers
from timerstore.memory.resident import Resident
from timerstore.memory.sorted_runs import EMPTY, RowRefs, select
from timerstore.operations import recovery
from timerstore.operations.maintenance import Maintenance
from timerstore.operations.recovery import Found, Recovered
from timerstore.operations.stats import Stats, look
from timerstore.operations.transaction import Transaction
from timerstore.rows.entry import payload_of
from timerstore.rows.position import Bools, Position, Progress
from timerstore.rows.sources import NamedPosition, NamedStep, SourceName, Sources, named_in


class TimerStore:
    """See the module. Made by `open`; every public method may be called from any thread unless it says otherwise."""

    def __init__(
        self, directory: Path, lock_descriptor: int, identity: Identity, sources: Sources, limits: Limits, now_ms: int
    ) -> None:
        self.lock = threading.RLock()
        self.directory = directory
        self.sources = sources
        self.limits = limits
        self.identity = identity
        self.reports: tuple[str, ...] = ()
        self.aside: tuple[Path, ...] = ()
        """Segments that were replaced or given up by a rebuild that has not caught up yet."""
        self.opened_ms = now_ms
        self.resident = Resident(len(sources), {})
        self.timerlog = TimerLog()
        self.checkpoint = Checkpoint(identity=identity, offsets={})
        self.checkpoint_ms: int | None = None
        self.next_segment = 1
        self.next_tombstones = 1
        self.cancels = Cancels(sources, limits.window_ms)
        self.maintenance = Maintenance(self)
        self._lock_descriptor = lock_descriptor
        self._changed = threading.Condition(self.lock)
        self._pending = Pending(now_ms - DAY_MS)
        self._transaction: Transaction | None = None
        self._appending = threading.Lock()
        self._news = False
        self._closed = False
        self._intake_closed = False

    @classmethod
    def open(
        cls,
        directory: Path,
        *,
        identity: Identity,
        partitions: Iterable[SourceName],
        committed: Mapping[SourceName, tuple[int, NamedPosition | None]],
        frozen: Mapping[SourceName, Sequence[NamedStep]] = MappingProxyType({}),
        log_starts: Mapping[SourceName, int] = MappingProxyType({}),
        now_ms: int,
        limits: Limits = DEFAULTS,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> TimerStore:
        """Open the index of a directory: `recovery.find` and `restore` in one."""
        return cls.restore(
            recovery.find(directory, identity, now_ms), partitions=partitions, committed=committed, frozen=frozen,
            log_starts=log_starts, now_ms=now_ms, limits=limits, progress=progress,
        )  # fmt: skip

    @classmethod
    def restore(
        cls,
        found: Found,
        *,
        partitions: Iterable[SourceName],
        committed: Mapping[SourceName, tuple[int, NamedPosition | None]],
        frozen: Mapping[SourceName, Sequence[NamedStep]],
        log_starts: Mapping[SourceName, int],
        now_ms: int,
        limits: Limits,
        progress: Callable[[int, int], None],
    ) -> TimerStore:
        """Make a store of what was found, for the owned sources (the keys of `committed`, with their committed O and P;
        `frozen` are their frozen steps, where there are any). It has the directory's lock from now on.

        `partitions` are all partitions of the delay topics, `log_starts` the first offsets that Kafka still has of the
        owned ones (0 where it is not said). What is found wrong and mended is told in `reports`.
        Raises DiskFailure.
        """
        offsets = {name: log_starts.get(name, 0) for name in committed}
        try:
            found = recovery.distrust(found, committed, frozen, offsets)
            while True:
                try:
                    recovered = recovery.recover(found, [*partitions, *named_in(committed)], offsets, now_ms, progress)
                    found = replace(found, checkpoint=recovered.checkpoint)
                    store = cls(found.directory, found.descriptor, found.identity, recovered.sources, limits, now_ms)
                    store._restore(recovered, committed, frozen, offsets, progress)
                    return store
                except Corrupt as error:
                    found = recovery.without(found, error, now_ms)
        except BaseException:
            found.release()
            raise

    def resume_offsets(self) -> dict[SourceName, int | None]:
        """Where ingest has to start for every owned source: O_c, or None when the index knows nothing of it (the log's
        start)."""
        return {
            name: self.checkpoint.offsets.get(name) for name in map(self.sources.name, sorted(self.resident.committed))
        }

    def start_at(self, offsets: Mapping[SourceName, int], log_ends: Mapping[SourceName, int]) -> None:
        """Set the first expected offset of every owned source, before anything is appended. `log_ends` are where their
        logs ended after the committed states were read: below may lie copies that another process wrote."""
        with self.lock:
            for name, offset in offsets.items():
                self.resident.ends[self.sources.index(*name)] = offset
            self.cancels.inherited = {self.sources.index(*name): log_ends[name] for name in offsets}

    def next_offsets(self) -> dict[SourceName, int]:
        """The next expected offset of every owned source."""
        with self.lock:
            return {self.sources.name(source): int(self.resident.ends[source]) for source in self.resident.committed}

    # ---- enqueue

    def append(self, entries: pa.Table, ends: Mapping[SourceName, int], now_ms: int) -> int:
        """Take in a micro-batch of `entry.ENTRY` rows, read at `now_ms`; `ends` are the exclusive end offsets it
        reaches, by source.

        Blocks while there is no room. Rows below the next expected offset (a batch seen before) and finished ones are
        dropped. Returns how many rows were new. Raises Closed when the store is closed meanwhile.
        """
        everything = select(entries, self.sources)
        payload = payload_of(entries)
        with self._appending:
            with self.lock:
                self._wait_for_room()
                resident = self.resident
                reached = resident.ends.copy()
                for name, end in ends.items():
                    source = self.sources.index(*name)
                    reached[source] = max(int(reached[source]), end)
                fresh = everything[everything.offset >= resident.ends[everything.source]]
                if not (fresh.offset < reached[fresh.source]).all():
                    raise Misuse("a batch has rows beyond the end offsets that it is said to reach")
                # Stays so until the rows are placed: what is not ingested yet cannot become finished.
                unfinished = ~resident.finished(fresh)
                parts = resident.parts(fresh[unfinished].sorted())
                known = self.cancels.known([s.ids for s in self.timerlog if s.ids is not None])
            # Copies and counts are made, and cancels looked up, without the lock: delivery goes on.
            judged = self.cancels.judge(known, payload, fresh, unfinished, self._is_pending, now_ms)
            chunks = [(part, payload.take(pa.array(part.row))) for part in parts]
            covered = None if judged is None else judged.covered
            tallies = [
                tally_timers(part.at, chunk, None if covered is None else covered[part.row]) for part, chunk in chunks
            ]
            with self.lock:
                nearest = resident.ready.first_at_ms()
                resident.ends = reached
                for part, chunk in chunks:
                    resident.add(part, chunk)
                for timers in tallies:
                    self._pending.add(timers)
                if judged is not None:
                    self._cancel(judged)
                if resident.ready_rows_bytes > self.limits.ready_rows_bytes:
                    resident.retreat_frontier(self.limits.loaded_bytes_max, self._floor())
                self._announce(nearest)
        return len(fresh)

    def has_room(self) -> bool:
        """Whether a batch may come in. Room is made by a flush, or by delivery; where neither is possible there is
        nothing to wait for.

        (Delivery waits for ingest to catch up. Whoever catches up no further than the committed O never gets that far.)
        """
        with self.lock:
            limits, resident = self.limits, self.resident
            delivers = self.is_caught_up()
            flushes = bool((resident.covered() > resident.stored)[resident.owned].any())
            full = resident.memtable_bytes >= limits.memtable_bytes_max and (delivers or flushes)
            flooded = resident.overtaken_bytes >= limits.overtaken_bytes and delivers
            buried = self.cancels.tombstones.memory_rows >= 2 * limits.tombstone_rows
            return not (full or flooded or buried)

    # ---- dispatcher

    def begin(self, *, only_output: bool = False) -> Transaction:
        """Start a transaction; one at a time, and only when every owned source is ingested up to its committed O
        (invariant I6). `only_output`: as far as it has output, it moves nothing but the sources of that.
        """
        with self.lock:
            if self._transaction is not None:
                raise Misuse("a transaction is open")
            if not self.is_caught_up():
                raise Misuse("nothing may be dispatched before ingest has reached the committed offsets")
            self._transaction = Transaction(self, only_output=only_output)
            return self._transaction

    def is_caught_up(self) -> bool:
        """Whether every owned source is ingested up to its committed O."""
        with self.lock:
            return bool((self.resident.ends >= self.resident.offset)[self.resident.owned].all())

    def next_wakeup_ms(self) -> int | None:
        """When the next resident row is due, or None. (In the past: at once.)"""
        with self.lock:
            resident = self.resident
            candidates = (resident.ready.first_at_ms(), resident.overtaken.first_at_ms(resident.held))
            return min((at for at in candidates if at is not None), default=None)

    def offsets_behind(self) -> bool:
        """Whether ingest is ahead of the committed O, so that a transaction would move it without rows (late rows in
        front stop it)."""
        with self.lock:
            resident = self.resident
            return bool((resident.offsets_reachable() > resident.offset)[resident.owned].any())

    def needs_offset_commit(self) -> bool:
        """Whether O should be committed at once: the memtable has to be flushed, and only rows below O can be."""
        with self.lock:
            return self.resident.memtable_bytes >= self.limits.flush_bytes // 2 and self.offsets_behind()

    def hold(self, sources: Collection[int]) -> None:
        """Deliver nothing of these sources from now on, and of all others again; between two transactions.

        For a partition of the delay topic that takes nothing of what must be written there: it keeps its own P, and
        holds up no other. A source that is released is delivered from its P on, as after a start.
        """
        with self.lock:
            if self._transaction is not None:
                raise Misuse("a transaction is open")
            held = np.zeros(len(self.sources), dtype=np.bool_)
            held[list(sources)] = True
            self.resident.hold(held)
            self.wake()

    def is_clock_behind(self, now_ms: int) -> bool:
        """Whether the clock has been set back behind P, further than is just waited for."""
        with self.lock:
            return self.resident.ahead_of_clock_ms(now_ms) > self.limits.clock_step_ms

    def step_back(self, now_ms: int) -> None:
        """Go on from a clock that was set back behind P (invariant I4); between two transactions.

        What is finished stays the same, so nothing need be committed: the next transaction carries it along.
        """
        with self.lock:
            if self._transaction is not None:
                raise Misuse("a transaction is open")
            self.resident.step_back(now_ms)
            if self.resident.ready_rows_bytes > self.limits.ready_rows_bytes:
                self.resident.retreat_frontier(self.limits.loaded_bytes_max, self._floor())
            self.wake()

    def wait(self, timeout_s: float | None) -> None:
        """Sleep until something nearer was appended, `wake` was called, or the time is over."""
        with self.lock:
            if not self._news and not self._closed:
                self._changed.wait_for(lambda: self._news or self._closed, timeout_s)
            self._news = False

    def wake(self) -> None:
        """End `wait` now."""
        with self.lock:
            self._news = True
            self._changed.notify_all()

    def transaction_committed(
        self,
        rows: RowRefs,
        delivered: Tally,
        cancelled: Sequence[Tally],
        progress: Mapping[int, Progress],
        position: Position,
    ) -> None:
        """Called by Transaction.acknowledge; `delivered` counts the timers among `rows` that were output, `cancelled`
        those whose cancel came too late."""
        with self.lock:
            for timers in cancelled:
                self._pending.add(timers)
            self._pending.remove(delivered)
            self.resident.commit(progress, position)
            self.resident.chunks.release(rows.chunk)
            self._transaction = None
            self._changed.notify_all()

    def transaction_rolled_back(self, rows: RowRefs, cancelled: Sequence[Tally]) -> None:
        """Called by Transaction.rollback; `cancelled` counts what is cancelled after all."""
        with self.lock:
            self.cancels.cancelled += sum(int(timers.counts.sum()) for timers in cancelled)
            self.resident.replace_all(rows)
            self._transaction = None
            self._news = True
            self._changed.notify_all()

    # ---- maintenance (see maintenance.py)

    def transaction_rows(self) -> RowRefs:
        """References of the rows that are handed out."""
        return EMPTY if self._transaction is None else self._transaction.rows()

    def notify(self) -> None:
        """There may be room again for who waits in `append`."""
        with self.lock:
            self._changed.notify_all()

    # ---- http, and the end

    def stats(self, edges_ms: Sequence[int] = ()) -> Stats:
        """A consistent look at everything; `pending_until` answers for each of `edges_ms` (epoch ms)."""
        with self.lock:
            return look(self, self._pending, edges_ms)

    def waits_since_ms(self) -> int | None:
        """Since when the oldest of what is pending waits (overdue.py); None where nothing is pending."""
        with self.lock:
            return overdue.waits_since_ms(self, self._pending)

    def close_intake(self) -> None:
        """Take in nothing more: who waits in `append`, or calls it, gets Closed. Delivery and flushes go on."""
        with self.lock:
            self._intake_closed = True
            self._changed.notify_all()

    def close(self) -> None:
        """Give up the directory and wake everybody who waits; what is not flushed is read from Kafka again next
        time."""
        with self.lock:
            if not self._closed:
                self._closed = True
                os.close(self._lock_descriptor)
                self._changed.notify_all()

    # ---- inside

    def _restore(
        self,
        recovered: Recovered,
        committed: Mapping[SourceName, tuple[int, NamedPosition | None]],
        frozen: Mapping[SourceName, Sequence[NamedStep]],
        log_starts: Mapping[SourceName, int],
        progress: Callable[[int, int], None],
    ) -> None:
        """Become what the checkpoint and its segments describe."""
        states = {
            self.sources.index(*name): self.sources.progress(name, *state, frozen.get(name, ()))
            for name, state in committed.items()
        }
        self.resident = Resident(len(self.sources), states)
        self.reports, self.aside = recovered.reports, recovered.aside
        if recovered.checkpoint is not None:
            self.checkpoint = recovered.checkpoint
            known = recovered.checkpoint.identity.topic_ids
            # A topic that is not configured now may come back: its rows in the segments must be known to be of that
            # topic.
            self.identity = replace(self.identity, topic_ids={**known, **self.identity.topic_ids})
        # What is read again of a source that the index does not cover begins at the log's start. Of what lies below,
        # there is what the segments hold.
        for name, offset in {**log_starts, **self.checkpoint.offsets}.items():
            self.resident.stored[self.sources.index(*name)] = offset
        self.cancels.tombstones.restore(recovered.tombstones)
        for file in recovered.tombstones:
            self.next_tombstones = max(self.next_tombstones, files.tombstones_number(file.named.name) + 1)
        for opened in recovered.segments:
            self.timerlog.add(opened)
            self.next_segment = max(self.next_segment, files.segment_number(opened.path.name) + 1)
            self._pending.add(recovery.count_pending(opened, self.resident, self.sources))
            if opened.ids is not None:
                self._pending.remove(self.cancels.covered_in(opened.ids, self._is_pending))
            progress(len(recovered.segments), len(recovered.segments))

    def _is_pending(self, timers: Timers) -> Bools:
        with self.lock:
            return unfinished(self.resident, timers)

    def _cancel(self, judged: Judged) -> None:
        """Tombstones, and what they cover leaves the counts."""
        hits, lent = self.cancels.take_in(judged, self.resident, self.transaction_rows())
        self._pending.remove(hits)
        if self._transaction is not None:
            self._transaction.cancel(lent)

    def _announce(self, nearest_ms: int | None) -> None:
        """Wake who waits, if there is something for them: late rows, something nearer than what was the nearest, or
        pressure."""
        first = self.resident.ready.first_at_ms()
        nearer = first is not None and (nearest_ms is None or first < nearest_ms)
        if nearer or len(self.resident.overtaken) or self.needs_offset_commit():
            self._news = True
            self._changed.notify_all()

    def _wait_for_room(self) -> None:
        while not (self._closed or self._intake_closed):
            if self.has_room():
                return
            self._changed.wait(1.0)
        raise Closed("the store was closed while a batch waited for room")

    def _floor(self) -> Position:
        """The frontier never moves below what is delivered or being delivered."""
        position = self.resident.position
        return position if self._transaction is None else max(position, self._transaction.position)
