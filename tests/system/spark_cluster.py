"""A standalone Spark cluster of processes, from the jars inside PySpark."""

from __future__ import annotations

import os
import socket
import subprocess
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


class SparkCluster:
    """A master and workers of `cores` each, ended with the context."""

    def __init__(self, directory: Path, *, workers: int, cores: int) -> None:
        self._directory = directory
        self._cores = cores
        self._count = workers
        self._port, self._ui = free_ports(2)
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def master(self) -> str:
        return f"spark://{HOST}:{self._port}"

    def __enter__(self) -> Self:
        self._launch("master.Master", "--host", HOST, "--port", str(self._port), "--webui-port", str(self._ui))
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
        work = self._directory / f"worker-{len(self._processes)}"
        [ui] = free_ports(1)
        options = ["--host", HOST, "--cores", str(self._cores), "--memory", "2g", "--work-dir", str(work)]
        self._launch("worker.Worker", *options, "--webui-port", str(ui), self.master)

    def kill_worker(self, number: int) -> int:
        """SIGKILL to a worker and its executors; returns how many of those there were."""
        return self._kill(self._processes[1 + number])

    def executor_commands(self) -> list[str]:
        """The command lines of all executors."""
        alive = [psutil.Process(process.pid) for process in self._processes if process.poll() is None]
        commands = (" ".join(child.cmdline()) for each in alive for child in each.children(recursive=True))
        return [command for command in commands if "CoarseGrainedExecutorBackend" in command]

    def _launch(self, name: str, *arguments: str) -> None:
        jars = connector.jars()
        java = str(Path(os.environ["JAVA_HOME"], "bin", "java")) if "JAVA_HOME" in os.environ else "java"
        options = ["-Xmx256m", SHORT_LIVED, "-XX:+UseSerialGC", f"-XX:SharedArchiveFile={archive(jars)}"]
        class_path = os.pathsep.join(map(str, (*jars, *shipped())))  # as the archive has it
        command = [java, *options, "-cp", class_path, f"{PACKAGE}.{name}"]
        own = {"SPARK_HOME": str(home()), "SPARK_SCALA_VERSION": "2.13", "SPARK_LOCAL_IP": HOST}
        with (self._directory / f"{len(self._processes)}-{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [*command, *arguments], env=os.environ | own, stdout=log, stderr=log, cwd=self._directory
            )
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
