"""One local Spark session for all tests that need one: starting it takes seconds."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from bridge.install import connector
from bridge.spark import session as own
from bridge.spark.installed import shipped
from tests.java import SHORT_LIVED


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """Two threads, no UI, ANSI mode as in production, and a session time zone far from UTC so that no test relies on
    it."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    jars = connector.jars()
    archive = own.archive(jars)  # of classes, as the bridge has it; one that is not there is not used
    session = (
        SparkSession.builder.master("local[2]")
        .appName("tests")
        .config(map=dict(own.DEFAULTS))
        .config("spark.driver.memory", "1g")
        .config("spark.driver.extraClassPath", os.pathsep.join(map(str, (*jars, *shipped()))))
        .config("spark.driver.extraJavaOptions", f"-XX:+UseSerialGC {SHORT_LIVED} -XX:SharedArchiveFile={archive}")
        .config("spark.sql.session.timeZone", "Pacific/Chatham")
        .config("spark.sql.ansi.enabled", "true")
        .config("spark.sql.variable.substitute", "false")
        .config("spark.sql.execution.arrow.pyspark.enabled", "true")
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()
