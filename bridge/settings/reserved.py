"""Names that settings must not use: topics of other systems, and Spark properties that the bridge sets itself."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

OTHERS_OWN: Final = re.compile(
    r"__.*|_schemas"
    r"|(.*[._-])?connect([._-].*)?[._-](configs?|offsets?|status(es)?)"
    r"|.*-(changelog|repartition)|.*-subscription-(registration|response)(-[0-9]+)?-topic"
    r"|(mm2-.*|.*\.checkpoints)\.internal",
    re.ASCII | re.IGNORECASE,
)
"""Topics with the state of the brokers, Schema Registry, Connect, Streams and MirrorMaker: one foreign record can ruin
it."""

SPARK_OWNED: Final[Mapping[str, str]] = {
    "spark.master": "it is spark.master, one level up",
    "spark.driver.memory": "it is spark.driver_memory",
    "spark.dynamicAllocation.enabled": "the query needs its executors before it has tasks for them",
    "spark.jars": "it is the connector; further jars belong in spark.driver.extraClassPath",
    "spark.sql.streaming.checkpointFileManagerClass": "the bridge writes Spark's own log as cheaply as possible",
    "spark.hadoop.fs.file.impl": "the bridge writes Spark's own log as cheaply as possible",
    "spark.sql.session.timeZone": "due times are decoded in UTC",
    "spark.sql.ansi.enabled": "decoding is written for ANSI mode",
    "spark.sql.parser.escapedStringLiterals": "decoding is written for escaped literals",
    "spark.sql.variable.substitute": "decoding needs its literals unchanged",
}
"""Spark properties with their own key here, and those that decoding relies on; each with the reason for the refusal."""
