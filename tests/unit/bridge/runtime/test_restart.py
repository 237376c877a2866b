"""bridge.runtime.restart: a process that executes itself anew."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bridge.errors import EnvironmentFailure
from bridge.runtime.restart import INTERVAL_S, VARIABLE, Restart
from tests.manual_clock import ManualClock
from tests.paths import ROOT

PROGRAM = """
import os, signal, socket, subprocess, sys, threading
from bridge.runtime.restart import Restart
from bridge.runtime.stop_signals import stop_signals
from timerstore.clock import SystemClock
restart = Restart(SystemClock())
child = None if restart.reason else subprocess.Popen(["cat"], stdin=subprocess.PIPE)
os.environ["ADDED"] = "by a library"
restart.await_children()
told = threading.Event()
print(os.getpid(), restart.reason, sys.argv[1:], "ADDED" in restart._environment, restart.wait_s() > 0, flush=True)
if restart.reason:
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        left = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
        print("no children", sum("socket:" in name for name in left), flush=True)
    with stop_signals(told.set):
        print("signal" if told.wait(10) else "none", flush=True)
else:
    leaked = socket.socket()
    leaked.set_inheritable(True)
    def signalled(*_):
        signal.raise_signal(signal.SIGTERM)
    before = signal.pthread_sigmask
    signal.pthread_sigmask = lambda how, numbers: (before(how, numbers), signalled())
    threading.Thread(target=restart.execute, args=("clock-set-back",)).start() if "-t" in sys.argv else (
        restart.execute("clock-set-back"))
"""


@pytest.mark.parametrize("thread", ["-m", "-t"], ids=["by the main thread", "by another thread"])
def test_the_next_process_has_id_arguments_and_environment_and_what_was_pending(thread: str) -> None:
    """Children have ended, what libraries put into the environment is gone, and a signal on the way is taken."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, thread], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if "restarting-in-place" not in line]
    pid = lines[0].split(" ")[0]
    arguments = f"[{thread!r}]"
    assert lines == [
        f"{pid}  {arguments} False False",
        f"{pid} clock-set-back {arguments} False True",
        "no children 0",
        "signal",
    ], done.stderr


def test_two_restarts_are_a_minute_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was started otherwise may restart at once."""
    clock = ManualClock()
    assert Restart(clock).wait_s() == 0
    monkeypatch.setenv(VARIABLE, f"clock-set-back {clock.monotonic_s():.3f}")
    restart = Restart(clock)
    assert restart.reason == "clock-set-back" and VARIABLE not in os.environ
    clock.advance(int(1_000 * INTERVAL_S) - 1)
    assert 0 < restart.wait_s() < 0.1
    clock.advance(1)
    assert restart.wait_s() == 0


def test_an_interpreter_that_is_gone_is_the_environments_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Replaced under the running process: what supervises it starts the new one."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(signal, "pthread_sigmask", lambda *_: None)
    with pytest.raises(EnvironmentFailure, match="cannot execute") as failed:
        Restart(ManualClock()).execute("clock-set-back")
    assert failed.value.exit_code == 3
