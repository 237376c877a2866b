"""Ingest: the delay topics into the store, by Spark's query, and by a plain reader for as long as that does not serve.

    thread   query     session | plan | up to the committed O (batch job) | stream --------------------------> stream
             ingest    plain reader ------------------------------------------->|  asks for ends  |  plain reader ...

Both readers start where the store stands and hand over by overlap: what comes twice is known by its offset and dropped,
so the plain reader goes on until the query has come as far as it had when the query began to send. A query that fails
is started anew the same way. So are both when partitions come or go: a *run* is what is read for one assignment, and
what an earlier run still sends is not taken in. Up to the committed O nothing is read beyond it: nothing may be
dispatched before (invariant I6), and what lies beyond could not be flushed, so that one partition's rows would fill the
memory for another's. What joins later holds up nothing else, and is read on at once.

What has ended a reader is left out by both and read batch by batch (batches/suspects.py) before the query starts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import CancelledError, Future
from functools import partial
from itertools import count
from math import inf
from pathlib import Path
from typing import Final

import pyarrow as pa
import structlog
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from bridge.errors import BridgeError, EnvironmentFailure, InternalError
from bridge.ingest.batches.suspects import Suspects
from bridge.ingest.finish import Finish
from bridge.ingest.frames import FrameReceiver
from bridge.ingest.guarded import guarded
from bridge.ingest.plain_reader import NOTHING, Offsets, PlainReader, by_source, new_records
from bridge.ingest.query import Query, too_few_slots
from bridge.kafka.errors import records_gone
from bridge.spark.errors import JAVA_ENDED, failures_named, named_failure, ranges
from bridge.spark.scratch import in_memory
from bridge.spark.session import quiet
from bridge.telemetry.heartbeats import Beat, unwatched
from bridge.telemetry.metrics import Metrics
from bridge.wire.decode_epochs import DecodeEpochs
from timerstore.clock import Clock
from timerstore.errors import Closed, TimerStoreError
from timerstore.rows.sources import SourceName
from timerstore.store import TimerStore

log = structlog.get_logger("bridge.ingest.ingest")

LOOK_S: Final = 0.2
SETTLE_S: Final = 1.0
"""After the first task of a query has begun, before the plain reader may end: the others follow, and fetch first."""
CLOSE_S: Final = 0.25
"""The query may be so far behind the plain reader when it relieves that; after CATCH_UP_S of trying, further."""
CATCH_UP_S: Final = 20.0
QUIET_S: Final = 5.0
"""A partition whose end lies further, and from which nothing has come for so long, is asked for its end."""
ANSWER_S: Final = 3.0
STARVED_MAX: Final = 3
"""Times that a partition is found to have records which the query does not send, before it is started anew."""
FAILURES_MAX: Final = 5
"""Of queries, one after the other, without a record between them."""
PAUSE_S_MAX: Final = 16.0
SLOTS_S: Final = 120.0
JOB_RECORDS_MIN: Final = 50_000
"""Fewer are left to the plain reader, which has them within two seconds."""


class Ingest:
    """See the module. `start` once; `stop` ends it; a failure is told to `on_fatal` once."""

    def __init__(
        self,
        *,
        session: Future[SparkSession],
        make_query: Callable[[SparkSession, FrameReceiver], Query],
        make_reader: Callable[[], PlainReader],
        store: TimerStore,
        committed: Offsets,
        log_starts: Callable[[Offsets], Offsets],
        all_epochs: Mapping[SourceName, DecodeEpochs],
        executor_host: str | None,
        suspects: Suspects,
        clock: Clock,
        metrics: Metrics,
        on_corrupt: Callable[[], None],
        on_fatal: Callable[[BridgeError], None],
        beat: Beat = unwatched,
        beat_query: Beat = unwatched,
    ) -> None:
        """`committed` are the committed O of every owned partition, `log_starts` looks up where the logs of some begin.
        `all_epochs` has those of partitions that come later by then. `executor_host` is this machine's address for
        executors elsewhere. `beat` is the plain reader's thread's, `beat_query` the query's.
        """
        self._session = session
        self._make_query = make_query
        self._make_reader = make_reader
        self._store = store
        self._committed = committed
        self._log_starts = log_starts
        self._all_epochs = all_epochs
        self._finish = Finish(all_epochs)
        self._executor_host = executor_host
        self._suspects = suspects
        self._clock = clock
        self._metrics = metrics
        self._on_corrupt, self._on_fatal = on_corrupt, on_fatal
        self._beat, self._beat_query = beat, beat_query
        self._stopping = threading.Event()
        self._taken = threading.Event()
        self._taking = threading.Lock()
        self._assigning = threading.Lock()
        self._runs, self._run = count(1), 0
        self._threads: list[threading.Thread] = []
        self._receiver: FrameReceiver | None = None
        self._query_serves = threading.Event()
        self._restart: str | None = None
        self._failure: Exception | None = None
        self._opened_s: float | None = None
        self._query_start: Offsets = {}
        self._sent: dict[SourceName, int] = {}
        """How far the query of now has come."""
        self._read_to: dict[SourceName, int] = {}
        """Behind the last record that the plain reader has read."""
        self._plain_rests = threading.Event()
        self._heard: set[SourceName] = set()
        self._log_ends: Offsets = {}

    # ---- from other threads

    @property
    def reader(self) -> str:
        """Which reader serves: `spark` or `plain`."""
        return "spark" if self._query_serves.is_set() else "plain"

    def is_reading(self) -> bool:
        """Whether every partition is being read: what is sent to it from now on comes at once."""
        return self._query_serves.is_set() or self._heard | self._suspects.held().keys() >= self._committed.keys()

    def restart(self, reason: str) -> None:
        """Have the query end, and start again where the store stands."""
        self._restart = reason

    def join(self, committed: Offsets, add: Callable[[], bool], wait_s: float) -> bool | None:
        """Partitions come: `add` puts them into the store while nothing is taken in, or says that it has not. Returns
        what that says; None where something is being taken in for as long as `wait_s`, perhaps for want of room."""
        if not self._taking.acquire(timeout=wait_s):
            return None
        try:
            if not add():
                return False
            with self._assigning:  # some may have left the store again
                here, both = self._store.next_offsets(), {**self._committed, **committed}
                self._committed = {name: offset for name, offset in both.items() if name in here}
            self._finish = Finish(self._all_epochs)
            self._begin_anew()
        finally:
            self._taking.release()
        return True

    def give_up(self, gone: Collection[SourceName]) -> None:
        """Partitions have left the store."""
        with self._assigning:
            self._committed = {name: offset for name, offset in self._committed.items() if name not in gone}
        self._suspects.forget(gone)
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._run, self._restart = next(self._runs), "assignment"
        self._query_serves.clear()

    def note_log_ends(self, ends: Offsets) -> None:
        self._log_ends = ends

    # ---- life

    def start(self) -> None:
        for name, run in (("ingest", self._run_reader), ("query", self._run_queries), ("batches", self._run_batches)):
            thread = threading.Thread(target=self._guarded, args=(run,), name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def catch_up(self, progress: Callable[[int, int], None]) -> None:
        """Return when everything up to the committed offsets is in the store, or when this is being stopped.
        `progress(done, total)` counts offsets."""
        begun = self._store.next_offsets()
        total = sum(max(0, end - begun[name]) for name, end in self._committed.items())
        while not (self._stopping.is_set() or self._store.is_caught_up()):
            at = self._store.next_offsets()
            progress(total - sum(max(0, end - at[name]) for name, end in self._committed.items()), total)
            self._taken.wait(LOOK_S)
            self._taken.clear()

    def cancel(self) -> None:
        """Let everything end soon; failures from now on are consequences, and not reported."""
        self._stopping.set()
        self._taken.set()
        if self._receiver is not None:
            self._receiver.close()

    def stop(self, timeout_s: float = 8.0) -> None:
        """End both readers. The store's intake must be closed first: one of them may wait for room."""
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
        if not self._stopping.is_set():
            self._stopping.set()
            self._on_fatal(error)

    # ---- into the store

    def _take(self, run: int, entries: pa.Table, ends: Offsets, beat: Beat) -> None:
        """Any reader's thread, whose `beat` it is. Blocks while the store has no room. What an earlier run has read may
        lie behind a gap: partitions may have come back since."""
        finished = self._finish(entries)
        began_s = self._clock.monotonic_s()
        while not self._taking.acquire(timeout=LOOK_S):
            if not self._store.has_room():  # the other thread waits for it; else it works, or hangs
                beat()
        try:
            if run != self._run:
                return
            before = self._store.next_offsets()
            self._store.append(finished, ends, self._clock.now_ms(), beat)
            for topic, count in new_records(entries, before):
                self._metrics.ingested(topic, count)
        finally:
            self._taking.release()
        if len(entries):
            self._metrics.batch.observe(self._clock.monotonic_s() - began_s)
        self._taken.set()

    # ---- the plain reader

    def _run_reader(self) -> None:
        reader = self._make_reader()
        try:
            while not self._stopping.is_set():
                if self._query_serves.is_set():
                    self._stand_by(reader)
                elif self._plain_rests.is_set():
                    self._beat()
                    self._stopping.wait(LOOK_S)
                else:
                    self._read(reader)
        finally:
            self._suspects.rests()
            reader.close()

    def _read(self, reader: PlainReader) -> None:
        """Read until the query serves, or the assignment changes; up to the committed offsets first."""
        run, until, without = self._run, self._committed, self._suspects.names
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
        is_ended = self._stopping.is_set() or run != self._run or without != self._suspects.names
        return is_ended or self._query_serves.is_set() or self._plain_rests.is_set()

    def _read_once(self, run: int, reader: PlainReader, until: Offsets | None) -> None:
        self._beat()
        if not self._store.has_room():
            self._stopping.wait(LOOK_S)
            return
        read = reader.poll(until)
        if read.ends:
            self._take(run, read.entries, read.ends, self._beat)
            self._read_to |= {name: int(offsets[-1]) + 1 for name, offsets in by_source(read.entries)}
            if until is None:
                self._heard.update(read.ends)
            self._suspects.reading(self._store.next_offsets())
        for name, why in read.left.items():
            self._suspects.suspect({name: self._store.next_offsets().get(name, 0)}, why)

    def _stand_by(self, reader: PlainReader) -> None:
        """While the query serves: tell the store where quiet partitions end. Behind the last record may lie transaction
        markers and aborted records, of which the query says nothing."""
        reader.assign({})
        self._suspects.rests()
        run, starved = self._run, dict[SourceName, int]()
        while not self._is_relieved_of_standing_by(QUIET_S):
            quiet_at = self._store.next_offsets()
            if self._is_relieved_of_standing_by(QUIET_S):
                return
            at = {name: end for name, end in self._trusted().items() if quiet_at.get(name) == end}
            behind = {name: end for name, end in at.items() if self._log_ends.get(name, end) > end}
            starved = {name: times for name, times in starved.items() if name in behind}
            if behind and self._store.has_room():
                for name in self._ask(run, reader, behind):
                    starved[name] = starved.get(name, 0) + 1
            if max(starved.values(), default=0) >= STARVED_MAX:
                log.warning("query-starves", partitions=[f"{topic}/{p}" for topic, p in starved])
                self.restart("partitions-starve")
                starved = {}

    def _is_relieved_of_standing_by(self, wait_s: float) -> bool:
        """Wait; True as soon as the plain reader has to read again, or ingest is being stopped."""
        self._await(lambda: not self._query_serves.is_set(), wait_s, self._beat)
        return self._stopping.is_set() or not self._query_serves.is_set()

    def _ask(self, run: int, reader: PlainReader, at: Offsets) -> set[SourceName]:
        """Take in the ends of those partitions that hold no record from there on; returns the others."""
        until_s = self._clock.monotonic_s() + ANSWER_S
        known, filled = reader.ask(at, self._beat, lambda: self._clock.monotonic_s() >= until_s)
        if known:
            self._take(run, NOTHING, known, self._beat)
        return filled

    # ---- batches

    def _run_batches(self) -> None:
        while not self._stopping.wait(LOOK_S):
            run = self._run
            is_over = partial(self._is_over, run)
            if self._suspects.look(self._store.next_offsets(), partial(self._take_batches, run), is_over):
                self.restart("readable-again")

    def _is_over(self, run: int) -> bool:
        return self._stopping.is_set() or run != self._run

    def _take_batches(self, run: int, entries: pa.Table, ends: Offsets) -> None:
        self._await(self._store.has_room, beat=unwatched)
        self._take(run, entries, ends, unwatched)

    # ---- the query

    def _run_queries(self) -> None:
        failures = 0
        session = self._await_session()
        while session is not None and not self._stopping.is_set():
            self._restart = None
            try:
                self._run_query(session)
            except EnvironmentFailure as error:
                has_sent = self._opened_s and any(self._sent[name] > at for name, at in self._query_start.items())
                failures = 1 if has_sent else failures + 1
                if not self._stopping.is_set():
                    self._suspects.judge(error, failures, self._sent)
                if self._stopping.is_set() or error.code == JAVA_ENDED or failures > FAILURES_MAX:
                    raise
                pause_s = min(PAUSE_S_MAX, 2.0 ** (failures - 1))
                log.warning("query-failed", reason=str(error), failures=failures, pause_s=pause_s)
                self._await(lambda: False, pause_s)
            else:
                failures = 0
                if not self._stopping.is_set():
                    log.info("query-restarted", reason=self._restart)

    def _await_session(self) -> SparkSession | None:
        """None when this is being stopped. Spark's own failure has been told already."""
        self._await(self._session.done)
        try:
            return None if self._stopping.is_set() else self._session.result()
        except (BridgeError, CancelledError):
            return None

    def _await(self, condition: Callable[[], bool], at_most_s: float = inf, beat: Beat | None = None) -> None:
        deadline_s = self._clock.monotonic_s() + at_most_s
        while not (condition() or self._stopping.wait(LOOK_S) or self._clock.monotonic_s() >= deadline_s):
            (beat or self._beat_query)()

    def _run_query(self, session: SparkSession) -> None:
        """One query, until it fails, is stopped, or is to be restarted."""
        self._failure, run = None, self._run
        self._query_start = dict(self._store.next_offsets())
        self._sent = dict(self._query_start)
        receiver = FrameReceiver(
            partial(self._take_frame, run), self._on_open, self._on_take_failure, self._executor_host
        )
        # One of the records that were not sent yet may be too large for the JVM: the operator must learn where it is.
        failures = failures_named(
            "read the delay topics", self._stopping.is_set, lambda: ranges(self._sent, self._log_ends)
        )
        try:
            with in_memory() as directory, receiver, failures:
                self._receiver = receiver
                if not self._stopping.is_set():
                    self._stream(run, self._make_query(session, receiver), directory)
        except BridgeError:
            self._raise_failure()  # what Spark says follows from it
            raise
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _stream(self, run: int, query: Query, directory: Path) -> None:
        self._await_slots(query)
        query.warm_up(self._store.next_offsets())
        self._await(lambda: self._suspects.are_done(self._store.next_offsets()))
        self._read_up_to_committed(run, query)
        self._await(lambda: self._store.is_caught_up() and self._suspects.are_done(self._store.next_offsets()))
        offsets = self._trusted()
        self._must_be_there(offsets)
        self._opened_s, self._query_start, self._sent = None, offsets, dict(offsets)
        streaming = query.start(offsets, directory)
        try:
            self._serve(run, streaming)
        finally:
            self._query_serves.clear()
            with quiet(query.session):
                streaming.stop()

    def _await_slots(self, query: Query) -> None:
        """A cluster's executors come one after the other; partitions may have been added since the session began."""
        self._await(lambda: query.slots() >= len(self._committed), SLOTS_S)
        if not self._stopping.is_set() and (slots := query.slots()) < len(self._committed):
            raise too_few_slots(slots, len(self._committed))

    def _read_up_to_committed(self, run: int, query: Query) -> None:
        """By a batch job, which ends, and reads all partitions at once; a little is left to the plain reader, and what
        partitions lack that have joined to the query, as the others must not wait for them."""
        start = self._trusted()
        end = {name: max(at, self._committed.get(name, at)) for name, at in start.items()}
        if self._store.is_caught_up() or sum(end[name] - at for name, at in start.items()) < JOB_RECORDS_MIN:
            return
        self._plain_rests.set()  # alone it is faster
        try:
            query.read(start, end)
            if self._failure is None:
                self._take(run, NOTHING, end, self._beat_query)
        finally:
            self._plain_rests.clear()

    def _must_be_there(self, offsets: Offsets) -> None:
        """Where the log starts later the source would be silent, or go round for ever."""
        for name, log_start in self._log_starts(offsets).items():
            if log_start > offsets[name]:
                raise records_gone(topic=name[0], partition=name[1], wanted=offsets[name], log_start=log_start)

    def _serve(self, run: int, streaming: StreamingQuery) -> None:
        """Watch the query; relieve the plain reader when it has come nearly as far: what it lacks then is read late."""
        relief: Offsets | None = None
        began_s = relief_s = self._clock.monotonic_s()
        while not (self._stopping.is_set() or self._restart or self._failure is not None or run != self._run):
            self._beat_query()
            if not self._query_serves.is_set() and self._opened_s is not None:
                now_s = self._clock.monotonic_s()
                if relief is not None and all(self._sent[name] >= end for name, end in relief.items()):
                    self._query_serves.set()
                    log.info("query-serves", seconds=round(now_s - began_s, 1))
                elif now_s > self._opened_s + SETTLE_S and (
                    relief is None or relief_s + CLOSE_S < now_s < began_s + CATCH_UP_S
                ):
                    at, relief_s = self._query_start, now_s
                    relief = {name: end for name, end in dict(self._read_to).items() if end > at.get(name, end)}
            if streaming.awaitTermination(LOOK_S if self._query_serves.is_set() else LOOK_S / 4):  # type: ignore[arg-type]
                return

    def _on_open(self) -> None:
        if self._opened_s is None:
            self._opened_s = self._clock.monotonic_s()

    def _take_frame(self, run: int, frame: pa.Table) -> None:
        stretches = by_source(frame)
        ends = {name: int(offsets[-1]) + 1 for name, offsets in stretches}
        if run == self._run and any(offsets[0] < self._sent.get(name, 0) for name, offsets in stretches):
            # A cluster has lost an executor, and runs its tasks again from where they began, half an hour ago perhaps.
            self.restart("replayed")
        self._await(self._store.has_room)
        self._take(run, frame, ends, self._beat_query)
        if run == self._run:
            self._sent |= {name: max(self._sent.get(name, end), end) for name, end in ends.items()}

    def _on_take_failure(self, error: Exception) -> None:
        """No later frame may be stored: the offsets of this one would be skipped."""
        if not self._stopping.is_set():
            self._failure = error if isinstance(error, TimerStoreError) else named_failure("take in frames", error)
