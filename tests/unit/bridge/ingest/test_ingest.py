"""bridge.ingest.ingest: which reader reads when, and what ends ingest. Both readers and the store are stand-ins."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pytest

from bridge.errors import BridgeError, EnvironmentFailure, InternalError, StateError
from bridge.ingest import ingest as module
from bridge.ingest import queries
from bridge.ingest.batches import reading_mark
from bridge.ingest.batches.reader import CorruptBatch
from bridge.ingest.decode_records import decode_records
from bridge.ingest.frames import FromElsewhere
from bridge.ingest.ingest import Ingest
from bridge.ingest.plain_reader import NOTHING, Read
from bridge.ingest.queries import FAILURES_MAX
from bridge.ingest.watch import backlogs
from bridge.ingest.watch.hand_over import CLOSE_S, SETTLE_S
from bridge.ingest.watch.waits import Wait
from bridge.stores.names import SourceName
from bridge.stores.stores import Life
from bridge.telemetry.heartbeats import unwatched
from bridge.wire.reasons import RejectReason
from bridge.wire.received import Record
from dev.harness.waiting import wait_until
from tests.manual_clock import ManualClock
from tests.unit.bridge.ingest.stand_ins import EPOCHS, PARAMETERS, A, B, Batches, Plain, Store, entries, suspects
from timerstore.errors import Closed, DiskFailure, Misuse

SEEN_S = 10


class Stream:
    """One run of the query. `send` has it send rows, `fail` ends it with an error of Spark's."""

    def __init__(self, bench: Bench, offsets: Mapping[SourceName, int]) -> None:
        self.bench, self.offsets = bench, dict(offsets)
        self.stopped = threading.Event()
        self.error: Exception | None = None
        self.runs, self.stands = threading.Event(), threading.Event()
        self.runs.set()
        self.looks = 0

    def opens(self, tasks: int | None = None) -> None:
        """The tasks run, all of them if no number is given, and have had the time to settle."""
        for _ in range(len(self.offsets) if tasks is None else tasks):
            self.bench.ingest._queries._on_task()
        self.bench.clock.advance(int(SETTLE_S * 1000) + 100)

    def send(self, name: SourceName, first: int, end: int) -> None:
        self.bench.receive(entries(name, first, end))

    def awaitTermination(self, _: float) -> bool:
        if self.error is not None:
            raise self.error
        if not self.runs.is_set():
            self.stands.set()
            self.runs.wait(6 * SEEN_S)
        self.stopped.wait(0.01)
        self.looks += 1
        return False

    def is_looked_at(self) -> None:
        """Return when it has been looked at, and what was found has been thought over."""
        looks = self.looks
        wait_until(lambda: self.looks >= looks + 2, SEEN_S, "two looks")

    def freeze(self) -> None:
        """The JVM stands still, and with it who asks it something, until it `runs` again."""
        self.runs.clear()
        assert self.stands.wait(SEEN_S)

    def stop(self) -> None:
        self.stopped.set()


class Bench:
    """Ingest between stand-ins. `streams` are the queries in the order of their starts."""

    def __init__(self, directory: Path, committed: Mapping[SourceName, int] | None = None) -> None:
        self.store = Store(committed or {A: 0, B: 0})
        self.plain = Plain()
        self.batches = Batches(self.plain.log)
        self.streams: queue.SimpleQueue[Stream] = queue.SimpleQueue()
        self.log_starts: dict[SourceName, int] = {}
        self.leaderless: set[SourceName] = set()
        self.failures: list[BridgeError] = []
        self.clock = ManualClock()
        self.session: Future[Any] = Future()
        self.metrics = mock.Mock()
        self.slots = 2
        self.spark: dict[str, object] = {}
        self.spark_answers = threading.Event()
        self.spark_answers.set()
        self.states = 0
        self.fails_at_once: Exception | None = None
        self.suspects = suspects(self.batches, self.clock, directory)
        self.ended = threading.Event()
        self.holds_plan: threading.Event | None = None
        self.plans = 0
        """The number of plans that were compiled before the start of their query."""
        self.receiver: Any = None
        self.refused: list[dict[str, int]] = []
        self.is_raised = False
        self.looks: Callable[[], int] = lambda: 0
        """How often the plain reader's thread has looked after the query's."""
        self.ingest = Ingest(
            session=self.session,
            make_query=self.make_query,
            make_reader=lambda: self.plain,  # type: ignore[arg-type, return-value]
            store=self.store,  # type: ignore[arg-type]
            log_starts=self.find_log_starts,
            all_epochs=EPOCHS,
            way=None,
            suspects=self.suspects,
            clock=self.clock,
            metrics=self.metrics,
            on_fatal=self.failures.append,
            has_outgrown=self.has_outgrown,
            end_jvm=lambda: self.ended.set(),
        )

    def find_log_starts(self, offsets: Mapping[SourceName, int], of_all: bool) -> Mapping[SourceName, int]:
        if of_all and self.leaderless.intersection(offsets):
            raise EnvironmentFailure("no leader", hint="Wait.", code="DB-3002")
        return {name: self.log_starts.get(name, 0) for name in offsets if name not in self.leaderless}

    def has_outgrown(self, refused: Mapping[str, int]) -> bool:
        self.refused.append(dict(refused))
        return self.is_raised

    def make_query(self, session: Any, receiver: Any) -> Any:
        if self.fails_at_once is not None:
            raise self.fails_at_once
        self.receiver = receiver
        query = mock.Mock(session=session)
        query.slots.side_effect = lambda: self.slots
        query.state.side_effect = self.state
        query.warm_up.side_effect = lambda _: self.warm_up()
        query.start.side_effect = lambda offsets, _: self.start(offsets)
        return query

    def warm_up(self) -> None:
        self.plans += 1
        if self.holds_plan is not None:
            self.holds_plan.wait(6 * SEEN_S)

    def state(self) -> dict[str, object]:
        self.states += 1
        self.spark_answers.wait(6 * SEEN_S)
        return dict(self.spark)

    def start(self, offsets: Mapping[SourceName, int]) -> Stream:
        stream = Stream(self, offsets)
        self.streams.put(stream)
        return stream

    def receive(self, frame: pa.Table) -> None:
        """As a connection's thread does."""
        try:
            self.ingest._queries._take_frame(self.store.run, frame)
        except Exception as error:  # noqa: BLE001 - as FrameReceiver
            self.ingest._queries._on_take_failure(error)

    def next_stream(self) -> Stream:
        return self.streams.get(timeout=SEEN_S)

    def begin(self) -> None:
        self.session.set_result(mock.Mock())
        self.ingest.start()

    def reads(self, name: SourceName, end: int) -> None:
        """The plain reader reads up to `end`."""
        self.plain.log[name] = end
        wait_until(lambda: self.ingest._reading.read_to.get(name, 0) >= end, SEEN_S, "the plain reader reads")


def come_back(bench: Bench, name: SourceName, offset: int) -> None:
    """The partition has gone, and comes again without an index."""
    bench.store.change(gone=name)
    bench.store.change(come={name: offset})
    bench.ingest.begin_anew()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Bench]]:
    monkeypatch.setattr(module, "LOOK_S", 0.01)
    monkeypatch.setattr(queries, "LOOK_S", 0.01)
    monkeypatch.setattr(queries, "quiet", lambda _: nullcontext())
    benches: list[Bench] = []

    def make(committed: Mapping[SourceName, int] | None = None) -> Bench:
        benches.append(Bench(tmp_path, committed))
        return benches[-1]

    yield make
    for bench in benches:
        bench.ingest.stop()
        assert all(not thread.is_alive() for thread in bench.ingest._threads)


def test_the_plain_reader_reads_until_the_query_has_come_as_far(made: Callable[..., Bench]) -> None:
    """Nothing is missing between the two, and nothing is there twice; the end behind the last record is not waited
    for, since the query never tells it."""
    bench = made()
    bench.ingest.start()
    bench.reads(A, 5)
    wait_until(bench.ingest.is_reading, SEEN_S, "each partition is read")
    assert bench.ingest.reader == "plain"
    bench.session.set_result(mock.Mock())
    stream = bench.next_stream()
    assert stream.offsets == {A: 5, B: 0}
    bench.reads(A, 8)
    bench.plain.markers[A] = 9
    wait_until(lambda: bench.store.ends[A] == 9, SEEN_S, "the marker")
    stream.opens()
    stream.send(A, 5, 7)
    assert bench.ingest.reader == "plain", "record 7 is still missing"
    stream.send(A, 7, 8)
    wait_until(lambda: bench.ingest.reader == "spark", SEEN_S, "the query serves")
    stream.send(A, 9, 12)
    assert bench.store.held[A] == [*range(8), 9, 10, 11]
    counted = [call.args for call in bench.metrics.ingested.call_args_list]
    assert sum(count for _, count in counted) == 11


@pytest.mark.parametrize("is_hurried", [False, True])
def test_a_query_that_is_behind_does_not_serve_yet(made: Callable[..., Bench], is_hurried: bool) -> None:
    """What it lacks would be late: it must come as far as the plain reader had just now, unless it is too slow."""
    bench = made()
    bench.begin()
    stream = bench.next_stream()
    bench.reads(A, 8)
    stream.opens()
    stream.is_looked_at()
    bench.reads(A, 20)
    bench.clock.advance(int(1000 * (Wait.CLOSE.s if is_hurried else CLOSE_S)) + 100)
    stream.is_looked_at()
    stream.send(A, 0, 8)
    if not is_hurried:
        stream.is_looked_at()
        assert bench.ingest.reader == "plain"
        stream.send(A, 8, 20)
    wait_until(lambda: bench.ingest.reader == "spark", SEEN_S, "the query serves")


@pytest.mark.fault("a log that was cut below the position of the plain reader")
def test_a_query_does_not_wait_for_records_that_its_log_has_lost(made: Callable[..., Bench]) -> None:
    """The query serves once it has come as far as the plain reader in the mended log."""
    bench = made()
    bench.begin()
    bench.next_stream()
    bench.reads(A, 20)
    bench.store.change(gone=A)
    bench.ingest.begin_anew([A])
    bench.plain.log[A] = 4
    bench.store.change(come={A: 4})
    bench.ingest.begin_anew()
    stream = bench.next_stream()
    while stream.offsets != {A: 4, B: 0}:
        stream = bench.next_stream()
    stream.opens()
    wait_until(lambda: bench.ingest.reader == "spark", SEEN_S, "the query serves")


def test_on_a_quiet_topic_the_query_serves_as_soon_as_its_tasks_run(made: Callable[..., Bench]) -> None:
    bench = made()
    bench.begin()
    bench.next_stream().opens()
    wait_until(lambda: bench.ingest.reader == "spark", SEEN_S, "the query serves")


def test_no_partition_waits_for_another_ones_backlog(made: Callable[..., Bench]) -> None:
    """Each is read on beyond its committed offset, and the query starts at once."""
    bench = made({A: 3, B: 2})
    bench.plain.log = {A: 9, B: 0}
    bench.begin()
    wait_until(lambda: bench.store.ends[A] == 9, SEEN_S, "A is read")
    assert bench.next_stream().offsets[B] == 0 and bench.store.in_life(Life.CATCHING_UP) == [B]


@pytest.mark.fault("a partition that comes with a large backlog")
def test_a_large_backlog_of_a_partition_that_comes_is_read_by_the_query_alone(
    made: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plain reader reads the partitions that stay, so that their messages do not wait for ten times the CPU of the
    query's frames. If the query has served, and is lost, the plain reader reads all."""
    monkeypatch.setattr(backlogs, "RECORDS_MAX", 8)
    bench = made({A: 3, B: 9})
    bench.plain.log = {A: 3, B: 9}
    bench.ingest.start()
    wait_until(lambda: bench.store.ends == {A: 3, B: 9}, SEEN_S, "a start without Java: all is read")
    bench.session.set_result(mock.Mock())
    bench.next_stream().opens()
    wait_until(lambda: bench.ingest.reader == "spark", SEEN_S, "the query serves")
    come_back(bench, B, 0)
    second = bench.next_stream()
    assert second.offsets == {A: 3, B: 0}
    bench.reads(A, 7)
    assert bench.plain.at.keys() == {A} and bench.store.held[B] == list(range(9))
    second.opens()
    second.send(A, 3, 7)
    wait_until(lambda: bench.ingest.reader == "spark", SEEN_S, "the query serves before the backlog is read")
    second.send(B, 0, 4)
    second.error = Py4JSaid("a task failed")
    wait_until(lambda: bench.store.ends == {A: 7, B: 9}, SEEN_S, "the plain reader reads the rest")


@pytest.mark.parametrize("case", ["small", "alone", "read"])
def test_the_plain_reader_helps_where_it_delays_nothing(
    made: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """It reads a small backlog at once, and any if all partitions have a large one; and a partition whose backlog is
    read, until the query serves."""
    monkeypatch.setattr(backlogs, "RECORDS_MAX", 9 if case == "small" else 8)
    bench = made({A: 9 if case == "alone" else 4, B: 9})
    bench.session.set_result(mock.Mock())
    bench.ingest.start()
    stream = bench.next_stream()
    if case == "read":
        wait_until(lambda: bench.plain.at.keys() == {A}, SEEN_S, "the backlog is left to the query")
        stream.send(B, 0, 9)
        bench.reads(B, 12)
    else:
        bench.reads(B, 9)
    assert bench.ingest.reader == "plain" and not bench.failures


@pytest.mark.fault("a live partition beside the backlog of another one")
def test_new_records_are_read_while_another_partition_catches_up(
    made: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """During a backlog the query reads new records of live partitions. A partition whose committed offset lies behind a
    transaction marker waits less for its end than a quiet live one."""
    monkeypatch.setattr(module, "QUIET_S", 1e9)
    bench = made({A: 30, B: 0})
    bench.begin()
    stream = bench.next_stream()
    assert stream.offsets == {A: 0, B: 0}
    stream.opens()
    wait_until(lambda: bench.ingest.reader == "spark", SEEN_S, "the query serves")
    stream.send(A, 0, 20)
    stream.send(B, 0, 2)
    assert bench.store.held[B] == [0, 1]
    stream.send(A, 20, 29)
    bench.plain.log |= {A: 29, B: 2}
    bench.plain.markers[A] = 30

    def is_caught_up() -> bool:
        bench.clock.advance(100)
        return bench.store.in_life(Life.CATCHING_UP) == []

    wait_until(is_caught_up, SEEN_S, "the end is told")
    assert bench.store.held[A] == list(range(29))


def test_a_query_that_fails_is_started_anew_and_the_plain_reader_reads_meanwhile(made: Callable[..., Bench]) -> None:
    bench = made()
    bench.begin()
    first = bench.next_stream()
    first.opens()
    wait_until(lambda: bench.ingest.reader == "spark", SEEN_S, "the query serves")
    first.error = Py4JSaid("a task failed")
    wait_until(lambda: bench.ingest.reader == "plain", SEEN_S, "the plain reader reads")
    bench.reads(B, 4)
    bench.clock.advance(60_000)
    assert bench.next_stream().offsets == {A: 0, B: 4}
    assert first.stopped.is_set() and not bench.failures


def test_partitions_that_come_or_go_have_both_readers_begin_anew(made: Callable[..., Bench]) -> None:
    """The plain reader goes on with what stays while the query is started anew. What the run before still sends is not
    taken in: where a partition has come back further back, it would leave a gap."""
    bench = made()
    bench.begin()
    first = bench.next_stream()
    first.opens()
    wait_until(lambda: bench.ingest.reader == "spark", SEEN_S, "the query serves")
    first.send(A, 0, 3)
    run = bench.store.run
    bench.store.change(gone=B)
    bench.ingest.begin_anew({B})
    assert bench.ingest.reader == "plain"
    bench.reads(A, 5)
    assert bench.next_stream().offsets.keys() == {A}
    bench.store.change(come={B: 2})
    bench.ingest.begin_anew()
    bench.ingest._queries._take_frame(run, entries(B, 7, 9))
    assert bench.store.held[B] == [] and bench.store.ends[B] == 2
    assert bench.next_stream().offsets == {A: 5, B: 2}
    wait_until(bench.ingest.is_reading, SEEN_S, "both are read")
    assert first.stopped.is_set() and not bench.failures


@pytest.mark.fault("a query that is started anew in a JVM that has run one")
def test_a_plan_is_compiled_in_advance_once_for_each_session(made: Callable[..., Bench]) -> None:
    """A query that is started anew begins without the jobs of a first start: they would take the processor from
    delivery for seconds."""
    bench = made()
    bench.begin()
    bench.next_stream()
    bench.ingest.begin_anew()
    bench.next_stream()
    assert bench.plans == 1
    bench.ingest._queries._make_query = lambda _, receiver: bench.make_query(mock.Mock(), receiver)
    bench.ingest.begin_anew()
    bench.next_stream()
    assert bench.plans == 2 and not bench.failures


@pytest.mark.fault("a delay topic that takes larger records by now")
def test_no_record_is_refused_for_the_former_limit_of_its_topic(made: Callable[..., Bench]) -> None:
    """A record that is too large for a copy is refused only if the delay topic takes no larger ones by now; else its
    reader waits for the start with the new limit."""
    bench = made()
    large = Record(*A, 0, 5, True, None, b"v" * 100, [("delay-every", b"1d"), ("delay-topic", b"orders")])
    entry = decode_records([large], {A: (replace(EPOCHS[A][0], parameters=replace(PARAMETERS, roll_bytes_max=99)),)})
    assert entry.column("reason").to_pylist() == [RejectReason.TOO_LARGE_TO_ROLL]
    bench.ingest._take(1, entry, {A: 1}, unwatched)
    assert bench.refused == [{"delay": 5}] and bench.store.ends[A] == 1
    bench.is_raised = True
    waits = threading.Thread(target=bench.receive, args=(entry,), daemon=True)
    bench.store.change(come={A: 0})
    waits.start()
    wait_until(lambda: len(bench.refused) == 2, SEEN_S, "the question")
    bench.ingest.cancel()
    waits.join(SEEN_S)
    assert not waits.is_alive() and bench.store.ends[A] == 0 and not bench.failures


def test_a_thread_that_waits_for_room_beats(made: Callable[..., Bench]) -> None:
    """Also where another thread waits for it, and lets no other in. Where there is room, the other one may hang."""
    bench, beats = made(), queue.SimpleQueue[None]()
    beat = partial(beats.put, None)
    waits = threading.Thread(target=bench.ingest._take, args=(1, entries(A, 0, 2), {A: 2}, beat), daemon=True)
    with bench.ingest._taking:
        waits.start()
        with pytest.raises(queue.Empty):
            beats.get(timeout=20 * module.LOOK_S)
        bench.store.room = False
        for _ in range(3):
            beats.get(timeout=SEEN_S)
    waits.join(SEEN_S)
    assert bench.store.held[A] == [0, 1] and bench.store.beat is beat


def test_a_query_that_never_comes_up_ends_the_process(made: Callable[..., Bench]) -> None:
    """So does one whose Java has ended, at once."""
    bench = made()
    bench.fails_at_once = EnvironmentFailure("Spark cannot read", hint="", code="DB-3017")
    made_before = mock.Mock(wraps=bench.make_query)
    bench.ingest._queries._make_query = made_before
    bench.begin()

    def ended() -> bool:
        bench.clock.advance(20_000)
        return bool(bench.failures)

    wait_until(ended, SEEN_S, "it ends")
    assert made_before.call_count == FAILURES_MAX + 1
    gone = made()
    gone.fails_at_once = EnvironmentFailure("Java has ended", hint="", code="DB-3016")
    gone.begin()
    wait_until(lambda: gone.failures, SEEN_S, "it ends")
    assert gone.failures[0].code == "DB-3016"


def test_a_frame_that_cannot_be_stored_ends_ingest(made: Callable[..., Bench]) -> None:
    """What follows it must not be stored either: its offsets would be skipped."""
    bench = made()
    bench.begin()
    stream = bench.next_stream()
    bench.store.refuses = Misuse("no", code="DB-7003")
    stream.send(A, 0, 1)
    wait_until(lambda: bench.failures, SEEN_S, "it ends")
    assert isinstance(bench.failures[0], InternalError)


def test_a_failing_disk_under_a_frame_is_no_bug(made: Callable[..., Bench]) -> None:
    """It ends the process as one."""
    broken = made()
    broken.begin()
    broken.store.refuses = DiskFailure("cannot read: EIO", hint="Replace the volume.", code="DB-3026")
    broken.next_stream().send(A, 0, 1)
    wait_until(lambda: broken.failures, SEEN_S, "it ends")
    assert isinstance(broken.failures[0], EnvironmentFailure) and broken.failures[0].code == "DB-3026"


def test_a_log_that_begins_later_is_found_before_the_query_would_spin_on_it(made: Callable[..., Bench]) -> None:
    bench = made()
    bench.log_starts = {A: 7}
    bench.begin()
    wait_until(lambda: bench.failures, SEEN_S, "it ends")
    [failure] = bench.failures
    assert isinstance(failure, StateError) and failure.code == "DB-4011" and failure.fields["log_start"] == 7


@pytest.mark.fault("a partition without a leader, when a query starts")
def test_a_query_starts_without_the_partitions_that_have_no_leader(made: Callable[..., Bench]) -> None:
    """While a partition has no leader, the query starts without it, and anew once it has records."""
    bench = made()
    bench.leaderless = {B}
    bench.begin()

    def starts() -> bool:
        bench.clock.advance(1_000)
        return not bench.streams.empty()

    wait_until(starts, SEEN_S, "the query starts")
    stream = bench.next_stream()
    assert stream.offsets == {A: 0} and not bench.suspects.names
    stream.opens()
    wait_until(lambda: bench.ingest.reader == "spark", SEEN_S, "the query serves")
    bench.leaderless, bench.plain.log[B] = set(), 2
    bench.ingest.note_log_ends({A: 0, B: 2})
    wait_until(starts, SEEN_S, "the query is started anew")
    assert B in bench.next_stream().offsets and not bench.failures


def test_a_task_that_is_run_again_has_the_query_started_anew(made: Callable[..., Bench]) -> None:
    """A cluster that has lost an executor would send all of its batch once more; what came twice is there once."""
    bench = made()
    bench.begin()
    first = bench.next_stream()
    first.send(A, 0, 4)
    first.send(A, 0, 3)
    assert bench.next_stream().offsets[A] == 4
    assert bench.store.held[A] == list(range(4)) and not bench.failures


def test_too_few_slots_are_waited_for_and_then_told(made: Callable[..., Bench]) -> None:
    """A partition without one would never be read. Executors come one after the other."""
    bench = made()
    bench.slots = 1
    bench.begin()
    bench.reads(A, 3)
    assert bench.streams.empty()
    bench.slots = 2
    assert bench.next_stream().offsets[A] == 3
    short = made()
    short.slots = 1
    short.begin()

    def ended() -> bool:
        short.clock.advance(20_000)
        return bool(short.failures)

    wait_until(ended, SEEN_S, "it ends")
    assert short.failures[0].code == "DB-3030" and short.failures[0].fields["slots"] == 1


@pytest.mark.fault("a taken `spark.frames_port`, or too few slots")
@pytest.mark.parametrize("is_port", [True, False])
def test_a_query_that_cannot_begin_makes_no_partition_suspect(made: Callable[..., Bench], *, is_port: bool) -> None:
    """The plain reader delivers until the process ends with the reason: no partition is left to the reader of single
    batches, since no record is the reason."""
    bench = made()
    bench.slots = 2 if is_port else 1
    with socket.create_server(("127.0.0.1", 0)) as taken, mock.patch.object(bench.suspects, "suspect") as suspect:
        if is_port:
            port = taken.getsockname()[1]
            bench.ingest._queries._way = FromElsewhere(host="bridge", bind="127.0.0.1", port=port)
        bench.begin()

        def ended() -> bool:
            bench.clock.advance(20_000)
            return bool(bench.failures)

        wait_until(ended, SEEN_S, "it ends")
    assert bench.failures[0].code == ("DB-3029" if is_port else "DB-3030") and not suspect.called


def test_a_restart_begins_where_the_store_stands(made: Callable[..., Bench]) -> None:
    """A clock that was set back: Spark waits by it. What the old query still sends is known by its offsets."""
    bench = made()
    bench.begin()
    first = bench.next_stream()
    first.send(A, 0, 4)
    bench.ingest.restart("clock-jumped")
    second = bench.next_stream()
    assert second.offsets[A] == 4
    second.send(A, 4, 7)
    assert bench.store.held[A] == list(range(7)) and not bench.failures


@pytest.mark.parametrize("is_failure", [False, True])
def test_what_is_asked_of_a_query_before_it_starts_is_not_lost(made: Callable[..., Bench], *, is_failure: bool) -> None:
    """A restart has it begin anew; a frame that could not be stored ends ingest."""
    bench = made()
    bench.holds_plan = threading.Event()
    bench.begin()
    wait_until(lambda: bench.receiver is not None, SEEN_S, "the plan is made")
    first = bench.receiver
    if is_failure:
        bench.ingest._queries._on_take_failure(InternalError("cannot be stored", hint="", code="DB-7001"))
    else:
        bench.ingest.restart("clock-jumped")
    bench.holds_plan.set()
    wait_until(lambda: bench.failures if is_failure else bench.receiver is not first, SEEN_S, "it is heard")


def test_quiet_partitions_are_asked_where_they_end(made: Callable[..., Bench]) -> None:
    """Behind the last record lie markers, of which the query says nothing. A partition with records that the query
    does not send starves: it is started anew."""
    bench = made()
    bench.begin()
    first = bench.next_stream()
    first.opens()
    wait_until(lambda: bench.ingest.reader == "spark", SEEN_S, "the query serves")
    bench.plain.markers[A] = 3
    bench.ingest.note_log_ends({A: 3, B: 0})

    def told() -> bool:
        bench.clock.advance(1_000)
        return bench.store.ends[A] == 3

    wait_until(told, SEEN_S, "the end is told")
    bench.plain.log[B] = 2
    bench.ingest.note_log_ends({A: 3, B: 2})

    def again() -> bool:
        bench.clock.advance(1_000)
        return not bench.streams.empty()

    wait_until(again, SEEN_S, "the query is started anew")
    assert bench.store.held[B] in ([], [0, 1]), "asking stores nothing"


@pytest.mark.fault("an assignment that changes while quiet partitions are asked for their ends")
def test_records_do_not_wait_for_brokers_that_are_asked_where_quiet_partitions_end(made: Callable[..., Bench]) -> None:
    """The plain reader reads as soon as the query is started anew, even if a broker does not answer its question."""
    bench = made()
    bench.begin()
    bench.next_stream().opens()
    wait_until(lambda: bench.ingest.reader == "spark", SEEN_S, "the query serves")
    silent = mock.Mock(side_effect=lambda *_: bench.plain.wakes.wait(0.01) or Read(entries=NOTHING))
    with mock.patch.object(bench.plain, "poll", silent):
        bench.ingest.note_log_ends({A: 5, B: 0})

        def is_asked() -> bool:
            bench.clock.advance(500)
            return bool(silent.call_count)

        wait_until(is_asked, SEEN_S, "it is asked")
        bench.ingest.begin_anew()
        wait_until(lambda: bench.plain.at.keys() == {A, B}, SEEN_S, "it reads")


@pytest.mark.fault("a pause of Java with a transaction marker behind the last record")
def test_a_query_relieves_the_plain_reader_although_only_that_knows_the_end(made: Callable[..., Bench]) -> None:
    """A query that stood still serves again at once when it has all records; it need not reach the end of a quiet
    partition behind them."""
    bench = made()
    bench.begin()
    stream = bench.next_stream()
    stream.opens()
    wait_until(lambda: bench.ingest.reader == "spark", SEEN_S, "the query serves")
    bench.plain.markers[A] = 3
    bench.ingest.note_log_ends({A: 3, B: 0})

    def told() -> bool:
        bench.clock.advance(1_000)
        return bench.store.ends[A] == 3

    wait_until(told, SEEN_S, "the end is told")
    stream.freeze()
    bench.ingest._take_over(Wait.LOOK)
    wait_until(lambda: bool(bench.plain.at), SEEN_S, "the plain reader reads")
    stream.runs.set()
    wait_until(lambda: bench.ingest.reader == "spark", SEEN_S, "the query serves again")


@pytest.mark.fault("a record that the plain reader cannot read")
def test_what_the_plain_reader_leaves_is_read_batch_by_batch_at_once(made: Callable[..., Bench]) -> None:
    """The record is read batch by batch at once, also below the committed offset: query and plain reader do not wait
    for each other."""
    bench = made({A: 5, B: 2})
    bench.plain.log |= {A: 5, B: 2}
    bench.plain.cannot_read[A] = 3
    bench.slots = 0
    bench.begin()
    wait_until(lambda: bench.store.ends == {A: 5, B: 2}, SEEN_S, "all is read")
    bench.slots = 2
    assert bench.next_stream().offsets == {A: 5, B: 2}
    assert bench.store.held == {A: list(range(5)), B: [0, 1]}
    assert [each.begin for each in bench.batches.stretches] == [3]


@pytest.mark.fault("a corrupt batch under the query")
def test_a_query_goes_on_without_the_partition_that_it_fails_at(made: Callable[..., Bench]) -> None:
    """The batch that ended the query is examined first. When the batch is whole again, the query is started anew with
    its partition."""
    bench = made()
    bench.begin()
    first = bench.next_stream()
    first.opens()
    wait_until(lambda: bench.ingest.reader == "spark", SEEN_S, "the query serves")
    bench.plain.log |= {A: 4, B: 1}
    bench.batches.finds[A] = [CorruptBatch(offset=2, next=3, reason="its CRC is wrong")]
    bench.plain.cannot_read[A] = 2
    first.error = Py4JSaid("Record batch for partition delay-0 at offset 2 is invalid, cause: Record is corrupt")
    wait_until(lambda: bench.suspects.held(), SEEN_S, "the partition is held")
    bench.clock.advance(60_000)
    second = bench.next_stream()
    assert second.offsets == {B: 1} and bench.store.held == {A: [0, 1], B: [0]} and not bench.failures
    second.opens()
    wait_until(lambda: bench.ingest.reader == "spark", SEEN_S, "the query serves")
    bench.batches.finds.clear()
    bench.plain.cannot_read.clear()
    bench.clock.advance(60_001)
    assert bench.next_stream().offsets[A] >= 3


@pytest.mark.parametrize("is_error", [True, False])
def test_a_reader_that_ends_for_want_of_memory_leaves_its_mark(
    made: Callable[..., Bench], tmp_path: Path, is_error: bool
) -> None:
    """The next start must know where; an end in order leaves none."""
    bench = made()
    bench.plain.fails = MemoryError() if is_error else None
    bench.ingest.start()
    if is_error:
        wait_until(lambda: bench.failures, SEEN_S, "it ends")
    else:
        wait_until(bench.ingest.is_reading, SEEN_S, "it reads")
    bench.ingest.stop()
    assert (tmp_path / reading_mark.READ).exists() is is_error


def test_a_stop_ends_both_readers_whatever_they_wait_for(made: Callable[..., Bench]) -> None:
    """A session that does not come, and a store without room."""
    bench = made()
    bench.store.room = False
    bench.plain.log[A] = 5
    bench.ingest.start()
    wait_until(lambda: bench.plain.at, SEEN_S, "it reads")
    bench.store.refuses = Closed("closed")
    bench.ingest.stop()
    assert bench.plain.closed and not bench.failures and bench.store.held[A] == []


class Py4JSaid(Exception):
    """An error that comes out of the JVM."""


Py4JSaid.__name__ = "Py4JJavaError"
