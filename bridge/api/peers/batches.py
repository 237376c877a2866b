"""The reader's end of an export: its Arrow batches, and whether the stream is complete. Pure; also for clients."""

from __future__ import annotations

import io
import json
from collections.abc import Generator, Iterator
from typing import Any, Final

import httpx
import pyarrow as pa

MEDIA_TYPE: Final = "application/vnd.apache.arrow.stream"


class _Body(io.RawIOBase):
    """A body that comes in parts."""

    def __init__(self, parts: Iterator[bytes]) -> None:
        self._parts, self._left = parts, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill the beginning of the buffer; 0: the body has ended."""
        while not self._left:
            if (part := next(self._parts, None)) is None:
                return 0
            self._left = memoryview(part)
        size = min(len(buffer), len(self._left))
        buffer[:size], self._left = self._left[:size], self._left[size:]
        return size


def as_file(parts: Iterator[bytes]) -> io.BufferedReader:
    """A binary file of the parts of a body."""
    return io.BufferedReader(_Body(parts))


class BrokenOffError(Exception):
    """A stream ended early, after `rows` rows."""

    def __init__(self, rows: int, reason: str) -> None:
        super().__init__(f"broken off after {rows} messages: {reason}")
        self.rows, self.reason = rows, reason


def read_export(stream: Any) -> Generator[pa.RecordBatch, None, list[str]]:
    """All batches of a binary file, at least one; returns the instances that did not answer. Raises BrokenOffError if
    the last batch is missing, or names another number of rows."""
    rows, metadata = 0, None
    try:
        reader = pa.ipc.open_stream(stream)
        while metadata is None:
            batch, metadata = reader.read_next_batch_with_custom_metadata()
            rows += batch.num_rows
            yield batch
        if rows != int(metadata["rows"]):
            raise BrokenOffError(rows, f"{int(metadata['rows'])} were announced")
        return list(json.loads(metadata["incomplete"])) if b"incomplete" in metadata else []
    except (pa.ArrowException, httpx.HTTPError, OSError, StopIteration, LookupError, ValueError) as error:
        raise BrokenOffError(rows, type(error).__name__) from None
