"""The bridge under measurement: a process of its own on an embedded broker, watched from outside (CPU, memory, its
own metrics)."""

from __future__ import annotations

import os
import re
import signal
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import yaml
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]  # public, but not marked

from bench.load import DELAY_TOPIC, TARGETS
from demo.process import BridgeProcess
from dev.broker.embedded import EmbeddedBroker
from timerstore.clock import Clock, SystemClock

START_S = 120.0
SAMPLE_S = 0.2
METRIC = re.compile(r"^delay_bridge_(\w+?)(?:\{[^}]*\})? ([0-9.e+-]+)$", re.MULTILINE)


@dataclass(slots=True)
class Usage:
    """CPU seconds (user and system) and resident bytes of the bridge: Python and its JVM."""

    cpu_s: float
    rss_bytes: int


class Bridge:
    """One bridge: `start`, measure, `kill` or `stop`."""

    def __init__(self, broker: EmbeddedBroker, directory: Path, clock: Clock, port: int) -> None:
        self.broker = broker
        self.clock = clock
        self._port = port
        self.store = directory / "data"
        self._config = directory / "bridge.yaml"
        self.configure()
        self._process = BridgeProcess(self._config, directory / "bridge.log")
        self._peak_bytes = 0
        self._sampling = threading.Event()
        self._sampler: threading.Thread | None = None

    def configure(self, **producer: str) -> None:
        """Write the configuration of the next start, with properties of the client that produces."""
        tree = {
            "bridge": {"id": "bench", "instance": "bench"},
            "kafka": {"common": {"bootstrap.servers": self.broker.bootstrap}, "producer": producer},
            "delay_topics": {DELAY_TOPIC: {"partitions": 4}},
            "store": {"directory": str(self.store)},
            "http": {"host": "127.0.0.1", "port": self._port},
            "logs": {"format": "json"},
        }
        self._config.write_text(yaml.safe_dump(tree))

    def start(self) -> float:
        """Start, wait until ready; returns the seconds that took."""
        began_s = self.clock.monotonic_s()
        self._process.start()
        self.wait(lambda: self._process.ready(), START_S, "the bridge to be ready")
        self._sampling.clear()
        self._sampler = threading.Thread(target=self._sample, daemon=True)
        self._sampler.start()
        return self.clock.monotonic_s() - began_s

    def kill(self) -> None:
        """SIGKILL."""
        self._sampling.set()
        self._process.kill()

    def stop(self) -> int:
        """SIGTERM; returns the exit status."""
        self._sampling.set()
        return self._process.stop(20)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """The bridge stands still meanwhile (SIGSTOP): a backlog builds up, and its JVM stays warm."""
        os.killpg(self._process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.killpg(self._process.pid, signal.SIGCONT)

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels; 0 while the port does not answer."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/metrics", timeout=5) as answer:
                text = answer.read().decode()
        except OSError:
            return 0.0
        return sum(float(value) for found, value in METRIC.findall(text) if found == name)

    def usage(self) -> Usage:
        """CPU and memory of the whole process group now."""
        cpu_s, rss, seen = 0.0, 0, set()
        root = psutil.Process(self._process.pid)
        for process in (root, *root.children(recursive=True)):
            with suppress(psutil.Error):
                times = process.cpu_times()
                cpu_s += times.user + times.system
                if (command := tuple(process.cmdline())) not in seen:  # before exec, a child shows its parent's memory
                    seen.add(command)
                    rss += process.memory_info().rss
        return Usage(cpu_s, rss)

    def disk_bytes(self) -> int:
        """The size of the index."""
        return sum(path.stat().st_size for path in self.store.rglob("*") if path.is_file())

    def peak_bytes(self) -> int:
        """The largest resident size sampled since `start`."""
        return self._peak_bytes

    def wait(self, condition: object, seconds: float, what: str) -> None:
        """Wait for a condition with a deadline."""
        deadline_s = self.clock.monotonic_s() + seconds
        pause = threading.Event()
        while not condition():  # type: ignore[operator]
            self._process.check()
            if self.clock.monotonic_s() > deadline_s:
                raise SystemExit(f"waited {seconds:.0f} s for {what}\n{self._process.last_lines()}")
            pause.wait(0.2)

    def _sample(self) -> None:
        while not self._sampling.wait(SAMPLE_S):
            with suppress(psutil.Error):
                self._peak_bytes = max(self._peak_bytes, self.usage().rss_bytes)


@contextmanager
def bridge_on_broker(port: int) -> Iterator[tuple[Bridge, str]]:
    """A bridge (not started) and a fresh broker with the targets."""
    with EmbeddedBroker() as broker, tempfile.TemporaryDirectory(prefix="delay-bridge-bench-") as directory:
        admin = AdminClient({"bootstrap.servers": broker.bootstrap})
        targets = [NewTopic(name, num_partitions=4, replication_factor=1) for name in TARGETS]
        for future in admin.create_topics(targets).values():
            future.result(30)
        bridge = Bridge(broker, Path(directory), SystemClock(), port)
        try:
            yield bridge, broker.bootstrap
        finally:
            with suppress(psutil.Error, OSError):
                bridge.kill()
