"""The bridge in its usual form: a separate process, with a configuration file, a directory, a log and a port."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import psutil
import yaml

from dev.harness.pace import scaled
from dev.harness.waiting import wait_until
from timerstore.clock import SystemClock

# The word, not a part of another event's name (`producer-not-ready`).
READY: Final = re.compile(r"(?<![\w-])ready(?![\w-])")
ROOT: Final = Path(__file__).parents[2]
READY_S_MAX: Final = 120
STOP_S_MAX: Final = 10
"""The promise itself: not a generous bound."""
IDLE_S: Final = 0.5
ORPHAN_S_MAX: Final = 30
HTTP_S_MAX: Final = 10
MARK: Final = "DELAY_BRIDGE_HARNESS"
"""A variable that marks a bridge's processes, since its JVM has another session."""

PROC: Final = Path("/proc")
"""Linux's directory of processes."""
_LABEL: Final = re.compile(r'\w+="(?:[^"\\]|\\.)*"')
_PLAIN: Final = {r"\\": "\\", r"\"": '"', r"\n": "\n"}
_ESCAPED: Final = re.compile(r'\\[\\"n]')

Tree = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """CPU seconds (user and system) and resident bytes of a bridge: Python and its JVM."""

    cpu_s: float
    rss_bytes: int


class BridgeProcess:
    """`python -m bridge run --config FILE` in a directory of its own; one object for all its starts.

    with BridgeProcess(directory, bootstrap, delay_topic) as bridge:
        bridge.start()

    A condition that is not met in time raises AssertionError, with the end of the log.
    """

    def __init__(
        self,
        directory: Path,
        bootstrap: str,
        *delay_topics: str,
        id: str | None = None,
        instance: str = "a",
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """`id` is the bridge's name, by default that of its first delay topic; `config` is laid over the rest."""
        self.directory = directory
        self.bootstrap = bootstrap
        self.id = id or f"bridge-{delay_topics[0]}"
        self.config: Tree = {
            "bridge": {"id": self.id, "instance": instance},
            "kafka": {"common": {"bootstrap.servers": bootstrap}},
            "delay_topics": {name: {} for name in delay_topics},
            "store": {"directory": str(directory / "data")},
            "http": {"host": "127.0.0.1", "port": 0, "api_port": 0},
            "logs": {"format": "json"},
        }
        self.configure(config or {})
        self.environment: dict[str, str] = {}
        """Variables of the next start, beside this process's own."""
        self._process: subprocess.Popen[bytes] | None = None
        self._mark = uuid.uuid4().hex
        self._log_start = self._read_to = 0
        self._entries: list[Tree] = []
        self._port: int | None = None
        directory.mkdir(parents=True, exist_ok=True)

    # ---- configuration

    def configure(self, changes: Mapping[str, Any]) -> None:
        """Lay `changes` over the configuration of the next start."""
        lay_over(self.config, changes)

    @property
    def data(self) -> Path:
        """The directory of the local index."""
        return Path(self.config["store"]["directory"])

    @property
    def config_file(self) -> Path:
        """The YAML, written at each start."""
        return self.directory / "bridge.yaml"

    @property
    def log_file(self) -> Path:
        """Standard output and standard error of all starts."""
        return self.directory / "bridge.log"

    # ---- life

    def launch(self) -> Self:
        """Start the process; returns at once."""
        assert not self.running, "it runs already"
        self.config_file.write_text(yaml.safe_dump(self.config, sort_keys=False))
        self.config_file.chmod(0o600)  # Kafka's settings may hold a password
        self._port = None
        self._log_start = self._read_to = self.log_file.stat().st_size if self.log_file.exists() else 0
        self._entries = []
        with self.log_file.open("ab") as output:
            # A session, hence a process group, of its own: Ctrl-C does not reach it.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "bridge", "run", "--config", str(self.config_file)],
                cwd=ROOT,
                env={**os.environ, **self.environment, MARK: self._mark},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self

    def start(self, deadline_s: float = READY_S_MAX) -> Self:
        """Start, and wait until the bridge has logged `ready` and /readyz says so, too."""
        self.launch()
        return self.wait_ready(deadline_s)

    def wait_ready(self, deadline_s: float = READY_S_MAX) -> Self:
        """Wait until this start is ready. Raises AssertionError when it is not in time, or ends."""
        wait_until(self.is_ready, deadline_s, lambda: f"ready; log:\n{self.tail()}")
        wait_until(lambda: self.http("/readyz")[0] == 200, deadline_s, lambda: f"/readyz; log:\n{self.tail()}")
        return self

    def is_ready(self) -> bool:
        """Whether this start has logged `ready`. Raises AssertionError if it has ended."""
        self.check()
        return READY.search(self.logs) is not None

    def check(self) -> None:
        """Raises AssertionError if this start has ended."""
        if not self.running:
            raise AssertionError(f"it ended with status {self._running_process().returncode}; log:\n{self.tail()}")

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Stopped meanwhile (SIGSTOP), Python and its JVM: a backlog builds up, and the JVM stays warm."""
        frozen = self.processes()
        for process in frozen:
            process.suspend()
        try:
            yield
        finally:
            for process in frozen:
                process.resume()

    def kill(self) -> None:
        """SIGKILL to the Python process alone, like an out-of-memory killer; its JVM must end by itself."""
        process = self._running_process()
        process.kill()
        process.wait(scaled(ORPHAN_S_MAX))

    def stop(self, deadline_s: float = STOP_S_MAX, number: signal.Signals = signal.SIGTERM) -> int:
        """SIGTERM, or `number`; returns the exit status. Raises AssertionError when it takes longer than promised."""
        process = self._running_process()
        process.send_signal(number)
        try:
            return process.wait(scaled(deadline_s))
        except subprocess.TimeoutExpired:
            raise AssertionError(f"no end within {deadline_s:g} s of {number.name}; log:\n{self.tail()}") from None

    def wait_end(self, deadline_s: float) -> int:
        """Wait until the process ends of its own accord; returns the exit status."""
        process = self._running_process()
        try:
            return process.wait(scaled(deadline_s))
        except subprocess.TimeoutExpired:
            raise AssertionError(f"no end within {deadline_s:g} s; log:\n{self.tail()}") from None

    def wait_no_orphans(self, deadline_s: float = ORPHAN_S_MAX) -> None:
        """Wait until no process of any start is left. Raises AssertionError if one is."""
        wait_until(lambda: not self.processes(), deadline_s, lambda: f"left behind: {self.processes()}")

    def end(self) -> None:
        """SIGKILL to all processes of any start, like the end of a machine or a container."""
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        if self._process is not None:
            self._process.wait(scaled(ORPHAN_S_MAX))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            error.add_note(f"log of {self.id}:\n{self.tail()}")
        self.end()

    # ---- observations

    @property
    def running(self) -> bool:
        """Whether the process is alive."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Process id of the latest start."""
        return self._running_process().pid

    @property
    def logs(self) -> str:
        """The output of this start up to now."""
        if not self.log_file.exists():
            return ""
        with self.log_file.open("rb") as file:
            file.seek(self._log_start)
            return file.read().decode(errors="replace")

    def tail(self, lines: int = 40) -> str:
        """The end of `logs`."""
        return "\n".join(line[:600] for line in self.logs.splitlines()[-lines:])

    def events(self, *names: str) -> list[Tree]:
        """The log entries of this start whose event is one of `names`."""
        self._read_entries()
        return [entry for entry in self._entries if entry.get("event") in names]

    @property
    def owned(self) -> int:
        """The number of partitions that the instance delivers, by its last event."""
        changes = self.events("ready", "partitions-joined", "partitions-given-up")
        return int(changes[-1]["owned" if "owned" in changes[-1] else "partitions"]) if changes else 0

    def _read_entries(self) -> None:
        """Later log entries only: there are thousands, and callers ask again and again."""
        if not self.log_file.exists():
            return
        with self.log_file.open("rb") as file:
            file.seek(self._read_to)
            lines = file.read().splitlines(keepends=True)
        for line in lines:
            if line.endswith(b"\n"):
                self._read_to += len(line)
                if line.startswith(b"{") and line.endswith(b"}\n"):
                    self._entries.append(json.loads(line.decode(errors="replace")))

    def last_words(self) -> str:
        """The line that a failed start ends with. Raises AssertionError if it is not the only one of its kind."""
        lines = [line for line in self.logs.splitlines() if line.startswith("delay-bridge:")]
        assert len(lines) == 1, f"{len(lines)} lines for the operator:\n{self.tail()}"
        assert "Traceback" not in self.logs, self.tail()
        return lines[0]

    def processes(self) -> list[psutil.Process]:
        """Every running process of every start: Python and JVM."""
        found: list[psutil.Process] = []
        for pid in psutil.pids():
            with suppress(psutil.Error):
                if _has_in_environment(pid, f"{MARK}={self._mark}"):
                    found.append(psutil.Process(pid))
        return found

    def usage(self) -> Usage:
        """CPU and memory of all starts' processes."""
        return usage_of(self.processes())

    def rss_bytes(self) -> int:
        """Resident memory of the process and its JVM."""
        return self.usage().rss_bytes

    def python_bytes(self) -> int:
        """Resident memory of the process alone."""
        return int(psutil.Process(self._running_process().pid).memory_info().rss)

    def http(self, path: str) -> tuple[int, str]:
        """Status and body of a request to the management port; status 0 when nothing listens."""
        is_known = self._port is not None
        if not is_known:
            started = self.events("management-port")
            if not started:
                return 0, ""
            self._port = int(started[-1]["port"])
        url = f"http://127.0.0.1:{self._port}{path}"
        try:
            with urllib.request.urlopen(url, timeout=scaled(HTTP_S_MAX)) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            self._port = None  # after a restart in place it is another
            return self.http(path) if is_known else (0, "")

    def api_url(self) -> str:
        """The address of the HTTP API of this start, without a path."""
        return f"http://127.0.0.1:{int(self.events('api-port')[-1]['port'])}"

    def ask(self, path: str, **parameters: object) -> Any:
        """The HTTP API's answer to a GET below /api/v1/. Raises HTTPError for a refusal."""
        url = f"{self.api_url()}/api/v1/{path}?{urllib.parse.urlencode(parameters, doseq=True)}"
        with urllib.request.urlopen(url, timeout=scaled(HTTP_S_MAX)) as answer:
            return json.loads(answer.read())

    def metrics(self) -> dict[str, float]:
        """All samples, as Prometheus writes them but without the prefix: `pending_messages`,
        `records_delivered_total{topic="orders"}`.
        """
        status, text = self.http("/metrics")
        assert status == 200, f"/metrics answers {status}"
        return {f"{name}{{{labels}}}" if labels else name: value for name, labels, value in _samples(text)}

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels; 0 while the management port does not answer."""
        return sum(value for found, _, value in _samples(self.http("/metrics")[1]) if found == name)

    def disk_bytes(self) -> int:
        """The size of the local index."""
        return sum(path.stat().st_size for path in self.data.rglob("*") if path.is_file())

    def wait_idle(self, deadline_s: float) -> dict[str, float]:
        """Wait until nothing is pending and nothing unread; returns the metrics of that moment. So it must be for a
        while: a copy that is written and not read back yet is neither for a moment."""
        clock, since_s = SystemClock(), float("inf")

        def stays_idle() -> dict[str, float]:
            nonlocal since_s
            metrics = self._idle_metrics()
            since_s = min(since_s, clock.monotonic_s()) if metrics else float("inf")
            return metrics if clock.monotonic_s() - since_s >= IDLE_S else {}

        return wait_until(stays_idle, deadline_s, lambda: f"nothing pending; log:\n{self.tail()}")

    def _idle_metrics(self) -> dict[str, float]:
        metrics = self.metrics()
        lags = [value for name, value in metrics.items() if name.startswith("consumer_lag_records")]
        return metrics if lags and not any(lags) and metrics["pending_messages"] == 0 else {}

    def _running_process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "it was never started"
        return self._process


def lay_over(tree: Tree, changes: Mapping[str, Any]) -> None:
    """Put `changes` into a tree of settings, key by key."""
    for name, value in changes.items():
        if isinstance(value, Mapping) and isinstance(tree.get(name), dict):
            lay_over(tree[name], value)
        else:
            tree[name] = value


def usage_of(processes: Iterable[psutil.Process]) -> Usage:
    """CPU and memory of processes. Children that have not called exec yet have their parent's memory, and its command
    line.
    """
    cpu_s, rss_bytes, seen = 0.0, 0, set()
    for process in processes:
        with suppress(psutil.Error):
            times = process.cpu_times()
            cpu_s += times.user + times.system
            if (command := tuple(process.cmdline())) not in seen:
                seen.add(command)
                rss_bytes += process.memory_info().rss
    return Usage(cpu_s=cpu_s, rss_bytes=rss_bytes)


def _has_in_environment(pid: int, variable: str) -> bool:
    """Whether a process that is no zombie was started with it. The file is not decoded: there are hundreds."""
    if not (PROC / "self" / "environ").exists():
        name, _, value = variable.partition("=")
        process = psutil.Process(pid)
        return process.environ().get(name) == value and process.status() != psutil.STATUS_ZOMBIE
    try:
        return variable.encode() in (PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:  # gone, or another user's
        return False


def _samples(text: str) -> Iterator[tuple[str, str, float]]:
    """Name without the prefix, labels in order, value. (The client library's own parser takes ten times as long.)"""
    for line in text.splitlines():
        if line and not line.startswith("#"):
            head, _, value = line.rpartition(" ")
            name, _, rest = head.partition("{")
            labels = ",".join(sorted(_LABEL.findall(rest)))
            yield name.removeprefix("delay_bridge_"), _ESCAPED.sub(lambda found: _PLAIN[found[0]], labels), float(value)
