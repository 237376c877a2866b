"""Programs that some tests run, from `make tools` or the PATH."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from tests.paths import ROOT


def program(name: str) -> str | None:
    """The path of one, if there is one."""
    made = Path(os.environ.get("DELAY_BRIDGE_CACHE") or ROOT / ".cache") / "bin" / name
    return str(made) if made.exists() else shutil.which(name)


def promtool() -> str:
    """The path of Prometheus' own checker, for tests that are skipped without one."""
    found = program("promtool")
    assert found is not None
    return found
