"""Jars by Maven: complete or absent, also with many who ask at once."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bridge.errors import EnvironmentFailure
from bridge.install import maven

# Stands in for Maven: writes two jars into -DoutputDirectory, and a line into the log for each run.
FAKE = """#!/bin/sh
echo run >> "{log}"
for argument in "$@"; do case "$argument" in -DoutputDirectory=*) into="${{argument#*=}}";; esac; done
mkdir -p "$into" && echo x > "$into/a-1.0.jar" && {then} echo x > "$into/b-2.0.jar"
"""


def fake_maven(directory: Path, monkeypatch: pytest.MonkeyPatch, then: str = "") -> Path:
    """Puts a stand-in before the real Maven on the PATH; returns its log, one line for each run."""
    log, program = directory / "runs", directory / "bin" / "mvn"
    program.parent.mkdir()
    program.write_text(FAKE.format(log=log, then=then))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    return log


def test_many_at_once_resolve_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several that ask at the same time one runs Maven; all get the complete directory."""
    log = fake_maven(tmp_path, monkeypatch)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: maven.resolve_jars("<project/>", tmp_path / "jars"), range(8)))
    assert log.read_text().splitlines() == ["run"]
    assert all([jar.name for jar in jars] == ["a-1.0.jar", "b-2.0.jar"] for jars in found)


def test_unwanted_jars_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only jars that `keep` accepts stay."""
    fake_maven(tmp_path, monkeypatch)
    jars = maven.resolve_jars("<project/>", tmp_path / "jars", keep=lambda jar: jar.name.startswith("b"))
    assert [jar.name for jar in jars] == ["b-2.0.jar"]


def test_a_failure_leaves_nothing_that_looks_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When Maven fails half-way, its words are in the error and the next attempt starts anew."""
    log = fake_maven(tmp_path, monkeypatch, then="echo no route && exit 1;")
    for _ in range(2):
        with pytest.raises(EnvironmentFailure, match="no route"):
            maven.resolve_jars("<project/>", tmp_path / "jars")
    assert not (tmp_path / "jars").exists()
    assert log.read_text().splitlines() == ["run", "run"]


def test_a_missing_maven_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Maven the error says what to install."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EnvironmentFailure, match="maven"):
        maven.resolve_jars("<project/>", tmp_path / "jars")
