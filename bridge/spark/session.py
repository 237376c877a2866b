"""The Spark session, set up for small, latency-bound work in a sidecar.

Measured on two cores (docs/architecture.md has the table): what an analytics job wants from Spark, wide parallelism
and a fully optimising compiler, costs a sidecar memory and its tail latency. Every default here can be overridden by
`spark.conf`, except what decoding and recovery rest on.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import pyspark
from pyspark import SparkConf, SparkContext
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession

from bridge.errors import BridgeError, EnvironmentFailure
from bridge.settings.clients import java
from bridge.settings.model import Settings, plain
from bridge.spark.errors import named_failure

LOG_LEVEL: Final = "ERROR"
ARCHIVE: Final = "spark-classes.jsa"
NICE: Final = 10
"""Of the JVM: where processors are short, delivery, the plain reader and brokers go before its start and compiler."""
JVM_OPTIONS: Final = " ".join(
    (
        # A young generation that holds what is on its way. With twice as much, a first backlog is read 7 % faster, for
        # 58 MiB.
        "-XX:+UseSerialGC -Xmn64m -XX:SurvivorRatio=3 -Xss4m",
        # The heap begins where load will have it, and shrinks to what lives when there is none: by default it would
        # begin at a 64th of the machine's memory, and keep more than half of itself free.
        "-XX:InitialHeapSize=176m -XX:MinHeapSize=128m -XX:MinHeapFreeRatio=20 -XX:MaxHeapFreeRatio=40",
        # The optimising compiler takes up a method after twenty times as many calls: what only a start runs it leaves
        # alone (it took a third of the CPU of a start), and what every record runs it reaches within a minute.
        "-XX:Tier4InvocationThreshold=100000 -XX:Tier4MinInvocationThreshold=12000",
        "-XX:Tier4CompileThreshold=300000 -XX:Tier4BackEdgeThreshold=800000",
        # What the compiler has used is given back. (The first Java 17 do not know the option.)
        "-XX:+IgnoreUnrecognizedVMOptions -XX:TrimNativeHeapInterval=10000",
        # One connection makes Arrow's batches: one arena for them is enough.
        "-Dio.netty.allocator.numDirectArenas=1 -Dio.netty.allocator.numHeapArenas=0",
        "-XX:+ExitOnOutOfMemoryError",
    )
)

DEFAULTS: Final = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.ui.explainMode": "simple",
    "spark.sql.streaming.metricsEnabled": "false",
    "spark.sql.streaming.numRecentProgressUpdates": "2",
    "spark.sql.streaming.minBatchesToRetain": "2",
    "spark.sql.streaming.stopTimeout": "3s",
    "spark.sql.ui.retainedExecutions": "1",
    "spark.ui.retainedJobs": "1",
    "spark.ui.retainedStages": "1",
    "spark.ui.retainedTasks": "10",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.maxResultSize": "1g",
    "spark.cleaner.periodicGC.interval": "30min",
}

REQUIRED: Final = {
    # Options of the source hold logins and keys: wherever Spark prints options, it prints these as redacted.
    "spark.redaction.regex": "(?i)secret|password|token|access[.]?key|jaas|keystore",
    "spark.sql.redaction.options.regex": "(?i)url|secret|password|token|jaas|keystore",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.ansi.enabled": "true",
    "spark.sql.parser.escapedStringLiterals": "false",
    "spark.sql.variable.substitute": "false",
    "spark.task.maxFailures": "1",
    # The query's log is not our recovery point: no CRC files for it; and no process for the mode of each file.
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
    "spark.hadoop.fs.file.impl": "com.globalmentor.apache.hadoop.fs.NakedLocalFileSystem",
}


_JVM_RUNS: Final = threading.Event()

SPARE_SLOTS: Final = 16
"""For partitions that are added while the bridge runs, and for batch jobs. An unused slot costs nothing."""


def with_slots(master: str, partitions: int) -> str:
    """`local`, `local[N]` or `local[*]` with a slot for each partition and some to spare, and one attempt for each
    task; another master as it is.

    A task of real-time mode keeps its slot, and one that finds none is never run, without an error. (Slots are threads,
    not cores.) A task that is tried again sends its whole batch again: the query is rather started anew.
    """
    local = re.fullmatch(r"local(?:\[(\d+|\*)(?:,\d+)?\])?", master.replace(" ", ""))
    if local is None:
        return master
    wanted = int(local[1]) if local[1] and local[1] != "*" else 1
    return f"local[{max(wanted, partitions + SPARE_SLOTS)},1]"


@contextmanager
def quiet(session: SparkSession) -> Iterator[None]:
    """Without Spark's log of errors: a query that is stopped tells a hundred lines of interrupted tasks."""
    session.sparkContext.setLogLevel("OFF")
    try:
        yield
    finally:
        session.sparkContext.setLogLevel(LOG_LEVEL)


class SessionStart:
    """The session, made on a thread of its own: delivery does not wait for it."""

    def __init__(self, make: Callable[[], SparkSession], on_failure: Callable[[BridgeError], None]) -> None:
        """`make` raises BridgeError, which is told to `on_failure` and by `session`."""
        self._make = make
        self._on_failure = on_failure
        self.session: Future[SparkSession] = Future()
        self.thread = threading.Thread(target=self._run, name="spark-start", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        with suppress(OSError):  # no Linux, where this is for a thread and what it starts
            own = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, own, max(NICE, os.getpriority(os.PRIO_PROCESS, own)))
        try:
            self.session.set_result(self._make())
        except Exception as error:  # noqa: BLE001 - told to the application
            failure = named_failure("start", error)
            self.session.set_exception(failure)
            self._on_failure(failure)


def start(settings: Settings, jars: Sequence[Path], partitions: int = 1) -> SparkSession:
    """The process's session with the Kafka connector's jars, and slots for so many partitions. Raises
    EnvironmentFailure when Java does not start, or a slot is missing."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ.setdefault("MALLOC_ARENA_MAX", "2")  # of the JVM that is about to start: fewer, fuller heaps of glibc
    if settings.spark.master.startswith("local"):
        # Else the JVM looks its own host's name up, and does not start where no name server knows it.
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        os.environ.setdefault("SPARK_LOCAL_HOSTNAME", "localhost")
    conf = SparkConf().setAll(list(properties(settings, jars, partitions).items()))
    try:
        if SparkContext._gateway is None:
            SparkContext._ensure_initialized(gateway=_launched(conf), conf=conf)
        _JVM_RUNS.set()
        SparkContext(conf=conf)
        session = SparkSession.builder.getOrCreate()
    except Exception as error:
        raise EnvironmentFailure(
            f"Spark does not start: {error}",
            hint="Java 17 must be installed; look at the lines above for Java's reason.",
            code="DB-3015",
        ) from error
    session.sparkContext.setLogLevel(LOG_LEVEL)
    return session


def jvm(timeout_s: float) -> Any | None:
    """The JVM, with the connector's classes, as soon as it runs: a second before the session is there, or more. None
    where it does not yet."""
    if SparkContext._jvm is None:
        _JVM_RUNS.wait(timeout_s)
    return SparkContext._jvm


def properties(settings: Settings, jars: Sequence[Path], partitions: int) -> dict[str, str]:
    """Spark's, of a session with these jars, and slots for so many partitions."""
    heap = f"{settings.spark.driver_memory >> 20}m"
    user = {name: plain(value) for name, value in settings.spark.conf.items()}
    # On the class path from the first moment: Spark needs its file system before it looks at `spark.jars`. PySpark's
    # own follow by name: Spark would add them in the order of the directory, with which no archive fits for long.
    before = user.pop("spark.driver.extraClassPath", None)
    class_path = [*map(str, jars), *([before] if before else map(str, shipped()))]
    archived = [] if before else _archived(jars)
    options = " ".join(
        (JVM_OPTIONS, *archived, *_allowed_urls(settings), user.pop("spark.driver.extraJavaOptions", ""))
    ).strip()
    chosen = {
        "spark.app.name": f"delay-bridge {settings.bridge.id}",
        "spark.master": with_slots(settings.spark.master, partitions),
        "spark.driver.memory": heap,
        "spark.driver.extraJavaOptions": options,
        "spark.driver.extraClassPath": os.pathsep.join(class_path),
    }
    if not settings.spark.master.startswith("local"):
        chosen["spark.jars"] = ",".join(str(jar) for jar in jars)
        chosen["spark.driver.host"] = chosen["spark.driver.bindAddress"] = str(settings.spark.executor_host)
        executor_options = " ".join((*_allowed_urls(settings), user.pop("spark.executor.extraJavaOptions", "")))
        if executor_options.strip():
            chosen["spark.executor.extraJavaOptions"] = executor_options.strip()
    return DEFAULTS | chosen | user | REQUIRED


def start_local(settings: Settings, jars: Sequence[Path]) -> SparkSession:
    """The same beside this process, wherever the bridge has its executors. Raises EnvironmentFailure."""
    local = settings.spark.model_copy(update={"master": "local", "executor_host": None})
    return start(settings.model_copy(update={"spark": local}), jars)


def _launched(conf: SparkConf) -> Any:
    """The JVM. It gets a Linux session of its own: without control groups the kernel shares processors out by session
    (`sched_autogroup_enabled`), and niceness counts within one only. It ends with the pipe to its standard input."""
    gateway: Any = launch_gateway(conf, {"start_new_session": True})  # type: ignore[no-untyped-call]
    with suppress(OSError):
        Path(f"/proc/{gateway.proc.pid}/autogroup").write_text(f"{NICE}")
    return gateway


def _allowed_urls(settings: Settings) -> list[str]:
    """Kafka's Java client asks a token endpoint only if a property of the JVM names it (CVE-2025-27817)."""
    url = java(settings).get("kafka.sasl.oauthbearer.token.endpoint.url")
    return [] if url is None else [f'"-Dorg.apache.kafka.sasl.oauthbearer.allowed.urls={url}"']


def archive(jars: Sequence[Path]) -> Path:
    """Where the archive of classes is that goes with these jars (class_archive.py)."""
    return jars[0].parent / ARCHIVE


def shipped() -> list[Path]:
    """The jars inside PySpark."""
    return sorted(Path(pyspark.__file__).parent.joinpath("jars").glob("*.jar"))


def _archived(jars: Sequence[Path]) -> list[str]:
    """The JVM's options for the archive, if there is one. It is mapped at the address that it was made for. At a random
    one (from Java 20 on, and in some builds of 17), a start writes all addresses in it anew: that takes 0.1 s, and the
    memory of every page."""
    found = archive(jars)
    mapped = [f'"-XX:SharedArchiveFile={found}"', "-XX:+UnlockDiagnosticVMOptions", "-XX:ArchiveRelocationMode=0"]
    return mapped if found.is_file() else []


def stop() -> None:
    """End the process's session, if there is one, and its JVM with it. One that has died says so where it was used."""
    with suppress(Exception):
        session = SparkSession._instantiatedSession
        if session is not None:
            session.stop()
