"""Commands, decided in the transaction that finishes them: moves and recalls (invariant I7).

A command at offset d names originals, or an id. Before its transaction it has no effect: messages are delivered as
without it, and the answer is then that they have left. Each original that it names has its own decision.

    ingest        an *effect* is noted (effects.py): the rows that the command covers, all at offsets below d
    transaction   the command acts on the rows that are still pending: a move writes copies, at offsets above d, a
                  recall writes none; later takes of the transaction pass over these rows
    committed     a tombstone of the origin with the offset d covers every row of that origin *below d*

A command by id becomes one command by origin for each message: its transaction writes these.

By id. A command by id leaves no tombstone, so that it may wait in its place, with all rows behind it: while copies of
an earlier process may be unread, below the log's end at the start. Its time counts when messages are delivered: it ends
10 s after the first such command was read, with 10,000 of them, or without room for new rows. From then on they have no
effect, until the log is read up to there; the answer says so.

Replay. A command below the committed O is finished: reading it makes its tombstone. Nothing is lost by that, since its
transaction acted on every pending row of the origin below d, and it is read before any delivery (I6). There is one
exception: a move to a later time leaves an original alone that is too large for a copy, at first and at each replay.
Decoding marks such an original; it has no other rows, and gets no tombstone.

In transit. A copy that a transaction has written (a roll, a retry, a tick, the copy of a move) is above the commands
that were read before it. If a command by origin finds no row, but such a copy may be in transit, its transaction writes
the command again, behind the copy. It does not wait in its place instead: read again after a crash, it would not say
whether it had acted on a copy above itself. A command by id becomes a command by origin for such a message, too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

import numpy as np
import pyarrow as pa

from timerstore.cancels.digests import Digests, concat_digests, digests_or_zeros
from timerstore.rows.entry import UNCOPYABLE
from timerstore.rows.position import AT_MAX, AT_MIN, OFFSET_MAX, Bools, Int64s, Positions

WAITING_MS_MAX: Final = 10_000
"""Limit of the wait for a command that was written, and of messages for commands by id after a start."""
WAITING_MAX: Final = 10_000
"""Limit of commands by id that wait."""
_NONE: Final = np.empty(0, np.int64)


class Decision(Enum):
    """The outcome of a command, for an original that it names, or for all messages of its id."""

    ACT = auto()  # the rows of `live` are pending
    SENT_ON = auto()  # commands by origin are written: of an id, or behind a copy that may be in transit
    LEFT = auto()  # the message has left in the meantime
    NOTHING = auto()  # no message was pending
    TOO_MANY = auto()  # the command covers more than effects.ROWS_MAX messages
    PASSED = auto()  # a later command of the same transaction acts in its place
    UNCOPYABLE = auto()  # a move to another time needs a copy, and the message is too large: it stays unchanged
    UNKNOWN = auto()  # of an id: its messages are not known yet


@dataclass(slots=True, eq=False)
class Copied:
    """The originals (offsets), among those that a command covers, that may have a copy above the command. Commands that
    share their rows share this object; for an id it may have later messages, too."""

    origins: Int64s = field(default_factory=lambda: np.empty(0, np.int64))
    first_ms: int = AT_MAX
    """The time at which the first one that was read comes up: it may leave in the command's own transaction."""
    is_unsure: bool = False
    """Whether there may be more, from copies that an earlier process wrote."""

    def add(self, *origins: Int64s) -> None:
        if any(map(len, origins)):
            self.origins = np.unique(np.concatenate((self.origins, *origins)))


@dataclass(slots=True, kw_only=True, eq=False)
class Effect:
    """The rows that one command covers. `offset` is the command's; `origin` int64[n] are the origins of `rows`.

    By origin: `named` are the offsets of the named originals, in order; `rows` are sorted by origin and offset;
    `payload` has n rows of `entry.PAYLOAD`, for a recall with some columns only. By id: `key` is the digest, one row;
    `rows` are `Timers`, sorted by offset, and shared with later commands of the id. The command covers `rows[:upto]`.
    """

    offset: int
    is_move: bool
    is_now: bool = False
    """Whether it moves to a time that is past when its record is written: such a move needs no copies."""
    rows: Positions
    origin: Int64s
    payload: pa.RecordBatch
    named: Int64s | None
    key: Digests | None
    copied: Copied = field(default_factory=Copied)
    is_too_many: bool = False
    upto: int | None = None
    large: Int64s = field(default_factory=lambda: np.empty(0, np.int64))
    """Originals that are too large for a copy; only of a move by id beside another one that waits."""
    bytes: int = 0
    """Its estimated size in memory."""

    @property
    def id(self) -> Id:
        """The digest of the id that the command names; (0, 0) for a command by origin."""
        return (0, 0) if self.key is None else (int(self.key.hi[0]), int(self.key.lo[0]))

    def are_uncopyable(self) -> Bools:
        """Mask of the rows that are too large for a copy, of a move by origin."""
        if not self.is_move:
            return np.zeros(len(self.rows), np.bool_)
        mask: Bools = self.payload.column("rolls").to_numpy() == UNCOPYABLE
        return mask

    def are_fixed(self) -> Bools:
        """Mask of the rows that would need a copy, and are too large for one."""
        return self.are_uncopyable() & (not self.is_now)

    def have(self, rows: Bools) -> Bools:
        """Mask of the named originals that have any of the rows in a mask."""
        assert self.named is not None
        return np.isin(self.named, self.origin[rows]) if len(self.named) > 1 else np.full(1, rows.any())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Decided:
    """A decision of a command about the originals `named`: all originals of its effect with this decision; None: about
    its id. `live` are the indices of the effect's rows that it acts on."""

    effect: Effect
    decision: Decision
    live: Int64s
    named: Int64s | None
    behind: Int64s = field(default_factory=lambda: np.empty(0, np.int64))
    """Originals that it acts on, and whose copies may be in transit."""

    @property
    def written(self) -> Int64s:
        """The originals for which a command by origin is written, one each."""
        named = self.named if self.decision is Decision.SENT_ON else self.behind
        return _NONE if named is None else named


def of_all(effect: Effect, decision: Decision) -> list[Decided]:
    """One decision about all messages of an id."""
    return [Decided(effect=effect, decision=decision, live=_NONE, named=None)]


def passed_over(effect: Effect, later: Effect, named: Int64s) -> list[Decided]:
    """The decisions of a move by id in whose place a later move acts. The later one cannot act on originals that are
    too large for its copies: these the earlier one decides itself."""
    large: Int64s = _NONE if later.is_now else np.intersect1d(named, np.union1d(effect.large, later.large))
    rest = np.setdiff1d(named, large)
    parts = (Decision.PASSED, rest), (Decision.SENT_ON if effect.is_now else Decision.UNCOPYABLE, large)
    return [Decided(effect=effect, decision=each, live=_NONE, named=part) for each, part in parts if len(part)]


def named_among(named: Int64s, some: Container[int]) -> Bools:
    """Mask of the originals that are in a small set."""
    return np.array([each in some for each in within_reach(named).tolist()], dtype=np.bool_)


class InTransit:
    """Copies in transit, written and not yet read back: their origins, and the digests of their ids."""

    def __init__(self) -> None:
        self._origins: Int64s = np.empty(0, np.int64)
        self._ids = concat_digests([])
        self._ordered: Int64s | None = None
        """The origins, sorted for look-ups: they may be many more than a command names."""

    def __len__(self) -> int:
        return len(self._origins)

    def add(self, origins: Int64s, ids: Digests) -> None:
        """Add committed copies; `ids` are zeros for copies without an id."""
        self._origins, self._ordered = np.concatenate([self._origins, origins]), None
        self._ids = concat_digests([self._ids, ids])

    def remove(self, origins: Int64s) -> Int64s:
        """Remove copies that were read back. Returns the origins that were not in transit."""
        if not len(self) or not len(origins):
            return origins
        distinct, counts = np.unique(origins, return_counts=True)
        order = np.argsort(self._origins, kind="stable")
        ordered = self._origins[order]
        nth = np.arange(len(order)) - np.searchsorted(ordered, ordered)
        at = np.minimum(np.searchsorted(distinct, ordered), len(distinct) - 1)
        gone = (distinct[at] == ordered) & (nth < counts[at])
        kept = np.sort(order[~gone])
        self._origins, self._ids, self._ordered = self._origins[kept], self._ids[kept], None
        left: Int64s = np.repeat(distinct, counts - np.bincount(at[gone], minlength=len(distinct)))
        return left

    def add_all(self, other: InTransit) -> None:
        """Add the copies of a committed transaction."""
        if len(other):
            self.add(other._origins, other._ids)

    def of(self, effect: Effect) -> Int64s:
        """The originals (offsets) with copies in transit, among those of a command, by origin or by id."""
        if not len(self):
            return self._origins
        if effect.named is None:
            hi, lo = effect.id
            originals: Int64s = self._origins[(self._ids.hi == hi) & (self._ids.lo == lo)]
            return originals
        if self._ordered is None:
            self._ordered = np.sort(self._origins, kind="stable")
        return effect.named[among(within_reach(effect.named), self._ordered)]


Id = tuple[int, int]
"""The digest of an id."""


class Commands:
    """The unfinished commands, with their effects. The store's lock guards them."""

    def __init__(self) -> None:
        self.effects: dict[int, Effect] = {}
        """By the command's offset."""
        self.in_transit = InTransit()
        self.sent_on: dict[int, int] = {}
        """Originals for which the bridge has written commands by origin that are not yet decided, and the time (ms)
        until which these count: later they may have been read as rejects. Missed ticks wait for them."""
        self.recalling: dict[int, int] = {}
        """The same for recalls only: moves by id leave these originals to them."""
        self.bytes = 0
        self.wait_until_ms = AT_MAX
        """The end of the wait of commands by id; AT_MIN: it is over."""

    def waiting_offset(self) -> int:
        """The offset of the first command by id, if they may wait; else OFFSET_MAX. The caller knows that copies are
        unread."""
        if self.wait_until_ms == AT_MIN:
            return OFFSET_MAX
        return min((offset for offset, effect in self.effects.items() if effect.named is None), default=OFFSET_MAX)

    def give_up(self, now_ms: int = AT_MIN) -> None:
        """End the wait, if its time is over, or too many wait."""
        if now_ms >= self.wait_until_ms or sum(each.named is None for each in self.effects.values()) > WAITING_MAX:
            self.wait_until_ms = AT_MIN

    def enough_offset(self, messages_max: int) -> int:
        """The offset of the first command by id that a transaction leaves to the next one: an earlier command names the
        same id, and all commands by id up to this one cover more than `messages_max` messages. OFFSET_MAX: there is no
        such command."""
        by_id = [each for each in self.effects.values() if each.upto is not None]  # in the order of offset
        if (count := sum(each.upto or 0 for each in by_id)) <= messages_max:
            return OFFSET_MAX
        ids, count = set[Id](), 0
        for effect in by_id:
            count += effect.upto or 0
            if count > messages_max and effect.id in ids:
                return effect.offset
            ids.add(effect.id)
        return OFFSET_MAX

    def note_read(self, rows: Positions, origin: Int64s, ids: pa.Array) -> None:
        """Note copies that were read above commands by id."""
        keys = digests_or_zeros(ids)
        read = set(keys.hi.tolist())
        for effect in _distinct(each for each in self.effects.values() if each.named is None and each.id[0] in read):
            hi, lo = effect.id
            mine = (keys.hi == hi) & (keys.lo == lo) & (rows.offset > effect.offset)
            effect.copied.add(origin[mine])
            effect.copied.first_ms = int(rows.at[mine].min(initial=effect.copied.first_ms))

    def take_in(
        self, effects: Sequence[Effect], finished: Callable[[Positions], Bools], now_ms: int, *, is_unread: bool
    ) -> None:
        """Add the effects of commands that were read; the copies in their batch are no longer in transit. `is_unread`:
        copies of an earlier process may be unread. Rows that were finished since their look-up may have left as
        copies."""
        if not effects:
            return
        distinct = _distinct(effects)
        at, offset = [each.rows.at for each in distinct], [each.rows.offset for each in distinct]
        gone = finished(Positions(np.concatenate(at), np.concatenate(offset)))
        ends = np.cumsum([len(each) for each in offset])[:-1]
        for effect, left in zip(distinct, np.split(gone, ends), strict=True):
            effect.copied.add(self.in_transit.of(effect), effect.origin[left])
            effect.copied.is_unsure |= is_unread
        self.effects.update((effect.offset, effect) for effect in effects)
        self.bytes += sum(effect.bytes for effect in effects)
        if is_unread and any(effect.named is None for effect in effects):
            self.wait_until_ms = min(self.wait_until_ms, now_ms + WAITING_MS_MAX)

    def moved_ids(self) -> set[Id]:
        """The ids of undecided moves."""
        return {each.id for each in self.effects.values() if each.is_move and each.key is not None}

    def forget(self, offsets: Int64s) -> None:
        """Drop the effects of finished commands; `offsets` may have other finished rows, too."""
        if self.effects:
            for offset in self.effects.keys() & set(offsets.tolist()):
                self.bytes -= self.effects.pop(offset).bytes

    def note_copied(self, offsets: Int64s, copies: InTransit, read: Int64s) -> None:
        """Note rows (`offsets`) that have left as `copies`; those of the originals `read` have been read back."""
        ordered = np.sort(offsets)
        for effect in _distinct(self.effects.values()) if len(offsets) or len(copies) else ():
            effect.copied.add(copies.of(effect), effect.origin[among(effect.rows.offset, ordered)])
        copies.remove(read)
        self.in_transit.add_all(copies)

    def note_written(self, written: Sequence[tuple[bool, Int64s]], settled: Iterable[Effect], now_ms: int) -> None:
        """Note commands by origin that were written: whether they are moves, and their originals; and commands that
        were decided (`settled`)."""
        for effect in settled if self.sent_on else ():
            for each in () if effect.named is None else within_reach(effect.named).tolist():
                self.sent_on.pop(each, None)
                if not effect.is_move:
                    self.recalling.pop(each, None)
        until_ms = now_ms + WAITING_MS_MAX
        for is_move, originals in written:
            self.sent_on |= dict.fromkeys(originals.tolist(), until_ms)
            self.recalling |= {} if is_move else dict.fromkeys(originals.tolist(), until_ms)
        self.sent_on = {each: until_ms for each, until_ms in self.sent_on.items() if until_ms > now_ms}
        self.recalling = {each: until_ms for each, until_ms in self.recalling.items() if until_ms > now_ms}


def _distinct(effects: Iterable[Effect]) -> Collection[Effect]:
    """The first effect of each set of effects that share their rows and `copied`."""
    first = dict[int, Effect]()
    for effect in effects:
        first.setdefault(id(effect.copied), effect)
    return first.values()


def among(wanted: Int64s, ordered: Int64s) -> Bools:
    """Mask of the wanted values that are in a sorted vector."""
    if not len(ordered):
        return np.zeros(len(wanted), np.bool_)
    mask: Bools = ordered[np.minimum(np.searchsorted(ordered, wanted), len(ordered) - 1)] == wanted
    return mask


def within_reach(offsets: Int64s) -> Int64s:
    """The originals, with offsets above OFFSET_MAX, which no record can have, lowered to it."""
    reached: Int64s = np.minimum(offsets, OFFSET_MAX)
    return reached
