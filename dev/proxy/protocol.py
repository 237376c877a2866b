"""As much of Kafka's protocol as the proxy needs: the headers, the transactional id, error codes and addresses.

A frame is what follows its length: in a request the API's key and version, the correlation id and the client's id; in
an answer the correlation id. From some version on an API is *flexible*: lengths are varints, and tagged fields follow.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

Address = tuple[str, int]


class Api(IntEnum):
    """Keys of the APIs that the proxy reads. It passes all others on unchanged."""

    PRODUCE = 0
    METADATA = 3
    FIND_COORDINATOR = 10
    INIT_PRODUCER_ID = 22
    ADD_PARTITIONS_TO_TXN = 24
    ADD_OFFSETS_TO_TXN = 25
    END_TXN = 26
    TXN_OFFSET_COMMIT = 28


FLEXIBLE_SINCE: Final = {
    Api.PRODUCE: 9,
    Api.METADATA: 9,
    Api.FIND_COORDINATOR: 3,
    Api.INIT_PRODUCER_ID: 2,
    Api.ADD_PARTITIONS_TO_TXN: 3,
    Api.ADD_OFFSETS_TO_TXN: 3,
    Api.END_TXN: 3,
    Api.TXN_OFFSET_COMMIT: 3,
}
TRANSACTIONAL: Final = frozenset(Api) - {Api.METADATA, Api.FIND_COORDINATOR}
"""Requests that begin with a transactional id."""
_CORRELATION_AT: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerRequest:
    """`transactional_id` and `is_commit` are None where the request has none, or the proxy does not read it."""

    api: Api
    version: int
    correlation: int
    frame: bytes
    transactional_id: str | None = None
    is_commit: bool | None = None
    """Of END_TXN."""

    def numbered(self, correlation: int) -> bytes:
        """The frame with another correlation id."""
        return self.frame[:_CORRELATION_AT] + struct.pack(">i", correlation) + self.frame[_CORRELATION_AT + 4 :]


class _Frame:
    """A frame that is read from its beginning."""

    def __init__(self, frame: bytes, *, is_flexible: bool) -> None:
        self.frame = frame
        self.at = 0
        self._is_flexible = is_flexible

    def number(self, code: str) -> int:
        """A number in the format of `struct`."""
        [value] = struct.unpack_from(f">{code}", self.frame, self.at)
        self.at += struct.calcsize(f">{code}")
        return int(value)

    def text(self) -> str | None:
        size = self._varint() - 1 if self._is_flexible else self.number("h")
        return None if size < 0 else self._bytes(size).decode()

    def fixed_text(self) -> str | None:
        """One whose length is never a varint."""
        size = self.number("h")
        return None if size < 0 else self._bytes(size).decode()

    def array(self) -> range:
        """A turn for each element."""
        return range(self._varint() - 1 if self._is_flexible else self.number("i"))

    def tags(self) -> None:
        """Pass over tagged fields."""
        if self._is_flexible:
            for _ in range(self._varint()):
                self._varint()
                self._bytes(self._varint())

    def rest(self) -> bytes:
        return self.frame[self.at :]

    def _bytes(self, size: int) -> bytes:
        self.at += size
        return self.frame[self.at - size : self.at]

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self.frame[self.at]
            self.at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7


def request_of(frame: bytes) -> BrokerRequest | None:
    """The request in a frame; None for an API that the proxy does not read."""
    key, version, correlation = struct.unpack_from(">hhi", frame)
    try:
        api = Api(key)
    except ValueError:
        return None
    if api not in TRANSACTIONAL or (api is Api.PRODUCE and version < 3):
        return BrokerRequest(api=api, version=version, correlation=correlation, frame=frame)
    reader = _Frame(frame, is_flexible=version >= FLEXIBLE_SINCE[api])
    reader.at = _CORRELATION_AT + 4
    reader.fixed_text()
    reader.tags()
    transactional_id, is_commit = reader.text(), None
    if api is Api.END_TXN:
        reader.number("q")
        reader.number("h")
        is_commit = bool(reader.number("b"))
    return BrokerRequest(
        api=api,
        version=version,
        correlation=correlation,
        frame=frame,
        transactional_id=transactional_id,
        is_commit=is_commit,
    )


def correlation_of(answer: bytes) -> int:
    [correlation] = struct.unpack_from(">i", answer)
    return int(correlation)


def error_of(request: BrokerRequest, answer: bytes) -> int:
    """The first error code in the answer that is not 0, else 0. Only for transactional requests."""
    reader = _answer(request, answer)
    if request.api is Api.PRODUCE:
        return _first_of_partitions(reader, lambda: _produce_partition(reader, request.version))
    reader.number("i")  # throttle time
    if request.api in (Api.ADD_PARTITIONS_TO_TXN, Api.TXN_OFFSET_COMMIT):
        return _first_of_partitions(reader, lambda: _partition(reader))
    return reader.number("h")


def _first_of_partitions(reader: _Frame, partition: Callable[[], int]) -> int:
    codes = []
    for _ in reader.array():
        reader.text()
        codes += [partition() for _ in reader.array()]
        reader.tags()
    return next((code for code in codes if code), 0)


def _partition(reader: _Frame) -> int:
    reader.number("i")
    code = reader.number("h")
    reader.tags()
    return code


def _produce_partition(reader: _Frame, version: int) -> int:
    reader.number("i")
    code = reader.number("h")
    reader.number("q")  # offset
    reader.number("q")  # time
    if version >= 5:
        reader.number("q")  # the log's start
    if version >= 8:
        for _ in reader.array():
            reader.number("i")
            reader.text()
            reader.tags()
        reader.text()
    reader.tags()
    return code


def with_addresses(request: BrokerRequest, answer: bytes, local: Callable[[Address], Address]) -> bytes:
    """An answer to METADATA or FIND_COORDINATOR with other addresses of the brokers."""
    reader = _answer(request, answer)
    written = bytearray(answer[: reader.at])
    is_flexible = request.version >= FLEXIBLE_SINCE[request.api]

    def skip(read: Callable[[], object]) -> None:
        before = reader.at
        read()
        written.extend(answer[before : reader.at])

    def address() -> None:
        host, port = reader.text(), reader.number("i")
        if host:
            host, port = local((host, port))
        written.extend(_written(host or "", is_flexible=is_flexible) + struct.pack(">i", port))

    if request.api is Api.METADATA:
        if request.version >= 3:
            skip(lambda: reader.number("i"))
        before = reader.at
        brokers = reader.array()
        written.extend(answer[before : reader.at])
        for _ in brokers:
            skip(lambda: reader.number("i"))
            address()
            if request.version >= 1:
                skip(reader.text)
            skip(reader.tags)
    elif request.version < 4:
        if request.version >= 1:
            skip(lambda: reader.number("i"))
        skip(lambda: reader.number("h"))
        if request.version >= 1:
            skip(reader.text)
        skip(lambda: reader.number("i"))
        address()
    else:
        skip(lambda: reader.number("i"))
        before = reader.at
        coordinators = reader.array()
        written.extend(answer[before : reader.at])
        for _ in coordinators:
            skip(reader.text)
            skip(lambda: reader.number("i"))
            address()
            skip(lambda: reader.number("h"))
            skip(reader.text)
            skip(reader.tags)
    return bytes(written) + reader.rest()


def _written(text: str, *, is_flexible: bool) -> bytes:
    """Text of fewer than 127 bytes."""
    encoded = text.encode()
    return (bytes([len(encoded) + 1]) if is_flexible else struct.pack(">h", len(encoded))) + encoded


def _answer(request: BrokerRequest, answer: bytes) -> _Frame:
    """The answer behind its header."""
    reader = _Frame(answer, is_flexible=request.version >= FLEXIBLE_SINCE[request.api])
    reader.number("i")
    reader.tags()
    return reader
