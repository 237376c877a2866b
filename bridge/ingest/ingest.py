"""Ingest: the delay topics go into the store, by Spark's query, and by a plain reader while the query does not serve.

    thread   query     session | plan | up to the committed O (batch job) | stream --------------------------> stream
             ingest    plain reader ------------------------------------------->|  asks for ends  |  plain reader ...

Both readers start at the store's offsets and hand over by overlap: the store drops repeated records by their offsets.
So the plain reader goes on until the query has come as far (watch/hand_over.py). A failed query is started anew the
same way; while it stands still the plain reader reads (all waits with their deadlines: watch/waits.py). Both readers
are also started anew when partitions come or go: a *run* is the reading for one assignment, and late frames of an
earlier run are ignored. Before the committed O is reached, nothing is read beyond it: such records must not be
dispatched (invariant I6), and could not be flushed, so that one partition's rows would fill the memory for another's.
Partitions that join later delay nothing else, and are read on at once.

Both readers leave out batches that have ended a reader; these are read one by one (batches/suspects.py) before the
query starts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from functools import partial
from itertools import count
from math import inf
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import structlog

from bridge.errors import BridgeError, InternalError
from bridge.ingest.batches.suspects import Suspects
from bridge.ingest.finish import Finish
from bridge.ingest.frames import FrameReceiver
from bridge.ingest.plain_reader import NOTHING, Offsets, PlainReader, by_source, new_records
from bridge.ingest.queries import Queries
from bridge.ingest.query import Query
from bridge.ingest.watch.guarded import guarded
from bridge.ingest.watch.hand_over import Readers
from bridge.ingest.watch.stalls import jvm_stands_still
from bridge.ingest.watch.waits import Then, Wait, Watch
from bridge.stores.names import SourceName
from bridge.stores.stores import Stores
from bridge.telemetry.heartbeats import Beat, unwatched
from bridge.telemetry.metrics import Metrics
from bridge.wire.decode_epochs import DecodeEpochs
from timerstore.clock import Clock
from timerstore.errors import Closed

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = structlog.get_logger("bridge.ingest.ingest")

LOOK_S: Final = 0.2
IDLE_LOOK_S: Final = 1.0
"""The interval of looks for corrupt batches while none is known."""
QUIET_S: Final = 5.0
"""Time without records after which a partition with a later end is asked for it."""


class Ingest:
    """See the module. `start` once; `stop` ends it; `on_fatal` gets a failure, once."""

    def __init__(
        self,
        *,
        session: Future[SparkSession],
        make_query: Callable[[SparkSession, FrameReceiver], Query],
        make_reader: Callable[[], PlainReader],
        store: Stores,
        committed: Offsets,
        log_starts: Callable[[Offsets], Offsets],
        all_epochs: Mapping[SourceName, DecodeEpochs],
        executor_host: str | None,
        suspects: Suspects,
        clock: Clock,
        metrics: Metrics,
        on_corrupt: Callable[[], None],
        on_fatal: Callable[[BridgeError], None],
        end_jvm: Callable[[], None] = lambda: None,
        beat: Beat = unwatched,
        beat_query: Beat = unwatched,
    ) -> None:
        """`committed`: the committed O of every owned partition; `log_starts` looks up the starts of some logs. When
        partitions come later, `all_epochs` already has theirs. `executor_host` is this machine's address for executors
        elsewhere. `end_jvm` ends a JVM that stands still. `beat` is for the plain reader's thread, `beat_query` for the
        query's."""
        self._make_reader = make_reader
        self._store = store
        self._all_epochs = all_epochs
        self._finish = Finish(all_epochs)
        self._suspects = suspects
        self._clock = clock
        self._metrics = metrics
        self._on_corrupt, self._on_fatal = on_corrupt, on_fatal
        self._end_jvm = end_jvm
        self._beats = beat
        self._watch = Watch(clock)
        self._shared = Readers(committed=committed)
        self._queries = Queries(
            session=session, make_query=make_query, shared=self._shared, take=self._take, store=store,
            suspects=suspects, log_starts=log_starts, executor_host=executor_host, clock=clock, watch=self._watch,
            beat=beat_query,
        )  # fmt: skip
        self._taken = threading.Event()
        self._taking = threading.Lock()
        self._assigning = threading.Lock()
        self._runs = count(1)
        self._threads: list[threading.Thread] = []
        self._heard: set[SourceName] = set()

    # ---- from other threads

    @property
    def reader(self) -> str:
        """Which reader serves: `spark` or `plain`."""
        return "spark" if self._shared.query_serves.is_set() else "plain"

    def is_reading(self) -> bool:
        """Whether every partition is being read: new records then arrive at once."""
        heard = self._heard | self._suspects.held().keys()
        return self._shared.query_serves.is_set() or heard >= self._shared.committed.keys()

    def restart(self, reason: str) -> None:
        """Have the query end, and start again at the store's offsets."""
        self._queries.restart(reason)

    def join(self, committed: Offsets, add: Callable[[], bool], wait_s: float) -> bool | None:
        """Partitions come: `add` puts them into the store while nothing is taken in, and returns whether it has.
        Returns that result; None if something is being taken in for as long as `wait_s`, perhaps for lack of room."""
        if not self._taking.acquire(timeout=wait_s):
            return None
        try:
            if not add():
                return False
            with self._assigning:  # some may have left the store meanwhile
                here, both = self._store.next_offsets(), {**self._shared.committed, **committed}
                self._shared.committed = {name: offset for name, offset in both.items() if name in here}
            self._finish = Finish(self._all_epochs)
            self._begin_anew()
        finally:
            self._taking.release()
        return True

    def give_up(self, gone: Collection[SourceName]) -> None:
        """Partitions have left the store."""
        with self._assigning:
            kept = self._shared.committed.items()
            self._shared.committed = {name: offset for name, offset in kept if name not in gone}
        self._suspects.forget(gone)
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._shared.run = next(self._runs)
        self.restart("assignment")
        self._shared.query_serves.clear()

    def note_log_ends(self, ends: Offsets) -> None:
        self._shared.log_ends = ends

    # ---- life

    def start(self) -> None:
        for name, run in (("ingest", self._run_reader), ("query", self._queries.run), ("batches", self._run_batches)):
            thread = threading.Thread(target=self._guarded, args=(run,), name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def catch_up(self, progress: Callable[[int, int], None]) -> None:
        """Return when everything up to the committed offsets is in the store, or at a stop. `progress(done, total)`
        counts offsets."""
        begun = self._store.next_offsets()
        total = sum(max(0, end - begun[name]) for name, end in self._shared.committed.items())
        while not (self._shared.stopping.is_set() or self._store.is_caught_up()):
            at = self._store.next_offsets()
            progress(total - sum(max(0, end - at[name]) for name, end in self._shared.committed.items()), total)
            self._taken.wait(LOOK_S)
            self._taken.clear()

    def cancel(self) -> None:
        """Let everything end soon; failures from now on are consequences, and not reported."""
        self._shared.stopping.set()
        self._taken.set()
        self._queries.cancel()

    def stop(self, timeout_s: float = 8.0) -> None:
        """End both readers. The store's intake must be closed first: a reader may wait for room."""
        self.cancel()
        deadline_s = self._clock.monotonic_s() + timeout_s
        for thread in self._threads:
            thread.join(max(0.1, deadline_s - self._clock.monotonic_s()))

    def _guarded(self, run: Callable[[], None]) -> None:
        try:
            guarded("ingest", run, clock=self._clock, on_corrupt=self._on_corrupt, on_fatal=self._fail)
        except Closed:
            self._fail(InternalError("the store is closed", hint="Please report this.", code="DB-7001"))

    def _fail(self, error: BridgeError) -> None:
        if not self._shared.stopping.is_set():
            self._shared.stopping.set()
            self._on_fatal(error)

    # ---- the query's thread, looked after

    def _beat(self, within_s: float | None = None) -> None:
        """Report the plain reader's thread as alive, and watch the query's, which may stand still with the JVM."""
        self._beats(within_s)
        for wait, waited_s in [] if self._shared.stopping.is_set() else self._watch.over():
            if wait.then is Then.PLAIN_READS:
                self._take_over(wait)
            else:
                self._fail(jvm_stands_still(wait, waited_s))
                self._end_jvm()

    def _take_over(self, wait: Wait) -> None:
        if self._shared.query_serves.is_set() or self._shared.plain_rests.is_set():
            log.warning("plain-reader-takes-over", waits_for=wait.waits_for, seconds=wait.s)
        self._shared.query_serves.clear()
        self._shared.plain_rests.clear()

    # ---- into the store

    def _take(self, run: int, entries: pa.Table, ends: Offsets, beat: Beat) -> None:
        """Store entries. Called by any reader's thread, with its `beat`. Blocks while the store has no room. Records of
        an earlier run may lie behind a gap: partitions may have come back since."""
        finished = self._finish(entries)
        began_s = self._clock.monotonic_s()
        while not self._taking.acquire(timeout=LOOK_S):
            if not self._store.has_room():  # the other thread waits for room; otherwise it works, or hangs
                beat()
        try:
            if run != self._shared.run:
                return
            before = self._store.next_offsets()
            self._store.append(finished, ends, self._clock.now_ms(), beat)
            for topic, new in new_records(entries, before):
                self._metrics.ingested(topic, new)
        finally:
            self._taking.release()
        if len(entries):
            self._metrics.batch.observe(self._clock.monotonic_s() - began_s)
        self._taken.set()

    # ---- the plain reader

    def _run_reader(self) -> None:
        reader = self._make_reader()
        try:
            while not self._shared.stopping.is_set():
                if self._shared.query_serves.is_set():
                    self._stand_by(reader)
                elif self._shared.plain_rests.is_set():
                    self._beat()
                    self._shared.stopping.wait(LOOK_S)
                else:
                    self._read(reader)
            self._suspects.rests()  # an end by an error, perhaps for lack of memory, leaves its mark
        finally:
            reader.close()

    def _read(self, reader: PlainReader) -> None:
        """Read until the query serves, or the assignment changes; up to the committed offsets first."""
        run, until, without = self._shared.run, self._shared.committed, self._suspects.names
        while not self._store.is_caught_up():
            behind = {name: at for name, at in self._trusted().items() if at < until.get(name, 0)}
            self._begin(reader, behind)
            while not (self._store.is_caught_up() or self._is_relieved(run, without)):
                self._read_once(run, reader, until)
            if self._is_relieved(run, without):
                return
        self._begin(reader, self._trusted())
        self._heard.clear()
        while not self._is_relieved(run, without):
            self._read_once(run, reader, None)

    def _trusted(self) -> dict[SourceName, int]:
        return self._suspects.trusted(self._store.next_offsets())

    def _begin(self, reader: PlainReader, at: Offsets) -> None:
        self._suspects.reading(at)
        reader.assign(at)

    def _is_relieved(self, run: int, without: Collection[SourceName]) -> bool:
        is_ended = self._is_over(run) or without != self._suspects.names
        return is_ended or self._shared.query_serves.is_set() or self._shared.plain_rests.is_set()

    def _read_once(self, run: int, reader: PlainReader, until: Offsets | None) -> None:
        self._beat()
        if not self._store.has_room():
            self._shared.stopping.wait(LOOK_S)
            return
        read = reader.poll(until)
        if read.ends:
            self._take(run, read.entries, read.ends, self._beat)
            self._shared.read_to |= {name: int(offsets[-1]) + 1 for name, offsets in by_source(read.entries)}
            if until is None:
                self._heard.update(read.ends)
            self._suspects.reading(self._store.next_offsets())
        for name, why in read.left.items():
            self._suspects.suspect({name: self._store.next_offsets().get(name, 0)}, why)

    def _stand_by(self, reader: PlainReader) -> None:
        """While the query serves: tell the store the ends of quiet partitions. Behind the last record there may be
        transaction markers and aborted records, which the query does not report."""
        reader.assign({})
        self._suspects.rests()
        run, starved = self._shared.run, dict[SourceName, int]()
        while not self._is_relieved_of_standing_by(QUIET_S):
            quiet_at = self._store.next_offsets()
            if self._is_relieved_of_standing_by(QUIET_S):
                return
            at = {name: end for name, end in self._trusted().items() if quiet_at.get(name) == end}
            behind = {name: end for name, end in at.items() if self._shared.log_ends.get(name, end) > end}
            starved = {name: times for name, times in starved.items() if name in behind}
            if behind and self._store.has_room():
                for name in self._ask(run, reader, behind):
                    starved[name] = starved.get(name, 0) + 1
            if max(starved.values(), default=0) * QUIET_S >= Wait.STARVING.s:
                log.warning("query-starves", partitions=[f"{topic}/{p}" for topic, p in starved])
                self.restart("partitions-starve")
                self._take_over(Wait.STARVING)

    def _is_relieved_of_standing_by(self, wait_s: float) -> bool:
        """Wait; True as soon as the plain reader must read again, or at a stop."""
        self._await(lambda: not self._shared.query_serves.is_set(), wait_s, self._beat)
        return self._shared.stopping.is_set() or not self._shared.query_serves.is_set()

    def _ask(self, run: int, reader: PlainReader, at: Offsets) -> set[SourceName]:
        """Take in the ends of those partitions without further records; returns the others."""
        until_s = self._clock.monotonic_s() + Wait.ENDS_OF_QUIET.s
        known, filled = reader.ask(at, self._beat, lambda: self._clock.monotonic_s() >= until_s)
        if known:
            self._take(run, NOTHING, known, self._beat)
        return filled

    def _await(self, condition: Callable[[], bool], at_most_s: float, beat: Beat) -> None:
        until_s = self._clock.monotonic_s() + at_most_s
        while not (condition() or self._shared.stopping.wait(LOOK_S) or self._clock.monotonic_s() >= until_s):
            beat()

    # ---- batches

    def _run_batches(self) -> None:
        while not self._shared.stopping.wait(LOOK_S if self._suspects.names else IDLE_LOOK_S):
            if not self._suspects.names:
                continue
            run = self._shared.run
            is_over = partial(self._is_over, run)
            if self._suspects.look(self._store.next_offsets(), partial(self._take_batches, run), is_over):
                self.restart("readable-again")

    def _is_over(self, run: int) -> bool:
        return self._shared.stopping.is_set() or run != self._shared.run

    def _take_batches(self, run: int, entries: pa.Table, ends: Offsets) -> None:
        self._await(self._store.has_room, inf, unwatched)
        self._take(run, entries, ends, unwatched)
