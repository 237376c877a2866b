"""Effects: the rows that the commands of a batch cover, read in bounded memory. (commands.py has the decisions.)

    by origin   the pending rows of the named originals, for a move with all columns that its copies need
    by id       the positions of the id's timers; the command only writes commands by origin, so that it needs no
                payload, and all commands of a batch with one id share the timers

Commands are processed in order of offset, in groups that fit the byte budget: the size of an effect is counted before
the effect is made. The caller cuts a batch before the first command that does not fit.
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
from timerstore.cancels.digests import Digests, digest, digests_or_zeros
from timerstore.cancels.id_index import Timers, no_timers, timers_of
from timerstore.memory.sorted_runs import EMPTY, RowRefs
from timerstore.rows.entry import DECIDED, PAYLOAD, PAYLOAD_COLUMNS, UNCOPYABLE, Kind
from timerstore.rows.position import OFFSET_MAX, Bools, Int64s, Positions

ROWS_MAX: Final = 1_000
"""Limit of the messages that one command by id covers. (A command by origin must cover its whole message at a
replay.)"""
FIRST_READ: Final = 64
"""Messages in the first group of commands; later groups fill the byte budget."""
FEWER: Final = 4
"""Divisor of a group's messages, after they were larger than expected."""
RECALLED: Final = ["kind", "target", "id", "origin", "schedule"]
"""Columns of the rows of recalls, which write no copies."""
EFFECT_BYTES: Final = 2_000
"""Estimated bytes of a command without its rows."""
TIMER_BYTES: Final = 64
"""Estimated bytes of one timer of an id, without payload."""
NO_PAYLOAD: Final = pa.RecordBatch.from_arrays([], names=[])


class NoRoom(Exception):
    """The messages of a command exceed the byte budget; `cut` is the offset of the first such command."""

    def __init__(self, cut: int) -> None:
        super().__init__()
        self.cut = cut


class TooLarge(Exception):
    """A result exceeds its limit of bytes."""


RowsOf = Callable[[Int64s, Sequence[str], int | None], tuple[RowRefs, pa.Table]]
"""The pending rows of originals, with some columns of `entry.PAYLOAD`. Given a limit of bytes, it raises TooLarge soon
after the rows exceed it."""


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
    """The effects of the commands among `fresh` rows (`row` is the index in `payload`). `is_pending` bool[n]: neither
    finished, nor covered by a tombstone; `is_over` returns the opposite mask for timers. `waiting` are the ids of
    earlier undecided moves. Raises NoRoom if the effects exceed `room_bytes`, though the first command always fits; and
    as `rows_of` does."""
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
            more, size = batch.read(group, None if len(group) == 1 else max(room, 0))
        except TooLarge:  # the estimate came from smaller messages
            count = batch.messages(group) // FEWER
            continue
        effects += more
        room, begin = room - size, begin + len(group)
        count = max(1, room * batch.messages(order[:begin]) // max(1, room_bytes - room))
    if begin < len(order):
        raise NoRoom(int(batch.commands.offset[order[begin:]].min()))
    return effects


class _Batch:
    """The unfinished commands of a batch. `order` has the indices of those with effects, by offset."""

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
        """`timers` are the pending timers of the batch."""
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
        """The offset of the last command of each id."""
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
            # No row below a command has an origin above it.
            self._named[i] = named
            self._about[i] = named[named < commands.offset[i]].tolist()
        self.order: list[int] = sorted([*self._about, *self._key_of], key=commands.offset.tolist().__getitem__)
        self._above = _Above(payload, timers)
        self._segments, unstored = known.segments, known.unstored
        self._holders = (*unstored, *known.segments, _timers(payload, timers)) if self._key_of else ()
        self._of_id: dict[tuple[int, int], _OfId] = {}

    def messages(self, commands: Sequence[int]) -> int:
        """The estimated number of messages that some commands cover."""
        return sum(map(self._weight, commands))

    def first(self, commands: Sequence[int], messages: int) -> list[int]:
        """The first of these commands, together about `messages` messages; at least one command."""
        ends = np.cumsum([self._weight(i) for i in commands])
        return list(commands[: max(1, int(np.searchsorted(ends, messages, side="right")))])

    def _weight(self, i: int) -> int:
        return max(1, len(self._about.get(i, ())))

    def read(self, commands: Sequence[int], bytes_max: int | None) -> tuple[list[Effect], int]:
        """The effects of some commands, and their size in bytes. Raises TooLarge above `bytes_max`."""
        size = EFFECT_BYTES * len(commands)
        keys = [(self._key_of.get(i), i) for i in reversed(commands)]
        new = {key: i for key, i in keys if key is not None and key not in self._of_id}  # each id's first
        of_id = self._read_ids(new, _left(bytes_max, size))
        size += sum(TIMER_BYTES * len(each.timers) for each in of_id.values())
        messages: dict[int, _Found] = {}
        for is_move, columns in ((True, PAYLOAD_COLUMNS), (False, RECALLED)):
            mine = [i for i in commands if i in self._about and self._is_move[i] == is_move]
            wanted = [origin for i in mine for origin in self._about[i]]
            if mine:
                whole = _Found.of(wanted, columns, self._timers, self._payload, self._rows_of, _left(bytes_max, size))
                rows = sum(whole.count(self._about[i]) for i in mine)  # each effect has its own rows of a message
                size += max(whole.payload.nbytes, int(whole.row_bytes * rows))
                messages |= dict.fromkeys(mine, whole)
        _left(bytes_max, size)
        self._of_id |= of_id
        return [self._by_origin(i, messages[i]) if i in messages else self._by_id(i) for i in commands], size

    def _read_ids(self, new: Mapping[tuple[int, int], int], bytes_max: int | None) -> dict[tuple[int, int], _OfId]:
        if not new:
            return {}
        keys = self._keys[np.array(list(new.values()))]
        below = np.array([self._below[key] for key in new], dtype=np.int64)
        try:
            of_ids = _of_ids(keys, below, self._holders, self._is_over, bytes_max)
            often = [each.timers for key, each in zip(new, of_ids, strict=True) if key in self._moved_often]
            large = self._large(often, bytes_max)
            of_ids = [replace(each, large=each.timers.origin[among(each.timers.offset, large)]) for each in of_ids]
            return dict(zip(new, of_ids, strict=True))
        finally:
            for segment in self._segments:
                segment.drop_pages()

    def _large(self, timers: Sequence[Timers], bytes_max: int | None) -> Int64s:
        """The offsets of the timers that are too large for a copy, in order. Raises TooLarge."""
        wanted = [origin for each in timers for origin in each.origin.tolist()]
        if not wanted:
            return EMPTY.offset
        messages = _Found.of(wanted, ("origin", "rolls"), self._timers, self._payload, self._rows_of, bytes_max)
        return np.sort(messages.offset[messages.payload.column("rolls").to_numpy() == UNCOPYABLE])

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
        # The last command of the id is finished last, so the shared timers count for it.
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
    """The pending timers of an id, by offset: timers of its first ROWS_MAX messages, below `end`, the offset of the
    first timer of the next message."""

    timers: Timers
    end: int
    copied: Copied = field(default_factory=Copied)
    large: Int64s = field(default_factory=lambda: np.empty(0, np.int64))
    """Originals that are too large for a copy, if several moves name the id."""


def _of_ids(
    keys: Digests, below: Int64s, holders: Collection[Any], is_over: Callable[[Timers], Bools], bytes_max: int | None
) -> list[_OfId]:
    """The pending timers of each id (`keys`), with offsets below that of the id in `below`. Raises TooLarge soon after
    they exceed `bytes_max`."""
    ends, begun = below.copy(), np.full(len(keys), OFFSET_MAX, np.int64)
    held: tuple[Int64s, ...] = (EMPTY.offset,) * 4
    parts: list[tuple[Int64s, ...]] = []
    for query, matches in _pieces(holders, keys):
        mask = matches.offset < ends[query]
        mask[mask] = ~is_over(matches[mask])
        if mask.any():
            parts.append((query[mask], matches.offset[mask], matches.at[mask], matches.origin[mask]))
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
    """(index in `keys`, timer) of all timers with these keys, in pieces of bounded size."""
    return chain.from_iterable(holder.matches(keys) for holder in holders)


def _first_messages(parts: Sequence[tuple[Int64s, ...]], ends: Int64s, begun: Int64s) -> tuple[Int64s, ...]:
    """The timers of the first ROWS_MAX messages of each id, each once, by id and offset. The columns are the index of
    the id, `offset`, `at` and `origin`. If an id has more messages, its `begun` and `ends` are lowered to the offset of
    the next message's first timer, as timers from there on are not needed."""
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
    nth -= nth[np.searchsorted(query, query)] - 1  # the first row of each id belongs to its first message
    beyond = nth > ROWS_MAX
    np.minimum.at(begun, query[beyond], offset[beyond])
    np.minimum(ends, begun, out=ends)
    return query[~beyond], offset[~beyond], at[~beyond], origin[~beyond]


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    """Rows sorted by original and offset; `row_bytes` is their average size."""

    at: Int64s
    offset: Int64s
    payload: pa.RecordBatch
    row_bytes: float
    spans: dict[int, tuple[int, int]]
    """The first index of each original's rows, and the end."""

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
        """The pending rows of originals, from the store and among `timers` of the batch, with some columns. Raises
        TooLarge, as `rows_of` does."""
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
        """The rows of some originals with offsets below `below`."""
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
        is_copy = origin < timers.offset
        self._offset, self._origin = timers.offset[is_copy], origin[is_copy]

    def of(self, offset: int, named: Int64s) -> Int64s:
        """The originals, among those `named`, of the copies above a command."""
        origin = self._origin[self._offset > offset]
        return np.unique(origin[among(origin, within_reach(named))])


def _left(bytes_max: int | None, size: int) -> int | None:
    """The rest of `bytes_max` (None: no limit) after `size` bytes. Raises TooLarge below 0."""
    if bytes_max is None:
        return None
    if size > bytes_max:
        raise TooLarge
    return bytes_max - size


def _timers(payload: pa.RecordBatch, rows: RowRefs) -> Timers:
    """The timers with ids among rows of a batch, sorted by key."""
    ids = payload.column("id").take(pa.array(rows.row))
    rows = rows[ids.is_valid().to_numpy(zero_copy_only=False)]
    keys = digest(ids.drop_null())
    origin, target = (payload.column(name).take(pa.array(rows.row)) for name in ("origin", "target"))
    return timers_of(keys, rows, origin.to_numpy(), target)[keys.order()]
