"""The timers of origins, in memory and in segments, for cancels and commands by origin: so the counts change at once.

In memory it is a pass over the resident rows' columns; of segments, the origin index names the rows to read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np
import pyarrow as pa

from timerstore.cancels.cancels import PendingOf
from timerstore.cancels.digests import ORIGIN, keys_of
from timerstore.cancels.effects import TooLarge
from timerstore.cancels.id_index import Timers, no_timers, timers_of
from timerstore.log.segment import Segment, SegmentReader
from timerstore.memory.chunks import materialize
from timerstore.memory.pending import Tally, labels
from timerstore.memory.sorted_runs import EMPTY, RowRefs, concat, select
from timerstore.operations.snapshot import Snapshot, looked
from timerstore.operations.state import StoreState
from timerstore.rows.entry import PAYLOAD, UNCOPYABLE, Kind
from timerstore.rows.position import Bools, Int64s, Positions

POSITION: Final = ("offset", "at")
COLUMNS: Final = ("kind", "id", "origin", "target", "schedule")


def pending_of(state: StoreState) -> PendingOf:
    """A `PendingOf` for the state at the time of its call. The function raises Corrupt, DiskFailure."""

    def pending(origins: Int64s) -> Timers:
        return _timers(*rows_of(state, origins, COLUMNS)) if len(origins) else no_timers()

    return pending


def rows_of(
    state: StoreState, origins: Int64s, columns: Sequence[str], bytes_max: int | None = None
) -> tuple[RowRefs, pa.Table]:
    """The pending rows of originals without covered ones, with some columns of `entry.PAYLOAD`. `chunk` and `row` of
    the references have no meaning. Raises TooLarge soon after the rows exceed `bytes_max`; Corrupt, DiskFailure."""
    wanted = list(dict.fromkeys((*COLUMNS, *columns)))
    if not len(origins):
        return EMPTY, pa.schema([PAYLOAD.field(name) for name in wanted]).empty_table()
    parts = looked(state, lambda snapshot: _bounded(_in_snapshot(state, snapshot, origins, wanted), bytes_max))
    rows = concat([part for part, _ in parts])
    table = pa.concat_tables([table.select(wanted) for _, table in parts])
    return _where(rows, table, ~state.finished(rows))


def uncopyable_of(state: StoreState, origins: Int64s) -> Int64s:
    """The `UncopyableOf` of a store. Raises Corrupt, DiskFailure."""
    rows, table = rows_of(state, origins, ("rolls",))
    offsets: Int64s = rows.offset[table.column("rolls").to_numpy() == UNCOPYABLE]
    return offsets


def covered_in(
    state: StoreState, segment: Segment, finished: Callable[[Positions], Bools] | None = None
) -> Iterator[Tally]:
    """Counts of a segment's unfinished timers that tombstones cover, part by part, each timer once. `finished` returns
    the mask of finished positions (None: by the store's own state). Raises Corrupt, DiskFailure."""
    finished = finished or state.finished
    if segment.ids is not None:
        for timers in state.cancels.covered_by_id(segment.ids):
            yield state.cancels.tally_unfinished(timers, finished)
    origins = state.cancels.named_origins()
    if origins is None or len(origins):
        for rows, table in _in_segment(segment, origins, COLUMNS):
            mask = _covered(state, rows, table) & ~_covered(state, rows, table, by_id=True)
            yield state.cancels.tally_unfinished(_timers(*_where(rows, table, mask)), finished)


def _in_snapshot(
    state: StoreState, snapshot: Snapshot, origins: Int64s, columns: Sequence[str]
) -> Iterator[tuple[RowRefs, pa.Table]]:
    yield _in_memory(state, snapshot, origins, columns)
    for segment in snapshot.segments:
        for rows, table in _in_segment(segment, origins, columns):
            yield _where(rows, table, ~snapshot.is_resident(rows) & ~_covered(state, rows, table))


def _bounded(found: Iterator[tuple[RowRefs, pa.Table]], bytes_max: int | None) -> list[tuple[RowRefs, pa.Table]]:
    parts, size = [], 0
    for rows, table in found:
        parts.append((rows, table))
        size += table.nbytes
        if bytes_max is not None and size > bytes_max:
            raise TooLarge
    return parts


def _in_memory(
    state: StoreState, snapshot: Snapshot, origins: Int64s, columns: Sequence[str]
) -> tuple[RowRefs, pa.Table]:
    rows, (everything, begins) = concat(snapshot.runs), snapshot.payload(["origin"])
    # A pass over one column leaves few rows for the others. Most rows of the chunks may be those of other stores.
    origin = everything.column("origin").to_numpy()[begins[rows.chunk] + rows.row]
    rows = rows[np.isin(origin, origins)]
    if not len(rows):
        return rows, pa.schema([PAYLOAD.field(name) for name in columns]).empty_table()
    chunks = {chunk: snapshot.chunks[chunk].select(list(columns)) for chunk in np.unique(rows.chunk).tolist()}
    table = pa.Table.from_batches([materialize(chunks, rows.chunk, rows.row)])
    rows, table = _where(rows, table, _named(table, origins))
    return _where(rows, table, ~_covered(state, rows, table))


def _in_segment(segment: Segment, origins: Int64s | None, columns: Sequence[str]) -> Iterator[tuple[RowRefs, pa.Table]]:
    """The timers of these origins (None: all timers), one part for each row group."""
    groups = list(range(len(segment.group_rows)))
    if origins is not None:
        groups = np.unique(segment.groups_of(segment.origins.rows_of(origins))).tolist()
        segment.origins.drop_pages()
    if groups:
        with SegmentReader(segment) as reader:
            for group in groups:
                table = reader.read(group, [*POSITION, *columns])
                yield _where(select(table), table, _named(table, origins))


def _named(table: pa.Table, origins: Int64s | None) -> Bools:
    mask: Bools = table.column("kind").to_numpy() == Kind.TIMER
    return mask if origins is None else mask & np.isin(table.column("origin").to_numpy(), origins)


def _where(rows: RowRefs, table: pa.Table, mask: Bools) -> tuple[RowRefs, pa.Table]:
    return rows[mask], table.filter(pa.array(mask))


def _covered(state: StoreState, rows: RowRefs, table: pa.Table, *, by_id: bool = False) -> Bools:
    """Mask of the rows that tombstones cover, or only those of their ids."""
    none: Bools = np.zeros(len(rows), dtype=np.bool_)
    if not len(rows):
        return none
    payload = table.select(["kind", "id", "origin"]).combine_chunks().to_batches()[0]
    cancels = state.cancels
    with state.lock:
        lookup = cancels.tombstones.lookup()
    covered = cancels.covered_ids(lookup, payload) if by_id else cancels.covered(lookup, rows.offset, payload)
    return none if covered is None else covered


def _timers(rows: RowRefs, table: pa.Table) -> Timers:
    origin = table.column("origin").to_numpy()
    return timers_of(keys_of(ORIGIN, origin), rows, origin, labels(table))
