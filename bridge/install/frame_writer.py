"""The bridge's Java, compiled against the jars inside PySpark: the sink of the ingest query, and a client for `check`.

python -m bridge.install.frame_writer install [--into DIR]     beside the connector's jars (`make install`, and images)
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Final

from bridge.errors import EnvironmentFailure
from bridge.install import connector
from bridge.spark import installed

SOURCES: Final = sorted((Path(__file__).parents[1] / "ingest" / "java").glob("*.java"))
RELEASE: Final = "17"
NEWEST: Final = (1980, 1, 1, 0, 0, 0)
"""The date of every file in the jar: the same source makes the same jar."""


def install_frame_writer(into: Path) -> Path:
    """Compile the sources into a jar of the directory `into`. Raises EnvironmentFailure."""
    javac = _javac()
    classes = os.pathsep.join([str(installed.home() / "jars" / "*"), str(into / "*")])
    jar = into / connector.FRAME_WRITER
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        command = [javac, "--release", RELEASE, "-nowarn", "-proc:none", "-cp", classes, "-d", scratch]
        command += map(str, SOURCES)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise EnvironmentFailure(
                "the bridge's Java does not compile",
                hint=done.stderr[-2000:],
                version=installed.spark_version(),
                code="DB-3032",
            )
        made = into / f".{jar.name}.{os.getpid()}"
        with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
            for path in sorted(Path(scratch).rglob("*.class")):
                archive.writestr(zipfile.ZipInfo(str(path.relative_to(scratch)), NEWEST), path.read_bytes())
    made.replace(jar)
    return jar


def _javac() -> str:
    home = os.environ.get("JAVA_HOME")
    javac = str(Path(home, "bin", "javac")) if home else shutil.which("javac")
    if javac is None or shutil.which(javac) is None:
        raise EnvironmentFailure(
            "no Java compiler was found", hint="Install a JDK 17 (Debian: openjdk-17-jdk-headless).", code="DB-3033"
        )
    return javac


if __name__ == "__main__":
    sys.exit(connector.run_step(lambda into: [install_frame_writer(into)]))
