"""Column files: what is written comes back, and what is damaged is not believed."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from timerstore.disk import column_file as columns
from timerstore.disk import files
from timerstore.errors import Corrupt, DiskFailure, DiskFull

SCHEMA = {"key": "<u8", "small": "<i4", "time": "<i8"}


def pieces(*sizes: int) -> list[dict[str, columns.Column]]:
    starts = np.cumsum([0, *sizes])
    return [
        {name: np.arange(start, start + size).astype(dtype) for name, dtype in SCHEMA.items()}
        for start, size in zip(starts.tolist(), sizes, strict=False)
    ]


@pytest.mark.parametrize("sizes", [(), (1,), (3, 0, 5), (1000, 1, 77)])
def test_what_is_written_comes_back(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    """In pieces of any size, and with fewer rows than there was room for."""
    path = tmp_path / "file"
    columns.write(path, SCHEMA, sum(sizes) + 10, pieces(*sizes), lambda: {"rows": sum(sizes)})
    file = columns.read(path)
    assert len(file) == sum(sizes)
    assert file.note == {"rows": sum(sizes)}
    for name, dtype in SCHEMA.items():
        assert file[name].dtype == np.dtype(dtype)
        assert file[name].tolist() == list(range(sum(sizes)))
    file.drop_pages()
    files.remove(path)
    files.remove(path)
    assert file["key"].tolist() == list(range(sum(sizes)))
    with pytest.raises(Corrupt, match="missing"):
        columns.read(path)


def test_every_damaged_byte_is_noticed(tmp_path: Path) -> None:
    """But for those between the columns, which mean nothing."""
    path = tmp_path / "file"
    columns.write(path, SCHEMA, 5, pieces(5), lambda: "note")
    content = path.read_bytes()
    start, sizes = 64, {"key": 40, "small": 20, "time": 40}
    meaning = {*range(8)}
    for size in sizes.values():
        meaning |= {*range(start, start + size)}
        start += 64
    meaning |= {*range(start, len(content))}
    for at in range(len(content)):
        path.write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
        if at in meaning:
            with pytest.raises(Corrupt):
                columns.read(path)
        else:
            assert len(columns.read(path)) == 5
    for length in range(0, len(content), 7):
        path.write_bytes(content[:length])
        with pytest.raises(Corrupt):
            columns.read(path)


@pytest.mark.parametrize(("number", "error"), [(28, DiskFull), (5, DiskFailure)])
def test_a_disk_that_takes_no_more_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, error: type[Exception]
) -> None:
    """An error, not a signal, and no half file."""

    def fail(*_: object) -> int:
        raise OSError(number, "no")

    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(error):
        columns.write(tmp_path / "file", SCHEMA, 5, pieces(5), lambda: None)
    assert list(tmp_path.iterdir()) == []
