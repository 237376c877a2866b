"""Entry tables for tests of the store, and a gather without Spark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from timerstore.entry import ENTRY, Kind
from timerstore.position import AT_MIN
from timerstore.segment import read_rows
from timerstore.timerlog import Window


@dataclass(frozen=True, slots=True)
class Record:
    """One record of a delay topic as the tests see it; `due_ms` None is a reject."""

    topic: str
    partition: int
    offset: int
    due_ms: int | None
    target: str | None = "orders"
    value: bytes = b"payload"

    @property
    def at_ms(self) -> int:
        return AT_MIN if self.due_ms is None else self.due_ms


def entries(records: Sequence[Record]) -> pa.Table:
    """The entry table of some records."""
    columns = {
        "topic": [r.topic for r in records],
        "partition": [r.partition for r in records],
        "offset": [r.offset for r in records],
        "at": [r.at_ms for r in records],
        "ts": [0 for _ in records],
        "due": [r.due_ms or 0 for r in records],
        "kind": [Kind.REJECT if r.due_ms is None else Kind.TIMER for r in records],
        "target": [r.target for r in records],
        "target_partition": [None for _ in records],
        "key": [f"{r.partition}-{r.offset}".encode() for r in records],
        "value": [r.value for r in records],
        "headers": [[{"key": "h", "value": b"v"}] for _ in records],
        "id": [None for _ in records],
        "replace": [False for _ in records],
        "origin": [r.offset for r in records],
        "attempt": [0 for _ in records],
        "rolls": [0 for _ in records],
        "reason": ["no-time" if r.due_ms is None else None for r in records],
    }
    return pa.table({name: pa.array(columns[name], type=ENTRY.field(name).type) for name in ENTRY.names})


def gather(window: Window) -> pa.Table:
    """What the Spark job reads for a window: the rows of its row groups, unfiltered."""
    tables = []
    for segment in window.segments:
        groups = segment.groups_between(window.lower, window.upper).nonzero()[0].tolist()
        tables.append(read_rows(segment, groups).cast(ENTRY))
    return pa.concat_tables(tables)
