"""bridge.sizes: the size of a record as brokers count it. (tests/broker/test_refused_records.py asks a broker.)"""

from __future__ import annotations

import pytest

from bridge.delivery.plan.record_size import record_bytes
from bridge.wire.headers import HeaderList


@pytest.mark.parametrize(
    ("key", "value", "headers", "size"),
    [
        (None, None, [], 68),  # 61 + length 1 + attributes, timestamp, offset, key -1, value -1, no headers
        (b"", b"", [], 68),
        (b"k", b"v", [], 70),
        (None, bytes(63), [], 132),  # a record of 69 bytes has a length of two, a value of 63 one of one
        (None, bytes(64), [], 134),
        (None, None, [("a", b"b")], 72),
        (None, None, [("a", None)], 71),
        (None, None, [("ä", "ö")], 74),
    ],
)
def test_a_record_alone_in_its_batch(key: bytes | None, value: bytes | None, headers: HeaderList, size: int) -> None:
    """Lengths are zigzag varints; null is the length -1."""
    assert record_bytes(key, value, headers) == size
