"""The thread of queries: it starts the session's query, watches it, and starts it anew.

    session | slots, plan | stream: both read --> the query serves

watch/waits.py has its deadlines, and the actions after them. A call into a JVM that stands still does not return; the
plain reader's thread detects that, and acts.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as NotYet
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import structlog

from bridge.errors import BridgeError, EnvironmentFailure
from bridge.ingest.batches.suspects import Suspects
from bridge.ingest.frames import FrameReceiver, FromElsewhere
from bridge.ingest.plain_reader import by_source
from bridge.ingest.query import SparkQuery, too_few_slots
from bridge.ingest.watch.hand_over import HandOver
from bridge.ingest.watch.reading import Reading
from bridge.ingest.watch.stalls import Laggards, session_missing
from bridge.ingest.watch.steps import QueryStep, Steps
from bridge.ingest.watch.waits import Wait, Watch
from bridge.kafka.errors import records_gone
from bridge.spark.errors import JAVA_ENDED, named_failure, ranges
from bridge.spark.scratch import in_memory
from bridge.spark.session import quiet, want
from bridge.stores.names import Offsets, SourceName
from bridge.stores.stores import Life, Stores
from bridge.telemetry.heartbeats import Beat
from timerstore.clock import Clock
from timerstore.errors import TimerStoreError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

log = structlog.get_logger("bridge.ingest.queries")

LOOK_S: Final = 0.2
FAILURES_MAX: Final = 5
"""The limit of failed queries in a row without a record between them."""
PAUSE_S_MAX: Final = 16.0


class Queries:
    """See the module. `run` is for the thread; the other methods are for any."""

    def __init__(
        self,
        *,
        session: Future[SparkSession],
        make_query: Callable[[SparkSession, FrameReceiver], SparkQuery],
        reading: Reading,
        take: Callable[[int, pa.Table, Offsets, Beat], None],
        store: Stores,
        suspects: Suspects,
        log_starts: Callable[[Offsets, bool], Offsets],
        way: FromElsewhere | None,
        clock: Clock,
        watch: Watch,
        steps: Steps,
        beat: Beat,
    ) -> None:
        """The arguments are those of Ingest; `watch` learns of the thread's waits, `steps` of its steps. `take`
        stores the entries of a run, and the ends that they reach; it blocks without room, and beats."""
        self._session = session
        self._make_query = make_query
        self._reading = reading
        self._take = take
        self._store = store
        self._suspects = suspects
        self._log_starts = log_starts
        self._way = way
        self._clock = clock
        self._watch = watch
        self._steps = steps
        self._beats = beat
        self.restart_reason = ""
        self._failures = 0
        self._failure: Exception | None = None
        self._receiver: FrameReceiver | None = None
        self._query: SparkQuery | None = None
        self._hand_over: HandOver | None = None
        """None until the query begins: a failure before that says nothing about records."""
        self._warm: SparkSession | None = None
        """The session that has compiled the plan."""
        self._query_start: Offsets = {}
        self._sent: dict[SourceName, int] = {}
        """The offsets that the present query has reached."""

    def restart(self, reason: str) -> None:
        """Have the query end, and start again at the store's offsets."""
        self.restart_reason = reason

    def can_start(self) -> bool:
        """Whether Spark's session is up."""
        session = self._session
        return session.done() and not session.cancelled() and session.exception() is None

    def leaves_out(self, name: SourceName) -> bool:
        """Whether the present query does not read this partition."""
        return name not in self._query_start

    def cancel(self) -> None:
        """Let it end soon: its tasks cannot send any more."""
        receiver = self._receiver
        if receiver is not None:
            receiver.close()

    def ask_spark(self) -> None:
        """Learn Spark's state, for the reports of a query that does not serve. Blocks while the JVM stands still."""
        query = self._query
        if query is None or self._steps.is_over:
            return
        self._steps.ask()
        self._steps.answer(query.state())

    def _beat(self, within_s: float | None = None) -> None:
        """Report the thread as alive, or a new frame."""
        self._beats(within_s)
        self._watch.progress()

    def run(self) -> None:
        """Run one query after the other, until a stop. Raises BridgeError."""
        session = self._await_session()
        while session is not None and not self._reading.stopping.is_set():
            self.restart_reason = ""
            try:
                self._run_query(session)
            except EnvironmentFailure as error:
                has_begun = self._hand_over is not None
                has_sent = has_begun and any(self._sent[name] > at for name, at in self._query_start.items())
                failures = self._failures = 1 if has_sent else self._failures + 1
                if (has_begun or error.code == JAVA_ENDED) and not self._reading.stopping.is_set():
                    self._suspects.judge(error, failures, self._sent)
                if self._reading.stopping.is_set() or error.code == JAVA_ENDED or failures > FAILURES_MAX:
                    raise
                pause_s = min(PAUSE_S_MAX, 2.0 ** (failures - 1))
                log.warning("query-failed", reason=str(error), failures=failures, pause_s=pause_s)
                self._steps.enter(QueryStep.PAUSE)
                self._await(lambda: False, pause_s)
            else:
                self._failures = 0
                if not self._reading.stopping.is_set():
                    log.info("query-restarted", reason=self.restart_reason or "partition-released")

    def _await_session(self) -> SparkSession | None:
        """The session; None at a stop. Spark's own failure has already been reported."""
        begun_s: float | None = None
        slow = Laggards(Wait.UP_TO_COMMITTED.s)
        while not self._reading.stopping.is_set():
            self._beat()
            try:
                return self._session.result(timeout=LOOK_S)
            except NotYet:
                now_s = self._clock.monotonic_s()
                if begun_s is None and self._session.running():  # it may begin later (`spark.start_after`)
                    begun_s = now_s
                    self._steps.enter(QueryStep.SESSION)
                if begun_s is not None and now_s >= begun_s + Wait.SESSION.s:
                    raise session_missing() from None
                at = self._store.next_offsets()
                if slow.look({name: at[name] for name in self._store.in_life(Life.CATCHING_UP) if name in at}, now_s):
                    want()
            except (BridgeError, CancelledError):
                return None
        return None

    def _await(self, condition: Callable[[], bool], at_most_s: float = inf) -> None:
        until_s = self._clock.monotonic_s() + at_most_s
        while not (condition() or self._reading.stopping.wait(LOOK_S) or self._clock.monotonic_s() >= until_s):
            self._beat()

    def _run_query(self, session: SparkSession) -> None:
        """Run one query, until it fails, stops, or must be restarted."""
        self._failure, self._hand_over, run = None, None, self._store.run
        self._query_start = dict(self._store.next_offsets())
        self._sent = dict(self._query_start)
        receiver = FrameReceiver(partial(self._take_frame, run), self._on_task, self._on_take_failure, self._way)
        try:
            with self._watch.waiting(Wait.CALL), in_memory() as directory, receiver:
                self._receiver = receiver
                if not self._reading.stopping.is_set():
                    self._query = self._make_query(session, receiver)
                    self._stream(run, self._query, directory)
        except BridgeError:
            self._raise_failure()  # Spark's error is a consequence
            raise
        except Exception as error:
            self._raise_failure()
            if not self._reading.stopping.is_set():
                # One of the unsent records may be too large for the JVM: the operator must learn its place.
                unread = ranges(self._sent, self._reading.known_ends(self._store.committed()))
                raise named_failure("read the delay topics", error, unread) from error
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _stream(self, run: int, query: SparkQuery, directory: Path) -> None:
        self._await_slots(query)
        if query.session is not self._warm:
            self._steps.enter(QueryStep.PLAN)
            query.warm_up(self._store.next_offsets(run))
            self._warm = query.session
        self._steps.enter(QueryStep.BATCHES)
        self._await(lambda: self._is_over(run) or self._suspects.are_done(self._store.next_offsets()))
        if self._is_over(run):
            return
        offsets = self._with_leaders(self._suspects.trusted(self._store.next_offsets(run)))
        self._query_start, self._sent = offsets, dict(offsets)
        hand_over = self._hand_over = HandOver(offsets, self._clock.monotonic_s())
        self._steps.enter(QueryStep.BEGIN)
        streaming = query.start(offsets, directory)
        try:
            with self._watch.waiting(Wait.LOOK, Wait.JVM):
                self._serve(run, streaming, hand_over)
        finally:
            self._reading.pass_to(query=False)
            self._steps.enter(QueryStep.END)
            with quiet(query.session):
                streaming.stop()

    def _await_slots(self, query: SparkQuery) -> None:
        """Wait for slots: a cluster's executors come one after the other, and partitions may be newer than the
        session."""

        def missing() -> bool:
            slots, partitions = query.slots(), len(self._store.next_offsets())
            self._steps.enter(QueryStep.SLOTS, slots=slots, partitions=partitions)
            return slots < partitions

        self._await(lambda: not missing(), Wait.SLOTS.s)
        if not self._reading.stopping.is_set() and missing():
            raise too_few_slots(query.slots(), len(self._store.next_offsets()))

    def _is_over(self, run: int) -> bool:
        return self._reading.stopping.is_set() or run != self._store.run

    def _with_leaders(self, offsets: Offsets) -> Offsets:
        """These offsets, after a failure only those of logs with a leader: the others starve later, and then the query
        starts anew. Before the first failure a missing leader raises EnvironmentFailure, since an election may be under
        way. Raises StateError for a log that starts later: the source would be silent, or loop for ever."""
        starts = self._log_starts(offsets, not self._failures)
        for name, log_start in starts.items():
            if log_start > offsets[name]:
                raise records_gone(topic=name[0], partition=name[1], wanted=offsets[name], log_start=log_start)
        return {name: at for name, at in offsets.items() if name in starts} or offsets

    def _serve(self, run: int, streaming: StreamingQuery, hand_over: HandOver) -> None:
        """Watch the query; relieve the plain reader when the query has nearly caught up with it."""
        began_s, serves = self._clock.monotonic_s(), False
        while not (self._is_over(run) or self.restart_reason or self._failure is not None):
            self._beat()
            now_s = self._clock.monotonic_s()
            if serves and not self._reading.query_serves:
                hand_over.begin_again(now_s)
            serves, read_to = self._reading.query_serves, dict(self._reading.read_to)
            if not serves and hand_over.is_over(self._sent, read_to, now_s):
                serves = self._reading.pass_to(query=True)
                self._steps.serve()
                log.info("query-serves", seconds=round(now_s - began_s, 1))
            elif not serves:
                self._enter_hand_over(hand_over, read_to)
            if streaming.awaitTermination(LOOK_S if serves else LOOK_S / 4):  # type: ignore[arg-type]
                return

    def _enter_hand_over(self, hand_over: HandOver, read_to: Offsets) -> None:
        if hand_over.has_all_tasks:
            behind = sum(max(0, read_to.get(name, 0) - sent) for name, sent in self._sent.items())
            self._steps.enter(QueryStep.RELIEF, behind=behind)
        else:
            self._steps.enter(QueryStep.TASKS, tasks=hand_over.tasks, partitions=len(self._query_start))

    def _on_task(self) -> None:
        if (hand_over := self._hand_over) is not None:
            hand_over.task_begins(self._clock.monotonic_s())

    def _take_frame(self, run: int, frame: pa.Table) -> None:
        stretches = by_source(frame)
        ends = {name: int(offsets[-1]) + 1 for name, offsets in stretches}
        if run == self._store.run and any(offsets[0] < self._sent.get(name, 0) for name, offsets in stretches):
            # A cluster has lost an executor, and runs its tasks again from their start, perhaps half an hour ago.
            self.restart("replayed")
        self._await(self._store.has_room)
        self._take(run, frame, ends, self._beat)
        if run == self._store.run:
            self._sent |= {name: max(self._sent.get(name, end), end) for name, end in ends.items()}

    def _on_take_failure(self, error: Exception) -> None:
        """Keep the failure: no later frame may be stored, which would skip the offsets of this one."""
        if not self._reading.stopping.is_set():
            self._failure = error if isinstance(error, TimerStoreError) else named_failure("take in frames", error)
