"""Searches over the stores of all partitions: pages, counts and exports, merged by position and with names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, replace
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bridge.stores.names import NamedPosition, SourceName
from timerstore.operations import export as of_log
from timerstore.operations.find import ORIGINALS_MAX, Count, FoundRow, LogQuery
from timerstore.rows.position import ORIGIN, Int64s, Position, Positions, end_of
from timerstore.store import TimerStore

Stores = Mapping[SourceName, TimerStore]
ROW_FIELDS: Final = [each.name for each in fields(FoundRow)]

_NAMES: Final = [pa.field("topic", pa.string()), pa.field("partition", pa.int32())]
SCHEMA: Final = pa.schema(
    [*_NAMES, *(pa.field(each.name, pa.string()) if each.name == "origin" else each for each in of_log.SCHEMA)]
)
"""Columns of an export, as the fields of `PendingRow`. `origin` is topic/partition/offset of the original record."""
EMPTY: Final = pa.RecordBatch.from_pylist([], schema=SCHEMA)


@dataclass(frozen=True, slots=True, kw_only=True)
class Query(LogQuery):
    """A filter of the pending messages of all partitions. `origin` is (topic, partition, offset) of the original
    record. `paused_topics` are delay topics whose default target is paused."""

    origin: tuple[str, int, int] | None = None
    paused_topics: frozenset[str] = field(default=frozenset(), compare=False)

    def of(self, name: SourceName) -> LogQuery | None:
        """The filter for the store of a partition; None if no message of it can match."""
        if self.origin is None:
            offset = self.origin_offset
        elif self.origin[:2] == name:
            offset = self.origin[2]
        else:
            return None
        return replace(self, origin_offset=offset, is_default_paused=name[0] in self.paused_topics)


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingRow(FoundRow):
    """A pending message of a partition."""

    topic: str
    partition: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Rows in order of position, and the cursor for the next ones; None: no more rows."""

    rows: tuple[PendingRow, ...]
    next: NamedPosition | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Originals:
    """Origins of pending messages: for each partition the offsets of the originals and the due times (epoch ms),
    int64[n] each, in order of position; and the cursor, as of a page."""

    found: Mapping[SourceName, tuple[Int64s, Int64s]]
    next: NamedPosition | None


def page(stores: Stores, query: Query, now_ms: int, after: NamedPosition | None, limit: int, *, bulky: bool) -> Page:
    """The first matching rows behind a cursor."""
    matching: list[PendingRow] = []
    bounds = _Bounds(limit)
    for name, store, mine in _asked(stores, query):
        page = store.find(bounds.narrowed(mine), now_ms, after=_after(name, after), limit=limit, bulky=bulky)
        matching += (_named(name, row) for row in page.rows)
        bounds.add(name, np.array([row.at_ms for row in page.rows], np.int64), page.next)
    end = bounds.end()
    matching.sort(key=_place)
    rows = [row for row in matching if end is None or _place(row) <= end]
    if len(rows) > limit:
        rows, end = rows[:limit], _place(rows[limit - 1])
    return Page(rows=tuple(rows), next=end)


def originals(
    stores: Stores, query: Query, now_ms: int, after: NamedPosition | None, limit: int = ORIGINALS_MAX
) -> Originals:
    """As `page`, with origins and due times only."""
    names, parts, bounds = [], [], _Bounds(limit)
    for name, store, mine in _asked(stores, query):
        part = store.find_originals(bounds.narrowed(mine), now_ms, after=_after(name, after), limit=limit)
        names.append(name)
        parts.append(part)
        bounds.add(name, part.at, part.next)
    end = bounds.end()
    order = sorted(range(len(names)), key=names.__getitem__)
    names, parts = [names[i] for i in order], [parts[i] for i in order]
    number = np.repeat(np.arange(len(parts)), [len(part.at) for part in parts])
    at = np.concatenate([np.empty(0, np.int64), *(part.at for part in parts)])
    offset = np.concatenate([np.empty(0, np.int64), *(part.offset for part in parts)])
    by_position = np.lexsort((offset, number, at))
    if end is not None:
        upto = [_after(name, end) for name in names]
        is_in = [Positions(part.at, part.offset).at_or_below(bound) for part, bound in zip(parts, upto, strict=True)]
        by_position = by_position[np.concatenate([np.empty(0, np.bool_), *is_in])[by_position]]
    if len(by_position) > limit:
        by_position = by_position[:limit]
        last = by_position[-1]
        end = int(at[last]), *names[number[last]], int(offset[last])
    origin = np.concatenate([np.empty(0, np.int64), *(part.origin for part in parts)])[by_position]
    due = np.concatenate([np.empty(0, np.int64), *(part.due for part in parts)])[by_position]
    of = number[by_position]
    return Originals(
        found={names[i]: (origin[of == i], due[of == i]) for i in np.unique(of).tolist()},
        next=end,
    )


def count(stores: Stores, query: Query, now_ms: int, scanned_rows_max: int) -> Count:
    """The number of matching pending messages."""
    parts = [
        store.count_where(mine, now_ms, scanned_rows_max=scanned_rows_max) for _, store, mine in _asked(stores, query)
    ]
    return Count(rows=sum(part.rows for part in parts), is_exact=all(part.is_exact for part in parts))


class StoresExport:
    """An iterator over batches of `SCHEMA`: one store after the other, each in its state at the beginning. For one
    thread at a time. `close` it, or read it to its end. `next` raises Corrupt, DiskFailure."""

    def __init__(self, stores: Stores, query: Query, now_ms: int, *, bulky: bool) -> None:
        self._ends = ExitStack()
        self._parts: list[tuple[SourceName, of_log.Export]] = []
        try:
            for name, store, mine in _asked(stores, query):
                part = store.export(mine, now_ms, bulky=bulky)
                self._ends.callback(part.close)
                self._parts.append((name, part))
        except BaseException:
            self._ends.close()
            raise
        self._batches = self._all()

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        return self

    def __next__(self) -> pa.RecordBatch:
        return next(self._batches)

    def close(self) -> None:
        self._ends.close()

    def _all(self) -> Iterator[pa.RecordBatch]:
        while self._parts:
            name, part = self._parts.pop()
            for batch in part:
                yield _with_names(name, batch)


def _with_names(name: SourceName, batch: pa.RecordBatch) -> pa.RecordBatch:
    topic, partition = name
    columns = {column: batch.column(column) for column in batch.schema.names} | {
        "topic": pa.repeat(pa.scalar(topic), len(batch)),
        "partition": pa.repeat(pa.scalar(partition, pa.int32()), len(batch)),
    }
    origin = pc.cast(batch.column("origin"), pa.string())
    columns["origin"] = pc.binary_join_element_wise(f"{topic}/{partition}", origin, "/")
    return pa.RecordBatch.from_arrays([columns[column] for column in SCHEMA.names], schema=SCHEMA)


class _Bounds:
    """The end of the known rows of each store. With `limit` rows at hand, later rows of the other stores need not be
    read."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._first = np.empty(0, np.int64)
        self._last_ms: int | None = None
        self._ends: list[NamedPosition] = []

    def narrowed(self, query: LogQuery) -> LogQuery:
        """The query, limited to times up to the last wanted row of the earlier stores."""
        if self._last_ms is None:
            return query
        until_ms = self._last_ms + 1
        return replace(query, at_until_ms=until_ms if query.at_until_ms is None else min(query.at_until_ms, until_ms))

    def add(self, name: SourceName, at: Int64s, end: Position | None) -> None:
        """The next store has rows at these times, up to a cursor."""
        if end is None and self._last_ms is not None:
            end = end_of(self._last_ms)
        if end is not None:
            self._ends.append(_placed(name, end))
        self._first = np.sort(np.concatenate([self._first, at]))[: self._limit]
        if len(self._first) == self._limit:
            self._last_ms = int(self._first[-1])

    def end(self) -> NamedPosition | None:
        """The position up to which the rows of all stores are known; None: the end."""
        return min(self._ends, default=None)


def _asked(stores: Stores, query: Query) -> Iterator[tuple[SourceName, TimerStore, LogQuery]]:
    for name, store in stores.items():
        mine = query.of(name)
        if mine is not None:
            yield name, store, mine


def _after(name: SourceName, after: NamedPosition | None) -> Position:
    """The largest position of a partition at or below one of any partition."""
    if after is None:
        return ORIGIN
    at_ms, topic, partition, offset = after
    if (topic, partition) == name:
        return Position(at_ms, offset)
    return Position(at_ms, ORIGIN.offset) if name < (topic, partition) else Position(at_ms - 1, ORIGIN.offset)


def _placed(name: SourceName, position: Position) -> NamedPosition:
    return position.at_ms, *name, position.offset


def _place(row: PendingRow) -> NamedPosition:
    return row.at_ms, row.topic, row.partition, row.offset


def _named(name: SourceName, row: FoundRow) -> PendingRow:
    return PendingRow(topic=name[0], partition=name[1], **{each: getattr(row, each) for each in ROW_FIELDS})
