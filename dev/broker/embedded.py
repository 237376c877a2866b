"""A native Kafka broker (KRaft, one node, or a second that joins it) from Maven's jars, started with `java` on
127.0.0.1.

    with EmbeddedBroker() as broker:
        Producer({"bootstrap.servers": broker.bootstrap})

Port, cluster id and data stay the same from the constructor to `close()`, through `stop()`, `kill()` and `start()`: to
its clients a restarted broker is the same one.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from bridge.errors import EnvironmentFailure
from bridge.install import maven
from timerstore.clock import Clock, SystemClock

CACHE_VARIABLE: Final = "DELAY_BRIDGE_CACHE"
VERSION_VARIABLE: Final = "DELAY_BRIDGE_KAFKA"
"""Another version of Kafka than the pom's, for all brokers of a process without a version of their own."""
POM: Final = Path(__file__).with_name("pom.xml")
HOST: Final = "127.0.0.1"
POLL_S: Final = 0.05
FORMAT_TIMEOUT_S: Final = 60
KILL_TIMEOUT_S: Final = 10
LOG_LINES_MAX: Final = 15
META: Final = "meta.properties"
MEMORY_BYTES_MIN: Final = 4 * 1024**3
_VERSION: Final = re.compile(r"<kafka\.version>([^<]+)<")
# Below the usual ephemeral ports: a client that keeps trying a port in their range may connect to itself, and then the
# restarted broker finds its port taken.
PORTS: Final = range(12_000, 30_000)

# One node: internal topics of one replica, and of few partitions, so that their first use is quick.
SINGLE_NODE: Final[Mapping[str, object]] = {
    "auto.create.topics.enable": "false",
    "group.initial.rebalance.delay.ms": 0,
    "offsets.topic.replication.factor": 1,
    "offsets.topic.num.partitions": 4,
    "transaction.state.log.replication.factor": 1,
    "transaction.state.log.min.isr": 1,
    "transaction.state.log.num.partitions": 4,
    "share.coordinator.state.topic.replication.factor": 1,
    "share.coordinator.state.topic.min.isr": 1,
    "log.cleaner.dedupe.buffer.size": 16 * 1024 * 1024,
}

LOG4J: Final = """\
status = error
rootLogger.level = warn
rootLogger.appenderRef.file.ref = file
appender.file.type = File
appender.file.name = file
appender.file.fileName = {log}
appender.file.layout.type = PatternLayout
appender.file.layout.pattern = %d %p %c{{1}}: %m%n
"""

# Ends the broker when this process, and each that shares it, has died without ending it (SIGKILL, a test runner's
# timeout): their ends of the pipe are then closed. $1 is the broker's pid, $2 the directory to remove, if any.
GUARD: Final = 'read -r _; kill -9 "$1" 2>/dev/null; if [ -n "$2" ]; then sleep 1; rm -rf "$2"; fi'


def broker_jars(version: str | None = None) -> list[Path]:
    """A broker's class path, resolved by Maven at first use and kept; None: of `kafka_version()`.

    The directory is `.cache/kafka-<version>/<digest of the pom>` in the checkout; the environment variable
    DELAY_BRIDGE_CACHE names another one than `.cache`.
    """
    version = version or kafka_version()
    pom = _VERSION.sub(f"<kafka.version>{version}<", POM.read_text(encoding="utf-8"))
    cache = Path(os.environ.get(CACHE_VARIABLE) or Path(__file__).parents[2] / ".cache")
    digest = hashlib.sha256(pom.encode()).hexdigest()[:12]
    return maven.resolve_jars(pom, cache.resolve() / f"kafka-{version}" / digest)


def class_archive(version: str | None = None) -> Path:
    """The archive of the broker's classes, which the JVM maps (archive.py): a start takes half the time."""
    directory = broker_jars(version)[0].parent
    return directory.with_name(f"{directory.name}.jsa")


def formatted(version: str | None = None) -> Path:
    """The files that Kafka's own tool has written for the first broker of this version, but for the cluster's identity:
    the features of a new cluster. Their names differ by version."""
    directory = broker_jars(version)[0].parent
    return directory.with_name(f"{directory.name}.formatted")


def kafka_version() -> str:
    """The version of a broker that is asked for none: DELAY_BRIDGE_KAFKA's, or `pom_version()`."""
    return os.environ.get(VERSION_VARIABLE) or pom_version()


def pom_version() -> str:
    """The version that the project develops with, from the one place where it is written."""
    found = _VERSION.search(POM.read_text(encoding="utf-8"))
    assert found is not None, "pom.xml names Kafka's version"
    return found[1]


def wait_for_cluster(
    bootstrap: str,
    cluster_id: str,
    *,
    timeout_s: float = 90,
    client: Mapping[str, str] | None = None,
    clock: Clock | None = None,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Returns when a broker at `bootstrap` answers with this cluster id; `check` may raise to end the wait early.

    Raises EnvironmentFailure after `timeout_s`, with the last answer: a wrong cluster id means that another process
    has the port.
    """
    clock = clock or SystemClock()
    deadline_s = clock.monotonic_s() + timeout_s
    answer = "no connection"
    while clock.monotonic_s() < deadline_s:
        check()
        if _listens(bootstrap):
            answer = _ask(bootstrap, client or {})
            if answer == cluster_id:
                return
        threading.Event().wait(POLL_S)
    raise EnvironmentFailure(
        f"The broker did not come up within {timeout_s:g} s", hint="See the answer and the log.", answer=answer
    )


class EmbeddedBroker:
    """One broker, its data directory and its ports.

    Arguments:
        properties: broker properties on top of, or instead of, the defaults here. `broker.properties` may be changed
            while the broker is down; `port` and `controller_port` are known before the first start.
        version: Kafka's version, any that Maven resolves. Default: `kafka_version()`, or that of the broker it joins.
        joins: another broker, running, whose cluster this one becomes a second node of.
        data: directory to keep the data in. One that an earlier broker left is taken over with its ports and cluster
            id. Default: a new temporary one, removed by `close()`.
        tmpfs: put the temporary directory into memory (/dev/shm), where that has room.
        heap: the JVM's largest heap.
        jvm_options: further options of the JVM.
        client: client properties, beside `bootstrap.servers`, with which a start asks the broker for an answer.
        start_timeout_s: the limit of a start.
    """

    def __init__(
        self,
        *,
        properties: Mapping[str, object] | None = None,
        version: str | None = None,
        joins: EmbeddedBroker | None = None,
        data: Path | None = None,
        tmpfs: bool = False,
        heap: str = "512m",
        jvm_options: Sequence[str] = (),
        client: Mapping[str, str] | None = None,
        start_timeout_s: float = 90,
        clock: Clock | None = None,
    ) -> None:
        self.properties: dict[str, object] = dict(properties or {})
        self.version: Final[str] = version or (joins.version if joins else kafka_version())
        self.heap = heap
        self._jvm_options = tuple(jvm_options)
        self._client = dict(client or {})
        self._start_timeout_s = start_timeout_s
        self._clock = clock or SystemClock()
        self._temporary = data is None
        if data is None:
            data = Path(tempfile.mkdtemp(prefix="delay-bridge-kafka-", dir=_memory() if tmpfs else None))
        self.data: Final = data.resolve()
        self.data.mkdir(parents=True, exist_ok=True)
        self.cluster_id, self.port, self.controller_port = self._identity()
        self._joins = joins
        if joins is not None:
            self.cluster_id, self.controller_port = joins.cluster_id, joins.controller_port
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None

    @property
    def bootstrap(self) -> str:
        """`host:port` for clients."""
        return f"{HOST}:{self.port}"

    @property
    def pid(self) -> int:
        """Process id of the running broker. Raises RuntimeError if it is down."""
        if self._process is None:
            raise RuntimeError("the broker is not running")
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process is alive."""
        return self._process is not None and self._process.poll() is None

    @property
    def log(self) -> Path:
        """The broker's log (warnings and errors), over all starts."""
        return self.data / "broker.log"

    def start(self) -> Self:
        """Start, or start again on the same data and port; returns when the broker answers with its own cluster id.

        Raises EnvironmentFailure, with the end of the log, if it does not come up.
        """
        if self.running:
            return self
        class_path = os.pathsep.join(str(jar) for jar in broker_jars(self.version))
        configuration = self.data / "server.properties"
        configuration.write_text("".join(f"{key}={value}\n" for key, value in self._all_properties().items()))
        (self.data / "log4j2.properties").write_text(LOG4J.format(log=self.log))
        logs = self.data / "kafka"
        if not (logs / META).exists():
            if formatted(self.version).exists():
                self._format(logs)
            else:
                self._run_format(class_path, configuration, logs)
        with (self.data / "stdout.log").open("ab") as output:
            # A session of its own: Ctrl-C on the terminal is for us, and we stop the broker after its clients.
            self._process = subprocess.Popen(
                [*self._java(class_path, self.heap, self._jvm_options), "kafka.Kafka", str(configuration)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", GUARD, "guard", str(self._process.pid), str(self.data) if self._temporary else ""],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            wait_for_cluster(
                self.bootstrap,
                self.cluster_id,
                timeout_s=self._start_timeout_s,
                client=self._client,
                clock=self._clock,
                check=self._check_alive,
            )
        except EnvironmentFailure as failure:
            failure.fields["log"] = self._last_lines()
            self.kill()
            raise
        except BaseException:
            self.kill()
            raise
        return self

    def stop(self, timeout_s: float = 20) -> None:
        """SIGTERM, and SIGKILL if the broker has not ended by itself after `timeout_s`. The data stay."""
        self._end(signal.SIGTERM, timeout_s)

    def kill(self) -> None:
        """SIGKILL, as a crash would. The data stay."""
        self._end(signal.SIGKILL, KILL_TIMEOUT_S)

    def share(self) -> int:
        """Leave it to the holders of the returned file, the guard's pipe: it lives until the last of them has closed it
        or is gone. Another process gets the file by `join`."""
        guard, self._guard = self._guard, None
        assert guard is not None and guard.stdin is not None, "it runs"
        return os.dup(guard.stdin.fileno())

    def close(self) -> None:
        """Stop, and remove the data directory if it is a temporary one."""
        if self._temporary:
            self.kill()  # these data are not read again: an orderly shutdown takes seconds
            shutil.rmtree(self.data, ignore_errors=True)
        else:
            self.stop()

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _identity(self) -> tuple[str, int, int]:
        """Cluster id and ports: those that an earlier broker left in the data directory, or new ones."""
        path = self.data / "identity.json"
        if path.exists():
            identity = json.loads(path.read_text())
        else:
            port, controller_port = free_ports(2)
            identity = {"cluster_id": _random_id(), "port": port, "controller_port": controller_port}
            path.write_text(json.dumps(identity))
        return str(identity["cluster_id"]), int(identity["port"]), int(identity["controller_port"])

    def _all_properties(self) -> dict[str, object]:
        controller = f"{HOST}:{self.controller_port}"
        alone = self._joins is None
        listeners = f"PLAINTEXT://{self.bootstrap}" + (f",CONTROLLER://{controller}" if alone else "")
        return {
            "process.roles": "broker,controller" if alone else "broker",
            "node.id": 1 if alone else 2,
            "controller.quorum.voters": f"1@{controller}",
            "controller.listener.names": "CONTROLLER",
            "listeners": listeners,
            "advertised.listeners": listeners,
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
            "inter.broker.listener.name": "PLAINTEXT",
            "log.dirs": self.data / "kafka",
            # A killed broker comes back when its old session has timed out; by default that is 9 s.
            "broker.session.timeout.ms": 4_000,
            "broker.heartbeat.interval.ms": 500,
            # No client waits for new records: that saves half of the CPU of an idle broker.
            "metadata.max.idle.interval.ms": 0,
            **SINGLE_NODE,
            **self.properties,
        }

    def _java(self, class_path: str, heap: str, options: Sequence[str]) -> list[str]:
        home = os.environ.get("JAVA_HOME")
        java = str(Path(home, "bin", "java")) if home else shutil.which("java")
        if java is None or not Path(java).exists():
            raise EnvironmentFailure(
                "Java was not found", hint="Install Java 17 and put it on the PATH or in JAVA_HOME."
            )
        archive = class_archive(self.version)
        archived = ["-Xlog:disable", f"-XX:SharedArchiveFile={archive}"] if archive.exists() else []
        log4j = f"-Dlog4j2.configurationFile={self.data / 'log4j2.properties'}"
        return [
            java,
            f"-Xmx{heap}",
            "-XX:+UseSerialGC",
            *archived,
            *options,
            "-Djava.awt.headless=true",
            log4j,
            "-cp",
            class_path,
        ]

    def _format(self, logs: Path) -> None:
        """As Kafka's own tool would, which takes a second."""
        shutil.copytree(formatted(self.version), logs, dirs_exist_ok=True)
        node = self._all_properties()["node.id"]
        identity = {"version": 1, "cluster.id": self.cluster_id, "node.id": node, "directory.id": _random_id()}
        (logs / META).write_text("".join(f"{key}={value}\n" for key, value in identity.items()))

    def _run_format(self, class_path: str, configuration: Path, logs: Path) -> None:
        # For a second's work Java's first compiler does.
        command = [*self._java(class_path, "128m", ["-XX:TieredStopAtLevel=1"]), "kafka.tools.StorageTool", "format"]
        command += ["--cluster-id", self.cluster_id, "--config", str(configuration)]
        run = subprocess.run(command, capture_output=True, text=True, timeout=FORMAT_TIMEOUT_S, check=False)
        if run.returncode != 0:
            output = " | ".join((run.stdout + run.stderr).strip().splitlines()[-LOG_LINES_MAX:])
            raise EnvironmentFailure(
                "The broker's storage could not be formatted", hint="See the output.", output=output
            )
        kept = formatted(self.version)
        copied = kept.with_name(f".{kept.name}.{os.getpid()}")
        shutil.copytree(logs, copied, ignore=shutil.ignore_patterns(META))
        try:
            copied.rename(kept)
        except OSError:  # another process was first
            shutil.rmtree(copied)

    def _check_alive(self) -> None:
        if self._process is not None and self._process.poll() is not None:
            raise EnvironmentFailure(f"The broker ended with status {self._process.returncode}", hint="See its log.")

    def _last_lines(self) -> str:
        lines: list[str] = []
        for path in (self.log, self.data / "stdout.log"):
            if path.exists():
                lines += path.read_text(errors="replace").splitlines()[-LOG_LINES_MAX:]
        return " | ".join(lines)

    def _end(self, number: signal.Signals, timeout_s: float) -> None:
        if self._guard is not None:
            # First the guard: once the broker is reaped, its pid may be another process's.
            self._guard.kill()
            self._guard.wait(KILL_TIMEOUT_S)
            if self._guard.stdin is not None:
                self._guard.stdin.close()
            self._guard = None
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(number)
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(KILL_TIMEOUT_S)


def join(pid: int, file: int) -> int | None:
    """The file by which the process `pid` shares a broker, for this process; None if it shares none any more."""
    with suppress(OSError):
        return os.open(f"/proc/{pid}/fd/{file}", os.O_WRONLY | os.O_NONBLOCK)
    return None


def _random_id() -> str:
    """As Kafka's own: 16 random bytes in URL-safe base64; a leading dash would look like an option."""
    made = "-"
    while made.startswith("-"):
        made = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
    return made


def _memory() -> Path | None:
    """A directory in memory with room for a broker; containers often have one of 64 MB only."""
    shared = Path("/dev/shm")
    return shared if shared.is_dir() and shutil.disk_usage(shared).free >= MEMORY_BYTES_MIN else None


def free_ports(count: int) -> list[int]:
    """Different ports of 127.0.0.1 on which nothing listens just now. Raises EnvironmentFailure without any."""
    sockets: list[socket.socket] = []
    try:
        for port in random.sample(PORTS, k=500):
            candidate = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            try:
                candidate.bind((HOST, port))
            except OSError:
                candidate.close()
                continue
            sockets.append(candidate)
            if len(sockets) == count:
                return [int(taken.getsockname()[1]) for taken in sockets]
        raise EnvironmentFailure(
            "No free ports on 127.0.0.1", hint=f"Free some between {PORTS.start} and {PORTS.stop}."
        )
    finally:
        for taken in sockets:
            taken.close()


def _listens(bootstrap: str) -> bool:
    # Asked first, since librdkafka backs off after a refused connection.
    host, port = bootstrap.rsplit(":", 1)
    try:
        with socket.create_connection((host, int(port)), timeout=1):
            return True
    except OSError:
        return False


def _ask(bootstrap: str, client: Mapping[str, str]) -> str:
    """The cluster id of the broker that listens there, or the error."""
    quiet = logging.getLogger("dev.broker.probe")
    quiet.addHandler(logging.NullHandler())
    quiet.propagate = False
    settings: dict[str, str | int | float | bool] = {**client, "bootstrap.servers": bootstrap}
    try:
        metadata = AdminClient(settings, logger=quiet).list_topics(timeout=5)
    except KafkaException as error:
        return str(error)
    return str(metadata.cluster_id) if metadata.brokers else "no broker has registered yet"
