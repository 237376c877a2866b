"""The ingest query, Spark's half: the delay topics as a Structured Streaming query in real-time mode.

    Kafka source (read_committed, headers) -> decode (Catalyst) -> FrameWriter (java/) -> socket -> frames.py

Real-time mode (SPARK-53736) runs one long-lived task for each partition, without planning in between. A task without a
slot never runs, silently, so there must be a slot for each (session.py).

Spark's own checkpoint is a scratch directory of one run. Every run starts at the store's offsets, and the store drops
repeated records by their offsets.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from bridge.errors import EnvironmentFailure
from bridge.ingest import sql as F
from bridge.ingest.decode import decode
from bridge.ingest.sql import Column
from bridge.stores.names import NAMED_ENTRY, Offsets, SourceName
from bridge.wire.decode_epochs import DecodeEpochs
from timerstore.rows.entry import DECIDED, UNCOPYABLE, Kind
from timerstore.rows.position import AT_MIN, Position

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery


BATCH: Final = "30 minutes"
"""Duration of a batch in real-time mode: its end plans anew, which takes half a second."""
REASON_CHARS_MAX: Final = 200
RANGE_RECORDS: Final = 200_000
"""Offsets of a task of a batch job: small enough for many tasks, and each one compiles and connects anew."""
WORK_NS: Final = 10_000_000
"""Processor time of a thread, more than the end of a wait takes."""


class SparkQuery:
    """The plan, over `session`; `kafka_options` are the source's, `address` and `token` those of a FrameReceiver."""

    def __init__(
        self,
        session: SparkSession,
        kafka_options: Mapping[str, str],
        group_prefix: str,
        all_epochs: Mapping[SourceName, DecodeEpochs],
        address: str,
        token: str,
    ) -> None:
        self.session = session
        self._options = {
            **kafka_options,
            "includeHeaders": "true",
            "failOnDataLoss": "true",
            "groupIdPrefix": group_prefix,
        }
        self._all_epochs = all_epochs
        self._address, self._token = address, token
        self._started: StreamingQuery | None = None
        self._sender = 0
        """The JVM's thread that sends: it plans and compiles the job, and waits for its tasks."""

    def slots(self) -> int:
        """The number of tasks that the present executors can run at a time. A task of the query keeps its slot, and
        there is one for each partition. (Spark's default parallelism is another number: without an executor it is
        2.)"""
        context = self.session.sparkContext._jsc.sc()
        context.assertNotStopped()
        return int(context.maxNumConcurrentTasks(context.resourceProfileManager().defaultResourceProfile()))

    def warm_up(self, offsets: Offsets) -> None:
        """Compile the plan and load its classes with no records, so that the first record does not wait for it."""
        self.send(self._stretches(offsets, offsets))

    def _stretches(self, begins: Offsets, ends: Offsets, ranges: int = 1) -> DataFrame:
        """The entries of the offsets from `begins` to `ends`, read by `ranges` tasks in parallel, or one for each
        partition if these are more."""
        reader = self.session.read.format("kafka").options(**self._options).option("assign", _assignment(begins))
        reader = reader.option("startingOffsets", _json_offsets(begins)).option("endingOffsets", _json_offsets(ends))
        return decode(reader.option("minPartitions", str(ranges)).load(), self._all_epochs)

    def send_unfinished(self, name: SourceName, begin: int, end: int, passed: Position) -> None:
        """Send a partition's entries from `begin` to `end` without the finished ones, in the order of position, and
        return when they are taken in. `passed` is the committed P, `end` the committed O.

        In front of all timers, with their `at`, are the commands, and once more, without a value, the timers that
        concern other ones: a replace, finished or not, and an original that is too large for a copy. One task sorts;
        rows that do not fit into its memory go to Spark's local disk."""
        assert self.session._jvm is not None
        self._sender = int(self.session._jvm.Thread.currentThread().getId())
        # P comes from a table, as literals would have the whole plan compiled for each partition.
        table = [None] * name[1] + [[passed.at_ms, passed.offset]]
        p = F.get(F.from_json(json.dumps(table), "array<array<bigint>>"), F.col("partition"))
        at, at_ms = F.col("at"), F.get(p, 0)
        is_finished = (at < at_ms) | ((at == at_ms) & (F.col("offset") <= F.get(p, 1)))
        is_fixed = F.col("replace") | (F.col("rolls") == UNCOPYABLE)
        true, false, none = (Column(f"array({items})") for items in ("true", "false", ""))
        turns = (
            F.when(F.col("kind").isin(Kind.CANCEL, *DECIDED), true)
            .when(F.col("kind") != Kind.TIMER, none.cast("array<boolean>"))
            .when(is_finished, F.when(F.col("replace"), true).otherwise(none.cast("array<boolean>")))
            .when(is_fixed, Column("array(true, false)"))
            .otherwise(false)
        )
        first = F.col("is_first")
        replaced = {"at": F.when(first, F.long(AT_MIN)).otherwise(F.col("at"))}
        replaced["value"] = F.when(first & (F.col("kind") == Kind.TIMER), None).otherwise(F.col("value"))
        entries = self._stretches({name: begin}, {name: end}, -(-(end - begin) // RANGE_RECORDS))
        columns = [replaced.get(column, F.col(column)).alias(f"`{column}`").sql for column in NAMED_ENTRY.names]
        turned = entries.selectExpr("*", f"explode({turns.sql}) AS is_first").selectExpr(*columns)
        self.send(turned.repartition(1).sortWithinPartitions("at", "offset"))

    def progress(self) -> tuple[int, ...]:
        """Numbers that change while a batch job makes progress: that of tasks (those of rows come every ten seconds),
        and the processor time of its plan, which a busy machine may not finish for minutes."""
        assert self.session._jvm is not None
        threads = self.session._jvm.java.lang.management.ManagementFactory.getThreadMXBean()
        worked = int(threads.getThreadCpuTime(self._sender)) // WORK_NS if self._sender else 0
        stages = self.session.sparkContext._jsc.sc().statusStore().activeStages()
        each = [stages.apply(i) for i in range(stages.size())]
        counts = ("stageId", "numCompleteTasks", "inputRecords", "shuffleReadRecords", "shuffleWriteRecords")
        return worked, *(int(getattr(stage, count)()) for stage in each for count in counts)

    def cancel_jobs(self) -> None:
        """Have the call of `send_unfinished` raise. For any thread."""
        self.session.sparkContext.cancelAllJobs()

    def let_go(self) -> None:
        """Have Spark remove the files of ended jobs, which it does after a collection of garbage: by itself each half
        hour, and meanwhile they would fill the disk."""
        assert self.session._jvm is not None
        gc.collect()  # Python's references to the plans
        self.session._jvm.System.gc()

    def send(self, entries: DataFrame) -> None:
        """Send entries, and return when they are taken in."""
        entries._jdf.foreachPartition(self._writer(entries))

    def start(self, offsets: Offsets, directory: Path) -> StreamingQuery:
        """Send everything from these offsets on; `directory` is for Spark's checkpoint."""
        reader = self.session.readStream.format("kafka").options(**self._options)
        reader = reader.option("assign", _assignment(offsets)).option("startingOffsets", _json_offsets(offsets))
        frame = decode(reader.load(), self._all_epochs)
        writer = frame.writeStream.outputMode("update").trigger(realTime=BATCH)  # type: ignore[call-overload]
        writer = writer.option("checkpointLocation", directory.as_uri()).queryName("ingest")
        writer._jwrite.foreach(self._writer(frame))
        started: StreamingQuery = writer.start()
        self._started = started
        return started

    def state(self) -> dict[str, object]:
        """Spark's present work, from its status store: the running and waiting tasks, the executors of a cluster, and
        its own word for the state of the query. Never raises: the query's thread reports a failure."""
        try:
            return _work(self.session) | ({"query": self._word(self._started)} if self._started else {})
        except Exception as error:  # noqa: BLE001 - of any kind: Spark may be ending
            return {"spark": f"does not answer: {error!r}"[:REASON_CHARS_MAX]}

    @staticmethod
    def _word(started: StreamingQuery) -> str:
        """Spark's word for the state of its query. After a failure it is the whole text of the error."""
        return str(started.status["message"]).partition("\n")[0][:REASON_CHARS_MAX]

    def _writer(self, frame: DataFrame) -> Any:
        jvm = self.session._jvm
        assert jvm is not None
        return jvm.delaybridge.FrameWriter(self._address, self._token, frame.schema.json())


def _work(session: SparkSession) -> dict[str, object]:
    context, running, waiting = session.sparkContext, 0, 0
    tracker = context.statusTracker()
    for number in tracker.getActiveStageIds():
        if stage := tracker.getStageInfo(number):
            running += stage.numActiveTasks
            waiting += stage.numTasks - stage.numActiveTasks - stage.numCompletedTasks
    work: dict[str, object] = {"tasks_running": running, "tasks_waiting": waiting}
    if not str(context.master).startswith("local"):
        cluster = context._jsc.sc()
        work["executors"] = int(cluster.getExecutorMemoryStatus().size()) - 1  # one is the driver
        work["cores_max"] = cluster.conf().get("spark.cores.max", "all")
    return work


def too_few_slots(slots: int, partitions: int) -> EnvironmentFailure:
    return EnvironmentFailure(
        "Spark has fewer slots than there are partitions: some would never be read",
        hint="Give Spark's executors more cores; in the sidecar, restart the bridge if partitions were added.",
        slots=slots,
        partitions=partitions,
        code="DB-3030",
    )


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
