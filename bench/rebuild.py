"""The loss of an index: a start that reads the log again, and `delay-bridge rebuild` before it."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from bench.bridge import SAMPLE_S, Bridge, run_program
from bench.load import DELAY_TOPIC
from bench.report import Comparison, Report, mib

FAR_MS: Final = ("7200000", "86400000")
NEAR: Final = 4_000
READ_S_MAX: Final = 900


def rebuild(bridge: Bridge, arguments: argparse.Namespace, report: Report) -> None:
    """--messages pending messages, one in ten with an id. A start without an index reads them all; then the index is
    removed, and the command makes it."""
    count = arguments.messages
    bridge.start()
    bridge.stop()
    run_program(bridge, "load", "--messages", str(count), "--delay", *FAR_MS, "--ids", str(count // 10)).wait()
    run_program(bridge, "load", "--messages", str(NEAR), "--delay", "1", "2").wait()
    scenario, began_s = f"rebuild, {count:,} pending", bridge.clock.monotonic_s()
    with sampled(bridge.launch().pid) as read:
        bridge.wait_ready()
        bridge.wait(lambda: bridge.metric("pending_messages") == count, READ_S_MAX, "the log is read")
        read_s = bridge.clock.monotonic_s() - began_s
        bridge.wait(lambda: bridge.metric("records_delivered_total") >= NEAR, READ_S_MAX, "O has moved")
    assert bridge.stop() == 0
    report.add(scenario, "read by a start", f"{read_s:.1f} s, {count / read_s:,.0f}/s", "")
    report.add(scenario, "anonymous memory of that start, Python and JVM, and CPU", str(read), "")
    shutil.rmtree(bridge.data / DELAY_TOPIC)
    began_s = bridge.clock.monotonic_s()
    command = [sys.executable, "-m", "bridge", "rebuild", "--config", str(bridge.config_file)]
    process = subprocess.Popen(command, stdout=sys.stderr)
    with sampled(process.pid) as made:
        assert process.wait() == 0
    made_s = bridge.clock.monotonic_s() - began_s
    report.add(scenario, "made by the command", f"{made_s:.1f} s, {count / made_s:,.0f}/s", f"<= {read_s:.1f} s")
    report.add(scenario, "anonymous memory of the command, Python and JVM, and CPU", str(made), "")
    for figure, mine, stream in (("time", made_s, read_s), ("CPU time", made.cpu_s, read.cpu_s)):
        compared = Comparison(
            scenario=scenario, figure=f"{figure} of the command, against the stream of a start", unit="s",
            bridge=(mine,), peer=(stream,), name="stream",
        )  # fmt: skip
        report.compare(compared)
    report.add(scenario, "start after it, until ready", f"{bridge.timed_start():.1f} s", "")
    (opened,) = bridge.events("index-opened")
    report.add(scenario, "offsets that it read again", f"{opened['read_again']:,}", "")


@dataclass(slots=True)
class Cost:
    """The largest anonymous memory of Python and of its JVM, bytes, and the CPU time of both."""

    python: int = 0
    java: int = 0
    cpu_s: float = 0

    def __str__(self) -> str:
        return f"{mib(self.python)} + {mib(self.java)}, {self.cpu_s:.0f} s"


@contextmanager
def sampled(pid: int) -> Iterator[Cost]:
    """Sample the cost of a process and its children."""
    cost, closed = Cost(), threading.Event()

    def sample() -> None:
        while not closed.wait(SAMPLE_S):
            try:
                python = psutil.Process(pid)
                children = python.children(recursive=True)
                cost.python = max(cost.python, _anonymous(pid))
                cost.java = max(cost.java, sum(_anonymous(each.pid) for each in children))
                cost.cpu_s = max(cost.cpu_s, sum(sum(each.cpu_times()[:2]) for each in (python, *children)))
            except (psutil.Error, OSError):  # one of them has ended
                continue

    sampler = threading.Thread(target=sample, name="sampler")
    sampler.start()
    try:
        yield cost
    finally:
        closed.set()
        sampler.join()


def _anonymous(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))
