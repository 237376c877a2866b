"""Bits that flip on a broker's disk."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Final

import pytest

from tests.system.broker import Broker, SharedBroker

_HEAD = struct.Struct(">qi")


VERSION: Final = 16
"""Where a batch has its version, which its checksum does not cover."""


def flip_a_bit(
    broker: Broker, topic: str, partition: int, offset: int, *, back: int = 2, front: int | None = None
) -> None:
    """In the batch that holds the offset, `back` bytes before its end, or `front` bytes behind its beginning. A second
    time puts it right."""
    if not isinstance(broker, SharedBroker):
        pytest.skip("the files of a broker in a container cannot be reached")
    directory = broker.data / "kafka" / f"{topic}-{partition}"
    found = [place for path in sorted(directory.glob("*.log")) if (place := _place(path, offset)) is not None]
    assert found, f"no batch of {directory} holds {offset}"
    path, begin, end = found[-1]
    at = end - back if front is None else begin + front
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def _place(path: Path, offset: int) -> tuple[Path, int, int] | None:
    """Where the batch with this offset begins and ends in the file."""
    data, at = path.read_bytes(), 0
    while at + _HEAD.size <= len(data):
        base, size = _HEAD.unpack_from(data, at)
        (delta,) = struct.unpack_from(">i", data, at + 23)
        begin, at = at, at + _HEAD.size + size
        if size and base <= offset <= base + delta:
            return path, begin, at
    return None
