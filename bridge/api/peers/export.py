"""The export of all instances as one. They begin together; then their batches come in turn, so that no instance waits
long for its reader."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from http import HTTPStatus

import pyarrow as pa

from bridge.api.peers.batches import BrokenOffError, read_export
from bridge.api.peers.client import Reply
from bridge.api.problems import Problem
from bridge.api.source import BatchStream
from bridge.stores.search import SCHEMA


class Everywhere:
    """A `BatchStream` made of those of several instances."""

    def __init__(self, here: BatchStream | None, streams: Sequence[Reply], incomplete: Iterable[str] = ()) -> None:
        self._left: deque[BatchStream] = deque([] if here is None else [here])
        self._left.extend(_There(reply) for reply in streams)
        self.incomplete = [*incomplete]
        """The instances and partitions whose messages are missing, in all streams that have ended."""

    def __next__(self) -> pa.RecordBatch:
        """The next batch. Raises Problem if an instance breaks off."""
        while self._left:
            try:
                batch = next(self._left[0])
            except StopIteration as end:
                self.incomplete += end.value or ()
                self._left.popleft().close()
            else:
                self._left.rotate(-1)
                return batch
        raise StopIteration

    def close(self) -> None:
        while self._left:
            self._left.popleft().close()


class _There:
    def __init__(self, reply: Reply) -> None:
        assert reply.stream is not None
        self._url, self._stream, self._batches = reply.url, reply.stream, read_export(reply.stream.file)

    def __next__(self) -> pa.RecordBatch:
        try:
            batch = next(self._batches)
        except BrokenOffError as error:
            raise Problem(HTTPStatus.SERVICE_UNAVAILABLE, f"The export of {self._url} has {error}.") from None
        if not batch.schema.equals(SCHEMA):
            raise Problem(HTTPStatus.SERVICE_UNAVAILABLE, f"{self._url} runs another version.")
        return batch

    def close(self) -> None:
        self._batches.close()
        self._stream.close()
