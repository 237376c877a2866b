"""Scratch directories: gone with their process, and never another's."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path

import pytest

from bridge.errors import EnvironmentFailure
from bridge.spark import scratch
from bridge.spark.scratch import PREFIX, SOCKET_PATH_MAX, Scratch, for_a_socket, sweep

HOLD = """
import sys
from pathlib import Path
from bridge.spark.scratch import Scratch
held = Scratch(Path(sys.argv[1]))
print(held.path, flush=True)
sys.stdin.read()
"""


@pytest.mark.fault("scratch files of a killed process")
def test_what_a_killed_process_leaves_is_removed_by_the_next(tmp_path: Path) -> None:
    """A directory stays for as long as its process lives, and the next process after a SIGKILL removes it."""
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        path = Path(holder.stdout.readline().strip())
        (path / "blockmgr-1").mkdir()
        with closing(Scratch(tmp_path)) as mine:
            assert path.is_dir() and mine.path != path
            holder.kill()
            holder.wait()
            sweep(tmp_path)
            assert not path.exists() and mine.is_there()
    assert list(tmp_path.iterdir()) == []


def test_nothing_else_is_swept(tmp_path: Path) -> None:
    """Files, links and directories of other names stay."""
    (tmp_path / "delay-bridge-kafka-1").mkdir()
    (tmp_path / f"{PREFIX}file").touch()
    (tmp_path / f"{PREFIX}link").symlink_to(tmp_path / "delay-bridge-kafka-1")
    before = set(tmp_path.iterdir())
    Scratch(tmp_path).close()
    assert set(tmp_path.iterdir()) == before


def test_a_directory_that_was_removed_is_noticed_and_made_anew(tmp_path: Path) -> None:
    """Also where something else took its name."""
    with closing(Scratch(tmp_path)) as held:
        shutil.rmtree(held.path)
        assert not held.is_there()
        held.path.mkdir()
        assert not held.is_there()
        held.renew()
        assert held.is_there()


def test_no_room_is_an_error_that_names_the_directory(tmp_path: Path) -> None:
    """The operator learns which directory it is."""
    with pytest.raises(EnvironmentFailure, match="absent") as raised:
        Scratch(tmp_path / "absent")
    assert raised.value.code == "DB-3085"


@pytest.mark.fault("a temporary directory with a path that is too long for a socket")
def test_a_socket_gets_a_path_that_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another directory takes the place of a temporary directory whose path is too long."""
    long = tmp_path / ("d" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with for_a_socket("frames") as path:
        assert len(os.fsencode(path)) <= SOCKET_PATH_MAX and path.parent.is_dir()
    assert not path.parent.exists()


def test_no_place_for_a_socket_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the reason of the first place that was tried."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    refused = EnvironmentFailure("cannot make", hint="Make room.", code="DB-3085")

    def none(parent: Path) -> Scratch:
        raise refused if parent == tmp_path else EnvironmentFailure("other", hint="None.", code="DB-3085")

    monkeypatch.setattr(scratch, "Scratch", none)
    monkeypatch.setattr(scratch, "SOCKET_PATH_MAX", 1_000)
    with pytest.raises(EnvironmentFailure) as raised, for_a_socket("frames"):
        pass
    assert raised.value is refused
