"""timerstore.disk.files: a file is there whole or not at all; one process at a time."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from timerstore.disk import files
from timerstore.errors import Corrupt, DirectoryInUse, DiskFailure, DiskFull


def text(content: str) -> Callable[[Path], None]:
    def write(temporary: Path) -> None:
        temporary.write_text(content)

    return write


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    """And no temporary file stays."""
    path = tmp_path / "a"
    files.write_durably(path, text("one"))
    files.write_durably(path, text("two"))
    assert path.read_text() == "two"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("number", "error"), [(errno.ENOSPC, DiskFull), (errno.EDQUOT, DiskFull), (errno.EIO, DiskFailure)]
)
def test_a_failed_write_leaves_the_old_file(tmp_path: Path, number: int, error: type[DiskFailure]) -> None:
    """A full disk is told from a broken one: the first is waited out."""
    path = tmp_path / "a"
    path.write_text("old")

    def write(temporary: Path) -> None:
        temporary.write_text("ne")
        raise OSError(number, os.strerror(number))

    with pytest.raises(DiskFailure) as caught:
        files.write_durably(path, write)
    assert type(caught.value) is error and caught.value.hint
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_failed_fsync_is_never_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it says of the file is nothing, so it is not tried again."""

    def fail(_: int) -> None:
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(DiskFailure) as caught:
        files.write_durably(tmp_path / "a", text("x"))
    assert not isinstance(caught.value, DiskFull)
    with pytest.raises(DiskFailure):
        files.sync_directory(tmp_path)


def test_the_directory_has_one_owner(tmp_path: Path) -> None:
    """The second is refused while the first lives, also in the same process; then it may come in."""
    first = files.lock_directory(tmp_path)
    with pytest.raises(DirectoryInUse) as caught:
        files.lock_directory(tmp_path)
    assert caught.value.hint
    os.close(first)
    os.close(files.lock_directory(tmp_path))


def test_the_lock_goes_with_its_process(tmp_path: Path) -> None:
    """However the process ends: no file has to be removed by hand."""
    program = (
        "import os, signal, sys; from pathlib import Path; from timerstore.disk import files;"
        "files.lock_directory(Path(sys.argv[1])); print('locked', flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    child = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert child.stdout == "locked\n" and child.returncode < 0
    os.close(files.lock_directory(tmp_path))


def test_a_directory_that_cannot_be_used_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    """Not a bare OSError."""
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskFailure) as caught:
        files.lock_directory(tmp_path / "file" / "store")
    assert "store.directory" in caught.value.hint


def test_what_a_crash_left_is_known_from_everything_else(tmp_path: Path) -> None:
    """Temporary files, and segments without a name in the checkpoint; not what was set aside."""
    kept = [files.segment_name(1), files.CHECKPOINT, files.LOCK, files.RESERVE, "segment-0000000003.parquet.7.corrupt"]
    gone = [
        files.segment_name(2),
        files.segment_name(4) + files.TEMPORARY_SUFFIX,
        files.CHECKPOINT + files.TEMPORARY_SUFFIX,
    ]
    for name in kept + gone:
        (tmp_path / name).write_text("")
    assert [path.name for path in files.unreferenced(tmp_path, {files.segment_name(1)})] == sorted(gone)


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ESTALE])
def test_an_errno_is_never_damage(tmp_path: Path, number: int) -> None:
    """It is the volume's; what has no number is what pyarrow says of a file's content, and a file that is gone cannot
    come back."""
    for error, expected in (
        (OSError(number, os.strerror(number)), DiskFailure),
        (OSError("CRC checksum verification failed"), Corrupt),
        (ValueError("not JSON"), Corrupt),
        (FileNotFoundError(errno.ENOENT, "gone"), Corrupt),
    ):
        with pytest.raises(expected), files.reading(tmp_path / "a"):
            raise error


def test_names_sort_by_number() -> None:
    """And the number is found again."""
    assert files.segment_name(9) < files.segment_name(10)
    assert files.number_of(files.segment_name(1_234)) == 1_234


def test_a_report_of_damage_does_not_repeat_the_file(tmp_path: Path) -> None:
    """A checkpoint may be large, and an error of decoding holds all that it was about."""
    with pytest.raises(Corrupt) as caught, files.reading(tmp_path / "a"):
        (b"x" * 10_000 + b"\xff").decode()
    assert caught.value.message.startswith("a cannot be parsed: UnicodeDecodeError: ")
    assert len(caught.value.message) < 200


def test_a_directory_is_durable_with_the_ones_above_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss of power leaves no gap in a path."""
    synced: list[Path] = []
    monkeypatch.setattr(files, "fsync", synced.append)
    for name, above in (("0", {tmp_path, tmp_path / "topic"}), ("1", {tmp_path / "topic"}), ("1", set())):
        files.make_directory(tmp_path / "topic" / name)
        assert set(synced) == above
        synced.clear()
