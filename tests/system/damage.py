"""Bits that flip on a broker's disk."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from dev.broker import EmbeddedBroker
from tests.system.broker import Broker

_HEAD = struct.Struct(">qi")


def flip_a_bit(broker: Broker, topic: str, partition: int, offset: int, *, back: int = 2) -> None:
    """In the batch that holds the offset, `back` bytes before its end. A second time puts it right."""
    if not isinstance(broker, EmbeddedBroker):
        pytest.skip("the files of a broker in a container cannot be reached")
    directory = Path(broker.data, "kafka", f"{topic}-{partition}")
    found = [place for path in sorted(directory.glob("*.log")) if (place := _end(path, offset)) is not None]
    assert found, f"no batch of {directory} holds {offset}"
    path, end = found[-1]
    with path.open("r+b") as file:
        file.seek(end - back)
        (byte,) = file.read(1)
        file.seek(end - back)
        file.write(bytes([byte ^ 1]))


def _end(path: Path, offset: int) -> tuple[Path, int] | None:
    """Where the batch with this offset ends in the file."""
    data, at = path.read_bytes(), 0
    while at + _HEAD.size <= len(data):
        base, size = _HEAD.unpack_from(data, at)
        (delta,) = struct.unpack_from(">i", data, at + 23)
        at += _HEAD.size + size
        if size and base <= offset <= base + delta:
            return path, at
    return None
