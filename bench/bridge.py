"""The bridge under measurement, on a broker of its own: how long it takes, and its memory, sampled."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import psutil

from bench.load import DELAY_TOPIC, TARGETS
from bridge.spark import session
from dev.broker import EmbeddedBroker
from dev.harness.bridge import BridgeProcess
from dev.harness.kafka import Topics
from dev.harness.waiting import wait_until
from timerstore.clock import SystemClock

SAMPLE_S: Final = 0.2
PARTITIONS: Final = 4
WARM_S: Final = 30
WARM_RATE: Final = 2_000
WARMED: Final = WARM_S * WARM_RATE
"""Messages of `warm_up`, unless it is told otherwise."""


class Bridge(BridgeProcess):
    """One bridge: `start`, measure, `kill` or `stop`; its broker, and a clock to measure by."""

    def __init__(self, broker: EmbeddedBroker, directory: Path, instance: str = "a") -> None:
        config = {"delay_topics": {DELAY_TOPIC: {"partitions": PARTITIONS}}}
        super().__init__(directory, broker.bootstrap, DELAY_TOPIC, id="bench", instance=instance, config=config)
        self.broker = broker
        self.clock = SystemClock()
        self.peak_bytes = 0
        """The largest resident size of all starts, sampled."""

    def timed_start(self) -> float:
        """Start, wait until ready; returns the seconds that took."""
        began_s = self.clock.monotonic_s()
        self.start()
        return self.clock.monotonic_s() - began_s

    def wait(self, condition: Callable[[], object], seconds: float, what: str) -> None:
        """Wait for a condition while the bridge runs. Raises AssertionError when it is not in time, or ends."""

        def met() -> object:
            self.check()
            return condition()

        wait_until(met, seconds, lambda: f"{what}; log:\n{self.tail()}")

    def has_class_archive(self) -> bool:
        """Whether the JVM has mapped it. It does not fit where jars are not where they were when it was made."""
        processes = psutil.Process(self._running_process().pid).children(recursive=True)
        maps = (Path(f"/proc/{process.pid}/maps") for process in processes)
        return any(session.ARCHIVE in each.read_text() for each in maps if each.is_file())

    @contextmanager
    def sampled(self) -> Iterator[None]:
        """Sample the memory meanwhile."""
        closed = threading.Event()

        def sample() -> None:
            while not closed.wait(SAMPLE_S):
                self.peak_bytes = max(self.peak_bytes, self.rss_bytes())

        sampler = threading.Thread(target=sample, name="sampler")
        sampler.start()
        try:
            yield
        finally:
            closed.set()
            sampler.join()


@contextmanager
def bridge_on_broker() -> Iterator[Bridge]:
    """A bridge (not started) and a fresh broker with the targets."""
    with EmbeddedBroker() as broker, tempfile.TemporaryDirectory(prefix="delay-bridge-bench-") as directory:
        topics = Topics(broker.bootstrap)
        for name in TARGETS:
            topics.create(exactly=name, partitions=PARTITIONS)
        with Bridge(broker, Path(directory)) as bridge, bridge.sampled():
            yield bridge


def run(bridge: Bridge, module: str, *arguments: str) -> subprocess.Popen[str]:
    """`load` or `receive`, as a process of its own; its standard input and what it prints are piped."""
    command = [sys.executable, "-m", f"bench.{module}", "--bootstrap", bridge.bootstrap, *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def warm_up(bridge: Bridge, rate: int = WARM_RATE, seconds: int = WARM_S) -> None:
    """A stretch of load, delivered before anything is measured: the compilers of broker and bridge have done most of
    their work then."""
    count = seconds * rate
    run(bridge, "load", "--messages", str(count), "--rate", str(rate), "--delay", "100", "2000").wait()
    bridge.wait(
        lambda: bridge.metric("pending_messages") == 0 and bridge.metric("records_delivered_total") >= count,
        60,
        "the warm-up",
    )
    if not bridge.has_class_archive():
        print("Starts are measured without the archive of Spark's classes: run `make install` here.", file=sys.stderr)


def pause(seconds: float) -> None:
    """Let time pass: what is measured here is a stretch of it."""
    threading.Event().wait(seconds)
