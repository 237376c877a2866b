"""A standalone Spark cluster of processes, from the jars inside PySpark."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import psutil

from bridge.install import connector
from bridge.spark.installed import home, shipped
from bridge.spark.session import archive
from dev.broker.embedded import free_ports
from dev.harness.waiting import wait_until
from tests.java import SHORT_LIVED

HOST: Final = "127.0.0.1"
START_S_MAX: Final = 90
PACKAGE: Final = "org.apache.spark.deploy"
KEPT: Final = ("PATH", "JAVA_HOME", "LANG")
"""Variables of a test that a cluster's processes have, too."""


class SparkCluster:
    """A master and workers of `cores` each, ended with the context.

    It behaves like other machines: each worker has a loopback address, directories and a working directory of its own,
    and `names` (with their addresses), like those of the workers, are known to its Java alone.
    """

    def __init__(self, directory: Path, *, workers: int, cores: int, names: Mapping[str, str]) -> None:
        self._directory = directory
        self._cores = cores
        self._count = workers
        self._names = {"localhost": HOST, socket.gethostname(): HOST, **names}
        self._port, self._ui = free_ports(2)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._home = directory / "spark"
        self._hosts = directory / "hosts"

    @property
    def address(self) -> tuple[str, int]:
        return HOST, self._port

    @property
    def master(self) -> str:
        return f"spark://{HOST}:{self._port}"

    def __enter__(self) -> Self:
        self._directory.mkdir()
        self._home.symlink_to(home())
        self._write_names()
        own = ("--host", HOST, "--port", str(self._port), "--webui-port", str(self._ui))
        self._launch("master.Master", HOST, "-Dspark.master.rest.enabled=false", *own)
        wait_until(self._listens, START_S_MAX, "the master listens")
        for _ in range(self._count):
            self.add_worker()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in reversed(self._processes):
            self._kill(process)

    def add_worker(self) -> None:
        """One more; it gets work when the master knows it."""
        number = len(self._processes)
        name, address = f"worker-{number}.test", f"127.0.1.{number}"
        self._names[name] = address
        self._write_names()
        [ui] = free_ports(1)
        options = ("--host", name, "--cores", str(self._cores), "--memory", "2g", "--webui-port", str(ui))
        self._launch("worker.Worker", address, *options, self.master)

    def kill_worker(self, number: int) -> int:
        """SIGKILL to a worker and its executors; returns how many of those there were."""
        return self._kill(self._processes[1 + number])

    def processes(self) -> list[psutil.Process]:
        """The master and the workers."""
        return [psutil.Process(process.pid) for process in self._processes if process.poll() is None]

    def executors(self) -> list[psutil.Process]:
        """All executors, whose working directories are their workers'."""
        found = []
        for child in [child for each in self.processes() for child in each.children(recursive=True)]:
            with suppress(psutil.Error):  # it ends, or begins
                if "CoarseGrainedExecutorBackend" in " ".join(child.cmdline()):
                    found.append(child)
        return found

    def _write_names(self) -> None:
        """Java reads the file at each look-up."""
        written = self._hosts.with_suffix(".new")
        written.write_text("".join(f"{address} {name}\n" for name, address in self._names.items()))
        written.replace(self._hosts)

    def _launch(self, name: str, address: str, *arguments: str) -> None:
        jars = connector.jars()
        java = str(Path(os.environ["JAVA_HOME"], "bin", "java")) if "JAVA_HOME" in os.environ else "java"
        options = ["-Xmx256m", SHORT_LIVED, "-XX:+UseSerialGC", f"-XX:SharedArchiveFile={archive(jars)}"]
        properties = [argument for argument in arguments if argument.startswith("-D")]
        class_path = os.pathsep.join(map(str, (*jars, *shipped())))  # as the archive has it
        command = [java, *options, *properties, "-cp", class_path, f"{PACKAGE}.{name}"]
        place = self._directory / f"{len(self._processes)}-{name}"
        place.mkdir()
        environment = {name: os.environ[name] for name in KEPT if name in os.environ} | {
            "JAVA_TOOL_OPTIONS": f"-Djdk.net.hosts.file={self._hosts}",
            "SPARK_HOME": str(self._home),
            "SPARK_SCALA_VERSION": "2.13",
            "SPARK_LOCAL_IP": address,
            "SPARK_LOCAL_DIRS": str(place / "local"),
            "SPARK_WORKER_DIR": str(place / "work"),
        }
        with (self._directory / f"{place.name}.log").open("wb") as log:
            process = subprocess.Popen(
                [*command, *(argument for argument in arguments if argument not in properties)],
                env=environment, stdout=log, stderr=log, cwd=place,
            )  # fmt: skip
        self._processes.append(process)

    def _listens(self) -> bool:
        try:
            with socket.create_connection((HOST, self._port), timeout=1):
                return True
        except OSError:
            return False

    @staticmethod
    def _kill(process: subprocess.Popen[bytes]) -> int:
        children: list[psutil.Process] = []
        if process.poll() is None:
            children = psutil.Process(process.pid).children(recursive=True)
            process.kill()
        for child in children:
            try:
                child.kill()
            except psutil.NoSuchProcess:
                pass
        process.wait()
        return len(children)
