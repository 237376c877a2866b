"""Names and ports that settings must not use: topics of other systems, Spark properties that the bridge sets itself,
and ports that the process listens on already."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from bridge.settings.model import HttpSettings, SparkSettings

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

SPARK_PORTS: Final = ("spark.driver.port", "spark.driver.blockManager.port")
"""Ports of Spark's in this process, which executors connect to."""

REMOTE_URI: Final = r"^(((s3|gs|az)://|abfss?://([^/?#@: ]+@)?)[^/?#@: ]+(/[^?#@ ]*)?|file:///[^?#]+)$"
"""Addresses of shared storage, without credentials or options; abfs has CONTAINER@ACCOUNT."""


def refuse_equal_ports(http: HttpSettings, spark: SparkSettings) -> None:
    """Raise ValueError if two listeners of the process have the same port. Port 0 is any free one."""
    ports: dict[str, object] = {"http.port": http.port}
    if http.api != "off":
        ports["http.api_port"] = http.api_port
    if not spark.master.startswith("local"):
        ports["spark.frames_port"] = spark.frames_port
        ports |= {f"spark.conf.{key}": spark.conf[key] for key in SPARK_PORTS if key in spark.conf}
    keys: dict[str, str] = {}
    for key, port in ports.items():
        other = keys.setdefault(str(port), key)
        if other != key and str(port) != "0":
            raise ValueError(f"{key} equals {other}; choose another one, or 0 for a free one")
