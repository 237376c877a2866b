"""One local Spark session for all tests that need one: starting it takes seconds."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from bridge.install import connector
from tests.java import SHORT_LIVED


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """Two threads, no UI, ANSI mode as in production, and a session time zone far from UTC so that no test relies on
    it."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    session = (
        SparkSession.builder.master("local[2]")
        .appName("tests")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.memory", "1g")
        .config("spark.driver.extraClassPath", os.pathsep.join(map(str, connector.jars())))
        .config("spark.driver.extraJavaOptions", SHORT_LIVED)
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.session.timeZone", "Pacific/Chatham")
        .config("spark.sql.ansi.enabled", "true")
        .config("spark.sql.variable.substitute", "false")
        .config("spark.sql.execution.arrow.pyspark.enabled", "true")
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()
