"""What settings must not name: topics of other systems, and properties of Spark that the bridge sets itself."""

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
"""Topics in which the brokers, Schema Registry, Connect, Streams and MirrorMaker keep what they know: one foreign
record can ruin it."""

SPARK_OWNED: Final[Mapping[str, str]] = {
    "spark.master": "it is spark.master, one level up",
    "spark.driver.memory": "it is spark.driver_memory",
    "spark.dynamicAllocation.enabled": "the query needs its executors before it has tasks for them",
    "spark.jars": "it is the connector's; further jars go into spark.driver.extraClassPath",
    "spark.sql.streaming.checkpointFileManagerClass": "Spark's own log is written as cheaply as can be",
    "spark.hadoop.fs.file.impl": "Spark's own log is written as cheaply as can be",
    "spark.sql.session.timeZone": "due times are decoded in UTC",
    "spark.sql.ansi.enabled": "decoding is written for ANSI mode",
    "spark.sql.parser.escapedStringLiterals": "decoding is written for escaped ones",
    "spark.sql.variable.substitute": "what decoding compares with is taken as it is",
}
"""Spark properties that have a key of their own here, or on which decoding relies; and why they cannot be set."""
