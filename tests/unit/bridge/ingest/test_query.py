"""bridge.ingest.query: why the query is restarted, what ends ingest, and how far catching up reads. No Spark."""

from __future__ import annotations

import json
import queue
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pyarrow as pa
import pytest

from bridge.errors import BridgeError, EnvironmentFailure, InternalError
from bridge.ingest import query as module
from bridge.ingest.batch_size import GROWTH_MAX, RECORDS_MIN, BatchLimits
from bridge.ingest.query import Ingest, Restart
from dev.harness.waiting import wait_until
from tests.manual_clock import ManualClock
from timerstore.errors import Closed
from timerstore.rows.sources import SourceName

DELAY: SourceName = ("delay", 0)
OTHER: SourceName = ("delay", 1)
SEEN_S = 10


def batch(first: int, end: int, size_bytes: int = 0) -> pa.Table:
    """Records of DELAY in [first, end)."""
    count = end - first
    return pa.table(
        {
            "topic": ["delay"] * count,
            "partition": pa.array([0] * count, pa.int32()),
            "offset": pa.array(range(first, end), pa.int64()),
            "value": [b"x" * size_bytes] * count,
        }
    )


class Query:
    """One run of Spark's: hands micro-batches over when the test says so, until it is stopped."""

    def __init__(self, spark: Spark, offsets: int, limit: int) -> None:
        self.begins_at, self.limit = offsets, limit
        self.status = {"isTriggerActive": False}
        self.stopped = False
        self._spark = spark
        self._take: Callable[[Any, int], None] = lambda *_: None
        self._directory = Path()
        self._batches = 0

    def foreachBatch(self, take: Callable[[Any, int], None]) -> Query:
        self._take = take
        return self

    def option(self, _: str, directory: str) -> Query:
        self._directory = Path(directory)
        return self

    def queryName(self, _: str) -> Query:
        return self

    def trigger(self, **_: str) -> Query:
        return self

    def start(self) -> Query:
        self._spark.started.put(self)
        return self

    def awaitTermination(self, timeout: float) -> bool:  # noqa: ARG002
        return False

    def stop(self) -> None:
        self.stopped = True

    def hand_over(self, table: pa.Table, end: int) -> None:
        """As Spark does: the log of offsets first, then the batch."""
        text = "\n".join(("v1", "{}", json.dumps({"delay": {"0": end}})))
        with suppress(FileNotFoundError):  # the query has ended, or does so meanwhile
            (self._directory / "offsets").mkdir(exist_ok=True)
            (self._directory / "offsets" / str(self._batches)).write_text(text)
        self._take(SimpleNamespace(toArrow=lambda: table), self._batches)
        self._batches += 1


class Spark:
    """A session whose streams are `Query`; `slices` are the [start, end) of batch jobs."""

    def __init__(self) -> None:
        self.started: queue.SimpleQueue[Query] = queue.SimpleQueue()
        self.slices: list[tuple[dict[str, int], dict[str, int]]] = []
        self.readStream = SimpleNamespace(format=lambda _: Reader(self, is_stream=True))
        self.read = SimpleNamespace(format=lambda _: Reader(self, is_stream=False))


class Reader:
    def __init__(self, spark: Spark, *, is_stream: bool) -> None:
        self._spark, self._is_stream = spark, is_stream
        self._options: dict[str, str] = {}

    def options(self, **options: str) -> Reader:
        self._options |= options
        return self

    def option(self, name: str, value: object) -> Reader:
        self._options[name] = str(value)
        return self

    def load(self) -> Any:
        start = json.loads(self._options["startingOffsets"])["delay"]
        if self._is_stream:
            query = Query(self._spark, start["0"], int(self._options["maxOffsetsPerTrigger"]))
            return SimpleNamespace(writeStream=query)
        end = json.loads(self._options["endingOffsets"])["delay"]
        self._spark.slices.append((start, end))
        return SimpleNamespace(toArrow=lambda: batch(start["0"], end["0"]))


class Bench:
    """Ingest from `Spark` into a store that only counts."""

    def __init__(self) -> None:
        self.spark = Spark()
        self.ends = {DELAY: 0, OTHER: 0}
        self.failures: list[BridgeError] = []
        self.refuses: Exception | None = None
        self.metrics = mock.Mock()
        store: Any = SimpleNamespace(next_offsets=lambda: dict(self.ends), append=self.append, has_room=lambda: True)
        self.ingest = Ingest(
            spark=self.spark,  # type: ignore[arg-type]
            kafka_options={},
            group_prefix="",
            store=store,
            all_epochs={},
            limits=BatchLimits(records=64_000, bytes=1 << 20, trigger_ms=1),
            mean_bytes=1 << 20,
            clock=ManualClock(),
            metrics=self.metrics,
            on_fatal=self.failures.append,
        )
        self.ingest._finish = lambda table: table  # type: ignore[assignment]

    def append(self, _: pa.Table, ends: Mapping[SourceName, int], __: int) -> int:
        if self.refuses is not None:
            raise self.refuses
        self.ends |= ends
        return 0

    def query(self) -> Query:
        """The next one that is started."""
        return self.spark.started.get(timeout=SEEN_S)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(module, "decode", lambda records, _: records)
    monkeypatch.setattr(module, "QUERY_LOOK_S", 0.01)
    bench = Bench()
    yield bench
    bench.ingest.stop()


def test_a_micro_batch_goes_into_the_store_and_is_counted(bench: Bench) -> None:
    """With the end that Spark's log of offsets names, which may lie beyond its last record."""
    bench.ingest.start({DELAY: 0})
    bench.query().hand_over(batch(0, 5), 7)
    wait_until(lambda: bench.ends[DELAY] == 7, SEEN_S)
    bench.ingest.stop()
    assert bench.metrics.ingested.call_args_list == [mock.call("delay", 5)]
    assert bench.failures == []


def test_another_batch_size_restarts_the_query_where_the_store_stands(bench: Bench) -> None:
    """Spark takes the limit at the start only."""
    bench.ingest.start({DELAY: 0})
    first = bench.query()
    assert first.limit == RECORDS_MIN
    first.hand_over(batch(0, RECORDS_MIN), RECORDS_MIN)
    second = bench.query()
    assert first.stopped
    assert (second.begins_at, second.limit) == (RECORDS_MIN, GROWTH_MAX * RECORDS_MIN)
    second.hand_over(batch(RECORDS_MIN, RECORDS_MIN + 64, 1 << 20), RECORDS_MIN + 64)
    assert bench.query().limit == RECORDS_MIN
    assert bench.failures == []


def test_a_clock_jump_restarts_the_query_with_the_same_batch_size(bench: Bench) -> None:
    """And nothing that the old query still hands over is stored."""
    bench.ingest.start({DELAY: 3})
    first = bench.query()
    bench.ends[DELAY] = 9
    bench.ingest.restart(Restart.CLOCK_JUMPED)
    first.hand_over(batch(9, 10), 10)
    second = bench.query()
    assert (second.begins_at, second.limit) == (9, RECORDS_MIN)
    assert bench.ends[DELAY] == 9


def test_a_batch_that_fails_ends_ingest_and_no_later_one_is_stored(bench: Bench) -> None:
    """Its records would be skipped. The application is told once, and nothing is raised into Spark."""
    bench.ingest.start({DELAY: 0})
    query = bench.query()
    bench.refuses = ConnectionError("Answer from Java side is empty")
    query.hand_over(batch(0, 1), 1)
    wait_until(lambda: bench.failures, SEEN_S)
    bench.refuses = None
    query.hand_over(batch(1, 2), 2)
    assert bench.ends[DELAY] == 0
    [failure] = bench.failures
    assert isinstance(failure, EnvironmentFailure)
    assert failure.fields["records"] == "delay/0 from 0 to 0"
    assert query.stopped and bench.spark.started.empty()


def test_a_batch_that_would_leave_a_gap_is_refused(bench: Bench) -> None:
    """Whatever made the gap: stopping there loses nothing."""
    bench.ingest.start({DELAY: 5})
    bench.query().hand_over(batch(5, 6), 6)
    wait_until(lambda: bench.failures, SEEN_S)
    assert isinstance(bench.failures[0], InternalError)
    assert bench.ends[DELAY] == 0


def test_a_store_that_is_closed_while_ingest_stops_is_no_failure(bench: Bench) -> None:
    bench.ingest.start({DELAY: 0})
    query = bench.query()
    bench.refuses = Closed("closed")
    bench.ingest.cancel()
    query.hand_over(batch(0, 1), 1)
    bench.ingest.stop()
    assert bench.failures == [] and query.stopped


def test_catching_up_reads_slices_up_to_the_end_and_not_beyond(bench: Bench) -> None:
    """The sources that are behind share a slice; one that is done is not read beyond its end (invariant I6)."""
    told: list[tuple[int, int]] = []
    reached = bench.ingest.catch_up(
        {DELAY: 0, OTHER: 10}, {DELAY: 100, OTHER: 12}, lambda done, total: told.append((done, total))
    )
    assert reached == {DELAY: 100, OTHER: 12} == bench.ends
    assert bench.spark.slices[0] == ({"0": 0, "1": 10}, {"0": 32, "1": 12})
    assert all(end["1"] == 12 for _, end in bench.spark.slices)
    assert told[-1] == (102, 102)


def test_catching_up_ends_after_the_slice_that_is_under_way_when_it_is_cancelled(bench: Bench) -> None:
    """The assignment has changed: the rest is of no use."""
    reached = bench.ingest.catch_up({DELAY: 0}, {DELAY: 10_000}, lambda *_: bench.ingest.cancel())
    assert reached == {DELAY: RECORDS_MIN}
