"""The state of a transactional id, without Java: DescribeTransactions (KIP-664)."""

from __future__ import annotations

import socket
import struct
from typing import Final

from confluent_kafka import KafkaError, KafkaException

DESCRIBE_TRANSACTIONS: Final = 65
TIMEOUT_S: Final = 10
CORRELATION: Final = 1
NOT_FOUND: Final = 105


def state_of(bootstrap: str, name: str) -> str | None:
    """The state of a transactional id on a cluster of one node; None: it knows no such id. Raises KafkaException
    without an answer."""
    id_ = name.encode()
    header = struct.pack(">hhih", DESCRIBE_TRANSACTIONS, 0, CORRELATION, -1) + b"\x00"
    frame = header + b"\x02" + bytes([len(id_) + 1]) + id_ + b"\x00"
    host, port = bootstrap.rsplit(":", 1)
    try:
        with socket.create_connection((host, int(port)), TIMEOUT_S) as connection, connection.makefile("rb") as answers:
            connection.sendall(struct.pack(">i", len(frame)) + frame)
            answer = answers.read(struct.unpack(">i", answers.read(4))[0])
    except (OSError, struct.error) as error:
        raise KafkaException(KafkaError(KafkaError._TRANSPORT, str(error), retriable=True)) from None
    # Correlation id, tags, throttle time, one state: its code, the id, the text.
    at = 4 + 1 + 4 + 1
    [code] = struct.unpack_from(">h", answer, at)
    if code == NOT_FOUND:
        return None
    if code:
        raise KafkaException(KafkaError(code, retriable=True))
    at += 2
    at += answer[at]
    size = answer[at] - 1
    return answer[at + 1 : at + 1 + size].decode()
