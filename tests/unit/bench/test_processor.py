"""CPU by thread, and limits of the processor."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from bench.processor import GROUPS, ThreadTimes, on_cores, quota, with_thread_names

NAMED = """
import threading
def work():
    total = 0
    while total < 3_000_000:
        total += 1
worker = threading.Thread(target=work, name="worker-of-numbers-7")
worker.start(); worker.join()
waiting = threading.Thread(target=input, name="waiting-3")
waiting.start()
print("there", flush=True)
waiting.join()
"""


@pytest.fixture
def program() -> Iterator[subprocess.Popen[str]]:
    """A program with a named thread, until its standard input ends."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", NAMED]
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, text=True, env={**os.environ, **with_thread_names()}
    ) as running:
        assert running.stdout is not None and running.stdout.readline() == "there\n"
        yield running


def test_threads_have_their_python_names(program: subprocess.Popen[str]) -> None:
    """A thread of Python has its name in `/proc`; numbers at the end do not count."""
    times = ThreadTimes(lambda: [program.pid])
    names = {name.partition(": ")[2] for name in times.look()}
    assert "waiting" in names


def test_ended_processes_keep_their_times(program: subprocess.Popen[str]) -> None:
    """The seconds of a process that has ended remain in the sum."""
    times = ThreadTimes(lambda: [program.pid])
    before = times.look()
    program.kill()
    program.wait()
    assert times.look() == before
    assert sum(before.values()) >= 0


def test_a_program_stays_on_its_cores() -> None:
    """A process that is started inside the context has these cores alone; afterwards this process has its own again."""
    before = os.sched_getaffinity(0)
    core = min(before)
    with on_cores([core]):
        shown = subprocess.run(
            [sys.executable, "-c", "import os; print(*os.sched_getaffinity(0))"],
            capture_output=True,
            text=True,
            check=True,
        )
    assert shown.stdout.split() == [str(core)]
    assert os.sched_getaffinity(0) == before


@pytest.mark.skipif(not any(os.access(group, os.W_OK) for group in GROUPS), reason="control groups are not writable")
def test_a_quota_holds_and_leaves_nothing(program: subprocess.Popen[str]) -> None:
    """A process in the context is in a control group, which is gone afterwards while the process goes on."""
    try:
        with quota(0.5) as limit:
            limit(program.pid)
            groups = [path for parent in GROUPS for path in parent.glob(f"delay-bridge-bench-{os.getpid()}")]
            assert str(program.pid) in (groups[0] / "cgroup.procs").read_text().split()
    except OSError as error:
        pytest.skip(f"control groups cannot be made here: {error}")
    assert not groups[0].exists()
    assert program.poll() is None
