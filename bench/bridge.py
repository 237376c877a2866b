"""The measured bridge with its own broker: times, and memory samples."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import psutil

from bench import relay
from bench.load import DELAY_TOPIC, TARGETS
from bridge.spark import session
from dev.broker import EmbeddedBroker
from dev.harness.bridge import BridgeProcess
from dev.harness.kafka import Topics
from dev.harness.waiting import wait_until
from timerstore.clock import SystemClock

SAMPLE_S: Final = 0.2
PARTITIONS: Final = 4
TIMED_TARGETS: Final = ("bench-timed-a", "bench-timed-b")
"""Targets with the broker's timestamps."""
WARM_S: Final = 30
WARM_RATE: Final = 2_000
WARMED: Final = WARM_S * WARM_RATE
"""The default number of messages of `warm_up`."""


class Bridge(BridgeProcess):
    """One bridge with `start`, `kill` and `stop`; its broker, and a clock for measurements."""

    def __init__(
        self, broker: EmbeddedBroker, directory: Path, instance: str = "a", partitions: int = PARTITIONS
    ) -> None:
        """`partitions` is the number of partitions of the delay topic."""
        config = {"delay_topics": {DELAY_TOPIC: {"partitions": partitions}}}
        super().__init__(directory, broker.bootstrap, DELAY_TOPIC, id="bench", instance=instance, config=config)
        self.broker = broker
        self.partitions = partitions
        self.clock = SystemClock()
        self.peak_bytes = 0
        """The largest resident size of all starts, sampled."""

    def timed_start(self) -> float:
        """Start, and wait until ready; returns the seconds."""
        began_s = self.clock.monotonic_s()
        self.start()
        return self.clock.monotonic_s() - began_s

    def wait(self, condition: Callable[[], object], seconds: float, what: str) -> None:
        """Wait for a condition while the bridge runs. Raises AssertionError after `seconds`, or if the bridge ends."""

        def met() -> object:
            self.check()
            return condition()

        wait_until(met, seconds, lambda: f"{what}; log:\n{self.tail()}")

    def has_class_archive(self) -> bool:
        """Whether the JVM has mapped the archive, which is invalid after a move of the jars."""
        processes = psutil.Process(self._running_process().pid).children(recursive=True)
        maps = (Path(f"/proc/{process.pid}/maps") for process in processes)
        return any(session.ARCHIVE in file.read_text() for file in maps if file.is_file())

    @contextmanager
    def sampled(self) -> Iterator[None]:
        """Sample the memory inside the context."""
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
def bridge_on_broker(partitions: int = PARTITIONS) -> Iterator[Bridge]:
    """A bridge (not started), a delay topic of that many partitions, and a fresh broker with the other topics."""
    with EmbeddedBroker() as broker, tempfile.TemporaryDirectory(prefix="delay-bridge-bench-") as directory:
        _make_topics(broker.bootstrap)
        with Bridge(broker, Path(directory), partitions=partitions) as bridge, bridge.sampled():
            yield bridge


def _make_topics(bootstrap: str) -> None:
    topics = Topics(bootstrap)  # its client, which would complain about a missing broker, ends here
    for name in TARGETS:
        topics.create(exactly=name, partitions=PARTITIONS)
    for name in (relay.TOPIC, *TIMED_TARGETS):
        topics.create(exactly=name, partitions=PARTITIONS, config={"message.timestamp.type": "LogAppendTime"})


def run_program(bridge: Bridge, module: str, *arguments: str) -> subprocess.Popen[str]:
    """Run `load` or `receive` as a separate process, with pipes for its standard input and output."""
    command = [sys.executable, "-m", f"bench.{module}", "--bootstrap", bridge.bootstrap, *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def tell_process(process: subprocess.Popen[str], line: str) -> None:
    """Send a line to a waiting process."""
    assert process.stdin is not None
    print(line, file=process.stdin, flush=True)


def warm_up(bridge: Bridge, rate: int = WARM_RATE, seconds: int = WARM_S, others: Sequence[Bridge] = ()) -> None:
    """Deliver some load before the measurement, so that the compilers of broker and bridge finish most of their
    work. `others` are instances of the same bridge."""
    count = seconds * rate
    instances = (bridge, *others)
    run_program(bridge, "load", "--messages", str(count), "--rate", str(rate), "--delay", "100", "2000").wait()
    bridge.wait(
        lambda: (
            all(one.metric("pending_messages") == 0 for one in instances)
            and sum(one.metric("records_delivered_total") for one in instances) >= count
        ),
        60,
        "the warm-up",
    )
    if not bridge.has_class_archive():
        print("Starts are measured without the archive of Spark's classes: run `make install` here.", file=sys.stderr)


def pause(seconds: float) -> None:
    """Let time pass: it is the subject of the measurement."""
    threading.Event().wait(seconds)
