"""Ingest: the delay topics go into the store, by Spark's query, and by a plain reader while the query does not serve.

    thread   query     session | plan | stream ----------------------------> stream
             ingest    plain reader ------------->|  asks for ends  |  plain reader ...

Both readers start at the store's offsets and hand over by overlap: the store drops repeated records by their offsets.
So the plain reader goes on until the query has come as far (watch/hand_over.py). A failed query is started anew the
same way; while it stands still the plain reader reads (all waits with their deadlines: watch/waits.py). Both readers
are also started anew when partitions come or go: a *run* is the reading for one assignment, and the store refuses late
frames of an earlier run for partitions that came after it.

Both readers leave out batches that have ended a reader; these are read one by one (batches/suspects.py) before the
query starts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc
import structlog

from bridge.errors import BridgeError, InternalError
from bridge.ingest.batches.suspects import Suspects
from bridge.ingest.decode_records import decode_records, unread_entry
from bridge.ingest.finish import Finish
from bridge.ingest.frames import FrameReceiver
from bridge.ingest.plain_reader import NOTHING, PlainReader, by_source, new_records
from bridge.ingest.queries import Queries
from bridge.ingest.query import SparkQuery
from bridge.ingest.watch.guarded import guarded
from bridge.ingest.watch.reading import Reading
from bridge.ingest.watch.stalls import jvm_stands_still
from bridge.ingest.watch.waits import Then, Wait, Watch
from bridge.stores.names import Offsets, SourceName, texts_of
from bridge.stores.stores import Life, Stores
from bridge.telemetry.heartbeats import Beat, unwatched
from bridge.telemetry.metrics import Metrics
from bridge.wire.decode_epochs import DecodeEpochs
from bridge.wire.reasons import RejectReason
from bridge.wire.received import Record, Unread
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
CATCHING_UP_QUIET_S: Final = 1.0
"""The same while a partition catches up: it may lack only the transaction marker before its committed O."""


class Ingest:
    """See the module. `start` once; `stop` ends it; `on_fatal` gets a failure, once."""

    def __init__(
        self,
        *,
        session: Future[SparkSession],
        make_query: Callable[[SparkSession, FrameReceiver], SparkQuery],
        make_reader: Callable[[], PlainReader],
        store: Stores,
        log_starts: Callable[[Offsets], Offsets],
        all_epochs: Mapping[SourceName, DecodeEpochs],
        executor_host: str | None,
        suspects: Suspects,
        clock: Clock,
        metrics: Metrics,
        on_corrupt: Callable[[], None],
        on_fatal: Callable[[BridgeError], None],
        has_outgrown: Callable[[Mapping[str, int]], bool] = lambda _: False,
        end_jvm: Callable[[], None] = lambda: None,
        beat: Beat = unwatched,
        beat_query: Beat = unwatched,
    ) -> None:
        """`log_starts` looks up the starts of some logs. When partitions come, `all_epochs` already has theirs.
        `executor_host` is this machine's address for executors elsewhere. `has_outgrown` asks whether topics, each
        with the time of a record that is too large for a copy (ms), take larger ones by now; then the application
        starts ingest anew. `end_jvm` ends a JVM that stands still.
        `beat` is for the plain reader's thread, `beat_query` for the query's."""
        self._make_reader = make_reader
        self._store = store
        self._all_epochs = all_epochs
        self._finish: tuple[int, Finish] | None = None
        """That of the last run: its epochs stay the same."""
        self._suspects = suspects
        self._clock = clock
        self._metrics = metrics
        self._on_corrupt, self._on_fatal, self._has_outgrown = on_corrupt, on_fatal, has_outgrown
        self._end_jvm = end_jvm
        self._beats = beat
        self._watch = Watch(clock)
        self._reading = Reading()
        self._queries = Queries(
            session=session, make_query=make_query, reading=self._reading, take=self._take, store=store,
            suspects=suspects, log_starts=log_starts, executor_host=executor_host, clock=clock, watch=self._watch,
            beat=beat_query,
        )  # fmt: skip
        self._taking = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._heard: set[SourceName] = set()

    # ---- from other threads

    @property
    def reader(self) -> str:
        """Which reader serves: `spark` or `plain`."""
        return "spark" if self._reading.query_serves else "plain"

    def is_reading(self) -> bool:
        """Whether every partition is being read: new records then arrive at once."""
        heard = self._heard | self._suspects.held().keys()
        return self._reading.query_serves or heard >= self._store.next_offsets(self._store.run).keys()

    def restart(self, reason: str) -> None:
        """Have the query end, and start again at the store's offsets."""
        self._queries.restart(reason)

    def begin_anew(self, gone: Collection[SourceName] = ()) -> None:
        """Partitions have come or gone."""
        self._suspects.forget(gone)
        self.restart("assignment")
        self._reading.pass_to(query=False)

    def note_log_ends(self, ends: Offsets) -> None:
        self._reading.log_ends = ends

    # ---- life

    def start(self) -> None:
        for name, run in (("ingest", self._run_reader), ("query", self._queries.run), ("batches", self._run_batches)):
            thread = threading.Thread(target=self._guarded, args=(run,), name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def cancel(self) -> None:
        """Let everything end soon; failures from now on are consequences, and not reported."""
        self._reading.stopping.set()
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
        if not self._reading.stopping.is_set():
            self._reading.stopping.set()
            self._on_fatal(error)

    # ---- the query's thread, looked after

    def _beat(self, within_s: float | None = None) -> None:
        """Report the plain reader's thread as alive, and watch the query's, which may stand still with the JVM."""
        self._beats(within_s)
        for wait, waited_s in [] if self._reading.stopping.is_set() else self._watch.over():
            if wait.then is Then.PLAIN_READS:
                self._take_over(wait)
            else:
                self._fail(jvm_stands_still(wait, waited_s))
                self._end_jvm()

    def _take_over(self, wait: Wait) -> None:
        if self._reading.pass_to(query=False):
            log.warning("plain-reader-takes-over", waits_for=wait.waits_for, seconds=wait.s)

    # ---- into the store

    def _take(self, run: int, entries: pa.Table, ends: Offsets, beat: Beat) -> None:
        """Store entries. Called by any reader's thread, with its `beat`. Blocks while the store has no room."""
        if self._finish is None or self._finish[0] != run:
            self._finish = run, Finish(dict(self._all_epochs))
        finished = self._finish[1](entries)
        if (large := _too_large_to_roll(finished)) and self._has_outgrown(large):
            self._await(lambda: False, inf, beat)  # for the new start, which decodes these records with the new limits
            raise Closed("decoded with outdated limits", code="DB-7003")
        began_s = self._clock.monotonic_s()
        while not self._taking.acquire(timeout=LOOK_S):
            if not self._store.has_room():  # the other thread waits for room; otherwise it works, or hangs
                beat()
        try:
            before = self._store.next_offsets(run)
            self._store.append(finished, ends, self._clock.now_ms(), beat, run)
            for topic, new in new_records(entries, before, self._store.next_offsets()):
                self._metrics.ingested(topic, new)
        finally:
            self._taking.release()
        if len(entries):
            self._metrics.batch.observe(self._clock.monotonic_s() - began_s)

    # ---- the plain reader

    def _run_reader(self) -> None:
        reader = self._make_reader()
        try:
            while not self._reading.stopping.is_set():
                (self._stand_by if self._reading.query_serves else self._read)(reader)
            self._suspects.rests()  # an end by an error, perhaps for lack of memory, leaves its mark
        finally:
            reader.close()

    def _read(self, reader: PlainReader) -> None:
        """Read until the query serves, or the assignment changes."""
        run, without = self._store.run, self._suspects.names
        self._begin(reader, self._trusted(run))
        self._heard.clear()
        while not self._is_relieved(run, without):
            self._read_once(run, reader)

    def _trusted(self, run: int) -> dict[SourceName, int]:
        return self._suspects.trusted(self._store.next_offsets(run))

    def _begin(self, reader: PlainReader, at: Offsets) -> None:
        self._reading.read_to = dict(at)  # a log that was cut may end below the offsets of the last run
        self._suspects.reading(at)
        reader.assign(at)

    def _is_relieved(self, run: int, without: Collection[SourceName]) -> bool:
        return self._is_over(run) or without != self._suspects.names or self._reading.query_serves

    def _read_once(self, run: int, reader: PlainReader) -> None:
        self._beat()
        if not self._store.has_room():
            self._reading.stopping.wait(LOOK_S)
            return
        read = reader.poll()
        if read.ends:
            self._take(run, read.entries, read.ends, self._beat)
            self._reading.read_to |= {name: int(offsets[-1]) + 1 for name, offsets in by_source(read.entries)}
            self._heard.update(read.ends)
            self._suspects.reading(self._store.next_offsets())
        for name, why in read.left.items():
            self._suspects.suspect({name: self._store.next_offsets().get(name, 0)}, why)

    def _stand_by(self, reader: PlainReader) -> None:
        """While the query serves: tell the store the ends of quiet partitions. Behind the last record there may be
        transaction markers and aborted records, which the query does not report."""
        reader.assign({})
        self._suspects.rests()
        run, starved_s = self._store.run, dict[SourceName, float]()
        while not self._is_relieved_of_standing_by(quiet_s := self._quiet_s()):
            quiet_at = self._store.next_offsets()
            if self._is_relieved_of_standing_by(quiet_s):
                return
            at, ends = self._trusted(run), self._reading.known_ends(self._store.committed())
            behind = {name: end for name, end in at.items() if quiet_at.get(name) == end < ends.get(name, 0)}
            starved_s = {name: seconds for name, seconds in starved_s.items() if name in behind}
            if behind and self._store.has_room():
                for name in self._ask(run, reader, behind):
                    starved_s[name] = starved_s.get(name, 0) + quiet_s
            if max(starved_s.values(), default=0) >= Wait.STARVING.s:
                log.warning("query-starves", partitions=texts_of(starved_s))
                self.restart("partitions-starve")
                self._take_over(Wait.STARVING)

    def _quiet_s(self) -> float:
        return CATCHING_UP_QUIET_S if self._store.in_life(Life.CATCHING_UP) else QUIET_S

    def _is_relieved_of_standing_by(self, wait_s: float) -> bool:
        """Wait; True as soon as the plain reader must read again, or at a stop."""
        self._await(lambda: not self._reading.query_serves, wait_s, self._beat)
        return self._reading.stopping.is_set() or not self._reading.query_serves

    def _ask(self, run: int, reader: PlainReader, at: Offsets) -> set[SourceName]:
        """Take in the ends of those partitions without further records; returns the others."""
        until_s = self._clock.monotonic_s() + Wait.ENDS_OF_QUIET.s
        ends, filled = reader.ask(at, self._beat, lambda: self._clock.monotonic_s() >= until_s)
        if ends:
            self._take(run, NOTHING, ends, self._beat)
        return filled

    def _await(self, condition: Callable[[], bool], at_most_s: float, beat: Beat) -> None:
        until_s = self._clock.monotonic_s() + at_most_s
        while not (condition() or self._reading.stopping.wait(LOOK_S) or self._clock.monotonic_s() >= until_s):
            beat()

    # ---- batches

    def _run_batches(self) -> None:
        while not self._reading.stopping.wait(LOOK_S if self._suspects.names else IDLE_LOOK_S):
            if not self._suspects.names:
                continue
            run = self._store.run
            is_over = partial(self._is_over, run)
            if self._suspects.look(self._store.next_offsets(), partial(self._take_batches, run), is_over):
                self.restart("readable-again")

    def _is_over(self, run: int) -> bool:
        return self._reading.stopping.is_set() or run != self._store.run

    def _take_batches(self, run: int, records: list[Record] | Unread, ends: Offsets) -> None:
        entries = unread_entry(records) if isinstance(records, Unread) else decode_records(records, self._all_epochs)
        self._await(self._store.has_room, inf, unwatched)
        self._take(run, entries, ends, unwatched)


def _too_large_to_roll(entries: pa.Table) -> dict[str, int]:
    """The timestamps (ms) of the last rejects for their size, by topic."""
    reason = entries.column("reason")
    if reason.null_count == len(reason):
        return {}
    rejects = entries.filter(pc.equal(reason, RejectReason.TOO_LARGE_TO_ROLL.value)).select(["topic", "ts"])
    return {row["topic"]: row["ts"] for row in sorted(rejects.to_pylist(), key=lambda row: row["ts"])}
