"""The query's plan, but for what it reads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from bridge.ingest.frames import FrameReceiver, FromElsewhere
from bridge.ingest.query import SparkQuery
from bridge.stores.names import NAMED_ENTRY
from dev.broker.embedded import free_ports
from timerstore.rows.position import Position

SEEN_S = 10.0


def test_slots_are_the_tasks_that_run_at_a_time(spark: SparkSession) -> None:
    """Not Spark's default parallelism, which a user may set, and which is 2 where there is no executor."""
    query, context = SparkQuery(spark, {}, "group", {}, "", ""), spark.sparkContext._jsc.sc()
    slots = query.slots()
    assert slots >= 1
    context.conf().set("spark.default.parallelism", str(slots + 7))
    try:
        assert spark.sparkContext.defaultParallelism == slots + 7
        assert query.slots() == slots
    finally:
        context.conf().remove("spark.default.parallelism")


@pytest.mark.fault("a machine so busy that the plan of a rebuild takes minutes")
def test_the_plan_of_a_job_is_progress(spark: SparkSession) -> None:
    """The work of the sending thread counts, its waits do not. Another thread looks, as in a rebuild."""
    query = SparkQuery(spark, {}, "group", {}, "", "")
    with pytest.raises(Exception, match=r"kafka\.bootstrap\.servers"):
        query.send_unfinished(("delay", 0), 0, 1, Position(0, 0))  # no broker is named
    with ThreadPoolExecutor(1) as looks:
        waiting = [looks.submit(query.progress).result() for _ in range(20)]
        spark.range(10).selectExpr(*(f"id + {i} AS c{i}" for i in range(300))).collect()
        assert len(set(waiting)) == 1 and looks.submit(query.progress).result() > waiting[0]


@pytest.mark.fault("a task of an earlier query that has not ended when the next one begins at the same port")
def test_tasks_do_not_use_the_connection_of_an_earlier_query(spark: SparkSession) -> None:
    """With `spark.frames_port`, a task connects with the token of its own query, whatever tasks of an earlier one are
    left in the executor."""
    assert spark._jvm is not None
    way = FromElsewhere(host="127.0.0.1", bind="127.0.0.1", port=free_ports(1)[0])
    schema = from_arrow_schema(NAMED_ENTRY).json()
    writers = []
    for _ in range(2):
        heard = threading.Event()
        with FrameReceiver(lambda _: None, heard.set, lambda _: None, way) as receiver:
            writer = spark._jvm.delaybridge.FrameWriter(receiver.address, receiver.token, schema)
            writers.append(writer)
            writer.open(0, 0)
            assert heard.wait(SEEN_S), len(writers)
    for writer in writers:
        with suppress(Py4JJavaError):  # the bridge's end is closed
            writer.close(None)
