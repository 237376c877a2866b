"""bridge.install.class_archive: the archive that `make install` has made is the one that Spark's JVM uses."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any, Final

import pytest

from bridge.install import connector
from bridge.spark import session as spark
from dev.harness.pace import scaled

START: Final = """
import json, pathlib, sys
from pyspark import SparkContext
from bridge.install import connector
from bridge.spark import jvm, session as spark
from bridge.settings.model import Settings

jvm.NICE = 0  # behind the other tests it would take minutes
conf = json.loads(sys.argv[1])
tree = {"kafka": {"common": {"bootstrap.servers": "localhost:1"}}, "delay_topics": {"delay": {}}}
session = spark.start(Settings.of({**tree, "spark": {"conf": conf}}), connector.jars())
java = SparkContext._gateway.proc.pid
print(json.dumps({
    "maps": "spark-classes.jsa" in pathlib.Path(f"/proc/{java}/maps").read_text(),
    "class path": session.sparkContext.getConf().get("spark.driver.extraClassPath").split(":"),
}))
"""


def start(**conf: str) -> dict[str, Any]:
    """Start Spark in a process of its own; what its JVM has mapped, and its class path."""
    command = [sys.executable, "-c", START, json.dumps(conf)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=scaled(120))
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.jvm
@pytest.mark.slow
def test_spark_maps_the_archive() -> None:
    """With all jars by name, since their order counts: the connector's first, each once."""
    jars = connector.jars()
    assert spark.archive(jars).is_file(), "`make install` makes it"
    found = start()
    assert found["maps"]
    own, others = found["class path"][: len(jars)], found["class path"][len(jars) :]
    assert own == [str(jar) for jar in jars]
    assert others == sorted(others)
    assert len(set(others)) > 100


@pytest.mark.jvm
@pytest.mark.slow
def test_a_class_path_of_the_user_s_own_goes_without() -> None:
    """It may replace a jar of Spark's: then it comes before them, and the archive would not fit."""
    found = start(**{"spark.driver.extraClassPath": "/nowhere/own.jar"})
    assert not found["maps"]
    assert found["class path"] == [*map(str, connector.jars()), "/nowhere/own.jar"]
