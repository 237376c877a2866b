"""`delay-bridge rebuild`: the indexes of partitions, brought up to their committed states by Spark in parallel.

The index is opened as by a start, with the same refusals, and the job reads from its end (without one, the log's start)
to the committed O. It does not join the group, so it runs beside the owner of a partition; `store.directory` must be
free. One job for each partition, and within it:

    step                                                        a crash right after it
    1  open the index: recovery.py                              see there
    2  read, decode, drop, sort: Spark (ingest/query.py)        nothing has changed
    3  write segments and tombstones (timerstore/rebuild.py)    the old index counts; the next rebuild removes the files
    4  read the committed state again                           the same
    5  replace the checkpoint                                   the new index counts

After step 4 the index is given up unless the log is the one that was read: the same topic and cuts, the same decode
parameters of the records that were read and are still there, and nothing finished before that is pending now. A record
that is deleted before it was read ends the job.

A failed task does not: Spark tries it again. Of the tasks that read, Spark keeps the rows of whole attempts alone. An
attempt of the task that sends them has step 3 begun anew, and only its own rows count from then on (`SendingTask`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from bridge.errors import ConfigurationError, EnvironmentFailure, StateError
from bridge.ingest.finish import Finish
from bridge.ingest.frames import FrameReceiver, FromElsewhere
from bridge.ingest.query import SparkQuery
from bridge.ingest.watch.waits import Wait, Watch
from bridge.kafka.admin import Cluster
from bridge.kafka.errors import RECORDS_GONE
from bridge.kafka.membership import FORCED
from bridge.kafka.reach import refuse_unreachable
from bridge.settings.clients import java, librdkafka
from bridge.settings.model import Settings
from bridge.spark.errors import named_failure
from bridge.spark.session import end_jvm
from bridge.start.facts import facts_of
from bridge.start.first_commits import StartFacts, StartPlan, decide
from bridge.start.index import as_bridge_errors, find_index, find_indexes, limits_of_stores, openings
from bridge.start.reset_offsets import committed_places, offsets_not_read
from bridge.start.retention import ingest_start
from bridge.start.roll_window import decode_parameters_of, limits_of
from bridge.stores.names import SourceName, texts_of
from bridge.stores.opening import Opening, Prepared
from bridge.wire.committed_state import CommittedState, decode_metadata
from bridge.wire.decode_epochs import DecodeEpochs, epochs_within
from timerstore.clock import Clock
from timerstore.limits import Limits
from timerstore.rebuild import Rebuild, remove_unfinished
from timerstore.rows.entry import ENTRY, Kind
from timerstore.rows.position import AT_MIN
from timerstore.store import TimerStore

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOOK_S: Final = 0.5
"""Less than the gap that a watch takes for a pause of the machine."""
CANCEL_S_MAX: Final = 60.0
"""For the end of a cancelled job; after it the JVM is killed."""
TASK_ATTEMPTS: Final = 4
"""Of each of Spark's tasks, as is Spark's default."""
ROWS_COUNT: Final = ("spark.sql.sources.useV1SourceList", "")
"""With its newer source of Kafka, Spark counts the rows that a task has read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebuilt:
    """One partition: the offsets that were read (`end` is O_c now), and the timers that are pending among them."""

    name: SourceName
    begin: int
    end: int
    pending: int


def rebuild(
    settings: Settings,
    session: Callable[[], SparkSession],
    clock: Clock,
    chosen: Collection[SourceName] = (),
) -> Iterator[Rebuilt]:
    """Bring the indexes of the `chosen` partitions (none: all) up to their committed states, one after the other. Each
    is durable when it is yielded. `session` is called when there is something to read. Raises StateError where a start
    would, or if the log or the committed state changed meanwhile; ConfigurationError, EnvironmentFailure."""
    refuse_unreachable(settings.kafka.bootstrap_servers)
    cluster = Cluster(settings)
    read_states = partial(_states, {**librdkafka(settings, "consumer"), "group.id": settings.group_id, **FORCED})
    with ExitStack() as leaving:
        directory = find_index(settings, cluster)
        leaving.callback(directory.release)
        topics = cluster.topics(sorted(settings.delay_topics))
        names = frozenset(
            (topic, partition)
            for topic, each in topics.items()
            for partition in range(each.partitions)
            if not chosen or (topic, partition) in chosen
        )
        if absent := set(chosen) - names:
            raise ConfigurationError(
                f"no such partition: {', '.join(texts_of(absent))}", hint="Name one of a delay topic.", code="DB-1001"
            )
        limits = limits_of(cluster, sorted({topic for topic, _ in names}))
        indexes = find_indexes(directory, names, clock.now_ms())

        def planned(owned: frozenset[SourceName]) -> tuple[StartFacts, StartPlan]:
            with as_bridge_errors():
                facts = facts_of(
                    partial(read_states, owned), cluster, owned, limits=limits, indexes=indexes,
                    parameters=decode_parameters_of(settings, limits), known=directory.known,
                )  # fmt: skip
            plan = decide(facts)
            if isinstance(plan, StartPlan):
                return facts, plan
            raise StateError(
                "a delay topic has partitions that the bridge has not used yet",
                hint="Start the bridge once, or name the other partitions.",
                topic=min(plan.states)[0],
                code="DB-4019",
            )

        facts, plan = planned(names)
        stores = limits_of_stores(settings, max(each.cancels_ms for each in plan.windows.values()))
        epochs = {name: facts.committed[name].epochs for name in plan.states}
        for name in sorted(names):
            facts, plan = planned(frozenset([name]))  # anew: the jobs before may have taken hours
            state, [opening] = facts.committed[name], openings(indexes, plan, clock.now_ms()).values()
            job = _Job(settings, cluster, state, plan, {**epochs, name: state.epochs}, clock)
            with as_bridge_errors(topic=name[0], partition=name[1]):
                done = job.run(opening, stores, session, partial(read_states, [name]))
            yield done


class Superseded(Exception):
    """A later attempt of the task has begun."""


class SendingTask:
    """The attempt of a job's one sending task that counts: the last one that has begun. An earlier one has failed; or
    its executor is lost, and may go on. Each has a connection of its own, and so a thread, which makes all calls."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self.is_done = True
        """Without an attempt, too: with its adaptive plans, Spark has no task for no rows."""

    def begin(self) -> bool:
        """Returns whether the attempt repeats another one. Raises EnvironmentFailure if it shares its connection."""
        before, self._thread, self.is_done = self._thread, threading.current_thread(), False
        if before is self._thread:
            raise _at_a_time()
        return before is not None

    def must_count(self) -> None:
        """Raises Superseded."""
        if self._thread is not threading.current_thread():
            raise Superseded

    def end(self) -> None:
        """All rows of the attempt are taken in. Raises Superseded."""
        self.must_count()
        self.is_done = True


class _Job:
    """The rebuild of one partition."""

    def __init__(
        self,
        settings: Settings,
        cluster: Cluster,
        state: CommittedState,
        plan: StartPlan,
        epochs: Mapping[SourceName, DecodeEpochs],
        clock: Clock,
    ) -> None:
        """`plan` has this partition alone, `state` is its committed state; `epochs` are those of all partitions, for
        one compiled plan."""
        self._settings, self._cluster, self._epochs = settings, cluster, epochs
        self._state, self._plan, self._clock = state, plan, clock
        (self._name,) = plan.states
        self._finish = Finish({self._name: state.epochs})
        self._taking = threading.Lock()
        self._failure: Exception | None = None
        self._frames = 0
        self._task = SendingTask()
        self._work: Mapping[str, object] = {}
        """Spark's, at the last look."""

    def run(
        self,
        opening: Opening,
        limits: Limits,
        session: Callable[[], SparkSession],
        states: Callable[[Collection[SourceName]], Mapping[SourceName, CommittedState | None]],
    ) -> Rebuilt:
        name, now_ms = self._name, self._clock.now_ms()
        remove_unfinished(opening.found)
        store = TimerStore.open(
            opening.found, opening.committed, log_start=opening.log_start, cuts=opening.cuts, now_ms=now_ms,
            limits=limits,
        )  # fmt: skip
        with closing(store):
            prepared = Prepared({name: store})
            resume, held = prepared.resume_offsets(), prepared.held_below()
            begin = ingest_start(self._cluster, self._plan, resume, held, now_ms, lambda _: None)[name]
            end = self._state.offset
            if resume[name] == end:
                return Rebuilt(name=name, begin=end, end=end, pending=0)
            made = Rebuild(store, now_ms)
            try:
                if begin < end:
                    self._read(session(), made, begin, end)
                made.write()
                self._must_be_the_same(states([name])[name], begin)
                made.publish()
            except BaseException:
                with self._taking:  # the thread of a connection may outlive the job
                    self._on_failure(RuntimeError("the rebuild has ended"))
                    made.abandon()
                raise
            return Rebuilt(name=name, begin=min(begin, end), end=end, pending=made.rows)

    def _read(self, session: SparkSession, made: Rebuild, begin: int, end: int) -> None:
        settings = self._settings
        receiver = FrameReceiver(
            partial(self._take, made), partial(self._on_task, made), self._on_failure,
            FromElsewhere.of(settings.spark), self._on_end,
        )  # fmt: skip
        session = session.newSession()
        session.conf.set(*ROWS_COUNT)
        try:
            with receiver:
                query = SparkQuery(
                    session, java(settings), f"{settings.group_id}-rebuild", self._epochs, receiver.address,
                    receiver.token,
                )  # fmt: skip
                query.let_go()
                with self._watched(query):
                    query.send_unfinished(self._name, begin, end, self._state.progress().position)
        except Exception as error:
            if self._failure is not None:
                raise self._failure from error
            failure = named_failure("rebuild an index", error)
            raise self._given_up("the log (its first records)") if failure.code == RECORDS_GONE else failure from error
        with self._taking:
            if self._failure is not None:
                raise self._failure
            if not self._task.is_done:
                raise _at_a_time()
            self._on_failure(RuntimeError("all rows are taken in"))  # for a connection that outlives the job

    def _take(self, made: Rebuild, frame: pa.Table) -> None:
        is_first = pc.equal(frame.column("at"), AT_MIN)
        with self._taking:
            if self._failure is not None:
                raise self._failure
            self._task.must_count()
            self._frames += 1
            if len(commands := frame.filter(is_first)):
                made.commands(self._finish(commands).select(ENTRY.names))
            if len(timers := frame.filter(pc.invert(is_first))):
                finished = self._finish(timers)
                made.timers(finished.filter(pc.equal(finished.column("kind"), int(Kind.TIMER))).select(ENTRY.names))

    def _on_task(self, made: Rebuild) -> None:
        with self._taking:
            if self._failure is not None:
                raise self._failure
            if self._task.begin():
                made.begin_again()

    def _on_end(self) -> None:
        with self._taking:
            self._task.end()

    def _on_failure(self, error: Exception) -> None:
        if not isinstance(error, Superseded):
            self._failure = self._failure or error

    @contextmanager
    def _watched(self, query: SparkQuery) -> Iterator[None]:
        """Cancel the jobs of `query` after `Wait.JOB` without progress; then kill a JVM that stands still."""
        over, watch = threading.Event(), Watch(self._clock)
        threading.Thread(target=self._look, args=(query, watch, over), name="rebuild-look", daemon=True).start()
        threading.Thread(target=self._watch, args=(watch, over), name="rebuild-watch", daemon=True).start()
        try:
            with watch.waiting(Wait.JOB):
                yield
        finally:
            over.set()

    def _look(self, query: SparkQuery, watch: Watch, over: threading.Event) -> None:
        """Note progress, and cancel the jobs after a failure. A JVM that stands still stops this thread alone."""
        before = None
        while not over.wait(LOOK_S):
            with suppress(Exception):  # without a JVM, the job's own call raises
                if self._failure is not None:
                    query.cancel_jobs()
                if (now := (self._frames, query.progress())) != before:
                    before = now
                    watch.progress()
                self._work = query.state()

    def _watch(self, watch: Watch, over: threading.Event) -> None:
        while not over.wait(LOOK_S):
            for wait, waited_s in watch.over():
                self._on_failure(_stands_still(wait, waited_s, self._work))
                if not over.wait(CANCEL_S_MAX):
                    end_jvm()
                return

    def _must_be_the_same(self, now: CommittedState | None, begin: int) -> None:
        """An owner may meanwhile have added a decode epoch at its O, and dropped those of deleted records. Raises
        StateError."""
        before, topic = self._state, self._name[0]
        marks = self._cluster.watermarks([self._name])[self._name]
        decoded = partial(epochs_within, begin=max(begin, marks.start), end=before.offset)
        changes = {
            "the topic": self._cluster.topic_ids([topic]).get(topic) == before.topic_id,
            "the committed offset": now is not None and now.progress().includes(before.progress()),
            "the decode parameters": now is not None and decoded(now.epochs) == decoded(before.epochs),
            "the log (cut)": now is not None and now.cuts == before.cuts and marks.end >= before.offset,
        }
        if changed := [what for what, is_same in changes.items() if not is_same]:
            raise self._given_up(*changed)

    def _given_up(self, *changed: str) -> StateError:
        return StateError(
            "the index was given up: it would not be that of the log",
            hint="Nothing is lost. Start the rebuild again.",
            changed=", ".join(changed),
            topic=self._name[0],
            partition=self._name[1],
            code="DB-4018",
        )


def _at_a_time() -> EnvironmentFailure:
    return EnvironmentFailure(
        "Spark has run the sending task of the rebuild twice at a time",
        hint="Leave spark.speculation out of spark.conf, and start the rebuild again.",
        code="DB-3087",
    )


def _stands_still(wait: Wait, waited_s: float, work: Mapping[str, object]) -> EnvironmentFailure:
    return EnvironmentFailure(
        "Spark's job makes no progress",
        hint="Without running tasks it waits for slots: give the executors cores. Else look at the brokers.",
        waits_for=wait.waits_for,
        waited_s=round(waited_s),
        code="DB-3088",
        **work,
    )


def _states(
    consumer: Mapping[str, Any], strict: Collection[SourceName], names: Collection[SourceName]
) -> dict[SourceName, CommittedState | None]:
    """Committed states, read from beside the group; those of `strict` partitions must be readable. Raises
    StateError, EnvironmentFailure."""
    states: dict[SourceName, CommittedState | None] = {}
    for place in committed_places(consumer, names):
        name = (place.topic, place.partition)
        if place.error is not None:
            if name in strict:
                raise offsets_not_read(place.error)
            continue
        try:
            states[name] = None if place.offset < 0 else decode_metadata(name, place.offset, place.metadata)
        except StateError:
            if name in strict:
                raise
    return states
