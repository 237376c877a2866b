"""Kafka's own quotas, to stretch a step that a test must hit to seconds."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from dev.broker.embedded import broker_jars
from dev.harness.pace import scaled
from tests.java import SHORT_LIVED

SECONDS_MAX: Final = 60


@contextmanager
def reading_throttled(bootstrap: str, bytes_per_s: int) -> Iterator[None]:
    """Each client (by its client id) may read this number of bytes a second, averaged over ten seconds; beyond that the
    broker answers with nothing, and with how long it will be mute."""
    _alter(bootstrap, "--add-config", f"consumer_byte_rate={bytes_per_s}")
    try:
        yield
    finally:
        _alter(bootstrap, "--delete-config", "consumer_byte_rate")


def _alter(bootstrap: str, *change: str) -> None:
    # By Kafka's command: librdkafka cannot ask for quotas.
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home, "bin", "java")) if home else "java"
    tool = [java, SHORT_LIVED, "-cp", os.pathsep.join(map(str, broker_jars())), "kafka.admin.ConfigCommand"]
    whom = ["--bootstrap-server", bootstrap, "--entity-type", "clients", "--entity-default"]
    run = subprocess.run(
        [*tool, *whom, "--alter", *change], capture_output=True, text=True, timeout=scaled(SECONDS_MAX)
    )
    assert run.returncode == 0, run.stdout + run.stderr
