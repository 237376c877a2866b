"""The timers of origins: what cancels by origin cancel, wherever it is, so that the counts follow at once.

In memory that is a pass over the resident rows' columns; beside segments the index of origins says which rows to read.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import pyarrow as pa

from timerstore.cancels.cancels import PendingOf
from timerstore.cancels.id_index import Timers, concat_timers, no_timers, target_codes
from timerstore.errors import Corrupt
from timerstore.log.segment import Reader, Segment, references
from timerstore.memory.pending import Tally
from timerstore.memory.sorted_runs import RowRefs, concat
from timerstore.operations.state import StoreState
from timerstore.operations.view import ATTEMPTS, View
from timerstore.rows.entry import Kind
from timerstore.rows.position import Bools, Int64s, pack

POSITION: Final = ("topic", "partition", "offset", "at")
COLUMNS: Final = ("kind", "id", "origin", "target")


def pending_of(state: StoreState) -> PendingOf:
    """As `PendingOf` says, of the moment of the call. Raises Corrupt, DiskFailure."""

    def pending(origins: Int64s) -> Timers:
        if not len(origins):
            return no_timers()
        for attempt in range(ATTEMPTS):
            try:
                found = _in_view(state, View.of(state), origins)
                break
            except Corrupt as error:
                if attempt == ATTEMPTS - 1 or not View.is_outdated(state, error):
                    raise
        return found[~state.finished(found)]

    return pending


def covered_in(state: StoreState, segment: Segment) -> Tally:
    """The pending timers of a segment that tombstones cover, counted. Raises Corrupt, DiskFailure."""
    parts = [no_timers()] if segment.ids is None else [state.cancels.covered_by_id(segment.ids)]
    if len(origins := state.cancels.named_origins()):
        for rows, table in _in_segment(state, segment, origins):
            parts.append(_timers(state, *_where(rows, table, _covered(state, rows, table))))
    return state.cancels.tally_once(concat_timers(parts), state.finished)


def _in_view(state: StoreState, view: View, origins: Int64s) -> Timers:
    parts = [_in_memory(state, view, origins)]
    for segment in view.segments:
        for rows, table in _in_segment(state, segment, origins):
            is_pending = ~view.is_resident(rows) & ~_covered(state, rows, table)
            parts.append(_timers(state, *_where(rows, table, is_pending)))
    return concat_timers(parts)


def _in_memory(state: StoreState, view: View, origins: Int64s) -> Timers:
    rows = concat(view.runs)
    table, begins = view.payload(COLUMNS)
    index = begins[rows.chunk] + rows.row
    named = _named(rows, table.column("origin").to_numpy()[index], table.column("kind").to_numpy()[index], origins)
    rows, table = rows[named], table.take(pa.array(index[named]))
    return _timers(state, *_where(rows, table, ~_covered(state, rows, table)))


def _in_segment(state: StoreState, segment: Segment, origins: Int64s) -> list[tuple[RowRefs, pa.Table]]:
    """The rows of these origins, a row group each."""
    groups = np.unique(segment.groups_of(segment.origins.rows_of(origins))).tolist()
    segment.origins.drop_pages()
    found = []
    if groups:
        with Reader(segment) as reader:
            for group in groups:
                table = reader.read(group, [*POSITION, *COLUMNS])
                rows = references(segment, table, state.sources)
                named = _named(rows, table.column("origin").to_numpy(), table.column("kind").to_numpy(), origins)
                found.append(_where(rows, table, named))
    return found


def _named(rows: RowRefs, origin: Int64s, kind: Int64s, origins: Int64s) -> Bools:
    mask: Bools = (kind == Kind.TIMER) & np.isin(pack(rows.source, origin), origins)
    return mask


def _where(rows: RowRefs, table: pa.Table, mask: Bools) -> tuple[RowRefs, pa.Table]:
    return rows[mask], table.filter(pa.array(mask))


def _covered(state: StoreState, rows: RowRefs, table: pa.Table) -> Bools:
    """Which of the rows a tombstone covers."""
    none: Bools = np.zeros(len(rows), dtype=np.bool_)
    if not len(rows):
        return none
    payload = table.select(["kind", "id", "origin"]).combine_chunks().to_batches()[0]
    with state.lock:
        lookup = state.cancels.tombstones.lookup()
    covered = state.cancels.covered(lookup, rows.source, payload)
    return none if covered is None else covered


def _timers(state: StoreState, rows: RowRefs, table: pa.Table) -> Timers:
    codes: dict[str, int] = {}
    origin = table.column("origin").to_numpy()
    return Timers(
        keys=state.cancels.keys_of_origins(origin, rows.source),
        at=rows.at,
        seq=rows.seq,
        origin=origin,
        target=target_codes(table.column("target"), codes),
        names=tuple(codes),
    )
