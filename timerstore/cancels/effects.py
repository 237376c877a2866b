"""Effects: what the commands of a batch are about, read in bounded memory. (What they come to: commands.py.)

    by origin   the pending rows of the originals that it names; of a move with all that its copies need
    by id       where the timers of the id are. It only writes commands by origin, so that it needs no payload, and all
                commands of a batch with one id share them

Commands are read in order of offset, as many at a time as there is room for: what each of them is to hold is counted
before it is made. A batch is to be cut in front of the first one for which there is none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Final

import numpy as np
import pyarrow as pa

from timerstore.cancels import id_index
from timerstore.cancels.cancels import NO_ORIGIN, Known, named_by
from timerstore.cancels.commands import Copied, Effect, Id, among, within_reach
from timerstore.cancels.digests import Digests, concat_digests, digest, digests_or_zeros
from timerstore.cancels.id_index import Timers, no_timers, timers_of
from timerstore.memory.sorted_runs import EMPTY, RowRefs
from timerstore.rows.entry import DECIDED, PAYLOAD, PAYLOAD_COLUMNS, UNCOPYABLE, Kind
from timerstore.rows.position import OFFSET_MAX, Bools, Int64s, Positions

ROWS_MAX: Final = 1_000
"""Messages that one command by id may be about. (One by origin covers all of its message when it is read again.)"""
FIRST_READ: Final = 64
"""So many messages that commands are about are read first, and then as many as there is room for,"""
FEWER: Final = 4
"""and so many times fewer where they turn out to be larger than those before."""
RECALLED: Final = ["kind", "target", "id", "origin", "schedule"]
"""What is kept of the rows of recalls, which write no copies."""
EFFECT_BYTES: Final = 2_000
"""What a command takes without its rows, about,"""
TIMER_BYTES: Final = 64
"""and a timer of an id, of which no payload is kept."""
NO_PAYLOAD: Final = pa.RecordBatch.from_arrays([], names=[])


class NoRoom(Exception):
    """`cut` is the offset of the first command for whose messages there is no room."""

    def __init__(self, cut: int) -> None:
        super().__init__()
        self.cut = cut


class TooLarge(Exception):
    """What is asked for takes more bytes than it may."""


RowsOf = Callable[[Int64s, Sequence[str], int | None], tuple[RowRefs, pa.Table]]
"""The pending rows of originals, with some columns of `entry.PAYLOAD`; with a number of
bytes, TooLarge is raised instead soon after they have become more."""


def effects_of(
    known: Known,
    payload: pa.RecordBatch,
    fresh: RowRefs,
    is_pending: Bools,
    is_over: Callable[[Timers], Bools],
    rows_of: RowsOf,
    room_bytes: int,
    waiting: Collection[Id] = (),
) -> list[Effect]:
    """The effects of the commands among `fresh` rows (`row` is the index in `payload`); `is_pending` bool[n]: not
    finished, and not covered by a tombstone; `is_over` says the opposite of timers. `waiting` are ids that moves name
    which were read before, and are not decided. Raises NoRoom where they take more
    than `room_bytes`, though the first one is always read; and as `rows_of` does."""
    kind = payload.column("kind").to_numpy()[fresh.row]
    chosen = np.isin(kind, DECIDED) & is_pending
    if not chosen.any():
        return []
    timers = fresh[(kind == Kind.TIMER) & is_pending]
    batch = _Batch(known, payload, fresh[chosen], timers, is_over, rows_of, waiting)
    order, effects = batch.order, list[Effect]()
    begin, room, count = 0, room_bytes, FIRST_READ
    while begin < len(order) and (room > 0 or not begin):
        group = batch.first(order[begin:], count)
        try:
            found, size = batch.read(group, None if len(group) == 1 else max(room, 0))
        except TooLarge:  # those before were smaller
            count = batch.messages(group) // FEWER
            continue
        effects += found
        room, begin = room - size, begin + len(group)
        count = max(1, room * batch.messages(order[:begin]) // max(1, room_bytes - room))
    if begin < len(order):
        raise NoRoom(int(batch.commands.offset[order[begin:]].min()))
    return effects


class _Batch:
    """The commands of a batch that are not finished: `order` are the indices of those with effects, by offset."""

    def __init__(
        self,
        known: Known,
        payload: pa.RecordBatch,
        commands: RowRefs,
        timers: RowRefs,
        is_over: Callable[[Timers], Bools],
        rows_of: RowsOf,
        waiting: Collection[Id],
    ) -> None:
        """`timers` are those of the batch that are pending."""
        self.commands, index = commands, commands.row
        self._payload, self._timers, self._is_over, self._rows_of = payload, timers, is_over, rows_of
        ids, origin = payload.column("id").take(pa.array(index)), payload.column("origin").to_numpy()[index]
        self._is_move = payload.column("kind").to_numpy()[index] == Kind.MOVE
        column = {name: payload.column(name).to_numpy()[index] for name in ("due", "ts")}
        self._is_now = self._is_move & (column["due"] <= column["ts"])
        by_id = ids.is_valid().to_numpy(zero_copy_only=False)
        self._keys = digests_or_zeros(ids)
        self._key_of = {i: (int(self._keys.hi[i]), int(self._keys.lo[i])) for i in np.flatnonzero(by_id).tolist()}
        self._below: dict[tuple[int, int], int] = {}
        """The last command of each id."""
        for i, key in self._key_of.items():
            self._below[key] = max(self._below.get(key, 0), int(commands.offset[i]))
        moves = Counter(key for i, key in self._key_of.items() if self._is_move[i])
        self._moved_often = {key for key, count in moves.items() if count > 1} | set(waiting)
        self._named: dict[int, Int64s] = {}
        self._about: dict[int, list[int]] = {}
        here = np.flatnonzero(~by_id & (origin != NO_ORIGIN))
        which, offsets = named_by(payload, index[here], origin[here])
        parts = np.split(offsets, np.flatnonzero(np.diff(which)) + 1) if len(here) else []
        for i, named in zip(here.tolist(), parts, strict=True):
            # Nothing below a command has an origin above it.
            self._named[i] = named
            self._about[i] = named[named < commands.offset[i]].tolist()
        self.order: list[int] = sorted([*self._about, *self._key_of], key=commands.offset.tolist().__getitem__)
        self._above = _Above(payload, timers)
        self._segments, unstored = known.segments, known.unstored
        self._holders = (*unstored, *known.segments, _timers(payload, timers)) if self._key_of else ()
        self._of_id: dict[tuple[int, int], _OfId] = {}

    def messages(self, commands: Sequence[int]) -> int:
        """About how many messages some commands are."""
        return sum(map(self._weight, commands))

    def first(self, commands: Sequence[int], messages: int) -> list[int]:
        """The first of these commands, about so many messages, and one at least."""
        ends = np.cumsum([self._weight(i) for i in commands])
        return list(commands[: max(1, int(np.searchsorted(ends, messages, side="right")))])

    def _weight(self, i: int) -> int:
        return max(1, len(self._about.get(i, ())))

    def read(self, commands: Sequence[int], bytes_max: int | None) -> tuple[list[Effect], int]:
        """Their effects, and how many bytes these take. Raises TooLarge."""
        size = EFFECT_BYTES * len(commands)
        keys = [(self._key_of.get(i), i) for i in reversed(commands)]
        new = {key: i for key, i in keys if key is not None and key not in self._of_id}  # the first of each
        of_id = self._read_ids(new, _left(bytes_max, size))
        size += sum(TIMER_BYTES * len(each.timers) for each in of_id.values())
        found: dict[int, _Found] = {}
        for is_move, columns in ((True, PAYLOAD_COLUMNS), (False, RECALLED)):
            mine = [i for i in commands if i in self._about and self._is_move[i] == is_move]
            wanted = [origin for i in mine for origin in self._about[i]]
            if mine:
                whole = _Found.of(wanted, columns, self._timers, self._payload, self._rows_of, _left(bytes_max, size))
                rows = sum(whole.count(self._about[i]) for i in mine)  # each has its own, of shared messages too
                size += max(whole.payload.nbytes, int(whole.row_bytes * rows))
                found |= dict.fromkeys(mine, whole)
        _left(bytes_max, size)
        self._of_id |= of_id
        return [self._by_origin(i, found[i]) if i in found else self._by_id(i) for i in commands], size

    def _read_ids(self, new: Mapping[tuple[int, int], int], bytes_max: int | None) -> dict[tuple[int, int], _OfId]:
        if not new:
            return {}
        keys = self._keys[np.array(list(new.values()))]
        below = np.array([self._below[key] for key in new], dtype=np.int64)
        try:
            found = _of_ids(keys, below, self._holders, self._is_over, bytes_max)
            for i, of_id in zip(new.values(), found, strict=True):
                of_id.copied.add(self._above.of_id(int(self.commands.offset[i]), self._keys[i : i + 1]))
            often = [each.timers for key, each in zip(new, found, strict=True) if key in self._moved_often]
            large = self._large(often, bytes_max)
            found = [replace(each, large=each.timers.origin[among(each.timers.offset, large)]) for each in found]
            return dict(zip(new, found, strict=True))
        finally:
            for segment in self._segments:
                segment.drop_pages()

    def _large(self, timers: Sequence[Timers], bytes_max: int | None) -> Int64s:
        """Which of these are too large for a copy (their offsets, in order). Raises TooLarge."""
        wanted = [origin for each in timers for origin in each.origin.tolist()]
        if not wanted:
            return EMPTY.offset
        found = _Found.of(wanted, ("origin", "rolls"), self._timers, self._payload, self._rows_of, bytes_max)
        return np.sort(found.offset[found.payload.column("rolls").to_numpy() == UNCOPYABLE])

    def _by_origin(self, i: int, found: _Found) -> Effect:
        rows, batch = found.rows_of(self._about[i], int(self.commands.offset[i]))
        return Effect(
            offset=int(self.commands.offset[i]),
            is_move=bool(self._is_move[i]),
            is_now=bool(self._is_now[i]),
            rows=rows,
            origin=batch.column("origin").to_numpy(),
            payload=batch,
            bytes=EFFECT_BYTES + int(len(rows) * found.row_bytes),
            named=self._named[i],
            key=None,
            copied=Copied(self._above.of(int(self.commands.offset[i]), self._named[i])),
        )

    def _by_id(self, i: int) -> Effect:
        key, offset = self._key_of[i], int(self.commands.offset[i])
        of_id, digest = self._of_id[key], self._keys[i : i + 1]
        is_too_many = of_id.end < offset
        rows = no_timers() if is_too_many else of_id.timers
        # The last one is finished last.
        shared = TIMER_BYTES * len(of_id.timers) if offset == self._below[key] else 0
        return Effect(
            offset=offset,
            is_move=bool(self._is_move[i]),
            is_now=bool(self._is_now[i]),
            rows=rows,
            upto=int(np.searchsorted(rows.offset, offset)),
            origin=rows.origin,
            payload=NO_PAYLOAD,
            bytes=EFFECT_BYTES + shared,
            named=None,
            key=digest,
            is_too_many=is_too_many,
            copied=of_id.copied,
            large=of_id.large,
        )


@dataclass(frozen=True, slots=True, eq=False)
class _OfId:
    """The pending timers of an id, by offset: those of its first ROWS_MAX messages that lie below `end`, the offset of
    the first timer of one more."""

    timers: Timers
    end: int
    copied: Copied = field(default_factory=Copied)
    large: Int64s = field(default_factory=lambda: np.empty(0, np.int64))
    """The originals that are too large for a copy, where several moves name the id."""


def _of_ids(
    keys: Digests, below: Int64s, holders: Collection[Any], is_over: Callable[[Timers], Bools], bytes_max: int | None
) -> list[_OfId]:
    """What is pending of ids below some offsets. Raises TooLarge soon after it is more than so many bytes."""
    ends, begun = below.copy(), np.full(len(keys), OFFSET_MAX, np.int64)
    held: tuple[Int64s, ...] = (EMPTY.offset,) * 4
    parts: list[tuple[Int64s, ...]] = []
    for query, found in _pieces(holders, keys):
        mask = found.offset < ends[query]
        mask[mask] = ~is_over(found[mask])
        if mask.any():
            parts.append((query[mask], found.offset[mask], found.at[mask], found.origin[mask]))
        rows = sum(len(part[0]) for part in parts)
        if rows > max(id_index.FOUND_ROWS_MAX, len(held[0])):
            held, parts = _first_messages([held, *parts], ends, begun), []
            _left(bytes_max, TIMER_BYTES * len(held[0]))
    query, offset, at, origin = _first_messages([held, *parts], ends, begun)
    _left(bytes_max, TIMER_BYTES * len(offset))
    bounds = np.searchsorted(query, np.arange(len(keys) + 1))
    result = []
    for i, (start, stop) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)):
        key, rows = keys[i : i + 1], stop - start
        timers = Timers(
            keys=Digests(np.broadcast_to(key.hi, rows), np.broadcast_to(key.lo, rows)),
            at=at[start:stop],
            offset=offset[start:stop],
            origin=origin[start:stop],
            target=np.broadcast_to(np.int32(0), rows),
            names=("",),
        )
        result.append(_OfId(timers, int(begun[i])))
    return result


def _pieces(holders: Collection[Any], keys: Digests) -> Iterator[tuple[Int64s, Timers]]:
    """(index in `keys`, timer) of all timers with these keys, a bounded number at a time."""
    return chain.from_iterable(holder.matches(keys) for holder in holders)


def _first_messages(parts: Sequence[tuple[Int64s, ...]], ends: Int64s, begun: Int64s) -> tuple[Int64s, ...]:
    """Of timers (the index of their id, offset, `at`, `origin`), each once, by id and offset, those of the first
    ROWS_MAX messages of each id. Where there are more, `begun` becomes the offset of the first timer of one more, and
    so does `ends`: what lies there is not wanted."""
    query, offset, at, origin = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.lexsort((offset, query))
    query, offset, at, origin = (column[order] for column in (query, offset, at, origin))
    is_new: Bools = np.ones(len(offset), np.bool_)
    is_new[1:] = (offset[1:] != offset[:-1]) | (query[1:] != query[:-1])
    query, offset, at, origin = (column[is_new] for column in (query, offset, at, origin))
    by_message = np.lexsort((origin, query))
    is_first: Bools = np.ones(len(offset), np.bool_)
    is_first[by_message[1:]] = (np.diff(query[by_message]) != 0) | (np.diff(origin[by_message]) != 0)
    nth: Int64s = np.cumsum(is_first)
    nth -= nth[np.searchsorted(query, query)] - 1  # the first row of each id is of its first message
    beyond = nth > ROWS_MAX
    np.minimum.at(begun, query[beyond], offset[beyond])
    np.minimum(ends, begun, out=ends)
    return query[~beyond], offset[~beyond], at[~beyond], origin[~beyond]


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    """Rows sorted by original and offset; `row_bytes` is what one of them takes, on average."""

    at: Int64s
    offset: Int64s
    payload: pa.RecordBatch
    row_bytes: float
    spans: dict[int, tuple[int, int]]
    """Where the rows of each original begin and end."""

    @classmethod
    def of(
        cls,
        origins: Sequence[int],
        columns: Sequence[str],
        timers: RowRefs,
        payload: pa.RecordBatch,
        rows_of: RowsOf,
        bytes_max: int | None = None,
    ) -> _Found:
        """The pending rows of these originals, of the store and among `timers` of the batch, with some columns. Raises
        TooLarge as `rows_of` does."""
        wanted = np.unique(np.array(origins, dtype=np.int64))
        rows, table = rows_of(wanted, columns, bytes_max)
        mine = timers[
            np.isin(payload.column("origin").to_numpy()[timers.row], wanted)
            if len(wanted)
            else np.zeros(len(timers), np.bool_)
        ]
        both = pa.concat_tables(
            [
                table.select(list(columns)),
                pa.Table.from_batches([payload]).select(list(columns)).take(pa.array(mine.row)),
            ]
        )
        at, offset = np.concatenate([rows.at, mine.at]), np.concatenate([rows.offset, mine.offset])
        origin = both.column("origin").to_numpy()
        order = np.lexsort((offset, origin))
        schema = pa.schema([PAYLOAD.field(name) for name in columns])
        batches = both.take(pa.array(order)).combine_chunks().to_batches()
        arrays = batches[0].columns if batches else [pa.array([], each.type) for each in schema]
        batch = pa.RecordBatch.from_arrays(arrays, schema=schema)
        origin = origin[order]
        originals, begins = np.unique(origin, return_index=True)
        bounds = zip(begins.tolist(), [*begins[1:].tolist(), len(origin)], strict=True) if len(origin) else ()
        spans = dict(zip(originals.tolist(), bounds, strict=True))
        return cls(at[order], offset[order], batch, batch.nbytes / max(1, len(batch)), spans)

    def count(self, origins: Sequence[int]) -> int:
        return sum(end - start for start, end in (self.spans.get(each, (0, 0)) for each in origins))

    def rows_of(self, origins: Sequence[int], below: int) -> tuple[Positions, pa.RecordBatch]:
        """The rows of some originals whose own offsets lie below one."""
        if len(origins) == 1:
            start, end = self.spans.get(origins[0], (0, 0))
            end = start + int(np.searchsorted(self.offset[start:end], below))
            return Positions(self.at[start:end], self.offset[start:end]), self.payload.slice(start, end - start)
        index = np.array([i for each in sorted({*origins}) for i in range(*self.spans.get(each, (0, 0)))], np.intp)
        index = index[self.offset[index] < below]
        return Positions(self.at[index], self.offset[index]), self.payload.take(pa.array(index))


class _Above:
    """The copies among the timers of a batch."""

    def __init__(self, payload: pa.RecordBatch, timers: RowRefs) -> None:
        origin = payload.column("origin").to_numpy()[timers.row]
        copies = timers[origin < timers.offset]
        self._offset, self._origin = copies.offset, origin[origin < timers.offset]
        ids = payload.column("id").take(pa.array(copies.row))
        self._ids = digests_or_zeros(ids) if len(copies) else concat_digests([])

    def of(self, offset: int, named: Int64s) -> Int64s:
        """The originals, among those `named`, of the copies above a command."""
        origin = self._origin[self._offset > offset]
        return np.unique(origin[among(origin, within_reach(named))])

    def of_id(self, offset: int, key: Digests) -> Int64s:
        """Those of the copies of an id."""
        is_of = (self._offset > offset) & (self._ids.hi == key.hi[0]) & (self._ids.lo == key.lo[0])
        found: Int64s = self._origin[is_of]
        return found


def _left(bytes_max: int | None, size: int) -> int | None:
    """What is left of a number of bytes, if there is one. Raises TooLarge."""
    if bytes_max is None:
        return None
    if size > bytes_max:
        raise TooLarge
    return bytes_max - size


def _timers(payload: pa.RecordBatch, rows: RowRefs) -> Timers:
    """Timers of a batch with ids, sorted by them."""
    ids = payload.column("id").take(pa.array(rows.row))
    rows = rows[ids.is_valid().to_numpy(zero_copy_only=False)]
    keys = digest(ids.drop_null())
    origin, target = (payload.column(name).take(pa.array(rows.row)) for name in ("origin", "target"))
    return timers_of(keys, rows, origin.to_numpy(), target)[keys.order()]
