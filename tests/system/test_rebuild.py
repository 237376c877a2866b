"""`delay-bridge rebuild`: the index that Spark makes from a log, and a store that has read the same log."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pytest
import yaml
from confluent_kafka import Consumer, Producer, TopicPartition
from pyspark.sql import SparkSession

from bridge.errors import ConfigurationError, EnvironmentFailure, StateError
from bridge.ingest import query
from bridge.ingest.finish import Finish
from bridge.ingest.plain_reader import PlainReader
from bridge.ingest.query import SparkQuery
from bridge.ingest.watch.waits import Wait
from bridge.kafka.admin import Cluster
from bridge.settings.clients import librdkafka
from bridge.settings.model import Settings
from bridge.start import rebuild as rebuilding
from bridge.start.rebuild import rebuild
from bridge.stores.directory import StoreDirectory
from bridge.stores.names import SourceName
from bridge.wire.committed_state import CommittedState, decode_metadata, initial_state
from bridge.wire.decode_epochs import DecodeEpoch, DecodeParameters
from dev.harness.kafka import Outgoing, TopicReader, Topics, assert_each_once, produce
from dev.harness.waiting import wait_until
from tests.broker.rig import DEADLINE_S, settings_for
from tests.java import SHORT_LIVED
from tests.system.bridge import RunningBridge
from tests.system.broker import Broker
from tests.system.spark_cluster import SparkCluster
from timerstore.cancels.digests import MOVE, are_of
from timerstore.clock import SystemClock
from timerstore.operations.find import LogQuery
from timerstore.rows.entry import ENTRY
from timerstore.store import TimerStore

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

LOGS: Final = 14
RECORDS: Final = 260
COUNT: Final = 2_000
FILES_OF_A_JOB: Final = 10
"""At most: two for each range of 100 offsets, of which markers take some, and a directory for each."""
HOUR_MS: Final = 3_600_000
BRIDGE: Final = "delay-bridge.test"
"""The bridge for executors, and its address; its own machine does not know the name."""
ADDRESS: Final = "127.0.0.2"
EARLY: Final = DecodeParameters(
    max_delay_ms=60 * HOUR_MS, roll_window_ms=2 * HOUR_MS, has_default_target=True, roll_bytes_max=900,
    header_bytes_max=400,
)  # fmt: skip
LATER: Final = replace(EARLY, roll_window_ms=HOUR_MS, header_bytes_max=300, headers_max=6)
Headers = list[tuple[str, bytes]]


class Log:
    """A partition with random records, and the committed state of a bridge that has delivered a part of them."""

    def __init__(self, broker: Broker, name: SourceName, topic_id: str, partitions: int, now_ms: int) -> None:
        self.name = name
        self._random = random.Random(name[1])
        self._now_ms = now_ms
        self._topic_id, self._partitions = topic_id, partitions
        id = f"{name[0]}-{name[1]}"
        self._producer = Producer({"bootstrap.servers": broker.bootstrap, "transactional.id": id})
        self._producer.init_transactions(DEADLINE_S)

    def write(self) -> None:
        """Transactions of a few records each, some of them aborted."""
        left = RECORDS
        while left:
            count = min(left, self._random.randint(1, 40))
            self._producer.begin_transaction()
            for _ in range(count):
                headers: list[Any] = [*self._headers()]
                value = b"v" * self._random.choice([0, 10, 10, 10, 1_000])
                key = self._random.choice([None, b"k"])
                self._producer.produce(self.name[0], value, key, self.name[1], headers=headers)
            self._producer.flush(DEADLINE_S)
            is_kept = self._random.random() < 0.85
            (self._producer.commit_transaction if is_kept else self._producer.abort_transaction)(DEADLINE_S)
            left -= count

    def leave_open(self) -> None:
        """Begin a transaction that does not end."""
        self._producer.begin_transaction()
        self._producer.produce(self.name[0], b"", None, self.name[1], headers=[("delay-for", b"1h")])
        self._producer.flush(DEADLINE_S)

    def _headers(self) -> Headers:
        draw, choose = self._random, self._random.choice
        ids = f"id-{draw.randint(0, 25)}".encode()
        origin = str(draw.randint(0, RECORDS)).encode()
        topic, partition = self.name
        due_ms = self._now_ms + choose([1, 10, 30, 90, 5_000]) * 60_000
        place = f"{topic}/{partition}/".encode() + origin
        several = b",".join(f"{topic}/{partition}/{draw.randint(0, RECORDS)}".encode() for _ in range(3))
        until = ("delay-until", b"%d" % due_ms)
        timer = choose([until, ("delay-for", choose([b"1m", b"20m", b"70m", b"9h"]))])
        copy = [("delay-copy-origin", origin), ("delay-copy-due", b"%d" % due_ms), ("delay-copy-rolls", b"1")]
        kinds: list[Headers] = [
            [timer],
            [timer],
            [timer, ("delay-id", ids)],
            [timer, ("delay-id", ids)],
            [timer, ("delay-id", ids), ("delay-replace", b"true")],
            [("delay-cancel", ids)],
            [("delay-cancel-origin", choose([place, several]))],
            [("delay-cancel-origin", place), ("delay-reply-to", b"answers")],
            [("delay-move-origin", choose([place, several])), until],
            [("delay-move", ids), until],
            [*copy, ("delay-copy-attempt", b"0")],
            [*copy, ("delay-copy-attempt", b"2"), ("delay-copy-at", b"%d" % (due_ms - 5)), ("delay-id", ids)],
            [("delay-every", b"1h"), ("delay-id", ids)],
            [("delay-until", b"soon")],
            [],
        ]
        headers = choose(kinds)
        return headers + choose([[], [], [("own", b"x" * draw.choice([5, 350, 500]))]])

    def state(self, end: int) -> CommittedState:
        """A committed state somewhere in the log, with a decode epoch below it and, now and then, frozen steps and a
        cut."""
        draw = self._random
        offset = end if draw.random() < 0.4 else draw.randint(end // 2, end)
        at_ms = self._now_ms + draw.choice([-10, 15, 40, 100]) * 60_000
        state = initial_state(
            offset=offset, topic_id=self._topic_id, partitions=self._partitions, parameters=EARLY, first_offset=0
        )
        return replace(
            state,
            position=None if draw.random() < 0.2 else (at_ms, draw.randint(0, offset)),
            epochs=(DecodeEpoch(offset=0, parameters=EARLY), DecodeEpoch(offset=offset // 3, parameters=LATER)),
            frozen=((offset // 2, at_ms + HOUR_MS, 7),) if draw.random() < 0.3 else (),
            cuts=((3, offset + 1),) if draw.random() < 0.3 else (),
        )


def commit(settings: Settings, states: Mapping[SourceName, CommittedState]) -> None:
    """Commit these states, as a bridge has left them."""
    consumer = Consumer({**librdkafka(settings, "consumer"), "group.id": settings.group_id, "group.instance.id": "x"})
    places = [TopicPartition(*name, state.offset, state.metadata()) for name, state in states.items()]
    assert all(each.error is None for each in consumer.commit(offsets=places, asynchronous=False))
    consumer.close()


def read_by_a_store(
    settings: Settings, name: SourceName, state: CommittedState, directory: StoreDirectory, now_ms: int
) -> TimerStore:
    """A store that a reader has filled up to the committed O, flushed."""
    store = opened(directory, name, state, now_ms)
    begin = store.resume_offset() or 0
    store.start_at(begin, 0)
    reader, finish = (
        PlainReader(librdkafka(settings, "reader"), "reader", {name: state.epochs}, SystemClock()),
        Finish({name: state.epochs}),
    )
    try:
        reader.assign({name: begin})

        def is_read() -> bool:
            read = reader.poll()
            entries = finish(read.entries) if len(read.entries) else read.entries
            below = entries.filter(pa.array(entries.column("offset").to_numpy() < state.offset))
            end = min(state.offset, read.ends.get(name, store.next_offset))
            store.append(below.select(ENTRY.names), max(end, store.next_offset), now_ms)
            return store.next_offset >= state.offset or name in read.at_end

        wait_until(is_read, DEADLINE_S, "the log is read")
    finally:
        reader.close()
    store.append(ENTRY.empty_table(), state.offset, now_ms)
    store.maintenance.flush(now_ms)
    return store


def opened(directory: StoreDirectory, name: SourceName, state: CommittedState, now_ms: int) -> TimerStore:
    return TimerStore.open(directory.find(name, now_ms), state.progress(), cuts=state.cuts, now_ms=now_ms)


def content(store: TimerStore, now_ms: int) -> dict[str, Any]:
    """What an index says: pending rows with their values, counts, and the tombstones by key and offset. Those of moves
    are left out: a store's have one or not, by its batches, for an original that is cancelled and too large for a copy,
    and they cover no record above the committed O."""
    tombstones = {
        (int(run.keys.hi[i]), int(run.keys.lo[i])): int(run.offset[i])
        for run in store.state.cancels.tombstones.lookup().merged()
        for i in np.flatnonzero(~are_of(MOVE, run.keys)).tolist()
    }
    batches = list(store.export(LogQuery(), now_ms, bulky=True))
    rows = [row for batch in batches for row in batch.to_pylist() if row["state"] != "cancelled"]
    stats = store.stats([now_ms, now_ms + HOUR_MS])
    return {
        "rows": sorted(rows, key=lambda row: int(row["offset"])),
        "pending": (stats.pending, stats.pending_until),
        "tombstones": tombstones,
        "O_c": store.state.checkpoint.offset,
        "cut": store.state.checkpoint.cut,
        "progress": store.state.checkpoint.progress,
    }


@pytest.fixture(scope="module")
def logs(broker: Broker, topics: Topics) -> tuple[Settings, dict[SourceName, CommittedState], int]:
    """One topic of many random logs, with a committed state for each."""
    now_ms = SystemClock().now_ms()
    topic = topics.delay(partitions=LOGS)
    settings = settings_for(broker.bootstrap, topic)
    cluster = Cluster(settings)
    topic_id = cluster.topic_ids([topic])[topic]
    made = [Log(broker, (topic, partition), topic_id, LOGS, now_ms) for partition in range(LOGS)]
    for log in made:
        log.write()
    ends = {name: mark.end for name, mark in cluster.watermarks([log.name for log in made]).items()}
    states = {log.name: log.state(ends[log.name]) for log in made}
    made[0].leave_open()
    commit(settings, states)
    return settings, states, now_ms


def with_directory(settings: Settings, path: Path) -> Settings:
    return settings.model_copy(update={"store": settings.store.model_copy(update={"directory": path})})


def test_the_index_is_that_of_a_store_that_reads_the_log(
    logs: tuple[Settings, dict[SourceName, CommittedState], int],
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pending rows, counts, cancels, O_c and cuts are the same, for random logs with everything that may be in one; in
    ranges that are read in parallel. A second rebuild reads nothing. Spark keeps the files of the last jobs alone."""
    monkeypatch.setattr(query, "RANGE_RECORDS", 100)
    settings, states, now_ms = logs
    settings = with_directory(settings, tmp_path / "made")
    done = list(rebuild(settings, lambda: spark, SystemClock()))
    assert [each.name for each in done] == sorted(states) and [each.end for each in done] == [
        states[name].offset for name in sorted(states)
    ]
    assert sum(each.pending for each in done) > LOGS * 10
    files = spark.sparkContext._jsc.sc().env().blockManager().diskBlockManager()
    wait_until(lambda: files.getAllFiles().size() <= 4 * FILES_OF_A_JOB, DEADLINE_S, "files of ended jobs are removed")
    again = list(rebuild(settings, lambda: pytest.fail("Spark is not needed"), SystemClock()))
    assert [(each.begin, each.end) for each in again] == [(each.end, each.end) for each in done]
    cluster = Cluster(settings)
    ids = cluster.topic_ids(list(settings.delay_topics))
    for name, state in sorted(states.items()):
        contents = []
        for path in (tmp_path / "made", tmp_path / "read"):
            directory = StoreDirectory.take(path, cluster.describe().cluster_id, ids)
            store = (
                opened(directory, name, state, now_ms)
                if path.name == "made"
                else read_by_a_store(settings, name, state, directory, now_ms)
            )
            contents.append(content(store, now_ms))
            store.close()
            directory.release()
        assert contents[0] == contents[1], name


def test_a_changed_state_gives_the_index_up(
    logs: tuple[Settings, dict[SourceName, CommittedState], int],
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A cut, or another decode epoch of the records, that is committed during the job leaves the index as before, and
    names the change; a directory in use is refused. An epoch that an owner adds at its later offset changes nothing."""
    settings, states, _ = logs
    settings = with_directory(settings, tmp_path)
    name, state = min(states.items())
    now, read_states = state, rebuilding._states
    changes = {
        "the log (cut)": replace(state, cuts=((9, state.offset + 2),)),
        "the decode parameters": replace(
            state, epochs=(*state.epochs, DecodeEpoch(offset=state.offset - 1, parameters=EARLY))
        ),
        "the committed offset": replace(state, offset=state.offset - 1, position=None, frozen=()),
    }

    def read(*args: Any) -> dict[SourceName, CommittedState | None]:
        found = read_states(*args)
        return {name: now} if set(found) == {name} else found

    monkeypatch.setattr(rebuilding, "_states", read)
    for what, changed in changes.items():
        now = changed
        with pytest.raises(StateError) as raised:
            list(rebuild(settings, lambda: spark, SystemClock(), [name]))
        assert raised.value.code == "DB-4018" and what in str(raised.value)
        assert not [path for path in (tmp_path / name[0] / "0").iterdir() if path.name != "reserve"]
    directory = StoreDirectory.take(tmp_path, "", {})
    with pytest.raises(EnvironmentFailure) as used:
        list(rebuild(settings, lambda: spark, SystemClock(), [name]))
    assert used.value.code == "DB-3024"
    directory.release()
    added = DecodeEpoch(offset=state.offset + 5, parameters=EARLY)
    now = replace(state, offset=state.offset + 9, epochs=(*state.epochs, added))
    [done] = rebuild(settings, lambda: spark, SystemClock(), [name])
    assert done.end == state.offset


@pytest.mark.parametrize("is_adaptive", ["false", "true"])
def test_a_log_of_finished_records_makes_an_empty_index(
    broker: Broker,
    topics: Topics,
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_adaptive: str,
) -> None:
    """Also with the adaptive plans that `spark.conf` may turn on: without rows these have no task."""
    monkeypatch.setattr(rebuilding, "ROWS_COUNT", ("spark.sql.adaptive.enabled", is_adaptive))
    settings, _ = one_log(broker, topics, tmp_path, delivered=COUNT)
    [done] = rebuild(settings, lambda: spark, SystemClock())
    assert (done.begin, done.end, done.pending) == (0, COUNT, 0)


def test_a_partition_that_is_not_there_is_refused(broker: Broker, topics: Topics, tmp_path: Path) -> None:
    """A wrong number is told, and nothing is done."""
    settings, (topic, _) = one_log(broker, topics, tmp_path)
    with pytest.raises(ConfigurationError, match=f"{topic}/7"):
        list(rebuild(settings, lambda: pytest.fail("Spark is not needed"), SystemClock(), [(topic, 0), (topic, 7)]))


@pytest.mark.fault("records that are deleted under a rebuild")
def test_deleted_records_give_the_index_up(
    broker: Broker, topics: Topics, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rebuild whose records are deleted before it has read them leaves the old index; the next one does without
    them, if they were finished."""
    monkeypatch.setattr(query, "RANGE_RECORDS", 100)
    settings, name = one_log(broker, topics, tmp_path)
    send = SparkQuery.send_unfinished

    def deleted(*args: Any) -> None:
        [done] = topics.admin.delete_records([TopicPartition(*name, 150)]).values()
        done.result(DEADLINE_S)
        send(*args)

    monkeypatch.setattr(SparkQuery, "send_unfinished", deleted)
    with pytest.raises(StateError) as raised:
        list(rebuild(settings, lambda: spark, SystemClock()))
    assert raised.value.code == "DB-4018" and "first records" in str(raised.value)
    assert not list((tmp_path / name[0] / "0").glob("*.parquet"))
    [done] = rebuild(settings, lambda: spark, SystemClock())
    assert (done.begin, done.end, done.pending) == (150, COUNT, COUNT - 150)


@pytest.mark.fault("records that are deleted while another partition is rebuilt")
def test_each_partition_has_its_own_facts(broker: Broker, topics: Topics, spark: SparkSession, tmp_path: Path) -> None:
    """A rebuild begins at the log's present start, although that was lower when the command began."""
    settings, name = one_log(broker, topics, tmp_path, partitions=2)
    each = rebuild(settings, lambda: spark, SystemClock())
    assert next(each).name == (name[0], 0)
    [done] = topics.admin.delete_records([TopicPartition(name[0], 1, 150)]).values()
    done.result(DEADLINE_S)
    [last] = each
    assert (last.begin, last.end, last.pending) == (150, COUNT, COUNT - 150)


@pytest.mark.fault("an executor that is lost under a rebuild")
def test_a_task_that_runs_twice_counts_once(
    broker: Broker, topics: Topics, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of a task that has sent them all, and sends them again, count once."""
    settings, name = one_log(broker, topics, tmp_path)
    send = SparkQuery.send_unfinished

    def twice(*args: Any) -> None:
        send(*args)
        send(*args)

    monkeypatch.setattr(SparkQuery, "send_unfinished", twice)
    [done] = rebuild(settings, lambda: spark, SystemClock())
    assert (done.begin, done.end, done.pending) == (0, COUNT, COUNT - 150)
    assert pending_of(settings, name) == COUNT - 150


FAILS_TWICE: Final = """
import runpy
from bridge.ingest import query
from bridge.ingest.frames import FrameReceiver

query.RANGE_RECORDS = 500
read, next_frame, cut = query.SparkQuery._stretches, FrameReceiver._next, []


def stretches(*args):
    set_once = "reflect('java.lang.System', 'setProperty', 'a.task.has.failed', 'yes')"
    return read(*args).where(f"coalesce({set_once}, '') = 'yes' OR raise_error('once') IS NULL")


def frame(*args):
    got = next_frame(*args)
    if got is None or len(got) or cut:
        return got
    return cut.append(args)


query.SparkQuery._stretches, FrameReceiver._next = stretches, frame
runpy.run_module("bridge", run_name="__main__")
"""
"""The command, whose first reading task fails at its first record, and whose sending task loses its connection when all
its rows are taken in."""


@pytest.mark.fault("a failed task under a rebuild")
def test_a_failed_task_is_tried_again(broker: Broker, topics: Topics, tmp_path: Path) -> None:
    """A task that reads, and the one that sends, fail once each: the job goes on, and nothing counts twice."""
    settings, name = one_log(broker, topics, tmp_path / "data")
    ran = run_command(broker, settings, tmp_path, FAILS_TWICE, {})
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == f"{name[0]}/0: {COUNT} offsets read up to {COUNT}, {COUNT - 150} timers of them are pending\n"
    assert pending_of(settings, name) == COUNT - 150


def pending_of(settings: Settings, name: SourceName) -> int:
    """The pending timers of an index, as the next start counts them."""
    cluster, now_ms = Cluster(settings), SystemClock().now_ms()
    offset, metadata = cluster.committed(settings.group_id, [name])[name]
    state, ids = decode_metadata(name, offset, metadata), cluster.topic_ids([name[0]])
    directory = StoreDirectory.take(settings.store.directory, cluster.describe().cluster_id, ids)
    try:
        store = opened(directory, name, state, now_ms)
        count = store.stats().pending
        store.close()
    finally:
        directory.release()
    return count


def run_command(
    broker: Broker, settings: Settings, directory: Path, program: str, spark: Mapping[str, Any]
) -> subprocess.CompletedProcess[str]:
    """Run a program that runs the command, with its configuration in `directory`."""
    tree = {
        "bridge": {"id": settings.bridge.id},
        "kafka": {"common": {"bootstrap.servers": broker.bootstrap}},
        "delay_topics": {topic: {} for topic in settings.delay_topics},
        "store": {"directory": str(settings.store.directory)},
        "spark": {"conf": {"spark.driver.extraJavaOptions": SHORT_LIVED}} | dict(spark),
    }
    file = directory / "bridge.yaml"
    file.write_text(yaml.safe_dump(tree))
    command = [sys.executable, "-c", program, "rebuild", "--config", str(file)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.fault("a job of Spark that stands still")
def test_a_job_without_progress_is_cancelled(
    broker: Broker, topics: Topics, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that waits for ever, here for the end of a transaction, is cancelled, and leaves the old index."""
    monkeypatch.setattr(Wait, "s", property(lambda _: 3.0))
    settings, name = one_log(broker, topics, tmp_path)
    log = Log(broker, name, "", 1, 0)
    log.leave_open()
    send = SparkQuery.send_unfinished
    monkeypatch.setattr(
        SparkQuery, "send_unfinished", lambda of, name, begin, end, passed: send(of, name, begin, end + 1, passed)
    )
    with pytest.raises(EnvironmentFailure) as raised:
        list(rebuild(settings, lambda: spark, SystemClock()))
    assert raised.value.code == "DB-3088" and "tasks_running=" in str(raised.value)
    assert not list((tmp_path / name[0] / "0").glob("*.parquet"))


@pytest.mark.slow
def test_a_cluster_reads_the_ranges(broker: Broker, topics: Topics, tmp_path: Path) -> None:
    """On a cluster of two workers, which share no directory with the bridge, the command makes the same index."""
    settings, name = one_log(broker, topics, tmp_path / "data")
    conf = {"spark.executor.memory": "512m", "spark.executor.extraJavaOptions": SHORT_LIVED}
    conf |= {"spark.driver.bindAddress": ADDRESS, "spark.driver.extraJavaOptions": SHORT_LIVED}
    program = "from bridge.ingest import query; query.RANGE_RECORDS = 500; import runpy; "
    program += "runpy.run_module('bridge', run_name='__main__')"
    with SparkCluster(tmp_path / "cluster", workers=2, cores=1, names={BRIDGE: ADDRESS}) as cluster:
        spark = {"master": cluster.master, "executor_host": BRIDGE, "conf": conf}
        ran = run_command(broker, settings, tmp_path, program, spark)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == f"{name[0]}/0: {COUNT} offsets read up to {COUNT}, {COUNT - 150} timers of them are pending\n"


def one_log(
    broker: Broker, topics: Topics, directory: Path, partitions: int = 1, delivered: int = 150
) -> tuple[Settings, SourceName]:
    """Logs of timers, all read by a bridge, and the first of each delivered; the name of the first log."""
    delay = topics.delay(partitions=partitions)
    settings = with_directory(settings_for(broker.bootstrap, delay), directory)
    due_ms = SystemClock().now_ms() + HOUR_MS
    produce(
        broker.bootstrap,
        [
            Outgoing(topic=delay, headers=[("delay-until", b"%d" % (due_ms + i))], partition=partition)
            for partition in range(partitions)
            for i in range(COUNT)
        ],
    )
    topic_id = Cluster(settings).topic_ids([delay])[delay]
    state = initial_state(offset=COUNT, topic_id=topic_id, partitions=partitions, parameters=EARLY, first_offset=0)
    state = replace(state, position=(due_ms + delivered - 1, delivered - 1))
    commit(settings, {(delay, partition): state for partition in range(partitions)})
    return settings, (delay, 0)


@pytest.mark.fault("the loss of the index")
def test_the_command_makes_the_index_of_a_start(broker: Broker, topics: Topics, tmp_path: Path) -> None:
    """After the loss of the index, the command makes it, a start reads nothing again, and each message arrives once.
    With shared storage, the start uploads it, and an instance with an empty disk adopts it."""
    delay, target = topics.delay(partitions=2), topics.create("orders")
    due_ms = SystemClock().now_ms() + 120_000
    with RunningBridge(tmp_path, broker.bootstrap, delay, spark=False) as bridge:
        bridge.start()
        headers: Headers = [("delay-topic", target.encode()), ("delay-until", b"%d" % due_ms)]
        sent = [Outgoing(topic=delay, value=b"%d" % i, headers=headers, partition=i % 2) for i in range(COUNT)]
        now: Headers = [("delay-topic", target.encode()), ("delay-for", b"1ms")]
        sent += [Outgoing(topic=delay, value=b"%d" % (COUNT + i), headers=now, partition=i) for i in range(2)]
        produce(broker.bootstrap, sent)
        delivered = f'records_delivered_total{{topic="{target}"}}'
        wait_until(lambda: bridge.metrics().get(delivered) == 2, DEADLINE_S, "the committed offsets have moved")
        wait_until(lambda: bridge.metrics()["pending_messages"] == COUNT, DEADLINE_S, "all are read")
        assert bridge.stop() == 0
        shutil.rmtree(bridge.data / delay)
        command = [sys.executable, "-m", "bridge", "rebuild", "--config", str(bridge.config_file)]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr
        assert [line.rpartition(", ")[2] for line in ran.stdout.splitlines()] == [
            f"{COUNT // 2} timers of them are pending"
        ] * 2
        remote = tmp_path / "remote"
        remote.mkdir()
        bridge.configure({"store": {"remote": f"file://{remote}"}})
        bridge.start()
        (opened_event,) = bridge.events("index-opened")
        assert opened_event["read_again"] == 0 and opened_event["without_index"] == 0
        wait_until(lambda: is_copied(bridge, remote), DEADLINE_S, bridge.tail)
        bridge.kill()
        shutil.rmtree(bridge.data)
        bridge.start()
        assert {each["partition"] for each in bridge.events("index-adopted")} == {0, 1}, "it was uploaded"
        (opened_event,) = bridge.events("index-opened")
        assert opened_event["without_index"] == 0
        with TopicReader(broker.bootstrap, [target]) as reader:
            assert_each_once((int(each.value or b"") for each in reader.wait_for(COUNT + 2, 300)), COUNT + 2)
        assert bridge.stop() == 0


def is_copied(bridge: RunningBridge, remote: Path) -> bool:
    """Whether committed manifests of both partitions have the present indexes."""
    return len({each.parent for each in remote.rglob("*.manifest")}) == 2 and (
        bridge.metrics()["remote_manifest_age_seconds"] == 0
    )
