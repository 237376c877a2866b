"""Commands that are decided in the transaction which finishes them: moves, and cancels that are answered (I7).

A command at offset d of a source names originals of it, or an id. It has no effect before its transaction: until then
the messages are delivered as if there were no command, and are told to have left. Of several that it names each has a
decision of its own.

    ingest        an *effect* is noted: the rows that the command is about, all of a lower offset than its own
    transaction   those that are still pending are acted on: a move writes copies, which have offsets above d, a recall
                  nothing; later takes of the transaction pass over them
    committed     a tombstone of the origin with the offset d covers every row of that origin *below d*

One command by id becomes one by origin for each message: the transaction that finishes it writes them.

Replay. A command below the committed O is finished: its tombstone is made when it is read. That is right, since its
transaction acted on every pending row of the origin below d; and it is read before anything is delivered (I6).

In transit. A copy that a transaction has written (a roll, a retry, a tick, the copy of a move) is above the commands
that were read before it. Where a command finds nothing but such a copy may be under way, its transaction writes the
command again, behind the copy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import chain
from typing import Final

import numpy as np
import pyarrow as pa

from timerstore.cancels.cancels import NO_ORIGIN, Known, named_by
from timerstore.cancels.digests import Digests, concat_digests
from timerstore.cancels.id_index import Seeds, SegmentIds, Timers, timers_of
from timerstore.memory.sorted_runs import RowRefs
from timerstore.rows.entry import DECIDED, PAYLOAD, PAYLOAD_COLUMNS, Kind, payload_of
from timerstore.rows.position import OFFSET_BITS, OFFSET_MAX, Bools, Int64s, Positions, offsets_of, pack, sources_of
from timerstore.rows.sources import Sources

ROWS_MAX: Final = 1_000
"""Messages that one command by id may be about. (One by origin covers all of its message when it is read again.)"""
FIRST_READ: Final = 64
"""Messages that moves copy are read so many first, and then as many as there is room for,"""
FEWER: Final = 4
"""and so many times fewer where they turn out to be larger than those before."""
LIGHT: Final = [name for name in PAYLOAD_COLUMNS if name not in ("key", "value", "headers")]
"""What is kept of the rows of commands that write no copies."""


class NoRoom(Exception):
    """`cuts`, by source: the offset of the first command for whose messages there is no room."""

    def __init__(self, cuts: dict[int, int]) -> None:
        super().__init__()
        self.cuts = cuts


class TooLarge(Exception):
    """What is asked for takes more bytes than it may."""


RowsOf = Callable[[Int64s, Sequence[str], int | None], tuple[RowRefs, pa.Table]]
"""The pending rows of originals (packed sources and offsets), with some columns of `entry.PAYLOAD`; with a number of
bytes, TooLarge is raised instead soon after they have become more."""


class Decision(Enum):
    """What a command comes to, for an original that it names, or for all of its id."""

    ACT = auto()  # the rows of `live` are pending
    AGAIN = auto()  # what it is about may be under way: it is written again
    LEFT = auto()  # what it is about has left in the meantime
    NOTHING = auto()  # nothing of it was pending
    TOO_MANY = auto()  # it is about more than ROWS_MAX messages
    PASSED = auto()  # a later one of the same transaction acts in its place


@dataclass(slots=True, kw_only=True, eq=False)
class Effect:
    """What one command is about. `seq` is its own, packed; `rows` are sorted by origin and offset, `origin` int64[n]
    theirs; `payload` has n rows of `entry.PAYLOAD` (without LIGHT's others they are null, unless it moves by origin).
    `named`: the offsets of the originals that it names, in order; `key`: the digest of the id instead, one row."""

    seq: int
    is_move: bool
    rows: Positions
    origin: Int64s
    payload: pa.RecordBatch
    named: Int64s | None
    key: Digests | None
    is_copied: Bools
    """Of each original, or of the id, whether a row may have left as a copy, which is above the command."""
    is_too_many: bool = False
    bytes: int = 0
    """Of its rows, about."""

    @property
    def source(self) -> int:
        return self.seq >> OFFSET_BITS

    @property
    def digest(self) -> tuple[int, int]:
        """Of the id that the command names; without one, of none."""
        return (0, 0) if self.key is None else (int(self.key.hi[0]), int(self.key.lo[0]))

    def have(self, rows: Bools) -> Bools:
        """Which of the originals have any of these rows (bool[n]); or whether the id has."""
        if self.named is None:
            return np.array([rows.any()])
        return np.isin(self.named, self.origin[rows])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Decided:
    """A command's decision about the originals `named`, all those of its effect that have it, or about an id (None);
    `live` are the indices of the effect's rows that are acted on."""

    effect: Effect
    decision: Decision
    live: Int64s
    named: Int64s | None
    behind: Int64s = field(default_factory=lambda: np.empty(0, np.int64))
    """Originals that are acted on, of which copies may be under way as well: they need the command once more."""


class InTransit:
    """Copies that were written and not read back yet: packed sources and origins, and digests of their ids."""

    def __init__(self) -> None:
        self._origins: Int64s = np.empty(0, np.int64)
        self._ids = concat_digests([])
        self._ordered: Int64s | None = None
        """The origins, for look-ups: there may be many times as many of them as a command names."""

    def __len__(self) -> int:
        return len(self._origins)

    def add(self, origins: Int64s, ids: Digests) -> None:
        """Copies that were committed; `ids` are zeros where there is none."""
        self._origins, self._ordered = np.concatenate([self._origins, origins]), None
        self._ids = concat_digests([self._ids, ids])

    def remove(self, origins: Int64s) -> Int64s:
        """Copies that were read. Returns those that were not among them."""
        if not len(self) or not len(origins):
            return origins
        found, counts = np.unique(origins, return_counts=True)
        order = np.argsort(self._origins, kind="stable")
        ordered = self._origins[order]
        nth = np.arange(len(order)) - np.searchsorted(ordered, ordered)
        at = np.minimum(np.searchsorted(found, ordered), len(found) - 1)
        gone = (found[at] == ordered) & (nth < counts[at])
        kept = np.sort(order[~gone])
        self._origins, self._ids, self._ordered = self._origins[kept], self._ids[kept], None
        left: Int64s = np.repeat(found, counts - np.bincount(at[gone], minlength=len(found)))
        return left

    def give_up(self, sources: Collection[int]) -> None:
        """Forget the copies of some sources."""
        kept = ~np.isin(sources_of(self._origins), list(sources))
        self._origins, self._ids, self._ordered = self._origins[kept], self._ids[kept], None

    def add_all(self, other: InTransit) -> None:
        """Copies of a transaction that was committed."""
        if len(other):
            self.add(other._origins, other._ids)

    def has(self, effect: Effect) -> Bools:
        """Which of the originals that a command names one of them may be of, or whether one may be of its id."""
        if not len(self):
            return np.zeros_like(effect.is_copied)
        if effect.named is not None:
            if self._ordered is None:
                self._ordered = np.sort(self._origins, kind="stable")
            return _among(_packed(effect.source, effect.named), self._ordered)
        key = effect.key
        return np.array([key is not None and ((self._ids.hi == key.hi[0]) & (self._ids.lo == key.lo[0])).any()])


class Commands:
    """Effects of commands that are not finished. Guarded by the store's lock, but for `effects_of`."""

    def __init__(self, sources: Sources) -> None:
        self.effects: dict[int, Effect] = {}
        """By the command's `seq`."""
        self.in_transit = InTransit()
        self.bytes = 0
        self._seeds = Seeds(sources)

    def take_in(
        self, effects: Sequence[Effect], finished: Callable[[Positions], Bools], is_unread: Callable[[int], bool]
    ) -> None:
        """Commands that were read, after the copies that were read with them have been taken out of what is in transit.
        `is_unread` says of a source whether copies that an earlier process wrote may be unread. What has been finished
        since the commands' rows were looked up may have left as a copy."""
        if not effects:
            return
        at, seq = [each.rows.at for each in effects], [each.rows.seq for each in effects]
        gone = finished(Positions(np.concatenate(at), np.concatenate(seq)))
        ends = np.cumsum([len(each) for each in seq])[:-1]
        for effect, left in zip(effects, np.split(gone, ends), strict=True):
            effect.is_copied |= self.in_transit.has(effect) | effect.have(left) | is_unread(effect.source)
            self.effects[effect.seq] = effect
            self.bytes += effect.bytes

    def forget(self, seqs: Int64s) -> None:
        """Rows that are finished, commands among them."""
        if self.effects:
            for seq in self.effects.keys() & set(seqs.tolist()):
                self.bytes -= self.effects.pop(seq).bytes

    def give_up(self, sources: Collection[int]) -> None:
        """Sources that are another instance's from now on: what is in transit there, it reads."""
        self.forget(np.array([seq for seq, each in self.effects.items() if each.source in sources], dtype=np.int64))
        self.in_transit.give_up(sources)

    def note_copied(self, seqs: Int64s, copies: InTransit, read: Int64s) -> None:
        """Rows that have left as copies; of these, those of the originals `read` (packed) were read already."""
        ordered = np.sort(seqs)
        for effect in self.effects.values() if len(seqs) or len(copies) else ():
            effect.is_copied |= copies.has(effect) | effect.have(_among(effect.rows.seq, ordered))
        copies.remove(read)
        self.in_transit.add_all(copies)

    def digests(self, ids: pa.Array, source: Int64s) -> Digests:
        """Of ids, zeros where there is none."""
        return _digests(ids, source, self._seeds)

    # ---- ingest: works on a snapshot

    def effects_of(
        self,
        known: Known,
        payload: pa.RecordBatch,
        fresh: RowRefs,
        is_pending: Bools,
        is_over: Callable[[Timers], Bools],
        rows_of: RowsOf,
        room_bytes: int,
    ) -> list[Effect]:
        """The effects of the commands among `fresh` rows (`row` is the index in `payload`); `is_pending` bool[n]: not
        finished, and not covered by a tombstone; `is_over` says the opposite of timers. Raises NoRoom where
        what moves copy is more than `room_bytes`, though those of one are always read; and as `rows_of` does."""
        kind = payload.column("kind").to_numpy()[fresh.row]
        chosen = np.flatnonzero(np.isin(kind, DECIDED) & is_pending)
        if not len(chosen):
            return []
        commands, index = fresh[chosen], fresh.row[chosen]
        ids, origin = payload.column("id").take(pa.array(index)), payload.column("origin").to_numpy()[index]
        is_move, by_id = kind[chosen] == Kind.MOVE, ids.is_valid().to_numpy(zero_copy_only=False)
        timers = fresh[(kind == Kind.TIMER) & is_pending]
        about, too_many, keys = self._by_id(known, payload, commands, ids, by_id, timers, is_over)
        above = _Above(payload, timers, self._seeds)
        here = np.flatnonzero(~by_id & (origin != NO_ORIGIN))
        which, offsets = named_by(payload, index[here], origin[here])
        parts = np.split(offsets, np.flatnonzero(np.diff(which)) + 1) if len(here) else []
        named = dict(zip(here.tolist(), parts, strict=True))
        for i, each in named.items():
            # Nothing below a command has an origin above it; and a larger one must not reach into another source.
            about[i] = _packed(int(commands.source[i]), each[each < commands.offset[i]]).tolist()
        copying = sorted((int(commands.seq[i]), i) for i in about if is_move[i] and not by_id[i])
        found_of = dict.fromkeys(
            about, _Found.of([o for os in about.values() for o in os], LIGHT, timers, payload, rows_of)
        )
        room, begin, count = room_bytes, 0, FIRST_READ
        while begin < len(copying) and (room > 0 or not begin):
            group = _group([i for _, i in copying[begin:]], about, count)
            wanted = [o for i in group for o in about[i]]
            try:
                room_bytes_left = None if len(group) == 1 else max(room, 0)
                whole = _Found.of(wanted, PAYLOAD_COLUMNS, timers, payload, rows_of, room_bytes_left)
            except TooLarge:  # those before were smaller
                count = len(wanted) // FEWER
                continue
            found_of |= dict.fromkeys(group, whole)
            held = int(whole.row_bytes * sum(len(about[i]) for i in group))  # each has its own, of shared messages too
            room, begin = room - max(whole.payload.nbytes, held), begin + len(group)
            count = max(1, room * sum(len(about[i]) for _, i in copying[:begin]) // max(1, room_bytes - room))
        if begin < len(copying):
            left = commands[np.array([i for _, i in copying[begin:]])]
            raise NoRoom(
                {source: int(left.offset[left.source == source].min()) for source in np.unique(left.source).tolist()}
            )
        effects = []
        for i, origins in about.items():
            rows, batch = found_of[i].rows_of(origins, int(commands.offset[i]))
            effects.append(
                Effect(
                    seq=int(commands.seq[i]),
                    is_move=bool(is_move[i]),
                    rows=rows,
                    origin=batch.column("origin").to_numpy(),
                    payload=batch,
                    bytes=int(len(rows) * found_of[i].row_bytes),
                    named=named.get(i),
                    key=keys[i : i + 1] if by_id[i] else None,
                    is_too_many=i in too_many or (bool(by_id[i]) and len(rows) > ROWS_MAX),
                    is_copied=above.has(int(commands.seq[i]), named.get(i), keys[i : i + 1]),
                )
            )
        return effects

    def _by_id(
        self,
        known: Known,
        payload: pa.RecordBatch,
        commands: RowRefs,
        ids: pa.Array,
        by_id: Bools,
        timers: RowRefs,
        is_over: Callable[[Timers], Bools],
    ) -> tuple[dict[int, list[int]], set[int], Digests]:
        """Packed originals of each command by id, the commands with too many of them, and the digests of the ids."""
        about: dict[int, list[int]] = {i: [] for i in np.flatnonzero(by_id).tolist()}
        keys = self.digests(ids, commands.source)
        if not about:
            return {}, set(), keys
        asked = np.flatnonzero(by_id)
        counts = np.zeros(len(commands), dtype=np.int64)
        batch = _timers(payload, timers, self._seeds)
        holders: tuple[Timers | SegmentIds, ...] = (*known.unstored, *known.segments, batch)
        for query, found in chain.from_iterable(holder.matches(keys[by_id]) for holder in holders):
            command = asked[query]
            mask = (found.offset < commands.offset[command]) & (counts[command] <= ROWS_MAX)
            mask[mask] = ~is_over(found[mask])
            np.add.at(counts, command[mask], 1)
            for i, origin in zip(command[mask].tolist(), pack(found.source, found.origin)[mask].tolist(), strict=True):
                if len(about[i]) <= ROWS_MAX:
                    about[i].append(origin)
        return about, set(np.flatnonzero(counts > ROWS_MAX).tolist()), keys


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    """Rows sorted by packed original and offset; `row_bytes` is what one of them takes, on average."""

    at: Int64s
    seq: Int64s
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
            np.isin(pack(timers.source, payload.column("origin").to_numpy()[timers.row]), wanted)
            if len(wanted)
            else np.zeros(len(timers), np.bool_)
        ]
        fresh = pa.Table.from_batches([payload]).select(list(columns)).take(pa.array(mine.row))
        both = pa.concat_tables([table.select(list(columns)), fresh])
        at, seq = np.concatenate([rows.at, mine.at]), np.concatenate([rows.seq, mine.seq])
        packed = pack(sources_of(seq), both.column("origin").to_numpy())
        order = np.lexsort((offsets_of(seq), packed))
        both = both.take(pa.array(order))
        for each in PAYLOAD:
            if each.name not in columns:
                both = both.append_column(each, pa.nulls(len(both), each.type))
        batch = payload_of(both)
        packed = packed[order]
        originals, begins = np.unique(packed, return_index=True)
        bounds = zip(begins.tolist(), [*begins[1:].tolist(), len(packed)], strict=True) if len(packed) else ()
        spans = dict(zip(originals.tolist(), bounds, strict=True))
        return cls(at[order], seq[order], batch, batch.nbytes / max(1, len(batch)), spans)

    def rows_of(self, origins: Sequence[int], below: int) -> tuple[Positions, pa.RecordBatch]:
        """The rows of some originals whose own offsets lie below one."""
        if len(origins) == 1:
            start, end = self.spans.get(origins[0], (0, 0))
            while end > start and int(self.seq[end - 1]) & OFFSET_MAX >= below:
                end -= 1
            return Positions(self.at[start:end], self.seq[start:end]), self.payload.slice(start, end - start)
        index = np.array([i for each in sorted({*origins}) for i in range(*self.spans.get(each, (0, 0)))], np.intp)
        index = index[offsets_of(self.seq[index]) < below]
        return Positions(self.at[index], self.seq[index]), self.payload.take(pa.array(index))


class _Above:
    """The copies among the timers of a batch."""

    def __init__(self, payload: pa.RecordBatch, timers: RowRefs, seeds: Seeds) -> None:
        origin = payload.column("origin").to_numpy()[timers.row]
        copies = timers[origin < timers.offset]
        self._seq, self._origin = copies.seq, pack(copies.source, origin[origin < timers.offset])
        ids = payload.column("id").take(pa.array(copies.row))
        self._ids = _digests(ids, copies.source, seeds) if len(copies) else concat_digests([])

    def has(self, seq: int, named: Int64s | None, key: Digests) -> Bools:
        """Which of the originals `named` have one above a command (`seq`), while they are below; or whether an id has
        one (None)."""
        if not len(self._seq):
            return np.zeros(1 if named is None else len(named), np.bool_)
        mask = (self._seq > seq) & (self._origin < seq)
        if named is not None:
            packed, origin = _packed(seq >> OFFSET_BITS, named), self._origin[mask]
            return np.isin(packed, origin[_among(origin, packed)])
        return np.array([(mask & (self._ids.hi == key.hi[0]) & (self._ids.lo == key.lo[0])).any()])


def _among(wanted: Int64s, ordered: Int64s) -> Bools:
    """Which are among many others."""
    if not len(ordered):
        return np.zeros(len(wanted), np.bool_)
    found: Bools = ordered[np.minimum(np.searchsorted(ordered, wanted), len(ordered) - 1)] == wanted
    return found


def _packed(source: int, offsets: Int64s) -> Int64s:
    """Originals of one source; an offset that no record can have becomes the largest one."""
    return pack(np.full(len(offsets), source), np.minimum(offsets, OFFSET_MAX))


def _group(commands: Sequence[int], about: Mapping[int, Sequence[int]], messages: int) -> list[int]:
    ends = np.cumsum([len(about[i]) for i in commands])
    return list(commands[: max(1, int(np.searchsorted(ends, messages, side="right")))])


def _digests(ids: pa.Array, source: Int64s, seeds: Seeds) -> Digests:
    """Of ids, zeros where there is none."""
    found = Digests(np.zeros(len(ids), np.uint64), np.zeros(len(ids), np.uint64))
    rows = np.flatnonzero(ids.is_valid().to_numpy(zero_copy_only=False))
    if len(rows):
        keys = seeds.digest(ids.take(pa.array(rows)), source[rows])
        found.hi[rows], found.lo[rows] = keys.hi, keys.lo
    return found


def _timers(payload: pa.RecordBatch, rows: RowRefs, seeds: Seeds) -> Timers:
    """Timers of a batch with ids, sorted by them."""
    ids = payload.column("id").take(pa.array(rows.row))
    rows = rows[ids.is_valid().to_numpy(zero_copy_only=False)]
    keys = seeds.digest(ids.drop_null(), rows.source)
    origin, target = (payload.column(name).take(pa.array(rows.row)) for name in ("origin", "target"))
    return timers_of(keys, rows, origin.to_numpy(), target)[keys.order()]
