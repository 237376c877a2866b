"""Export: all matching pending messages of one moment, as Arrow record batches, for analysis elsewhere.

    at the moment   lists and the committed state are copied under the lock; then the files of all segments are opened
    afterwards      rows in memory are read, then segment by segment, in parts of row groups

Later deliveries, cancels and compactions do not change the result: a slow client still reads that moment. Memory holds
the resident rows of that moment until they are read, one row group in its compressed form, and one batch. The disk
space of a segment that is removed meanwhile becomes free at the end of the export.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from timerstore.log.segment import ROW_GROUP_ROWS, Segment, SegmentReader, open_file
from timerstore.memory.chunks import materialize
from timerstore.memory.sorted_runs import RowRefs
from timerstore.operations.find import BULKY, POSITION_COLUMNS, STATES, Hits, LogQuery, Search
from timerstore.operations.snapshot import Snapshot, looked
from timerstore.operations.state import StoreState
from timerstore.rows.entry import HEADERS, PAYLOAD_COLUMNS
from timerstore.rows.position import ORIGIN

BATCH_BYTES_MAX: Final = 4 << 20
"""Approximate limit of a batch; a single row may exceed it."""
TIME: Final = pa.timestamp("us", tz="UTC")
SCHEMA: Final = pa.schema(
    [
        pa.field("offset", pa.int64()),
        pa.field("origin", pa.int64()),
        pa.field("due", TIME),
        pa.field("at", TIME),
        pa.field("ts", TIME),
        pa.field("state", pa.string()),
        pa.field("target", pa.string()),
        pa.field("target_partition", pa.int32()),
        pa.field("key", pa.binary()),
        pa.field("id", pa.string()),
        pa.field("rolls", pa.int32()),
        pa.field("attempts", pa.int32()),
        pa.field("reason", pa.string()),
        pa.field("headers", HEADERS),
        pa.field("value", pa.binary()),
    ]
)
"""The columns have the meaning of the fields of `find.FoundRow`; times are whole milliseconds. Without `bulky`, headers
and values are null."""
_OUTSIDE: Final = {"kind", "replace"}
"""Payload columns that an export leaves out."""


class Export:
    """An iterator over batches of `SCHEMA`, in no order of rows. Some batches are empty, so that one comes every few
    milliseconds even for few matches. It is for one thread at a time. Read it to its end, or `close` it.

    `next` raises Corrupt, DiskFailure.
    """

    def __init__(self, state: StoreState, snapshot: Snapshot, query: LogQuery, now_ms: int, *, bulky: bool) -> None:
        """Raises Corrupt, DiskFailure."""
        self._names = [n for n in PAYLOAD_COLUMNS if n not in _OUTSIDE and (bulky or n not in BULKY)]
        self._files = ExitStack()
        self._snapshot = snapshot
        self._search = Search(state, self._snapshot, query, now_ms, ORIGIN)
        self._plan: list[tuple[Segment, pa.NativeFile, list[int]]] = []
        try:
            for segment in self._snapshot.segments:
                if groups := np.flatnonzero(self._search.may_fit(segment)).tolist():
                    self._plan.append((segment, self._files.enter_context(open_file(segment)), groups))
        except BaseException:
            self._files.close()
            raise
        self._batches = self._all()

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        return self

    def __next__(self) -> pa.RecordBatch:
        return next(self._batches)

    def close(self) -> None:
        self._batches.close()
        self._files.close()

    def _all(self) -> Generator[pa.RecordBatch]:
        with self._files:
            yield from self._in_memory()
            while self._plan:
                segment, file, groups = self._plan.pop()
                with SegmentReader(segment, file) as reader:
                    for group in groups:
                        yield from self._in_group(segment, reader, group)

    def _in_memory(self) -> Iterator[pa.RecordBatch]:
        hits, chunks = self._search.in_memory(), self._snapshot.chunks
        self._snapshot = self._search.snapshot = replace(self._snapshot, chunks={})
        size = np.ones(max(chunks, default=-1) + 1, dtype=np.int64)
        for c, payload in chunks.items():
            size[c] += payload.nbytes // max(1, payload.num_rows)
        part = np.cumsum(size[hits.refs.chunk]) // BATCH_BYTES_MAX
        chunks = {c: payload.select(self._names) for c, payload in chunks.items()}
        for piece in np.split(np.arange(len(part)), np.flatnonzero(np.diff(part)) + 1):
            refs = hits.refs[piece]
            if len(refs):
                yield self._batch(Hits(refs, hits.state[piece]), materialize(chunks, refs.chunk, refs.row))

    def _in_group(self, segment: Segment, reader: SegmentReader, group: int) -> Iterator[pa.RecordBatch]:
        if not self._search.has_any(reader, group):
            yield EMPTY
            return
        rows, size = int(segment.group_rows[group]), int(segment.group_bytes[group])
        rows_max = max(1, min(ROW_GROUP_ROWS, rows * BATCH_BYTES_MAX // max(1, size)))
        for table in reader.parts(group, [*POSITION_COLUMNS, "kind", *self._names], rows_max):
            hits = self._search.in_table(table)
            yield self._batch(hits, table.select(self._names).take(pa.array(hits.refs.row)))

    def _batch(self, hits: Hits, payload: pa.Table | pa.RecordBatch) -> pa.RecordBatch:
        """A batch of `SCHEMA`; `payload` has one row for each of `hits`."""
        refs: RowRefs = hits.refs
        columns = {name: payload.column(name) for name in self._names} | {
            "offset": pa.array(refs.offset),
            "at": pa.array(refs.at),
            "state": pa.array([state.value for state in STATES]).take(pa.array(hits.state)),
            "target": pc.fill_null(payload.column("target"), ""),
            "attempts": payload.column("attempt"),
        }
        for name in ("due", "at", "ts"):
            columns[name] = columns[name].cast(pa.timestamp("ms", tz="UTC"))
        for name in BULKY:
            columns.setdefault(name, pa.nulls(len(refs), SCHEMA.field(name).type))
        table = pa.table([columns[name] for name in SCHEMA.names], names=SCHEMA.names).cast(SCHEMA)
        return table.combine_chunks().to_batches()[0] if len(refs) else EMPTY


EMPTY: Final = pa.RecordBatch.from_pylist([], schema=SCHEMA)


def export(state: StoreState, query: LogQuery, now_ms: int, *, bulky: bool) -> Export:
    """See `TimerStore.export`."""
    return looked(state, lambda snapshot: Export(state, snapshot, query, now_ms, bulky=bulky))
