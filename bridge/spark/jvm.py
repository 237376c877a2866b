"""Spark's JVM: its environment and its output.

The environment is isolated. The variables of a Spark or Hadoop installation on the host (SPARK_HOME, HADOOP_CONF_DIR
and others) would put other jars on the class path, or resolve paths in another file system.
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
"""The niceness of a bridge's JVM: on busy processors, delivery, the plain reader and brokers precede its start and
compiler. That of a rebuild has the niceness of its command."""
FOREIGN: Final = re.compile(r"_?(SPARK|PYSPARK|HADOOP|HDFS|HIVE|MAPRED|YARN)_\w*")
"""Variables with the installation, configuration and arguments of Spark and Hadoop."""
OF_YARN: Final = re.compile(r"(HADOOP|HDFS|YARN)_\w*")
"""The variables that a YARN cluster needs."""
REASON_LINES: Final = 20
"""The number of last lines of output that are searched for the reason of a failed start."""
_LEVEL: Final = re.compile(r"\S+ \S+ (ERROR|WARN|INFO|FATAL) ")
_REASON: Final = re.compile(
    r"Error|Exception|error:|not set|not found|[Cc]annot|Could not|No space|Permission denied|Unrecognized|Invalid"
)
_NO_JAVA: Final = re.compile(r"JAVA_HOME is not set|java: (not found|No such file)|java: command not found")
_USUAL: Final = re.compile(
    r"WARNING: Using incubator modules|Using Spark's default log4j profile|Setting default log level"
    r"|To adjust logging level|WARN NativeCodeLoader|spark\.local\.dir will be overridden"
)
"""The output of every normal start."""

log = structlog.get_logger("bridge.spark.jvm")


def own_environment(environment: MutableMapping[str, str], master: str) -> None:
    """Remove foreign variables from `environment`, which the JVM inherits, and set those for this Spark master."""
    for name in list(environment):
        if FOREIGN.fullmatch(name) and not (master.startswith("yarn") and OF_YARN.fullmatch(name)):
            del environment[name]
    environment["SPARK_HOME"] = str(home())
    environment["PYSPARK_PYTHON"] = sys.executable
    environment.setdefault("MALLOC_ARENA_MAX", "2")  # fewer, fuller heaps of glibc
    if master.startswith("local"):
        # Without it the JVM resolves the name of its own host, and does not start if no name server knows it.
        environment["SPARK_LOCAL_IP"] = "127.0.0.1"
        environment["SPARK_LOCAL_HOSTNAME"] = "localhost"


def launched(conf: SparkConf) -> Any:
    """PySpark's gateway to a new JVM. Raises EnvironmentFailure with the JVM's own reason.

    The JVM gets a separate Linux session: without control groups the kernel distributes processors by session
    (`sched_autogroup_enabled`), and niceness only counts within a session. So the session gets the niceness of this
    thread. The JVM ends with the pipe to its standard input.
    """
    from pyspark.java_gateway import launch_gateway

    output = JvmOutput()
    try:
        options = {"start_new_session": True, "stdout": output.write_end, "stderr": STDOUT}
        gateway: Any = launch_gateway(conf, options)  # type: ignore[no-untyped-call]
    except Exception as error:
        output.close()
        raise _not_started(output.last(), error) from error
    output.close()
    with suppress(OSError):
        niceness = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        Path(f"/proc/{gateway.proc.pid}/autogroup").write_text(f"{niceness}")
    return gateway


class JvmOutput:
    """Logs the standard output and error of a JVM, in a thread that runs until the JVM ends."""

    def __init__(self) -> None:
        read_end, self.write_end = os.pipe()
        self._last: deque[str] = deque(maxlen=REASON_LINES)
        self._open = True
        self._thread = threading.Thread(target=self._run, args=(os.fdopen(read_end, "rb"),), name="jvm", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close this process's end of the pipe. The JVM has its own by now, or has not started."""
        if self._open:
            self._open = False
            os.close(self.write_end)

    def last(self) -> list[str]:
        """The last lines of output, after the end of the JVM."""
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
    level = _LEVEL.match(line)
    if level and level[1] in ("ERROR", "FATAL"):
        log.error("jvm-output", line=line)
    else:
        log.warning("jvm-output", line=line)


def _not_started(lines: Iterable[str], error: Exception) -> EnvironmentFailure:
    said = list(lines)
    reason = next((line for line in said if _REASON.search(line)), said[-1] if said else str(error))
    if any(_NO_JAVA.search(line) for line in said):
        hint = "Install Java 17 (Debian: openjdk-17-jre-headless), or set JAVA_HOME to an installation."
    else:
        hint = "The reason comes from Java; the lines above (jvm-output) have the details."
    return EnvironmentFailure("Spark does not start", hint=hint, reason=reason.strip(), code="DB-3015")
