"""The image as Kubernetes runs it: any user, a read-only root, no network but the broker's, signals that arrive."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import docker
import pytest
from docker.errors import DockerException, ImageNotFound

from bridge import __version__
from bridge.install import connector
from tests.paths import ROOT

IMAGE: Final = f"delay-bridge:{__version__}"
SCENARIO_S_MAX: Final = 280
JARS: Final = ROOT / ".venv" / "share" / "delay-bridge" / "jars"


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    """A container engine that has the image."""
    try:
        client = docker.from_env(timeout=5)
        client.images.get(IMAGE)
    except ImageNotFound:
        pytest.skip(f"the engine has no {IMAGE}: `make image` builds it")
    except DockerException:
        pytest.skip("no container engine answers")
    yield client
    client.close()


@pytest.fixture
def network(engine: Any) -> Iterator[tuple[str, list[str]]]:
    """A network with a loopback and nothing else, and how to run a program in it; for root only, else the host's."""
    if os.geteuid() != 0 or shutil.which("nsenter") is None:
        yield "host", []
        return
    holder = engine.containers.run(IMAGE, entrypoint=["sleep", "900"], network_mode="none", detach=True)
    try:
        holder.reload()
        yield f"container:{holder.id}", ["nsenter", "--target", str(holder.attrs["State"]["Pid"]), "--net"]
    finally:
        holder.remove(force=True, v=True)


@pytest.mark.system
@pytest.mark.slow
def test_the_image_delivers_as_nobody_without_a_network_on_a_read_only_root(
    network: tuple[str, list[str]],
) -> None:
    """A random user, nothing writable but /tmp, /dev/shm and the volume: a message arrives, SIGTERM ends it with 0."""
    name, enter = network
    user = str(random.randrange(100_000, 200_000))
    command = [*enter, sys.executable, "-m", "tests.packaging.image.scenario", IMAGE, name, user]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SCENARIO_S_MAX, check=False)
    assert run.returncode == 0, run.stderr
    seen = json.loads(run.stdout)
    assert seen["uid"] == user
    assert seen["send"][0] == 0 and "arrived at orders-" in seen["send"][1], seen
    assert seen["end"] == 0, seen["log"]
    assert "Traceback" not in seen["log"] and "ClassNotFound" not in seen["log"], seen["log"]


def test_the_jars_are_those_that_the_image_is_pinned_to() -> None:
    """connector.lock has the name and the digest of every jar that `make install` resolves."""
    run = subprocess.run(
        ["sha256sum", "--check", "--strict", "--quiet", str(ROOT / "connector.lock")],
        cwd=JARS,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    locked = {line.split()[1] for line in (ROOT / "connector.lock").read_text().splitlines()}
    assert locked == {path.name for path in JARS.glob("*.jar")} - {connector.FRAME_WRITER}, "which is compiled here"


def test_both_locks_name_the_same_versions() -> None:
    """The tests run with the image's versions."""
    pattern = re.compile(r"^([\w.-]+)==([^\s;]+)", re.MULTILINE)
    tested = dict(pattern.findall((ROOT / "requirements.lock").read_text()))
    shipped = dict(pattern.findall((ROOT / "requirements.runtime.lock").read_text()))
    assert len(shipped) > 10
    assert {name: version for name, version in shipped.items() if tested.get(name) != version} == {}


def test_patterns_of_jars_that_are_left_out_match() -> None:
    """A pattern that matches nothing is of another version of Spark."""
    import pyspark

    jars = Path(pyspark.__file__).parent / "jars"
    lines = (ROOT / "release" / "unused-jars.txt").read_text().splitlines()
    patterns = [line for line in lines if not line.startswith("#")]
    assert [pattern for pattern in patterns if not list(jars.glob(f"{pattern}.jar"))] == []
