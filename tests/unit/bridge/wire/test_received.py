"""bridge.wire.received: what a record takes."""

from __future__ import annotations

from typing import cast

import pytest
from confluent_kafka import Message

from bridge.wire.received import FRAMING_BYTES, HEADER_BYTES, message_bytes


class Record:
    """What is asked of a message."""

    def __init__(self, value: bytes | None, key: bytes | None, headers: list[tuple[str, bytes | None]] | None) -> None:
        self.value = lambda: value
        self.key = lambda: key
        self.headers = lambda: headers


@pytest.mark.parametrize(
    "headers", [None, [], [("x", None)], [("", None)] * 1_000, [("x" * 10, b"1" * 8_000), ("y", b"")]]
)
def test_headers_count_in_the_size_of_a_record(headers: list[tuple[str, bytes | None]] | None) -> None:
    """They may be all of it, and have neither names nor values."""
    written = sum(HEADER_BYTES + len(name) + len(value or b"") for name, value in headers or [])
    assert message_bytes(cast(Message, Record(b"v" * 5, b"k" * 3, headers))) == 8 + written + FRAMING_BYTES
    assert message_bytes(cast(Message, Record(None, None, headers))) == written + FRAMING_BYTES
