"""Spark's Kafka connector: the jars that PySpark does not ship, in the version of the installed PySpark; and a file
system for Spark that does not start a process for every file it writes.

    python -m bridge.install.connector install [--into DIR]     resolve them with Maven (`make install`, and images)

At run time nothing is downloaded: `jars()` only searches.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from bridge.errors import BridgeError, EnvironmentFailure
from bridge.install import maven
from bridge.spark import installed

JARS_VARIABLE: Final = "DELAY_BRIDGE_JARS"
SCALA: Final = "2.13"
# Without one of these the source fails at its first query with a NoClassDefFoundError. PySpark already contains the
# other resolved jars (compression, logging).
NEEDED: Final = (
    f"spark-sql-kafka-0-10_{SCALA}",
    f"spark-token-provider-kafka-0-10_{SCALA}",
    "kafka-clients",
    "commons-pool2",
    # Without its native library, Hadoop's local file system runs `chmod` for each written file.
    "hadoop-bare-naked-local-fs",
)
FRAME_WRITER: Final = "delay-bridge-frames.jar"
"""The query's sink, compiled by frame_writer.py."""
REMEDY: Final = (
    "Run `python -m bridge.install.connector install` and `python -m bridge.install.frame_writer install`, or set "
    f"{JARS_VARIABLE} to the directory of the jars."
)

POM: Final = f"""\
<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>delay-bridge</groupId>
  <artifactId>spark-connector</artifactId>
  <version>1</version>
  <packaging>pom</packaging>
  <dependencies>
    <dependency>
      <groupId>org.apache.spark</groupId>
      <artifactId>spark-sql-kafka-0-10_{SCALA}</artifactId>
      <version>{{version}}</version>
    </dependency>
    <dependency>
      <groupId>com.globalmentor</groupId>
      <artifactId>hadoop-bare-naked-local-fs</artifactId>
      <version>0.1.0</version>
      <exclusions><exclusion><groupId>*</groupId><artifactId>*</artifactId></exclusion></exclusions>
    </dependency>
  </dependencies>
</project>
"""


def jars() -> list[Path]:
    """The connector's jars for `spark.jars`: from the directory DELAY_BRIDGE_JARS, else from beside the environment.

    Raises EnvironmentFailure, with the remedy, if one is missing or belongs to another version of Spark.
    """
    named = os.environ.get(JARS_VARIABLE)
    directory = Path(named) if named else installed_directory()
    if not _complete(directory) or not Path(directory, FRAME_WRITER).is_file():
        raise EnvironmentFailure(
            "Spark's Kafka connector is not installed in the version that PySpark requires",
            hint=REMEDY,
            directory=directory,
            version=installed.spark_version(),
            code="DB-3021",
        )
    return sorted(directory.glob("*.jar"))


def install_connector(into: Path) -> list[Path]:
    """Resolve the jars into the directory `into` if they are missing; jars of another version are replaced."""
    if into.is_dir() and not _complete(into):
        # Moved aside in one step, so that no other process sees a directory with the jars of two versions.
        with tempfile.TemporaryDirectory(prefix=f".{into.name}.", dir=into.parent) as scratch:
            into.rename(Path(scratch, "replaced"))
    shipped = _shipped()
    return maven.resolve_jars(
        POM.format(version=installed.spark_version()), into, keep=lambda jar: artifact(jar) not in shipped
    )


def installed_directory() -> Path:
    """The default directory of the jars, beside the Python environment."""
    return Path(sys.prefix, "share", "delay-bridge", "jars")


def artifact(jar: Path) -> str:
    """A jar's name without its version: `kafka-clients` for `kafka-clients-3.9.0.jar`."""
    # A version begins with numbers and dots; the `-0-10_2.13` in the connector's own name does not.
    return re.sub(r"-\d+(\.\d+)+[^/]*\.jar$", "", jar.name)


def _complete(directory: Path) -> bool:
    present = list(directory.glob("*.jar"))
    connector = f"{NEEDED[0]}-{installed.spark_version()}.jar"
    return {artifact(jar) for jar in present}.issuperset(NEEDED) and any(jar.name == connector for jar in present)


def _shipped() -> frozenset[str]:
    """Names of the jars inside PySpark. With two versions on the class path, the choice would be arbitrary."""
    return frozenset(artifact(jar) for jar in installed.shipped())


def run_step(step: Callable[[Path], Iterable[Path]]) -> int:
    """The program of a step of the installation; it prints the paths that `step` returns."""
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["install"])
    parser.add_argument("--into", type=Path, default=installed_directory(), metavar="DIR")
    try:
        print(*step(parser.parse_args().into.absolute()), sep="\n")
    except BridgeError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(run_step(install_connector))
