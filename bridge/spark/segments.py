"""Dequeue: the next window of the TimerLog into the ready rows, as a Spark job over its Parquet segments.

Spark prunes row groups by the predicate on the position; the driver sorts what comes back (a range-sampled sort in
Spark would read twice). The store decides when a window is loaded, where it ends, and what of it is still pending.
"""

from __future__ import annotations

import pyarrow as pa
from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F

from bridge.spark.errors import failures_named
from timerstore.log.timerlog import Window
from timerstore.rows.position import ORIGIN, Position
from timerstore.rows.sources import Sources

SCHEMA = (
    "topic string, partition int, offset bigint, at bigint, ts bigint, due bigint, kind tinyint, target string,"
    " target_partition int, key binary, value binary, headers array<struct<key: string, value: binary>>, id string,"
    " replace boolean, origin bigint, attempt smallint, rolls smallint, reason string"
)
"""`entry.ENTRY` in Spark's words: given, so that Spark does not open files to infer it."""


def gather(spark: SparkSession, sources: Sources, window: Window) -> pa.Table:
    """The rows of a window, in no order, as a table of `entry.ENTRY`. Raises BridgeError when Spark fails."""
    with failures_named("read the timer log"):
        frame = spark.read.schema(SCHEMA).parquet(*[str(segment.path.absolute()) for segment in window.segments])
        if window.lower != ORIGIN:
            frame = frame.where(after(sources, window.lower))
        return frame.where(~after(sources, window.upper)).toArrow()


def after(sources: Sources, position: Position) -> Column:
    """The predicate "above this position", written so that Parquet's statistics can prune row groups by it."""
    at = F.col("at")
    if position.source >= len(sources):
        return at > position.at_ms
    topic, partition = sources.name(position.source)
    beyond_offset = (F.col("partition") == partition) & (F.col("offset") > position.offset)
    beyond_partition = (F.col("topic") == topic) & ((F.col("partition") > partition) | beyond_offset)
    return (at > position.at_ms) | ((at == position.at_ms) & ((F.col("topic") > topic) | beyond_partition))
