"""The proxy's reading of Kafka's protocol, in layouts that the tests' own clients do not request."""

from __future__ import annotations

import struct
from typing import Final

import pytest

from dev.proxy.protocol import Address, Api, BrokerRequest, error_of, request_of, with_addresses

OLD: Final = b"\x00\x04kept"
NEW: Final = b"\x05kept"


def request(api: Api, version: int) -> BrokerRequest:
    return BrokerRequest(api=api, version=version, correlation=7, frame=b"")


def local(address: Address) -> Address:
    return ("127.0.0.1", 1) if address == ("kept", 9092) else address


COORDINATOR_2: Final = struct.pack(">iih", 7, 0, 0) + b"\xff\xff" + struct.pack(">i", 1)
COORDINATOR_6: Final = struct.pack(">i", 7) + b"\x00" + struct.pack(">i", 0) + b"\x02" + NEW + struct.pack(">i", 1)
METADATA_1: Final = struct.pack(">iii", 7, 1, 1)
METADATA_12: Final = struct.pack(">i", 7) + b"\x00" + struct.pack(">i", 0) + b"\x02" + struct.pack(">i", 1)
PORT: Final = struct.pack(">i", 9092)


@pytest.mark.parametrize(
    ("api", "version", "before", "host", "after"),
    [
        (Api.FIND_COORDINATOR, 2, COORDINATOR_2, OLD, b""),
        (Api.FIND_COORDINATOR, 6, COORDINATOR_6, NEW, b"\x00\x00\x00\x00\x00"),
        (Api.METADATA, 1, METADATA_1, OLD, b"\xff\xffrest"),
        (Api.METADATA, 12, METADATA_12, NEW, b"\x00\x00rest"),
    ],
)
def test_addresses_are_replaced_in_every_layout(
    api: Api, version: int, before: bytes, host: bytes, after: bytes
) -> None:
    """All else is unchanged."""
    written = b"\x0a127.0.0.1" if host is NEW else b"\x00\x09127.0.0.1"
    expected = before + written + struct.pack(">i", 1) + after
    assert with_addresses(request(api, version), before + host + PORT + after, local) == expected


def test_a_request_of_either_layout_tells_its_transactional_id() -> None:
    """And whether it asks for a commit."""
    body = struct.pack(">qhb", 5, 0, 1)
    old = struct.pack(">hhih", Api.END_TXN, 1, 7, 1) + b"c" + OLD + body
    new = struct.pack(">hhih", Api.END_TXN, 3, 7, 1) + b"c" + b"\x01\x00\x02xy" + NEW + body
    for frame in (old, new):
        read = request_of(frame)
        assert read is not None
        assert (read.transactional_id, read.is_commit, read.correlation) == ("kept", True, 7)
        assert request_of(read.numbered(-2)) == BrokerRequest(
            api=Api.END_TXN, version=read.version, correlation=-2, frame=read.numbered(-2),
            transactional_id="kept", is_commit=True,
        )  # fmt: skip


def test_the_first_error_of_any_partition_counts() -> None:
    """An answer names one for each partition."""
    fine, failed = struct.pack(">ih", 0, 0), struct.pack(">ih", 1, 53)
    answer = struct.pack(">iii", 7, 0, 1) + OLD + struct.pack(">i", 2) + fine + failed
    assert error_of(request(Api.ADD_PARTITIONS_TO_TXN, 0), answer) == 53
