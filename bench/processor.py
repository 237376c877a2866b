"""Processors: CPU seconds by thread, and the part of the machine that a measured program may use."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from dev.harness.bridge import PROC

SAMPLE_S: Final = 1.0
"""A thread that ends takes its times along: later ones than its last sample are missing."""
TICKS_S: Final = os.sysconf("SC_CLK_TCK")
PERIOD_US: Final = 100_000
NUMBERED: Final = re.compile(r"[-#/\d ]+$")
GROUPS: Final = (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup"))
"""The directories of version 1 and version 2."""
NAMES: Final = Path(__file__).with_name("thread_names")
BUSY: Final = "while True: pass"


class ThreadTimes:
    """CPU seconds of some processes' threads by name: `java: C2 CompilerThre`. Linux keeps 15 characters of a name;
    numbers at its end do not count."""

    def __init__(self, pids: Callable[[], Iterable[int]]) -> None:
        self._pids = pids
        self._seconds: dict[tuple[int, int], tuple[str, float]] = {}
        self._lock = threading.Lock()

    def look(self) -> dict[str, float]:
        """The seconds by now, those of ended threads included."""
        with self._lock:
            for pid in self._pids():
                self._look_at(PROC / str(pid))
            totals: dict[str, float] = defaultdict(float)
            for name, seconds in self._seconds.values():
                totals[name] += seconds
            return dict(totals)

    def _look_at(self, process: Path) -> None:
        with suppress(OSError):  # it, or a thread, has ended
            program = (process / "comm").read_text().strip()
            for task in (process / "task").iterdir():
                with suppress(OSError):
                    name, seconds = _parse((task / "stat").read_text())
                    self._seconds[int(process.name), int(task.name)] = f"{program}: {name}", seconds

    @contextmanager
    def sampled(self) -> Iterator[None]:
        """Look every second inside the context."""
        closed = threading.Event()

        def sample() -> None:
            while not closed.wait(SAMPLE_S):
                self.look()

        sampler = threading.Thread(target=sample, name="thread-times")
        sampler.start()
        try:
            yield
        finally:
            closed.set()
            sampler.join()


def _parse(stat: str) -> tuple[str, float]:
    """The name, and the CPU seconds, of a line of `/proc/PID/task/TID/stat`."""
    head, _, rest = stat.rpartition(")")
    name, fields = head.partition("(")[2], rest.split()
    return NUMBERED.sub("", name) or name, (int(fields[11]) + int(fields[12])) / TICKS_S


def with_thread_names() -> dict[str, str]:
    """Variables with which a Python program gives its threads' names to the operating system (3.14 does it itself)."""
    paths = [str(NAMES), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths)}


@contextmanager
def on_cores(cores: Sequence[int]) -> Iterator[None]:
    """Processes that this thread starts inside the context stay on these cores; none: on all."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def beside(count: int, cores: Sequence[int]) -> Iterator[None]:
    """A number of endless loops on these cores, inside the context."""
    with on_cores(cores):
        loops = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@contextmanager
def quota(cores: float | None) -> Iterator[Callable[[int], None]]:
    """A control group with a part of the processor time, in cores. The context's value moves a new process into it, and
    so all processes that it starts. None: no limit. Raises OSError where control groups cannot be made."""
    if cores is None:
        yield lambda _pid: None
        return
    limit = str(int(cores * PERIOD_US))
    files = {"cpu.cfs_period_us": str(PERIOD_US), "cpu.cfs_quota_us": limit}
    parent = GROUPS[0]
    if not (parent / "cgroup.procs").exists():
        parent, files = GROUPS[1], {"cpu.max": f"{limit} {PERIOD_US}"}
    group = parent / f"delay-bridge-bench-{os.getpid()}"
    group.mkdir()
    try:
        for name, text in files.items():
            (group / name).write_text(text)
        yield lambda pid: _write(group / "cgroup.procs", pid)
    finally:
        for line in (group / "cgroup.procs").read_text().split():
            with suppress(OSError):  # it has ended
                _write(parent / "cgroup.procs", int(line))
        group.rmdir()


def _write(file: Path, pid: int) -> None:
    file.write_text(str(pid))
