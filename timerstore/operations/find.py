"""Find: searches for pending messages, with their places and states. It serves people and programs, not delivery.

Rows come in order of position, the soonest first, page by page. A cursor is the position of the last row of a page, so
it stays valid while messages come and go:

    memory     one pass over the resident rows' columns, in Arrow
    segments   row groups in the order of their first positions, with needed columns only; ids and origins have indexes
    a page     ends when the next row group begins behind its last row, or after `SCANNED_ROWS_MAX` rows

A search works on a snapshot: references, immutable batches, open files. It holds the store's lock only to copy lists,
and reads one row group at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from timerstore.cancels.digests import digest
from timerstore.errors import Misuse
from timerstore.log.segment import Segment, SegmentReader
from timerstore.memory.sorted_runs import EMPTY, RowRefs, concat, select
from timerstore.operations.snapshot import Snapshot, looked
from timerstore.operations.state import StoreState
from timerstore.rows.entry import PAYLOAD_COLUMNS, Kind
from timerstore.rows.pending_state import PENDING as PENDING
from timerstore.rows.pending_state import STATES as STATES
from timerstore.rows.pending_state import PendingState as PendingState
from timerstore.rows.position import ORIGIN, Bools, Int64s, Position

ROWS_MAX: Final = 1_000
"""Limit of a page, in rows."""
KEY_BYTES_MAX: Final = 4_096
"""Limit of a key in a page without bulky columns; a cut key has one byte more."""
ORIGINALS_MAX: Final = 10_000
"""Limit of a page of origins, in rows."""
SCANNED_ROWS_MAX: Final = 16_000_000
"""Rows on disk that one search examines, before it returns with the position that it has reached."""
SEARCHES_MAX: Final = 2
"""Searches at a time; others wait."""

POSITION_COLUMNS: Final = ("offset", "at")
STATE_COLUMNS: Final = ("kind", "id", "origin", "due", "attempt", "rolls")
"""The columns that decide the state of a row."""
BULKY: Final = ("value", "headers")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogQuery:
    """A filter of pending messages: a message matches if it has all given values.

    `origin_offset` is the offset of the original record, and matches its copies, too. `target` "" is the log's default
    target. `at` is the time of the bridge's next action on a message, `ts` the write time of its record.
    `..._from_ms` is inclusive, `..._until_ms` exclusive. `recurring`: only messages with a schedule. `paused` targets
    and `is_default_paused` choose no messages; they only decide between states.
    """

    id: str | None = None
    origin_offset: int | None = None
    key: bytes | None = None
    target: str | None = None
    due_from_ms: int | None = None
    due_until_ms: int | None = None
    at_from_ms: int | None = None
    at_until_ms: int | None = None
    ts_until_ms: int | None = None
    states: frozenset[PendingState] = PENDING
    recurring: bool = False
    paused: frozenset[str] = frozenset()
    is_default_paused: bool = False

    def is_of_target(self) -> bool:
        """Whether the filter has a target only, or is empty."""
        chosen = (self.id, self.origin_offset, self.key, self.due_from_ms, self.due_until_ms, self.at_from_ms,
                  self.at_until_ms, self.ts_until_ms)  # fmt: skip
        return not self.recurring and self.states == PENDING and all(each is None for each in chosen)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundRow:
    """A pending message. Times are epoch milliseconds: `at_ms` is the time of the bridge's next action, `due_ms` the
    due time, `ts_ms` the timestamp of the record at `offset`. That record is the original if `offset` equals `origin`,
    else a copy. Without `bulky`, `value` is None, `headers` are empty, and `key` may be cut."""

    offset: int
    origin: int
    at_ms: int
    due_ms: int
    ts_ms: int
    state: PendingState
    target: str
    target_partition: int | None
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    id: str | None
    rolls: int
    attempt: int
    reason: str | None
    schedule: str | None = None
    tick: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundPage:
    """Rows in order of position, and the cursor for the next ones; None: no more rows."""

    rows: tuple[FoundRow, ...]
    next: Position | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FoundOriginals:
    """Origins of pending messages, int64[n] each, in order of position: offsets of the records and of the originals,
    effective and due times (epoch ms); and the cursor, as of a page."""

    offset: Int64s
    origin: Int64s
    at: Int64s
    due: Int64s
    next: Position | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """The number of messages that match a query; a lower bound unless `is_exact`."""

    rows: int
    is_exact: bool


@dataclass(frozen=True, slots=True, eq=False)
class Hits:
    """Matching rows, in order of position, with the indices of their states in `STATES`. `chunk` and `row` of `refs`
    are the place of a payload: in the snapshot's chunks, or in the row group `-1 - chunk` of the search."""

    refs: RowRefs
    state: Int64s

    def first(self, n: int) -> Hits:
        return Hits(self.refs[:n], self.state[:n])

    def __add__(self, other: Hits) -> Hits:
        if not len(other.refs):
            return self
        refs, state = concat([self.refs, other.refs]), np.concatenate([self.state, other.state])
        order = np.lexsort((refs.offset, refs.at))
        return Hits(refs[order], state[order])


NO_HITS: Final = Hits(EMPTY, np.empty(0, np.int64))


class Find:
    """See the module. Any thread may use it."""

    def __init__(self, state: StoreState) -> None:
        self._state = state
        self._turns = threading.BoundedSemaphore(SEARCHES_MAX)

    def page(self, query: LogQuery, now_ms: int, after: Position, limit: int, *, bulky: bool) -> FoundPage:
        """See `TimerStore.find`."""
        if not 1 <= limit <= ROWS_MAX:
            raise Misuse(f"a page has 1 to {ROWS_MAX} rows, not {limit}", code="DB-7003")
        with self._turns, self._search(query, now_ms, after, limit, SCANNED_ROWS_MAX) as search:
            rows = tuple(search.rows(search.hits.first(limit), bulky=bulky))
            return FoundPage(rows=rows, next=self._end(search, limit))

    def originals(self, query: LogQuery, now_ms: int, after: Position, limit: int) -> FoundOriginals:
        """See `TimerStore.find_originals`."""
        if not 1 <= limit <= ORIGINALS_MAX:
            raise Misuse(f"a page has 1 to {ORIGINALS_MAX} rows, not {limit}", code="DB-7003")
        with self._turns, self._search(query, now_ms, after, limit, SCANNED_ROWS_MAX) as search:
            return search.originals(search.hits.first(limit), self._end(search, limit))

    @staticmethod
    def _end(search: Search, limit: int) -> Position | None:
        return search.hits.refs[limit - 1 : limit].last() if len(search.hits.refs) > limit else search.complete_to

    def count(self, query: LogQuery, now_ms: int, scanned_rows_max: int) -> Count:
        """See `TimerStore.count_where`."""
        if query.is_of_target():
            with self._state.lock:
                by_target, is_exact = self._state.pending.by_target(), self._state.pending.is_by_target
            if query.target is None:
                return Count(rows=sum(by_target.values()), is_exact=True)
            if query.target in by_target and is_exact:
                return Count(rows=by_target[query.target], is_exact=True)
        with self._turns, self._search(query, now_ms, ORIGIN, 0, scanned_rows_max) as search:
            return Count(rows=search.total, is_exact=search.complete_to is None)

    def _search(self, query: LogQuery, now_ms: int, after: Position, limit: int, scanned_rows_max: int) -> Search:
        """A search that has run; the caller closes it."""

        def look(snapshot: Snapshot) -> Search:
            search = Search(self._state, snapshot, query, now_ms, after)
            try:
                search.run(limit, scanned_rows_max)
            except BaseException:
                search.close()
                raise
            return search

        return looked(self._state, look)


class Search:
    """One pass over a snapshot. `hits` are the first matching rows, `total` is their number in the pass. `complete_to`
    is the position that an incomplete pass has reached. It is a context: files stay open until its end."""

    def __init__(self, state: StoreState, snapshot: Snapshot, query: LogQuery, now_ms: int, after: Position) -> None:
        self.hits = NO_HITS
        self.total = 0
        self.complete_to: Position | None = None
        self._state, self.snapshot, self._query = state, snapshot, query
        self._now_ms, self._after = now_ms, after
        self._files = ExitStack()
        self._readers: dict[Segment, SegmentReader] = {}
        self._groups: list[tuple[Segment, int]] = []
        """Row groups with matching rows."""
        self._origin: Int64s = np.array([] if query.origin_offset is None else [query.origin_offset], dtype=np.int64)
        self._asked = [name for name in ("key", "target") if getattr(query, name) is not None]
        self._asked += ["schedule"] * query.recurring + ["ts"] * (query.ts_until_ms is not None)
        self._paused = pa.array(query.paused, pa.string())
        told = STATE_COLUMNS + (("target",) if query.paused or query.is_default_paused else ())
        self._columns = [name for name in PAYLOAD_COLUMNS if name in (*self._asked, *told)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._files.close()

    def run(self, limit: int, scanned_rows_max: int) -> None:
        """Search for the first `limit` matching rows, and one more; 0: count all."""
        self._keep(self.in_memory(), limit)
        scanned = 0
        for first, segment, group in self._ordered_groups():
            if limit and len(self.hits.refs) > limit and first > self.hits.refs.last():
                return
            if scanned >= scanned_rows_max and (end := first.before()) > self._after:
                self.complete_to = end
                self.hits = self.hits.first(int(np.count_nonzero(self.hits.refs.at_or_below(end))))
                return
            scanned += int(segment.group_rows[group])
            self._keep(self._in_group(segment, group), limit)

    def _keep(self, hits: Hits, limit: int) -> None:
        self.total += len(hits.refs)
        if limit:
            self.hits = (self.hits + hits).first(limit + 1)

    def rows(self, hits: Hits, *, bulky: bool) -> Iterator[FoundRow]:
        """The rows of hits, in order, without rows that were finished meanwhile; keys are cut unless `bulky`."""
        names = [name for name in PAYLOAD_COLUMNS if bulky or name not in BULKY]
        gone, chunk = self._state.finished(hits.refs), hits.refs.chunk
        payloads: dict[int, dict[str, Any]] = {}
        for c, batch in self._batches(chunk, names):
            mine = np.flatnonzero(~gone & (chunk == c))
            shown = batch.select(names) if bulky else _with_short_keys(batch.select(names))
            columns = shown.take(pa.array(hits.refs.row[mine])).to_pydict()
            rows = zip(*columns.values(), strict=True)
            payloads |= {n: dict(zip(columns, row, strict=True)) for n, row in zip(mine.tolist(), rows, strict=True)}
        for n in sorted(payloads):
            values = payloads[n]
            yield FoundRow(
                offset=int(hits.refs.offset[n]),
                origin=values["origin"],
                at_ms=int(hits.refs.at[n]),
                due_ms=values["due"],
                ts_ms=values["ts"],
                state=STATES[int(hits.state[n])],
                target=values["target"] or "",
                target_partition=values["target_partition"],
                key=values["key"],
                value=values.get("value"),
                headers=tuple((header["key"], header["value"]) for header in values.get("headers") or ()),
                id=values["id"],
                rolls=max(values["rolls"], 0),
                attempt=values["attempt"],
                reason=values["reason"],
                schedule=values["schedule"],
                tick=values["tick"],
            )

    def originals(self, hits: Hits, end: Position | None) -> FoundOriginals:
        """The origins of hits, in order, without rows that were finished meanwhile."""
        refs = hits.refs[~self._state.finished(hits.refs)]
        origin, due = np.empty(len(refs), np.int64), np.empty(len(refs), np.int64)
        for c, batch in self._batches(refs.chunk, ["origin", "due"]):
            mine = np.flatnonzero(refs.chunk == c)
            for name, values in (("origin", origin), ("due", due)):
                values[mine] = batch.column(name).to_numpy()[refs.row[mine]]
        return FoundOriginals(offset=refs.offset, origin=origin, at=refs.at, due=due, next=end)

    def _batches(self, chunk: npt.NDArray[np.int32], names: list[str]) -> Iterator[tuple[int, pa.RecordBatch]]:
        """The batches to which hits refer, with at least these columns; memory holds one row group at a time."""
        for c in np.unique(chunk).tolist():
            if c >= 0:
                yield c, self.snapshot.chunks[c]
            else:
                segment, group = self._groups[-1 - c]
                yield c, self._reader(segment).read(group, names).combine_chunks().to_batches()[0]

    # ---- memory

    def in_memory(self) -> Hits:
        """The matching rows in memory."""
        snapshot = self.snapshot
        rows = concat([run[~run.at_or_below(self._after)] for run in snapshot.runs])
        if not len(rows):
            return NO_HITS
        table, begins = snapshot.payload(self._columns)
        index = begins[rows.chunk] + rows.row
        fits = self._fits(table)[index] & self._is_at(rows)
        rows, index = rows[fits], index[fits]
        return self._judged(rows, table.take(pa.array(index))) if len(rows) else NO_HITS

    # ---- segments

    def _ordered_groups(self) -> list[tuple[Position, Segment, int]]:
        """The row groups that may have matching rows, in the order of their first positions."""
        row_groups: list[tuple[Position, Segment, int]] = []
        for segment in self.snapshot.segments:
            firsts = segment.fences
            groups = np.flatnonzero(self.may_fit(segment)).tolist()
            row_groups += [(Position(int(firsts.at[g]), int(firsts.offset[g])), segment, g) for g in groups]
        return sorted(row_groups, key=lambda each: each[0])

    def may_fit(self, segment: Segment) -> Bools:
        """Mask of a segment's row groups that may have matching rows."""
        query, fences = self._query, segment.fences
        lasts = segment.lasts()
        mask = ~lasts.at_or_below(self._after) & ~lasts.at_or_below(self.snapshot.frontier)
        if query.at_until_ms is not None:
            mask &= fences.at < query.at_until_ms
        if query.at_from_ms is not None:
            mask &= lasts.at >= query.at_from_ms
        if query.id is not None:
            named = np.zeros(len(fences), dtype=np.bool_)
            key = digest(pa.array([query.id]))
            for _, timers in segment.ids.matches(key) if segment.ids is not None else ():
                named[segment.groups_at(timers)] = True
            mask &= named
        if query.origin_offset is not None:
            named = np.zeros(len(fences), dtype=np.bool_)
            named[segment.groups_of(segment.origins.rows_of(self._origin))] = True
            mask &= named
        return mask

    def has_any(self, reader: SegmentReader, group: int) -> bool:
        """Whether a row group may have matching rows. Keys and targets have no index: a read of their columns alone
        rules out most row groups."""
        return not self._asked or pc.any(self._has_asked(reader.read(group, self._asked))).as_py() is True

    def _in_group(self, segment: Segment, group: int) -> Hits:
        reader = self._reader(segment)
        if not self.has_any(reader, group):
            return NO_HITS
        hits = self.in_table(reader.read(group, [*POSITION_COLUMNS, *self._columns]))
        if not len(hits.refs):
            return NO_HITS
        self._groups.append((segment, group))
        chunk = np.full(len(hits.refs), -len(self._groups), dtype=np.int32)
        return Hits(RowRefs(hits.refs.at, hits.refs.offset, chunk, hits.refs.row), hits.state)

    def in_table(self, table: pa.Table) -> Hits:
        """The matching rows among rows of a segment; `row` is the index in `table`."""
        refs = select(table)
        fits = ~self.snapshot.is_resident(refs) & ~refs.at_or_below(self._after) & self._fits(table) & self._is_at(refs)
        return self._judged(refs[fits], table.select(self._columns).filter(pa.array(fits)))

    def _reader(self, segment: Segment) -> SegmentReader:
        if segment not in self._readers:
            self._readers[segment] = self._files.enter_context(SegmentReader(segment))
        return self._readers[segment]

    # ---- both

    def _fits(self, table: pa.Table) -> Bools:
        query = self._query
        mask = pc.and_(self._has_asked(table), pc.equal(table["kind"], Kind.TIMER))
        if query.id is not None:
            mask = pc.and_(mask, pc.equal(table["id"], query.id))
        if query.origin_offset is not None:
            mask = pc.and_(mask, pc.equal(table["origin"], query.origin_offset))
        if query.due_from_ms is not None:
            mask = pc.and_(mask, pc.greater_equal(table["due"], query.due_from_ms))
        if query.due_until_ms is not None:
            mask = pc.and_(mask, pc.less(table["due"], query.due_until_ms))
        fits: Bools = pc.fill_null(mask, False).to_numpy()
        return fits

    def _has_asked(self, table: pa.Table) -> Any:
        """Mask (Arrow) of the rows with the query's values in the columns of `self._asked`."""
        query, mask = self._query, pa.scalar(True)
        if query.key is not None:
            mask = pc.and_(mask, pc.equal(table["key"], pa.scalar(query.key, pa.binary())))
        if query.target is not None:
            mask = pc.and_(mask, pc.equal(pc.fill_null(table["target"], ""), query.target))
        if query.recurring:
            mask = pc.and_(mask, pc.is_valid(table["schedule"]))
        if query.ts_until_ms is not None:
            mask = pc.and_(mask, pc.less(table["ts"], query.ts_until_ms))
        return mask

    def _is_at(self, rows: RowRefs) -> Bools:
        query, mask = self._query, np.ones(len(rows), dtype=np.bool_)
        if query.at_from_ms is not None:
            mask &= rows.at >= query.at_from_ms
        if query.at_until_ms is not None:
            mask &= rows.at < query.at_until_ms
        return mask

    def _is_paused(self, payload: pa.RecordBatch) -> Bools:
        target = pc.fill_null(payload.column("target"), "")
        mask: Bools = pc.is_in(target, self._paused).to_numpy(zero_copy_only=False)
        if self._query.is_default_paused:
            mask |= pc.equal(target, "").to_numpy(zero_copy_only=False)
        return mask

    def _judged(self, rows: RowRefs, table: pa.Table) -> Hits:
        """The pending ones among rows, in a wanted state; `table` has their columns, row by row."""
        if not len(rows):
            return NO_HITS
        payload = table.select(self._columns).combine_chunks().to_batches()[0]
        state = np.full(len(rows), STATES.index(PendingState.WAITING))
        if "target" in self._columns:
            state[self._is_paused(payload)] = STATES.index(PendingState.PAUSED)
        due, rolls = (payload.column(name).to_numpy() for name in ("due", "rolls"))
        state[(due > rows.at) & (rolls > 0)] = STATES.index(PendingState.ROLLED)
        state[rows.at <= self._now_ms] = STATES.index(PendingState.OVERDUE)
        state[payload.column("attempt").to_numpy() > 0] = STATES.index(PendingState.RETRYING)
        cancels, tombstones = self._state.cancels, self.snapshot.tombstones
        origin = payload.column("origin").to_numpy()
        is_cancelled = cancels.cancelled_by(tombstones, payload)
        is_cancelled |= cancels.recalled(tombstones, rows.offset, origin)
        state[is_cancelled] = STATES.index(PendingState.CANCELLED)
        wanted = ~cancels.moved(tombstones, rows.offset, origin)
        wanted &= np.isin(state, [STATES.index(each) for each in self._query.states])
        wanted &= ~self.snapshot.committed.finished(rows)
        rows, state = rows[wanted], state[wanted]
        order = np.lexsort((rows.offset, rows.at))
        return Hits(rows[order], state[order])


def _with_short_keys(batch: pa.RecordBatch) -> pa.RecordBatch:
    index = batch.schema.get_field_index("key")
    short = pc.binary_slice(batch.column(index), 0, KEY_BYTES_MAX + 1)
    return batch.set_column(index, batch.schema.field(index), short)
