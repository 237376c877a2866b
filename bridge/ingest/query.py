"""Ingest: the delay topics into the store, as micro-batches of a Spark Structured Streaming query.

    Kafka source (read_committed, headers) -> decode (Catalyst) -> one Arrow table a batch -> TimerStore.append

Resume contract: Spark's own checkpoint is a scratch directory of one run. Every run starts at the offsets that the
store asks for; a batch that Spark hands over twice is recognised by its offsets. While Spark plans a batch, the one
before goes into the store: both take a good part of a core, and neither needs the other. `catch_up` reads up to the
committed offsets with bounded batch jobs, before the query starts: nothing may be dispatched until then (invariant I6),
so nothing may be read beyond it for the source that is done first.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import structlog
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from bridge.errors import BridgeError, InternalError
from bridge.ingest.batch_size import BatchLimits, BatchSize
from bridge.ingest.decode import decode
from bridge.ingest.finish import Finish
from bridge.spark.errors import failures_named, named_failure, ranges
from bridge.telemetry.heartbeats import Beat, unwatched
from bridge.telemetry.metrics import Metrics
from bridge.wire.decode_epochs import DecodeEpochs
from timerstore.clock import Clock
from timerstore.errors import Closed
from timerstore.rows.sources import SourceName
from timerstore.store import TimerStore

log = structlog.get_logger("bridge.ingest.query")

Offsets = Mapping[SourceName, int]

POLL_RECORDS: Final = "kafka.max.poll.records"
ROOM_LOOK_S: Final = 1.0
QUERY_LOOK_S: Final = 0.2


class Restart(Enum):
    """Why the query ends, to be started again where the store stands. The values are words for the log."""

    CLOCK_JUMPED = "clock-jumped"
    """Spark's trigger and its consumers wait by the wall clock, and would wait for one that was set back."""
    BATCH_FAILED = "batch-failed"
    """No later batch may be stored: the offsets of this one would be skipped. The failure ends ingest."""
    BATCH_SIZE = "batch-size"
    """The source's limit can only be set at the start."""


class Ingest:
    """The query and its thread. `start` once; `stop` ends it; a failure is told to `on_fatal` once.

    Nothing is raised into Spark: it takes the text apart with a regular expression that overflows its stack.
    """

    def __init__(
        self,
        *,
        spark: SparkSession,
        kafka_options: Mapping[str, str],
        group_prefix: str,
        store: TimerStore,
        all_epochs: Mapping[SourceName, DecodeEpochs],
        limits: BatchLimits,
        mean_bytes: float,
        clock: Clock,
        metrics: Metrics,
        on_fatal: Callable[[BridgeError], None],
        beat: Beat = unwatched,
        beat_query: Beat = unwatched,
    ) -> None:
        """`mean_bytes` is the expected size of a record. `beat` is the thread's, `beat_query` that of Spark's thread,
        of which is known what it calls here, and whether it waits for its next trigger.
        """
        self._spark = spark
        self._options = {
            **kafka_options,
            "includeHeaders": "true",
            "failOnDataLoss": "true",
            "groupIdPrefix": group_prefix,
        }
        self._store = store
        self._all_epochs = dict(all_epochs)
        self._finish = Finish(self._all_epochs)
        self._limits = limits
        self._size = BatchSize(limits, mean_bytes)
        self._clock = clock
        self._metrics = metrics
        self._on_fatal = on_fatal
        self._beat = beat
        self._beat_query = beat_query
        self._stopping = threading.Event()
        self._restart: Restart | None = None
        self._failure: BridgeError | None = None
        self._thread: threading.Thread | None = None
        self._reading = ""
        self._storing: threading.Thread | None = None

    def cancel(self) -> None:
        """Let `catch_up` return after the current slice; failures from now on are consequences, and not reported."""
        self._stopping.set()

    def restart(self, reason: Restart) -> None:
        """Have the query end, and start again where the store stands."""
        self._restart = reason

    # ---- catching up

    def catch_up(self, start: Offsets, end: Offsets, progress: Callable[[int, int], None]) -> dict[SourceName, int]:
        """Read [start, end) of every source into the store with bounded batch jobs; returns where every source stands.

        `progress(done, total)` counts offsets. Returns early when stopped. Raises StateError when records are gone.
        """
        at = dict(start)
        total = sum(max(0, end[name] - at[name]) for name in at)

        def tell() -> None:
            progress(total - sum(max(0, end[name] - at[name]) for name in at), total)

        while not self._stopping.is_set():
            step = self._next_slice(at, end)
            if step == at:
                return at
            frame = self._batch_frame(at, step)
            began_s = self._clock.monotonic_s()
            with failures_named("read the delay topics up to the committed offsets", records=partial(ranges, at, step)):
                table = frame.toArrow()
            while not (self._store.has_room() or self._stopping.wait(ROOM_LOOK_S)):
                tell()
            self._store_batch(table, step, began_s)
            at = step
            tell()
        return at

    def warm_up(self, start: Offsets) -> None:
        """Compile and run the decoding plan on nothing, so that the first real batch does not wait for it."""
        with failures_named("read the delay topics"):
            self._batch_frame(start, start).toArrow()

    def _next_slice(self, at: Offsets, end: Offsets) -> dict[SourceName, int]:
        behind = [name for name in at if at[name] < end[name]]
        share = max(1, self._size.records // max(1, len(behind)))
        return {name: min(end[name], at[name] + share) if name in behind else at[name] for name in at}

    def _batch_frame(self, start: Offsets, end: Offsets) -> DataFrame:
        reader = self._spark.read.format("kafka").options(**self._sized()).option("assign", _assignment(start))
        reader = reader.option("startingOffsets", _json_offsets(start)).option("endingOffsets", _json_offsets(end))
        return decode(reader.load(), self._all_epochs)

    def _sized(self) -> dict[str, str]:
        """The source's options. A consumer unpacks no more than a micro-batch at once: what is small as it was
        compressed may be large."""
        at_once = min(int(self._options.get(POLL_RECORDS, self._size.records)), self._size.records)
        return {**self._options, POLL_RECORDS: str(at_once)}

    # ---- the query

    def start(self, offsets: Offsets) -> None:
        """Start the query at these offsets."""
        self._thread = threading.Thread(target=self._run, args=(dict(offsets),), name="ingest", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float = 8.0) -> None:
        """End the query. The store's intake must be closed first: a batch that waits for room would hold the query
        up."""
        self._stopping.set()
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)

    def _run(self, offsets: dict[SourceName, int]) -> None:
        try:
            while not self._stopping.is_set():
                self._beat()
                self._restart = None
                self._run_query(offsets)
                offsets = self._store.next_offsets()
        except BridgeError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001 - the application must know that nothing is read any more
            bug = InternalError(f"ingest failed: {error!r}", hint="Please report this with the log.", code="DB-7001")
            bug.__cause__ = error
            self._fail(bug)

    def _run_query(self, offsets: Offsets) -> None:
        """One query, until it fails, is stopped, or is to be restarted."""
        failures = failures_named("read the delay topics", self._stopping.is_set, lambda: self._reading)
        with scratch_directory() as directory, failures:
            query = self._start_query(offsets, directory)
            self._beat_query()
            try:
                while not self._is_ending():
                    self._beat()
                    if not query.status["isTriggerActive"]:
                        self._beat_query()
                    if query.awaitTermination(QUERY_LOOK_S):  # type: ignore[arg-type]  # parts of a second too
                        break
            finally:
                query.stop()
                self._await_stored()
        if self._failure is not None:
            raise self._failure
        if self._restart is not None:
            log.info("query-restarted", reason=self._restart.value, batch_records=self._size.records)

    def _is_ending(self) -> bool:
        return self._restart is not None or self._stopping.is_set()

    def _start_query(self, offsets: Offsets, directory: Path) -> StreamingQuery:
        reader = self._spark.readStream.format("kafka").options(**self._sized())
        reader = reader.option("assign", _assignment(offsets)).option("startingOffsets", _json_offsets(offsets))
        records = reader.option("maxOffsetsPerTrigger", self._size.records).load()

        def each(frame: DataFrame, batch_id: int) -> None:
            if self._is_ending():
                return
            try:
                self._beat_query()
                began_s = self._clock.monotonic_s()
                self._await_stored()
                if self._is_ending():
                    return
                begins = read_ends(directory, batch_id - 1) if batch_id else offsets
                self._must_follow(begins)
                ends = read_ends(directory, batch_id)
                self._reading = ranges(begins, ends)
                # Read only now, so that no two batches are in memory.
                self._store_aside([frame.toArrow()], ends, began_s)
            except Exception as error:  # noqa: BLE001 - told to the application by the query's thread
                self._batch_failed(error)

        writer = decode(records, self._all_epochs).writeStream.foreachBatch(each)
        writer = writer.option("checkpointLocation", str(directory)).queryName("ingest")
        return writer.trigger(processingTime=f"{self._limits.trigger_ms} milliseconds").start()

    def _await_stored(self) -> None:
        """Wait until the last batch is in the store, or has failed. For room in the store it may wait for any time."""
        while self._storing is not None and self._storing.is_alive():
            self._storing.join(ROOM_LOOK_S)
            if not self._store.has_room():
                self._beat()
                self._beat_query()

    def _store_aside(self, batch: list[pa.Table], ends: Offsets, began_s: float) -> None:
        """Store a batch, the one element of a list, beside what comes next. (The list lets go of it.)"""

        def run() -> None:
            try:
                self._store_batch(batch.pop(), ends, began_s)
            except Exception as error:  # noqa: BLE001 - told to the application by the query's thread
                self._batch_failed(error)

        self._storing = threading.Thread(target=run, name="ingest-store", daemon=True)
        self._storing.start()

    def _batch_failed(self, error: Exception) -> None:
        if not self._stopping.is_set():
            self._failure = named_failure("take in a micro-batch", error, self._reading)
            self.restart(Restart.BATCH_FAILED)

    def _must_follow(self, begins: Offsets) -> None:
        """A batch that begins beyond what the store expects would leave a gap: stopping here loses nothing."""
        expected = self._store.next_offsets()
        gaps = {name: (expected[name], begin) for name, begin in begins.items() if begin > expected[name]}
        if gaps:
            raise InternalError(
                "a micro-batch does not begin where the previous one ended",
                hint="Please report this.",
                gaps=gaps,
                code="DB-7002",
            )

    def _store_batch(self, table: pa.Table, ends: Offsets, began_s: float) -> None:
        before, read_bytes = self._store.next_offsets(), table.nbytes  # with the headers that are taken out now
        entries = self._finish(table)
        try:
            self._store.append(entries, ends, self._clock.now_ms())
        except Closed:
            if self._stopping.is_set():
                return
            raise
        seconds = self._clock.monotonic_s() - began_s
        self._metrics.observe_batch(seconds)
        log.debug("batch", rows=table.num_rows, bytes=read_bytes, seconds=round(seconds, 3), limit=self._size.records)
        self._count(table, before)
        if self._size.observe(table.num_rows, read_bytes):
            self.restart(Restart.BATCH_SIZE)

    def _count(self, table: pa.Table, before: Offsets) -> None:
        """Tell the metrics how many records of each topic were new."""
        offset = table.column("offset").to_numpy()
        for topic in {topic for topic, _ in before}:
            first = {partition: o for (t, partition), o in before.items() if t == topic}
            mine = pc.equal(table.column("topic"), topic).to_numpy()
            known = np.zeros(max(first) + 1, dtype=np.int64)
            known[list(first)] = list(first.values())
            new = int(np.count_nonzero(offset[mine] >= known[table.column("partition").to_numpy()[mine]]))
            if new:
                self._metrics.ingested(topic, new)

    def _fail(self, error: BridgeError) -> None:
        if not self._stopping.is_set():
            self._on_fatal(error)


def read_ends(directory: Path, batch_id: int) -> dict[SourceName, int]:
    """The exclusive end offsets of a micro-batch, from the query's offset log, which Spark writes before it runs the
    batch.

    They are more than the last record's offset + 1 where the log ends in transaction markers or aborted records.
    """
    lines = (directory / "offsets" / str(batch_id)).read_text().splitlines()
    ends: dict[str, dict[str, int]] = json.loads(lines[2])
    return {(topic, int(partition)): offset for topic, by in ends.items() for partition, offset in by.items()}


SCRATCH_PREFIX: Final = "delay-bridge-query-"


@contextmanager
def scratch_directory() -> Iterator[Path]:
    """A directory for Spark's own checkpoint of one run, in memory where the machine has a tmpfs for that."""
    memory = Path("/dev/shm")
    usable = memory.is_dir() and shutil.disk_usage(memory).free > 16 << 20
    parent = memory if usable else Path(tempfile.gettempdir())
    _sweep(parent)
    path = Path(tempfile.mkdtemp(prefix=f"{SCRATCH_PREFIX}{os.getpid()}-", dir=parent))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _sweep(parent: Path) -> None:
    """Remove what killed processes have left: each directory's name holds its process id."""
    for path in parent.glob(f"{SCRATCH_PREFIX}*"):
        owner = path.name.removeprefix(SCRATCH_PREFIX).partition("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            shutil.rmtree(path, ignore_errors=True)


def _assignment(offsets: Offsets) -> str:
    by_topic: dict[str, list[int]] = {}
    for topic, partition in sorted(offsets):
        by_topic.setdefault(topic, []).append(partition)
    return json.dumps(by_topic)


def _json_offsets(offsets: Offsets) -> str:
    by_topic: dict[str, dict[str, int]] = {}
    for (topic, partition), offset in sorted(offsets.items()):
        by_topic.setdefault(topic, {})[str(partition)] = offset
    return json.dumps(by_topic)
