"""The Spark session, set up for small, latency-bound work in a sidecar.

Measured on two cores (docs/architecture.md has the table): what an analytics job wants from Spark, wide parallelism
and a fully optimising compiler, costs a sidecar memory and its tail latency. Every default here can be overridden by
`spark.conf`, except what decoding and recovery rest on.
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
from bridge.settings.model import Settings, plain
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
        # Else a file in the temporary directory, which a killed JVM leaves there.
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


_WANTED: Final = threading.Event()
"""Somebody waits for what only Java can do."""

log = structlog.get_logger("bridge.spark.session")

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


class Files:
    """Spark's own files: a scratch directory for as long as the process lives."""

    def __init__(self) -> None:
        self._scratch: Scratch | None = None
        self._noted: list[Path] = []

    def path(self) -> Path:
        """The directory; it is made where it is not there. The JVM knows it by this path. Raises EnvironmentFailure."""
        if self._scratch is None:
            self._scratch = Scratch(temporary())
            atexit.register(self._scratch.close)
        elif not self._scratch.is_there():
            self._scratch.renew()
        return self._scratch.path

    def note(self) -> None:
        """A session is there, with its files."""
        self._noted = [path for path in self.path().iterdir() if path.name.startswith(("blockmgr-", "spark-"))]

    def are_there(self) -> bool:
        """Whether the session's files still are."""
        return self._scratch is not None and self._scratch.is_there() and all(path.exists() for path in self._noted)


_FILES: Final = Files()


class SessionStart:
    """The session, made on a thread of its own: delivery does not wait for it."""

    def __init__(
        self, make: Callable[[], SparkSession], on_failure: Callable[[BridgeError], None], after_s: float = 0
    ) -> None:
        """`make` raises BridgeError, which is told to `on_failure` and by `session`. It is called after so long, or as
        soon as the session is wanted."""
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
            # With a low priority, importing would keep the interpreter's lock from delivery for long.
            importlib.import_module("pyspark.sql")
            with suppress(OSError):  # no Linux, where this is for a thread and what it starts
                own = threading.get_native_id()
                os.setpriority(os.PRIO_PROCESS, own, max(java_process.NICE, os.getpriority(os.PRIO_PROCESS, own)))
            self.session.set_result(self._make())
        except Exception as error:  # noqa: BLE001 - told to the application
            failure = named_failure("start", error)
            self.session.set_exception(failure)
            self._on_failure(failure)


def start(settings: Settings, jars: Sequence[Path], partitions: int = 1) -> SparkSession:
    """The process's session with the Kafka connector's jars, and slots for so many partitions. Raises
    EnvironmentFailure when Java does not start, or a slot is missing."""
    from pyspark import SparkConf, SparkContext
    from pyspark.sql import SparkSession

    java_process.own_environment(os.environ, settings.spark.master)
    conf = SparkConf().setAll(list(properties(settings, jars, partitions, _FILES.path()).items()))
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
            hint="The lines above (jvm-output) have Java's reason.",
            code="DB-3015",
        ) from error
    session.sparkContext.setLogLevel(LOG_LEVEL)
    _FILES.note()
    return session


def intact(session: SparkSession, make: Callable[[], SparkSession]) -> SparkSession:
    """The process's session; made anew where a cleaner of temporary directories has removed its files. `session` is the
    first one. Raises what `make` raises."""
    current = _instantiated() or session
    if _FILES.are_there():
        return current
    log.warning("spark-files-gone", directory=str(_FILES.path()))
    with suppress(Exception):  # it may miss its files; the next one does not need it
        current.sparkContext.setLogLevel("OFF")
        current.stop()
    return make()


def want() -> None:
    """Start Java now, where a start waits (`spark.start_after`): it is asked something."""
    _WANTED.set()


def properties(settings: Settings, jars: Sequence[Path], partitions: int, scratch: Path) -> dict[str, str]:
    """Spark's, of a session with these jars, slots for so many partitions, and its files in `scratch`."""
    heap = f"{settings.spark.driver_memory >> 20}m"
    user = {name: plain(value) for name, value in settings.spark.conf.items()}
    # On the class path from the first moment: Spark needs its file system before it looks at `spark.jars`. PySpark's
    # own follow by name: Spark would add them in the order of the directory, with which no archive fits for long.
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
        "spark.master": with_slots(settings.spark.master, partitions),
        "spark.driver.memory": heap,
        "spark.driver.extraJavaOptions": options,
        "spark.driver.extraClassPath": os.pathsep.join(class_path),
        "spark.local.dir": str(scratch),
        "spark.jars.ivy": str(scratch / "ivy"),  # by default below the user's home, which a user may lack
    }
    if not settings.spark.master.startswith("local"):
        chosen["spark.jars"] = ",".join(str(jar) for jar in jars)
        chosen["spark.driver.host"] = chosen["spark.driver.bindAddress"] = str(settings.spark.executor_host)
        executor_options = " ".join(
            (*map(_quoted, allowed_urls(settings)), user.pop("spark.executor.extraJavaOptions", ""))
        )
        if executor_options.strip():
            chosen["spark.executor.extraJavaOptions"] = executor_options.strip()
    return DEFAULTS | chosen | user | REQUIRED


def _quoted(option: str) -> str:
    """As Spark reads an option among others."""
    return f'"{option}"'


def archive(jars: Sequence[Path]) -> Path:
    """Where the archive of classes is that goes with these jars (class_archive.py)."""
    return jars[0].parent / ARCHIVE


def with_classes(jars: Sequence[Path]) -> list[str]:
    """Options of a JVM beside Spark's: it has the same class path, so that the archive fits, and a start takes two
    thirds of the time."""
    return [*_archived(jars), "-cp", os.pathsep.join(map(str, (*jars, *shipped())))]


def _archived(jars: Sequence[Path]) -> list[str]:
    """The JVM's options for the archive, if there is one. It is mapped at the address that it was made for. At a random
    one (from Java 20 on, and in some builds of 17), a start writes all addresses in it anew: that takes 0.1 s, and the
    memory of every page."""
    if not jars or not archive(jars).is_file():
        return []
    return [f"-XX:SharedArchiveFile={archive(jars)}", "-XX:+UnlockDiagnosticVMOptions", "-XX:ArchiveRelocationMode=0"]


def stop() -> None:
    """End the process's session, if there is one, and its JVM with it. One that has died says so where it was used."""
    with suppress(Exception):
        session = _instantiated()
        if session is not None:
            session.stop()


def _instantiated() -> SparkSession | None:
    """The process's session; nothing is imported to find that there is none."""
    made = getattr(sys.modules.get("pyspark.sql"), "SparkSession", None)
    found: SparkSession | None = getattr(made, "_instantiatedSession", None)
    return found


def end_jvm() -> None:
    """End a JVM that stands still, so that calls into it return: it hears nothing else."""
    context = getattr(sys.modules.get("pyspark"), "SparkContext", None)
    process = getattr(getattr(context, "_gateway", None), "proc", None)
    if process is not None:
        process.kill()
