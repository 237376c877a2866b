"""The Spark session, configured for small, latency-bound work in a sidecar.

Analytics jobs need wide parallelism and a fully optimising compiler. In a sidecar these cost memory and tail latency
(docs/decisions.md has the measurements). `spark.conf` can override every default here, except those that decoding
and recovery rely on.
"""

from __future__ import annotations

import atexit
import importlib
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog

from bridge.errors import BridgeError, EnvironmentFailure
from bridge.settings.clients import allowed_urls
from bridge.settings.model import Settings
from bridge.settings.secrets import unmasked
from bridge.spark import jvm as java_process
from bridge.spark.errors import named_failure
from bridge.spark.installed import shipped
from bridge.spark.scratch import Scratch, temporary

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOG_LEVEL: Final = "ERROR"
ARCHIVE: Final = "spark-classes.jsa"
JVM_OPTIONS: Final = " ".join(
    (
        # A young generation that holds the records in transit. Twice its size reads a first backlog 7 % faster, for
        # 58 MiB.
        "-XX:+UseSerialGC -Xmn64m -XX:SurvivorRatio=3 -Xss4m",
        # The heap begins at its size under load, and shrinks to the live objects without load. By default it would
        # begin at a 64th of the machine's memory, and keep more than half of itself free.
        "-XX:InitialHeapSize=176m -XX:MinHeapSize=128m -XX:MinHeapFreeRatio=20 -XX:MaxHeapFreeRatio=40",
        # The optimising compiler waits for twenty times as many calls. It skips methods that only a start runs (a third
        # of the CPU of a start), and reaches the methods that run for each record within a minute.
        "-XX:Tier4InvocationThreshold=100000 -XX:Tier4MinInvocationThreshold=12000",
        "-XX:Tier4CompileThreshold=300000 -XX:Tier4BackEdgeThreshold=800000",
        # Returns the compiler's memory to the system. (The first releases of Java 17 do not have the option.)
        "-XX:+IgnoreUnrecognizedVMOptions -XX:TrimNativeHeapInterval=10000",
        # One connection creates Arrow's batches: a single arena is enough.
        "-Dio.netty.allocator.numDirectArenas=1 -Dio.netty.allocator.numHeapArenas=0",
        "-XX:+ExitOnOutOfMemoryError",
        # Prevents a file in the temporary directory that a killed JVM would leave behind.
        "-XX:-UsePerfData",
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
    # Options of the source contain logins and keys, which Spark must redact when it prints options.
    "spark.redaction.regex": "(?i)secret|password|token|access[.]?key|jaas|keystore",
    "spark.sql.redaction.options.regex": "(?i)url|secret|password|token|jaas|keystore",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.ansi.enabled": "true",
    "spark.sql.parser.escapedStringLiterals": "false",
    "spark.sql.variable.substitute": "false",
    # The query's log is not the bridge's recovery point: no CRC files, and no process for the mode of each file.
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
    "spark.hadoop.fs.file.impl": "com.globalmentor.apache.hadoop.fs.NakedLocalFileSystem",
}


_WANTED: Final = threading.Event()
"""Set when a caller needs Java."""

log = structlog.get_logger("bridge.spark.session")

SPARE_SLOTS: Final = 16
"""Slots for partitions that are added while the bridge runs. An unused slot costs nothing."""


def with_slots(master: str, partitions: int, attempts: int = 1) -> str:
    """`local`, `local[N]` or `local[*]` with a slot for each partition, spare slots, and these attempts for each task
    (`spark.task.maxFailures` does not count there). Another master stays unchanged.

    A task of real-time mode keeps its slot. A task without a slot never runs, and causes no error. (Slots are threads,
    not cores.) A second attempt of a task of the query would send its whole batch again, so the query has one, and is
    started anew instead.
    """
    local = re.fullmatch(r"local(?:\[(\d+|\*)(?:,\d+)?\])?", master.replace(" ", ""))
    if local is None:
        return master
    wanted = int(local[1]) if local[1] and local[1] != "*" else 1
    return f"local[{max(wanted, partitions + SPARE_SLOTS)},{attempts}]"


@contextmanager
def quiet(session: SparkSession) -> Iterator[None]:
    """Suppress Spark's log of errors: a stopping query logs a hundred lines about interrupted tasks."""
    session.sparkContext.setLogLevel("OFF")
    try:
        yield
    finally:
        session.sparkContext.setLogLevel(LOG_LEVEL)


class Files:
    """Spark's own files: a scratch directory during the life of the process."""

    def __init__(self) -> None:
        self._scratch: Scratch | None = None
        self._noted: list[Path] = []

    def path(self) -> Path:
        """The directory, created if missing, always at the path that the JVM knows. Raises EnvironmentFailure."""
        if self._scratch is None:
            self._scratch = Scratch(temporary())
            atexit.register(self._scratch.close)
        elif not self._scratch.is_there():
            self._scratch.renew()
        return self._scratch.path

    def note(self) -> None:
        """Note the files of a new session."""
        self._noted = [path for path in self.path().iterdir() if path.name.startswith(("blockmgr-", "spark-"))]

    def are_there(self) -> bool:
        """Whether the session's files still exist."""
        return self._scratch is not None and self._scratch.is_there() and all(path.exists() for path in self._noted)


_FILES: Final = Files()


class SessionStart:
    """Creates the session in a separate thread, so that delivery does not wait for it."""

    def __init__(
        self, make: Callable[[], SparkSession], on_failure: Callable[[BridgeError], None], after_s: float = 0
    ) -> None:
        """`make` may raise BridgeError; `on_failure` gets it, and `session` raises it. `make` is called after
        `after_s`, or as soon as the session is wanted."""
        self._make = make
        self._on_failure = on_failure
        self._after_s = after_s
        self.session: Future[SparkSession] = Future()
        self.thread = threading.Thread(target=self._run, name="spark-start", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        _WANTED.wait(self._after_s)
        self.session.set_running_or_notify_cancel()
        try:
            # An import with low priority would keep the interpreter's lock from delivery for a long time.
            importlib.import_module("pyspark.sql")
            with suppress(OSError):  # on Linux this applies to the thread and its children; elsewhere it may fail
                own = threading.get_native_id()
                os.setpriority(os.PRIO_PROCESS, own, max(java_process.NICE, os.getpriority(os.PRIO_PROCESS, own)))
            self.session.set_result(self._make())
        except Exception as error:  # noqa: BLE001 - told to the application
            failure = named_failure("start", error)
            self.session.set_exception(failure)
            self._on_failure(failure)


def start(settings: Settings, jars: Sequence[Path], partitions: int = 1, attempts: int = 1) -> SparkSession:
    """The process's session with the Kafka connector's jars, slots for `partitions`, and `attempts` for each task.
    Raises EnvironmentFailure if Java does not start, or a slot is missing."""
    from pyspark import SparkConf, SparkContext
    from pyspark.sql import SparkSession

    java_process.own_environment(os.environ, settings.spark.master)
    conf = SparkConf().setAll(list(properties(settings, jars, partitions, _FILES.path(), attempts).items()))
    try:
        if SparkContext._gateway is None:
            SparkContext._ensure_initialized(gateway=java_process.launched(conf), conf=conf)
        SparkContext(conf=conf)
        session = SparkSession.builder.getOrCreate()
    except BridgeError:
        raise
    except Exception as error:
        raise EnvironmentFailure(
            f"Spark does not start: {error}",
            hint="The lines above (jvm-output) contain Java's reason.",
            code="DB-3015",
        ) from error
    session.sparkContext.setLogLevel(LOG_LEVEL)
    _FILES.note()
    return session


def intact(session: SparkSession, make: Callable[[], SparkSession]) -> SparkSession:
    """The process's session, or a new one if a cleaner of temporary directories has removed its files. `session` is the
    first session. Raises the exceptions of `make`."""
    current = _instantiated() or session
    if _FILES.are_there():
        return current
    log.warning("spark-files-gone", directory=str(_FILES.path()))
    with suppress(Exception):  # it may fail without its files; the next session does not need it
        current.sparkContext.setLogLevel("OFF")
        current.stop()
    return make()


def want() -> None:
    """Start Java now instead of after `spark.start_after`: a caller needs it."""
    _WANTED.set()


def properties(
    settings: Settings, jars: Sequence[Path], partitions: int, scratch: Path, attempts: int = 1
) -> dict[str, str]:
    """Spark's properties for a session with these jars, slots for `partitions`, its files in `scratch`, and `attempts`
    for each task."""
    heap = f"{settings.spark.driver_memory >> 20}m"
    user = {name: unmasked(value) for name, value in settings.spark.conf.items()}
    # On the class path from the beginning: Spark needs the file system before it reads `spark.jars`. PySpark's own jars
    # follow sorted by name: Spark would add them in the order of the directory, which soon invalidates an archive.
    before = user.pop("spark.driver.extraClassPath", None)
    class_path = [*map(str, jars), *([before] if before else map(str, shipped()))]
    mapped = [] if before else map(_quoted, _archived(jars))
    options = " ".join(
        (
            *(JVM_OPTIONS, f'"-Djava.io.tmpdir={scratch}"', *mapped, *map(_quoted, allowed_urls(settings))),
            user.pop("spark.driver.extraJavaOptions", ""),
        )
    ).strip()
    chosen = {
        "spark.app.name": f"delay-bridge {settings.bridge.id}",
        "spark.master": with_slots(settings.spark.master, partitions, attempts),
        "spark.driver.memory": heap,
        "spark.driver.extraJavaOptions": options,
        "spark.driver.extraClassPath": os.pathsep.join(class_path),
        "spark.local.dir": str(scratch),
        "spark.jars.ivy": str(scratch / "ivy"),  # by default below the user's home, which may not exist
    }
    if not settings.spark.master.startswith("local"):
        chosen["spark.jars"] = ",".join(str(jar) for jar in jars)
        chosen["spark.driver.host"] = chosen["spark.driver.bindAddress"] = str(settings.spark.executor_host)
        executor_options = " ".join(
            (*map(_quoted, allowed_urls(settings)), user.pop("spark.executor.extraJavaOptions", ""))
        )
        if executor_options.strip():
            chosen["spark.executor.extraJavaOptions"] = executor_options.strip()
    return DEFAULTS | chosen | user | REQUIRED | {"spark.task.maxFailures": str(attempts)}


def _quoted(option: str) -> str:
    """An option in quotes, as Spark parses lists of options."""
    return f'"{option}"'


def archive(jars: Sequence[Path]) -> Path:
    """The path of the class archive for these jars (class_archive.py)."""
    return jars[0].parent / ARCHIVE


def with_classes(jars: Sequence[Path]) -> list[str]:
    """Options for a further JVM. It has Spark's class path, so it can use the archive, and a start takes two thirds of
    the time."""
    return [*_archived(jars), "-cp", os.pathsep.join(map(str, (*jars, *shipped())))]


def _archived(jars: Sequence[Path]) -> list[str]:
    """The JVM's options for the archive, if it exists. It is mapped at its original address. At a random address (the
    default from Java 20 on, and in some builds of 17), a start relocates all its pointers, which takes 0.1 s and
    private memory for every page."""
    if not jars or not archive(jars).is_file():
        return []
    return [f"-XX:SharedArchiveFile={archive(jars)}", "-XX:+UnlockDiagnosticVMOptions", "-XX:ArchiveRelocationMode=0"]


def stop() -> None:
    """End the process's session, if any, and its JVM. The user of a dead session has already had its error."""
    with suppress(Exception):
        session = _instantiated()
        if session is not None:
            session.stop()


def _instantiated() -> SparkSession | None:
    """The process's session, or None; never imports PySpark."""
    made = getattr(sys.modules.get("pyspark.sql"), "SparkSession", None)
    session: SparkSession | None = getattr(made, "_instantiatedSession", None)
    return session


def end_jvm() -> None:
    """Kill a hanging JVM, so that calls into it return; it would not react to anything else."""
    context = getattr(sys.modules.get("pyspark"), "SparkContext", None)
    process = getattr(getattr(context, "_gateway", None), "proc", None)
    if process is not None:
        process.kill()
