"""The query's plan, but for what it reads."""

from __future__ import annotations

from pyspark.sql import SparkSession

from bridge.ingest.query import SparkQuery


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
