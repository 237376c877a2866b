"""Spark's JVM: its environment, and its output.

The environment is the bridge's own. A host's Spark or Hadoop installation announces itself by variables (SPARK_HOME,
HADOOP_CONF_DIR and their kind), which would put other jars on the class path, or another file system under paths.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections import deque
from collections.abc import Iterable, MutableMapping
from contextlib import suppress
from pathlib import Path
from subprocess import STDOUT
from typing import IO, TYPE_CHECKING, Any, Final

import structlog

from bridge.errors import EnvironmentFailure
from bridge.spark.installed import home

if TYPE_CHECKING:
    from pyspark import SparkConf

NICE: Final = 10
"""Of the JVM: where processors are short, delivery, the plain reader and brokers go before its start and compiler."""
FOREIGN: Final = re.compile(r"_?(SPARK|PYSPARK|HADOOP|HDFS|HIVE|MAPRED|YARN)_\w*")
"""Variables by which Spark and Hadoop find an installation, its configuration, and arguments."""
OF_YARN: Final = re.compile(r"(HADOOP|HDFS|YARN)_\w*")
"""Those without which no YARN cluster is found."""
REASON_LINES: Final = 20
"""Last lines of output that are searched for the reason of a JVM that does not start."""
_LEVEL: Final = re.compile(r"\S+ \S+ (ERROR|WARN|INFO|FATAL) ")
_REASON: Final = re.compile(
    r"Error|Exception|error:|not set|not found|[Cc]annot|Could not|No space|Permission denied|Unrecognized|Invalid"
)
_NO_JAVA: Final = re.compile(r"JAVA_HOME is not set|java: (not found|No such file)|java: command not found")
_USUAL: Final = re.compile(
    r"WARNING: Using incubator modules|Using Spark's default log4j profile|Setting default log level"
    r"|To adjust logging level|WARN NativeCodeLoader|spark\.local\.dir will be overridden"
)
"""What every start prints."""

log = structlog.get_logger("bridge.spark.jvm")


def own_environment(environment: MutableMapping[str, str], master: str) -> None:
    """Make `environment`, which the JVM inherits, the bridge's own for this Spark master."""
    for name in list(environment):
        if FOREIGN.fullmatch(name) and not (master.startswith("yarn") and OF_YARN.fullmatch(name)):
            del environment[name]
    environment["SPARK_HOME"] = str(home())
    environment["PYSPARK_PYTHON"] = sys.executable
    environment.setdefault("MALLOC_ARENA_MAX", "2")  # fewer, fuller heaps of glibc
    if master.startswith("local"):
        # Else the JVM looks its own host's name up, and does not start where no name server knows it.
        environment["SPARK_LOCAL_IP"] = "127.0.0.1"
        environment["SPARK_LOCAL_HOSTNAME"] = "localhost"


def launched(conf: SparkConf) -> Any:
    """PySpark's gateway to a new JVM. Raises EnvironmentFailure with the JVM's own reason.

    It gets a Linux session of its own: without control groups the kernel shares processors out by session
    (`sched_autogroup_enabled`), and niceness counts within one only. It ends with the pipe to its standard input.
    """
    from pyspark.java_gateway import launch_gateway

    output = Output()
    try:
        options = {"start_new_session": True, "stdout": output.write_end, "stderr": STDOUT}
        gateway: Any = launch_gateway(conf, options)  # type: ignore[no-untyped-call]
    except Exception as error:
        output.close()
        raise _not_started(output.last(), error) from error
    output.close()
    with suppress(OSError):
        Path(f"/proc/{gateway.proc.pid}/autogroup").write_text(f"{NICE}")
    return gateway


class Output:
    """Standard output and error of a JVM, as events of the log, on a thread of its own until the JVM ends."""

    def __init__(self) -> None:
        read_end, self.write_end = os.pipe()
        self._last: deque[str] = deque(maxlen=REASON_LINES)
        self._open = True
        self._thread = threading.Thread(target=self._run, args=(os.fdopen(read_end, "rb"),), name="jvm", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """This process writes nothing; the JVM has its own end of the pipe by now, or none."""
        if self._open:
            self._open = False
            os.close(self.write_end)

    def last(self) -> list[str]:
        """The last lines of a JVM that has ended."""
        self._thread.join(5.0)
        return list(self._last)

    def _run(self, lines: IO[bytes]) -> None:
        with lines:
            for raw in lines:
                line = raw.decode("utf-8", "replace").rstrip()
                if line:
                    self._last.append(line)
                    _tell(line)


def _tell(line: str) -> None:
    if _USUAL.search(line):
        log.debug("jvm-output", line=line)
        return
    found = _LEVEL.match(line)
    if found and found[1] in ("ERROR", "FATAL"):
        log.error("jvm-output", line=line)
    else:
        log.warning("jvm-output", line=line)


def _not_started(lines: Iterable[str], error: Exception) -> EnvironmentFailure:
    said = list(lines)
    reason = next((line for line in said if _REASON.search(line)), said[-1] if said else str(error))
    if any(_NO_JAVA.search(line) for line in said):
        hint = "Install Java 17 (Debian: openjdk-17-jre-headless), or let JAVA_HOME name it."
    else:
        hint = "The reason is Java's; the lines above (jvm-output) have the rest."
    return EnvironmentFailure("Spark does not start", hint=hint, reason=reason.strip(), code="DB-3015")
