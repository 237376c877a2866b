"""Small files in store.directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from bridge import json_file
from bridge.errors import EnvironmentFailure
from bridge.json_file import JsonFile

DAMAGED = [b"", b"{", b"[]", b'{"a": 1}', b'{"version": 1, "items": {"a": {}}}', b"\xff", b"[" * 100_000]


@pytest.fixture
def file(tmp_path: Path) -> JsonFile:
    return JsonFile(tmp_path, "small.json", "nothing is known.")


def items(found: dict[str, dict[str, int]]) -> dict[str, int]:
    return {name: int(number) for name, number in found["items"].items()}


def test_what_was_written_is_read(file: JsonFile) -> None:
    """A file that is not there is no failure."""
    assert file.read(items) is None
    file.write({"items": {"a": 1}})
    assert file.read(items) == {"a": 1} and [path.name for path in file.path.parent.iterdir()] == ["small.json"]


@pytest.mark.parametrize("text", DAMAGED)
@pytest.mark.fault("a damaged file in store.directory, beside the index")
def test_a_damaged_file_is_not_taken_for_an_empty_one(file: JsonFile, text: bytes) -> None:
    """A damaged file ends the start if going on without it may do harm; otherwise it is set aside."""
    file.path.write_bytes(text)
    with pytest.raises(EnvironmentFailure, match="nothing is known") as raised:
        file.read(items)
    assert raised.value.code == "DB-3061" and file.path.exists()
    assert file.read_or_set_aside(items) is None and not file.path.exists()
    [aside] = file.path.parent.iterdir()
    assert aside.name.endswith(".corrupt") and aside.read_bytes() == text


def test_what_is_not_damaged_is_not_set_aside(file: JsonFile) -> None:
    """The file of another version, and a volume that does not give it."""
    file.write({"items": {}, "version": 2})
    other = JsonFile(file.path.parent, "directory.json", "")
    other.path.mkdir()
    for each in (file, other):
        with pytest.raises(EnvironmentFailure) as raised:
            each.read_or_set_aside(items)
        assert raised.value.code == "DB-3063" and each.path.exists()


def test_a_file_that_cannot_be_written_stays_as_it_was(file: JsonFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too large is one reason."""
    file.write({"items": {"a": 1}})
    monkeypatch.setattr(json_file, "BYTES_MAX", 40)
    with pytest.raises(EnvironmentFailure) as raised:
        file.write({"items": {"a" * 40: 1}})
    assert raised.value.code == "DB-3062" and file.read(items) == {"a": 1}
    with pytest.raises(EnvironmentFailure):
        JsonFile(file.path.parent / "missing", "small.json", "").write({})
