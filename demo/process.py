"""The bridge as a process of its own: started by its command line, killed as a crash would, stopped as it should be."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

from bridge.errors import EnvironmentFailure

# The word, not a part of another event's name (`producer-not-ready`).
READY: Final = re.compile(rb"(?<![\w-])ready(?![\w-])")
KILL_TIMEOUT_S: Final = 10
LOG_LINES_MAX: Final = 25


class BridgeProcess:
    """`python -m bridge run --config FILE`, logging into `log`; one object for all its starts."""

    def __init__(self, config: Path, log: Path) -> None:
        self.config = config
        self.log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    @property
    def running(self) -> bool:
        """Whether the process is alive."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Process id. Raises RuntimeError if it was never started."""
        if self._process is None:
            raise RuntimeError("the bridge was not started")
        return self._process.pid

    def start(self) -> None:
        """Start; returns at once, `ready()` tells when it delivers."""
        self._log_start = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as output:
            # A session, hence a process group, of its own: Ctrl-C is for us, and a kill reaches its JVM, too.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "bridge", "run", "--config", str(self.config)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def ready(self) -> bool:
        """Whether this start has logged that it is ready. Raises EnvironmentFailure if the process has ended."""
        if READY.search(self._read_log()):
            return True
        self.check()
        return False

    def check(self) -> None:
        """Raises EnvironmentFailure, with the end of its log, if the process has ended."""
        if self._process is not None and self._process.poll() is not None:
            raise EnvironmentFailure(
                f"The bridge ended with status {self._process.returncode}",
                hint=f"Its last words:\n{self.last_lines()}",
            )

    def kill(self) -> None:
        """SIGKILL to the process and its JVM, as when a machine or a container goes; nothing if it is not running."""
        if self._process is None:
            return
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it ended on its own, and took its group along
        self._process.wait(KILL_TIMEOUT_S)

    def stop(self, timeout_s: float) -> int:
        """SIGTERM; returns the exit status. Raises EnvironmentFailure, after a kill, if it takes longer."""
        if self._process is None:
            raise RuntimeError("the bridge was not started")
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise EnvironmentFailure(
                f"The bridge did not stop within {timeout_s:g} s", hint=f"Its last words:\n{self.last_lines()}"
            ) from None

    def last_lines(self) -> str:
        """The end of this start's log."""
        return "\n".join(self._read_log().decode(errors="replace").splitlines()[-LOG_LINES_MAX:])

    def _read_log(self) -> bytes:
        if not self.log.exists():
            return b""
        with self.log.open("rb") as log:
            log.seek(self._log_start)
            return log.read()
