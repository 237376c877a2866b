"""Entry tables for tests of the store, and what a window may be read as."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from timerstore.log.segment import read_rows
from timerstore.log.timerlog import Window
from timerstore.rows.entry import ENTRY, Kind
from timerstore.rows.position import AT_MIN


@dataclass(frozen=True, slots=True)
class Record:
    """One row of a delay topic as the tests see it; `due_ms` None is a reject, or a cancel where `cancels` says so.

    `origin` None: the row is an original. `command`: the row is one, and `moved_ms` is where it moves to.
    """

    topic: str
    partition: int
    offset: int
    due_ms: int | None
    target: str | None = "orders"
    value: bytes = b"payload"
    id: str | None = None
    cancels: bool = False
    replace: bool = False
    origin: int | None = None
    rolls: int = 0
    ts_ms: int = 0
    schedule: str | None = None
    tick: int = 0
    command: Kind | None = None
    moved_ms: int | None = None
    key: bytes | None = None
    put_off_ms: int | None = None
    """When it comes up, of a copy that was put off."""

    @property
    def origin_offset(self) -> int:
        return self.offset if self.origin is None else self.origin

    @property
    def kind(self) -> Kind:
        if self.command is not None:
            return self.command
        return Kind.CANCEL if self.cancels else Kind.REJECT if self.due_ms is None else Kind.TIMER

    @property
    def at_ms(self) -> int:
        return AT_MIN if self.due_ms is None else self.put_off_ms or self.due_ms


def entries(records: Sequence[Record]) -> pa.Table:
    """The entry table of some records."""
    columns = {
        "offset": [r.offset for r in records],
        "at": [r.at_ms for r in records],
        "ts": [r.ts_ms for r in records],
        "due": [r.due_ms or r.moved_ms or 0 for r in records],
        "kind": [r.kind for r in records],
        "target": [r.target for r in records],
        "target_partition": [None for _ in records],
        "key": [r.key or f"{r.partition}-{r.offset}".encode() for r in records],
        "value": [r.value for r in records],
        "headers": [[{"key": "h", "value": b"v"}] for _ in records],
        "id": [r.id for r in records],
        "replace": [r.replace for r in records],
        "origin": [r.origin_offset for r in records],
        "attempt": [0 for _ in records],
        "rolls": [r.rolls for r in records],
        "reason": ["no-time" if r.kind == Kind.REJECT else None for r in records],
        "schedule": [r.schedule for r in records],
        "tick": [r.tick for r in records],
    }
    return pa.table({name: pa.array(columns[name], type=ENTRY.field(name).type) for name in ENTRY.names})


def gather(window: Window) -> pa.Table:
    """The rows of a window's row groups, unfiltered: admitting them leaves out what lies outside."""
    tables = []
    for segment in window.segments:
        groups = segment.groups_between(window.lower, window.upper).nonzero()[0].tolist()
        tables.append(read_rows(segment, groups).cast(ENTRY))
    return pa.concat_tables(tables)
