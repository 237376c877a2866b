"""The JVM's environment, output, and the reason why it does not start."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import pyspark
import pytest
from pyspark import SparkConf

from bridge.errors import EnvironmentFailure
from bridge.spark.jvm import launched, own_environment

HOST = {
    "SPARK_HOME": "/opt/spark-2",
    "SPARK_CONF_DIR": "/etc/spark",
    "SPARK_DIST_CLASSPATH": "/opt/hadoop/*",
    "SPARK_LOCAL_DIRS": "/gone",
    "SPARK_LOCAL_IP": "10.0.0.1",
    "PYSPARK_SUBMIT_ARGS": "--master yarn pyspark-shell",
    "PYSPARK_GATEWAY_PORT": "1",
    "PYSPARK_PYTHON": "/usr/bin/python2",
    "PYSPARK_DRIVER_PYTHON": "jupyter",
    "HADOOP_CONF_DIR": "/etc/hadoop",
    "HADOOP_USER_NAME": "hdfs",
    "YARN_CONF_DIR": "/etc/hadoop",
    "_SPARK_CMD_USAGE": "x",
}
OWN = {"PATH": "/bin", "JAVA_HOME": "/jdk", "LANG": "C", "AWS_REGION": "x", "SPARKLING": "water"}


@pytest.mark.fault("a host with a Spark or Hadoop installation of its own")
def test_the_environment_of_the_jvm_is_the_bridges() -> None:
    """No variable of the host's Spark or Hadoop reaches the JVM; all others do."""
    environment = HOST | OWN
    own_environment(environment, "local")
    assert environment == OWN | {
        "SPARK_HOME": str(Path(pyspark.__file__).parent),
        "PYSPARK_PYTHON": sys.executable,
        "MALLOC_ARENA_MAX": "2",
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_LOCAL_HOSTNAME": "localhost",
    }
    again = dict(environment)
    own_environment(again, "local")
    assert again == environment


def test_a_yarn_cluster_is_found_by_hadoops_variables() -> None:
    """Nothing else tells where it is."""
    environment = HOST | OWN
    own_environment(environment, "yarn")
    kept = {name for name in environment if name.startswith(("HADOOP", "YARN"))}
    assert kept == {"HADOOP_CONF_DIR", "HADOOP_USER_NAME", "YARN_CONF_DIR"}


@pytest.mark.parametrize(
    ("script", "reason", "hint"),
    [
        ("echo 'Error: Could not create the Java Virtual Machine.' >&2; exit 1", "Could not create", "comes from Java"),
        ("echo 'hello'; echo 'Exception in thread main java.io.IOException: No space left on device'; exit 1",
         "No space left", "comes from Java"),
        ("exit 7", "spark-class", "comes from Java"),
    ],
    ids=["options", "disk", "silent"],
)  # fmt: skip
@pytest.mark.fault("a JVM that does not start")
def test_the_reason_is_the_jvms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    script: str, reason: str, hint: str,
) -> None:  # fmt: skip
    """The error has the JVM's own words, and blames a missing Java only if Java is missing."""
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text(f"#!/bin/sh\n{script}\n")
    java.chmod(0o755)
    monkeypatch.setattr(os, "environ", os.environ | {"JAVA_HOME": str(tmp_path)})
    own_environment(os.environ, "local")
    with caplog.at_level(logging.DEBUG), pytest.raises(EnvironmentFailure) as raised:
        launched(SparkConf(loadDefaults=False))
    assert raised.value.code == "DB-3015" and reason in str(raised.value.fields["reason"])
    assert hint in raised.value.hint


def test_a_missing_java_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what to install."""
    for name in ("bash", "dirname", "cat", "env", "sh", "sed", "tr", "ls", "readlink", "uname", "id", "basename"):
        found = next(Path(path, name) for path in ("/usr/bin", "/bin") if Path(path, name).exists())
        (tmp_path / name).symlink_to(found)
    own = {name: value for name, value in os.environ.items() if name != "JAVA_HOME"}
    monkeypatch.setattr(os, "environ", own | {"PATH": str(tmp_path)})
    own_environment(os.environ, "local")
    with pytest.raises(EnvironmentFailure, match="Install Java 17"):
        launched(SparkConf(loadDefaults=False))
