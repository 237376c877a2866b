"""Maintenance: the thread that flushes the store, loads its windows, reclaims and compacts its segments.

One thread does all of it, for all partitions, as `Upkeep` requires. Reclaiming frees space, so it precedes the
work that needs space. A full disk does not stop the loading of windows. A damaged segment is set aside, and the index
of its partition is opened anew, from the other segments and Kafka.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Final

import structlog

from bridge.errors import BridgeError
from bridge.ingest.watch.guarded import guarded
from bridge.stores.names import SourceName
from bridge.stores.stores import Stores
from bridge.stores.upkeep import Upkeep
from bridge.telemetry.heartbeats import DISK_BYTES_PER_S, SPARK_S, Beat, unwatched
from bridge.telemetry.metrics import Metrics
from timerstore.clock import Clock
from timerstore.errors import Closed, Corrupt, DiskFailure, DiskFull

BUSY_WAIT_S: Final = 0.05
IDLE_WAIT_S: Final = 0.5
RECLAIM_INTERVAL_S: Final = 1.0
LEFT_INTERVAL_S: Final = 60.0
"""The interval of looks at the indexes of partitions that other instances have."""
COMPACT_INTERVAL_S: Final = 5.0
"""The interval of checks whether a compaction is worthwhile. A running one continues window by window."""
COMPACT_AGAIN_S: Final = 60.0
"""The pause after a compaction without room."""
FLUSH_AGAIN_S: Final = 5.0
"""The pause after a flush without room."""

log = structlog.get_logger("bridge.runtime.maintenance_thread")


class MaintenanceThread:
    """Runs `store.upkeep` until stopped. `beat` is called before each step, even an idle one."""

    def __init__(
        self,
        *,
        store: Stores,
        clock: Clock,
        metrics: Metrics,
        on_fatal: Callable[[BridgeError], None],
        beat: Beat = unwatched,
    ) -> None:
        self._store = store
        self._clock = clock
        self._metrics = metrics
        self._on_fatal = on_fatal
        self._beat = beat
        in_memory = store.limits.flush_bytes + store.limits.ready_rows_bytes
        self._flush_budget_s = SPARK_S + in_memory / DISK_BYTES_PER_S
        self._compact_budget_s = SPARK_S + store.limits.segment_bytes_max / DISK_BYTES_PER_S
        self._stop = threading.Event()
        self._news = threading.Event()
        self._asked: deque[Callable[[], None]] = deque()
        self._thread = threading.Thread(target=self._run, name="maintenance", daemon=True)
        self._reclaimed_s = 0.0
        self._left_s = 0.0
        self._not_removed: str | None = None
        """The reason why an index stays, as reported."""
        self._flush_s = 0.0
        self._compact_s = 0.0
        self.disk_is_full = False

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> bool:
        """End after the current step; returns whether that was in time."""
        self._stop.set()
        self._news.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def ask(self, work: Callable[[], object], timeout_s: float) -> bool:
        """Call `work` between two steps; returns whether that was in time. It may raise the same errors as a step."""
        done = threading.Event()

        def run() -> None:
            work()
            done.set()

        self._asked.append(run)
        self._news.set()
        return done.wait(timeout_s)

    def flush_now(self, timeout_s: float, names: Collection[SourceName] | None = None) -> bool:
        """Flush these partitions (None: all) between two steps; returns whether that was in time."""
        return self.ask(lambda: self._try_flush(self._store.upkeep_of(names)), timeout_s)

    def pass_step(self, timeout_s: float) -> bool:
        """Wait for the end of the present step; returns whether that was in time."""
        return self.ask(lambda: None, timeout_s)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def flush(self) -> None:
        """Flush once more after `stop`, so that a restart has little to read again. Ignores a full disk."""
        self._store.upkeep.abandon_compaction()
        try:
            self._flush(self._store.upkeep)
        except DiskFull as full:
            log.warning("flush-skipped", reason=full.message, hint=full.hint)

    def _run(self) -> None:
        with suppress(Closed):
            guarded("maintenance", self._work, on_fatal=self._on_fatal)

    def _work(self) -> None:
        while not self._stop.is_set():
            try:
                wait_s = self._step()
            except Corrupt as corrupt:
                self._store.damage.set_aside(corrupt, self._clock.now_ms())
                wait_s = IDLE_WAIT_S
            self._news.wait(wait_s)
            self._news.clear()

    def _step(self) -> float:
        self._beat()
        self._do_asked()
        self._reclaim()
        loaded = self._load_window()
        flushed = self._flush_due()
        if not (loaded or self.disk_is_full):
            self._compact()
        busy = loaded or flushed or self._asked or self._store.upkeep.has_rows()
        return 0.0 if loaded else BUSY_WAIT_S if busy else IDLE_WAIT_S

    def _do_asked(self) -> None:
        while self._asked:
            self._beat(self._compact_budget_s)
            self._asked.popleft()()

    def _reclaim(self) -> None:
        now_s = self._clock.monotonic_s()
        if now_s - self._reclaimed_s >= RECLAIM_INTERVAL_S:
            self._reclaimed_s = now_s
            try:
                self._store.upkeep.reclaim(self._clock.now_ms())
            except DiskFull as full:
                self._note_full(full)
        if now_s - self._left_s >= LEFT_INTERVAL_S:
            self._left_s = now_s
            self._remove_left()

    def _remove_left(self) -> None:
        """Nothing depends on the removal: a link, or a file of another user, ends no delivery."""
        try:
            if removed := self._store.remove_left(self._clock.now_ms()):
                log.info("indexes-removed", partitions=removed)
            self._not_removed = None
        except DiskFailure as failure:
            if failure.message != self._not_removed:
                log.warning("indexes-not-removed", reason=failure.message, hint=failure.hint)
            self._not_removed = failure.message

    def _flush_due(self) -> bool:
        if self._clock.monotonic_s() < self._flush_s:
            return False
        is_due = self._store.upkeep.flush_due(self._clock.now_ms())
        if is_due and not self._try_flush(self._store.upkeep, only_due=True):
            return False
        if self.disk_is_full:
            self.disk_is_full = False
            log.info("disk-has-room-again")
        return is_due

    def _compact(self) -> None:
        """Compact one window if that is worthwhile; due load windows and flushes take place in between."""
        began_s = self._clock.monotonic_s()
        if began_s < self._compact_s:
            return
        self._beat(self._compact_budget_s)
        upkeep = self._store.upkeep
        segments = upkeep.segments()
        try:
            reading = upkeep.next_compaction(self._clock.now_ms())
            if reading is not None:
                self._beat()
                upkeep.compact(reading, reading.read())
        except DiskFull as full:
            # A compaction needs space before it frees any. No other work depends on it.
            log.warning("compaction-put-off", reason=full.message, hint=full.hint)
            self._compact_s = began_s + COMPACT_AGAIN_S
            return
        if reading is not None:
            self._metrics.compaction.observe(self._clock.monotonic_s() - began_s)
            return
        left = upkeep.segments()
        if left != segments:
            log.info("segments-compacted", before=segments, after=left)
        else:
            self._compact_s = began_s + COMPACT_INTERVAL_S

    def _load_window(self) -> bool:
        reading = self._store.upkeep.next_window(self._clock.now_ms())
        if reading is None:
            return False
        began_s, window = self._clock.monotonic_s(), reading.window
        admitted = self._store.upkeep.admit(reading, reading.read())
        self._metrics.window.observe(self._clock.monotonic_s() - began_s)
        log.debug("window-loaded", segments=len(window.segments), until_ms=window.upper.at_ms, admitted=admitted)
        return True

    def _try_flush(self, upkeep: Upkeep, *, only_due: bool = False) -> bool:
        try:
            self._flush(upkeep, only_due=only_due)
        except DiskFull as full:
            self._note_full(full)
            self._flush_s = self._clock.monotonic_s() + FLUSH_AGAIN_S
            return False
        return True

    def _flush(self, upkeep: Upkeep, *, only_due: bool = False) -> None:
        self._beat(self._flush_budget_s)
        began_s = self._clock.monotonic_s()
        flushed = upkeep.flush(self._clock.now_ms(), only_due=only_due)
        if flushed.rows:
            self._metrics.flush.observe(self._clock.monotonic_s() - began_s)
            log.debug("segment-written", rows=flushed.rows, bytes=flushed.bytes)

    def _note_full(self, full: DiskFull) -> None:
        """Free the space of a running compaction: the flush needs it more."""
        self._store.upkeep.abandon_compaction()
        given = self._store.upkeep.drop_aside()
        if given:
            log.warning("set-aside-removed", files=given, reason=full.message)
        if not self.disk_is_full:
            self.disk_is_full = True
            log.error("disk-full", reason=full.message, hint=full.hint)
