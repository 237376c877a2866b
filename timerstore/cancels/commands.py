"""Commands that are decided in the transaction which finishes them: moves, and cancels that are answered (I7).

A command at offset d names originals, or an id. It has no effect before its transaction: until then
the messages are delivered as if there were no command, and are told to have left. Of several that it names each has a
decision of its own.

    ingest        an *effect* is noted (effects.py): the rows that the command is about, all of a lower offset than its
                  own
    transaction   those that are still pending are acted on: a move writes copies, which have offsets above d, a recall
                  nothing; later takes of the transaction pass over them
    committed     a tombstone of the origin with the offset d covers every row of that origin *below d*

One command by id becomes one by origin for each message: the transaction that finishes it writes them.

Replay. A command below the committed O is finished: its tombstone is made when it is read. That is right, since its
transaction acted on every pending row of the origin below d; and it is read before anything is delivered (I6). Only an
original that is too large for a copy, which decoding tells, is left alone by a move to a later time, then and when the
move is read again: there is no other row of it, and no tombstone is made.

In transit. A copy that a transaction has written (a roll, a retry, a tick, the copy of a move) is above the commands
that were read before it. Where a command by origin finds nothing but such a copy may be under way, its transaction
writes the command again, behind the copy. One by id becomes one by origin for such a message, too. Only where the
store does not know all copies (those that an earlier process wrote may be unread), it is written again as it is; what
was sent after its client's record stays out of it, and later commands of the id that are decided before it is are
written again behind it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

import numpy as np
import pyarrow as pa

from timerstore.cancels.digests import Digests, concat_digests
from timerstore.rows.entry import UNCOPYABLE
from timerstore.rows.position import OFFSET_MAX, Bools, Int64s, Positions

WAITING_MS_MAX: Final = 10_000
"""How long a command that was written is waited for. It takes some tens of milliseconds."""
_NONE: Final = np.empty(0, np.int64)


class Decision(Enum):
    """What a command comes to, for an original that it names, or for all of its id."""

    ACT = auto()  # the rows of `live` are pending
    AGAIN = auto()  # what it is about may be under way: it is written again
    LEFT = auto()  # what it is about has left in the meantime
    NOTHING = auto()  # nothing of it was pending
    TOO_MANY = auto()  # it is about more than effects.ROWS_MAX messages
    PASSED = auto()  # a later one of the same transaction acts in its place
    UNCOPYABLE = auto()  # a move to another time would need a copy, for which it is too large: it stays as it is


@dataclass(slots=True, eq=False)
class Copied:
    """Of what a command is about, the originals (offsets) of which a row may have left as a copy, which is above the
    command. Commands that share their rows share this; of an id, there may be later messages in it."""

    origins: Int64s = field(default_factory=lambda: np.empty(0, np.int64))
    is_unsure: bool = False
    """Whether there may be others, of copies that an earlier process wrote."""

    def add(self, *origins: Int64s) -> None:
        if any(map(len, origins)):
            self.origins = np.unique(np.concatenate((self.origins, *origins)))


@dataclass(slots=True, kw_only=True, eq=False)
class Effect:
    """What one command is about. `offset` is its own; `origin` int64[n] is of `rows`.

    By origin: `named` are the offsets of the originals that it names, in order; `rows` are sorted by origin and offset;
    `payload` has n rows of `entry.PAYLOAD`, of a recall with some columns. By id: `key` is its digest, one row; `rows`
    are `Timers`, sorted by offset, which later commands of the id share: its own are those up to `upto`."""

    offset: int
    is_move: bool
    is_now: bool = False
    """Whether it is a move to a time that is past when its record is written: it needs no copies."""
    rows: Positions
    origin: Int64s
    payload: pa.RecordBatch
    named: Int64s | None
    key: Digests | None
    copied: Copied = field(default_factory=Copied)
    is_too_many: bool = False
    upto: int | None = None
    large: Int64s = field(default_factory=lambda: np.empty(0, np.int64))
    """Of a move by id beside which another one waits: the originals that are too large for a copy."""
    bytes: int = 0
    """What it takes, about."""

    @property
    def id(self) -> Id:
        """The id that the command names; without one, none."""
        return (0, 0) if self.key is None else (int(self.key.hi[0]), int(self.key.lo[0]))

    def are_uncopyable(self) -> Bools:
        """Which rows of a move by origin are too large for a copy."""
        if not self.is_move:
            return np.zeros(len(self.rows), np.bool_)
        found: Bools = self.payload.column("rolls").to_numpy() == UNCOPYABLE
        return found

    def are_fixed(self) -> Bools:
        """Which of its rows would need a copy that is too large."""
        return self.are_uncopyable() & (not self.is_now)

    def have(self, rows: Bools) -> Bools:
        """Which of the originals that it names have any of these rows."""
        assert self.named is not None
        return np.isin(self.named, self.origin[rows])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Decided:
    """A command's decision about the originals `named`, all those of its effect that have it, or about an id (None);
    `live` are the indices of the effect's rows that are acted on. One by id that acts does so by commands about the
    originals `named`."""

    effect: Effect
    decision: Decision
    live: Int64s
    named: Int64s | None
    behind: Int64s = field(default_factory=lambda: np.empty(0, np.int64))
    """Originals that are acted on, of which copies may be under way as well: they need the command once more."""

    def written(self) -> list[Int64s]:
        """The originals about which it has commands by origin written."""
        by_origin = self.named if self.decision is Decision.AGAIN or self.effect.named is None else self.behind
        if by_origin is None or self.decision not in (Decision.AGAIN, Decision.ACT) or not len(by_origin):
            return []
        return [within_reach(by_origin)]


def of_all(effect: Effect, decision: Decision) -> list[Decided]:
    """A decision about an id."""
    return [Decided(effect=effect, decision=decision, live=_NONE, named=None)]


def passed_over(effect: Effect, later: Effect, named: Int64s, *, waits: bool) -> list[Decided]:
    """Of a move by id in whose place a later one acts, but not on what is too large for the copy that one needs."""
    large: Int64s = _NONE if later.is_now else np.intersect1d(named, np.union1d(effect.large, later.large))
    if not len(large):
        return [Decided(effect=effect, decision=Decision.PASSED, live=_NONE, named=named)]
    if waits:
        return of_all(effect, Decision.AGAIN)
    rest = np.setdiff1d(named, large)
    parts = (Decision.PASSED, rest), (Decision.ACT if effect.is_now else Decision.UNCOPYABLE, large)
    return [Decided(effect=effect, decision=each, live=_NONE, named=part) for each, part in parts if len(part)]


def named_among(named: Int64s, some: Collection[int]) -> Bools:
    """Which of these originals are among some."""
    return np.array([each in some for each in within_reach(named).tolist()], dtype=np.bool_)


class InTransit:
    """Copies that were written and not read back yet: their origins, and digests of their ids."""

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

    def add_all(self, other: InTransit) -> None:
        """Copies of a transaction that was committed."""
        if len(other):
            self.add(other._origins, other._ids)

    def of(self, effect: Effect) -> Int64s:
        """The originals (offsets) that they are of, among those that a command names, or of its id."""
        if not len(self):
            return self._origins
        if effect.named is None:
            hi, lo = effect.id
            found: Int64s = self._origins[(self._ids.hi == hi) & (self._ids.lo == lo)]
            return found
        if self._ordered is None:
            self._ordered = np.sort(self._origins, kind="stable")
        return effect.named[among(within_reach(effect.named), self._ordered)]


class Waiting:
    """Originals about which commands by origin have been written, once more or for one by id, and are not
    decided yet: missed ticks are put off until then. What was written long ago may have been read as a reject, and
    counts no more."""

    def __init__(self) -> None:
        self._counts: dict[int, tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self._counts)

    def add(self, origins: Int64s, now_ms: int) -> None:
        """Commands that are written now."""
        for each in origins.tolist():
            count, _ = self._counts.get(each, (0, 0))
            self._counts[each] = count + 1, now_ms + WAITING_MS_MAX

    def remove(self, origins: Int64s) -> None:
        """Commands that were decided."""
        for each in origins.tolist():
            count, until_ms = self._counts.pop(each, (0, 0))
            if count > 1:
                self._counts[each] = count - 1, until_ms

    def among(self, origins: Int64s, now_ms: int) -> Bools:
        """About which of some originals there are any."""
        until_ms = [self._counts.get(each, (0, 0))[1] for each in origins.tolist()]
        return np.array(until_ms, np.int64) > now_ms

    def forget(self, now_ms: int) -> None:
        """Those of long ago."""
        for key in [key for key, (_, until_ms) in self._counts.items() if until_ms <= now_ms]:
            del self._counts[key]


Id = tuple[int, int]
"""The digest of an id."""


class Commands:
    """Effects of commands that are not finished. Guarded by the store's lock, but for `effects_of`."""

    def __init__(self) -> None:
        self.effects: dict[int, Effect] = {}
        """By the command's offset."""
        self.in_transit = InTransit()
        self.again: Counter[Id] = Counter()
        """Commands by id that were written again, and are not decided yet: later ones of the id go behind them."""
        self.waiting = Waiting()
        self.recalling = Waiting()
        """The same for recalls: moves by id leave these originals to them."""
        self.bytes = 0

    def take_in(self, effects: Sequence[Effect], finished: Callable[[Positions], Bools], *, is_unread: bool) -> None:
        """Commands that were read, after the copies that were read with them have been taken out of what is in transit.
        `is_unread`: copies that an earlier process wrote may be unread. What has been finished since the commands' rows
        were looked up may have left as a copy."""
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

    def moved_ids(self) -> set[Id]:
        """The ids that moves name which are not decided."""
        return {each.id for each in self.effects.values() if each.is_move and each.key is not None}

    def forget(self, offsets: Int64s) -> None:
        """Rows that are finished, commands among them."""
        if self.effects:
            for offset in self.effects.keys() & set(offsets.tolist()):
                self.bytes -= self.effects.pop(offset).bytes

    def note_copied(self, offsets: Int64s, copies: InTransit, read: Int64s) -> None:
        """Rows that have left as copies; of these, those of the originals `read` were read already."""
        ordered = np.sort(offsets)
        for effect in _distinct(self.effects.values()) if len(offsets) or len(copies) else ():
            effect.copied.add(copies.of(effect), effect.origin[among(effect.rows.offset, ordered)])
        copies.remove(read)
        self.in_transit.add_all(copies)

    def note_written(
        self, written: Sequence[tuple[bool, Int64s]], settled: Sequence[tuple[bool, Int64s]], now_ms: int
    ) -> None:
        """Commands by origin that were written, and those that were decided: whether they are moves, and the originals
        that they are about."""
        for moves, originals in settled:
            for waiting in (self.waiting,) if moves else (self.waiting, self.recalling):
                waiting.remove(originals)
        for moves, originals in written:
            for waiting in (self.waiting,) if moves else (self.waiting, self.recalling):
                waiting.add(originals, now_ms)
        for waiting in (self.waiting, self.recalling):
            if len(waiting):
                waiting.forget(now_ms)


def _distinct(effects: Iterable[Effect]) -> Collection[Effect]:
    """Of those that share their rows, and what is known of these, one."""
    return {id(effect.copied): effect for effect in effects}.values()


def among(wanted: Int64s, ordered: Int64s) -> Bools:
    """Which are among many others."""
    if not len(ordered):
        return np.zeros(len(wanted), np.bool_)
    found: Bools = ordered[np.minimum(np.searchsorted(ordered, wanted), len(ordered) - 1)] == wanted
    return found


def within_reach(offsets: Int64s) -> Int64s:
    """Originals; an offset that no record can have becomes the largest one."""
    reached: Int64s = np.minimum(offsets, OFFSET_MAX)
    return reached
