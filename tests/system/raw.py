"""Records that no client of ours can write: header names with NUL, and names that are no UTF-8.

(Kafka's protocol: Produce, version 3, with a record batch of version 2. The broker must be the partition's leader.)
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from dev.harness.waiting import wait_until
from timerstore.clock import SystemClock

TIMEOUT_S: Final = 30
NOT_LEADER: Final = 6
_CASTAGNOLI: Final = 0x82F63B78


@dataclass(frozen=True, slots=True, kw_only=True)
class RawRecord:
    """A record as bytes."""

    value: bytes | None = b""
    key: bytes | None = None
    headers: Sequence[tuple[bytes, bytes | None]] = ()


def produce_raw(
    bootstrap: str, topic: str, partition: int, records: Sequence[RawRecord], ts_ms: int | None = None
) -> int:
    """Write the records as one batch, all with that timestamp, or with the present time; returns the first one's
    offset. (A broker deletes records with a timestamp before the topic's retention within minutes.)

    Raises AssertionError if they are refused."""
    batch = _batch(records, SystemClock().now_ms() if ts_ms is None else ts_ms)
    name = topic.encode()
    body = struct.pack(">hhii", -1, -1, TIMEOUT_S * 1_000, 1) + struct.pack(">h", len(name)) + name
    body += struct.pack(">iii", 1, partition, len(batch)) + batch
    request = struct.pack(">hhih", 0, 3, 1, -1) + body
    host, port = bootstrap.rsplit(":", 1)

    def answered() -> tuple[int, int] | None:
        with socket.create_connection((host, int(port)), TIMEOUT_S) as connection, connection.makefile("rb") as answers:
            connection.sendall(struct.pack(">i", len(request)) + request)
            answer = answers.read(struct.unpack(">i", answers.read(4))[0])
        error, offset = struct.unpack_from(">hq", answer, 4 + 4 + 2 + len(name) + 4 + 4)
        return None if error == NOT_LEADER else (error, offset)

    found = wait_until(answered, TIMEOUT_S, "the partition of a new topic has a leader")
    assert found is not None
    error, offset = found
    assert error == 0, f"refused with error {error}"
    return offset


def _batch(records: Sequence[RawRecord], ts_ms: int) -> bytes:
    listed = b"".join(_record(i, record) for i, record in enumerate(records))
    last = len(records) - 1
    checked = struct.pack(">hiqqqhii", 0, last, ts_ms, ts_ms, -1, -1, -1, len(records)) + listed
    return struct.pack(">qiibI", 0, 4 + 1 + 4 + len(checked), -1, 2, _crc32c(checked)) + checked


def _record(number: int, record: RawRecord) -> bytes:
    parts = [b"\0", _varint(0), _varint(number), _sized(record.key), _sized(record.value), _varint(len(record.headers))]
    parts += [_sized(name) + _sized(value) for name, value in record.headers]
    return _sized(b"".join(parts))


def _sized(text: bytes | None) -> bytes:
    return _varint(-1) if text is None else _varint(len(text)) + text


def _varint(number: int) -> bytes:
    zigzag, parts = (number << 1) ^ (number >> 63), []
    while zigzag > 0x7F:
        parts.append(zigzag & 0x7F | 0x80)
        zigzag >>= 7
    return bytes([*parts, zigzag])


def _crc32c(text: Iterable[int]) -> int:
    crc = 0xFFFFFFFF
    for byte in text:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def _entry(number: int) -> int:
    for _ in range(8):
        number = (number >> 1) ^ (_CASTAGNOLI if number & 1 else 0)
    return number


_TABLE: Final = [_entry(number) for number in range(256)]
