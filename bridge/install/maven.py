"""Jars from Maven, in a directory that is either complete or absent, even for concurrent processes."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from bridge.errors import EnvironmentFailure

# The plugin's version is pinned, so Maven neither warns nor searches for a newer one.
COPY_DEPENDENCIES: Final = "org.apache.maven.plugins:maven-dependency-plugin:3.6.1:copy-dependencies"
RESOLVE_TIMEOUT_S: Final = 900
OUTPUT_LINES_MAX: Final = 12


def resolve_jars(pom: str, into: Path, *, keep: Callable[[Path], bool] = lambda jar: True) -> list[Path]:
    """The jars of `pom`'s runtime dependencies in the directory `into`, sorted. An existing directory is not resolved
    again.

    `keep` selects the resolved jars to keep. One rename creates `into`, so it is complete whenever it exists. Of
    several processes one resolves, and the others wait. Raises EnvironmentFailure if Maven is missing or fails.
    """
    if not into.is_dir():
        into.parent.mkdir(parents=True, exist_ok=True)
        with locked(into.with_name(f".{into.name}.lock")):
            if not into.is_dir():
                _resolve(pom, into, keep)
    return sorted(into.glob("*.jar"))


def _resolve(pom: str, into: Path, keep: Callable[[Path], bool]) -> None:
    with tempfile.TemporaryDirectory(prefix=f".{into.name}.", dir=into.parent) as scratch:
        pom_path, jars = Path(scratch, "pom.xml"), Path(scratch, "jars")
        pom_path.write_text(pom, encoding="utf-8")
        _run_maven(pom_path, jars)
        for jar in jars.glob("*.jar"):
            if not keep(jar):
                jar.unlink()
        jars.rename(into)


def _run_maven(pom: Path, into: Path) -> None:
    maven = shutil.which("mvn")
    if maven is None:
        raise EnvironmentFailure(
            "Maven is not on the PATH", hint="Install it (Debian: apt-get install maven).", code="DB-3022"
        )
    command = [maven, "-B", "-q", "-f", str(pom), COPY_DEPENDENCIES, f"-DoutputDirectory={into}"]
    command += ["-DincludeScope=runtime", "-Dstyle.color=never"]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=RESOLVE_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise EnvironmentFailure(
            "Maven did not finish in time",
            hint="Check the network, then try again.",
            timeout_s=RESOLVE_TIMEOUT_S,
            code="DB-3022",
        ) from None
    if run.returncode != 0:
        output = " | ".join((run.stdout + run.stderr).strip().splitlines()[:OUTPUT_LINES_MAX])
        raise EnvironmentFailure(
            "Maven could not resolve the jars",
            hint="Check that a Maven repository is reachable (~/.m2/settings.xml, proxy), then try again.",
            output=output,
            code="DB-3022",
        )


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an advisory lock on the file `path`. It ends with the process, so a killed process blocks no other."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
