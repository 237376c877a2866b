"""timerstore.disk.checkpoint: what was written is read, and nothing else is believed."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import pytest

from timerstore.disk import checkpoint, files
from timerstore.disk.checkpoint import Checkpoint, Identity, NamedFile
from timerstore.errors import Corrupt
from timerstore.rows.position import Position, Progress, Step

FULL = Checkpoint(
    identity=Identity(cluster_id="c", log_id="x/0"),
    offset=17,
    progress=Progress(20, Position(1_600_000_000_000, 5), (Step(19, Position(1_700_000_000_000, 7)),)),
    cut=3,
    segments=(NamedFile(name="segment-0000000001.parquet", bytes=12, crc=34),),
)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    """All of it, and the last one written counts."""
    assert checkpoint.read(tmp_path) is None
    checkpoint.write(tmp_path, Checkpoint(identity=FULL.identity))
    checkpoint.write(tmp_path, FULL)
    assert checkpoint.read(tmp_path) == FULL
    assert [path.name for path in tmp_path.iterdir()] == [files.CHECKPOINT]


def test_no_flipped_byte_goes_unnoticed(tmp_path: Path) -> None:
    """Every byte of the file: it is refused, or (in the text around the checksummed body) says the same."""
    checkpoint.write(tmp_path, FULL)
    path = tmp_path / files.CHECKPOINT
    content = path.read_bytes()
    refused = 0
    for place in range(len(content)):
        for mask in (0x01, 0x20, 0x80):
            path.write_bytes(content[:place] + bytes([content[place] ^ mask]) + content[place + 1 :])
            try:
                assert checkpoint.read(tmp_path) == FULL
            except Corrupt:
                refused += 1
    assert refused > 0.95 * 3 * len(content)


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"null", b'{"crc": 1, "body": 2}', b'{"crc": 1}', b"\xff\xfe"])
def test_what_is_no_checkpoint_is_refused(tmp_path: Path, content: bytes) -> None:
    """Torn, empty or foreign files among them."""
    (tmp_path / files.CHECKPOINT).write_bytes(content)
    with pytest.raises(Corrupt) as caught:
        checkpoint.read(tmp_path)
    assert caught.value.path == str(tmp_path / files.CHECKPOINT)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    """At any length."""
    checkpoint.write(tmp_path, FULL)
    path = tmp_path / files.CHECKPOINT
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(Corrupt):
            checkpoint.read(tmp_path)


def test_another_version_is_not_guessed_at(tmp_path: Path) -> None:
    """Its checksum is right, its meaning unknown."""
    checkpoint.write(tmp_path, FULL)
    path = tmp_path / files.CHECKPOINT
    body = json.loads(json.loads(path.read_text())["body"]) | {"version": 0}
    text = json.dumps(body)
    path.write_text(json.dumps({"crc": zlib.crc32(text.encode()), "body": text}))
    with pytest.raises(Corrupt, match="version 0"):
        checkpoint.read(tmp_path)
