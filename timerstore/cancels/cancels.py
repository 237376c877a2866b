"""Cancels: the tombstones and the cancelled timers of a batch (invariant I7).

A cancel, or a timer that replaces, read at offset c leaves a tombstone (its id, or the origin that it names, and c),
even if it is finished itself. A timer of the same id, or of that origin, is *covered* if its origin offset is below c.
Covered timers stay in place, as physical rows (invariant I3); a transaction passes over them without output.

The gauges change at once. For a batch with new tombstones:

    before the lock   Digests are made. The covered timers of the batch are found, and the pending timers that the batch
                      covers first: by id in memory (`Unstored`) and beside segments (`SegmentIds`), by origin with
                      ingest's help (`PendingOf`).
    under the lock    The tombstones are added. Those pending timers that are still unfinished leave the counts. If one
                      of them is in the open transaction (on loan, or with a command that acts on it), the
                      acknowledgement counts it in, because it also counts it out a second time.

Only one thread appends, so no timer can become covered between the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from timerstore.cancels.digests import (
    MOVE,
    ORIGIN,
    RECALL,
    Digests,
    are_commands,
    are_of,
    digest,
    index_of,
    keys_of,
)
from timerstore.cancels.id_index import SegmentIds, Timers, Unstored, concat_timers, no_timers, timers_of
from timerstore.cancels.tombstones import Lookup, Run, Tombstones, merged_runs
from timerstore.memory.pending import Tally, labels, tally_coded
from timerstore.memory.resident import Resident
from timerstore.memory.sorted_runs import RowRefs
from timerstore.rows.entry import DECIDED, UNCOPYABLE, Kind
from timerstore.rows.position import AT_MIN, Bools, Int64s, Positions

MARGIN_MS: Final = 3_600_000
"""A tombstone outlives its window by this margin, for clocks that differ, and ingest that lags."""


NO_ORIGIN: Final = -1
"""`origin` of a command that names a record of another log."""
SEVERAL: Final = -2
"""`origin` of a command that names several records."""
ORIGINS_HELD_MAX: Final = 1 << 17
"""Limit of named origins in memory."""
PendingOf = Callable[[Int64s], Timers]
"""The pending timers of origins, in memory and segments, with the origins as keys, without covered timers."""
UncopyableOf = Callable[[Int64s], Int64s]
"""The subset of originals that are pending, and too large for a copy."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Known:
    """A snapshot from before a batch: tombstones, and the id index in memory and beside segments."""

    lookup: Lookup
    unstored: tuple[Timers, ...]
    segments: tuple[SegmentIds, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Judged:
    """The effect of a batch on cancels. `covered` is bool[rows of the batch]: timers that are cancelled on arrival.
    `tombstones` are new. `timers` are new pending timers with ids. `hits` are timers that were pending until now."""

    covered: Bools
    tombstones: Run
    timers: Timers
    hits: Timers


class _Batch(NamedTuple):
    """Arguments of `Cancels.judge`."""

    payload: pa.RecordBatch
    fresh: RowRefs
    is_unfinished: Bools
    now_ms: int


class Cancels:
    """See the module. The store's lock guards it; `judge` and `covered` work on snapshots, without the lock."""

    def __init__(self, window_ms: int) -> None:
        """`window_ms` is the least time for which a tombstone is kept."""
        self.tombstones = Tombstones()
        self.unstored = Unstored()
        self.cancelled = 0
        """The number of timers cancelled since the store was opened."""
        self.inherited: int | None = None
        """Below this offset the log may have copies of another process; None: not known."""
        self._keep_ms = window_ms + MARGIN_MS

    # ---- delivery

    def covered(self, lookup: Lookup, offset: Int64s, payload: pa.RecordBatch) -> Bools | None:
        """Mask of the covered timers among rows of `entry.PAYLOAD`, bool[n]; None without any."""
        if not len(lookup):
            return None
        mask = self.cancelled_by(lookup, payload)
        is_timer, origin = payload.column("kind").to_numpy() == Kind.TIMER, payload.column("origin").to_numpy()
        mask |= is_timer & self.decided(lookup, offset, origin)
        return mask if mask.any() else None

    def decided(self, lookup: Lookup, offset: Int64s, origin: Int64s) -> Bools:
        """Mask of the rows with these origins that finished commands cover."""
        return self.moved(lookup, offset, origin) | self.recalled(lookup, offset, origin)

    def moved(self, lookup: Lookup, offset: Int64s, origin: Int64s) -> Bools:
        """Mask of the rows that moves cover: a copy replaces each."""
        return _below(lookup, MOVE, offset, origin)

    def recalled(self, lookup: Lookup, offset: Int64s, origin: Int64s) -> Bools:
        """Mask of the rows that recalls cover."""
        return _below(lookup, RECALL, offset, origin)

    def cancelled_by(self, lookup: Lookup, payload: pa.RecordBatch) -> Bools:
        """Mask of the timers among rows of `entry.PAYLOAD` that cancels cover."""
        mask = self.covered_ids(lookup, payload)
        origin, is_timer = payload.column("origin").to_numpy(), payload.column("kind").to_numpy() == Kind.TIMER
        rows = np.flatnonzero(is_timer & (origin < lookup.highest.by_origin))
        if len(rows):
            offset, _ = lookup.look_up(keys_of(ORIGIN, origin[rows]))
            mask[rows] |= offset > origin[rows]
        return mask

    def covered_ids(self, lookup: Lookup, payload: pa.RecordBatch) -> Bools:
        """Mask of the timers among rows of `entry.PAYLOAD` that cancels of their ids cover."""
        ids, origin = payload.column("id"), payload.column("origin").to_numpy()
        mask = np.zeros(len(ids), dtype=np.bool_)
        by_id = (payload.column("kind").to_numpy() == Kind.TIMER) & (origin < lookup.highest.any)
        if by_id.any() and ids.null_count < len(ids):
            rows = np.flatnonzero(by_id & ids.is_valid().to_numpy(zero_copy_only=False))
            offset, _ = lookup.look_up(digest(ids.take(pa.array(rows))))
            mask[rows] = offset > origin[rows]
        return mask

    def are_covered(self, lookup: Lookup, timers: Timers) -> Bools:
        """Mask of the covered timers; `keys` are digests of their ids."""
        offset, _ = lookup.look_up(timers.keys)
        return (offset > timers.origin) | self._are_covered_otherwise(lookup, timers)

    # ---- ingest

    def known(self, segments: Sequence[SegmentIds]) -> Known:
        """A snapshot for `judge`; `segments` are the id indexes of the live segments."""
        return Known(lookup=self.tombstones.lookup(), unstored=self.unstored.runs, segments=tuple(segments))

    def judge(
        self,
        known: Known,
        payload: pa.RecordBatch,
        fresh: RowRefs,
        is_unfinished: Bools,
        finished: Callable[[Positions], Bools],
        pending_of: PendingOf,
        uncopyable_of: UncopyableOf,
        now_ms: int,
    ) -> Judged | None:
        """The effect on cancels of a batch's `fresh` rows, read at `now_ms`; None without any effect.

        `row` of `fresh` is the index in `payload`; `is_unfinished` is by row of `fresh`. `finished` returns the mask of
        finished positions. The caller holds no lock.
        """
        batch = _Batch(payload, fresh, is_unfinished, now_ms)
        by_id = self._judge_ids(known, batch, finished)
        by_origin = self._judge_origins(known, batch, pending_of)
        by_command = self._judge_commands(known, batch, pending_of, uncopyable_of)
        parts = [part for part in (by_id, by_origin, by_command) if part is not None]
        if len(parts) < 2:
            return parts[0] if parts else None
        hits = concat_timers([part.hits for part in parts])
        _, once = np.unique(hits.offset, return_index=True)
        covered: Bools = np.logical_or.reduce([part.covered for part in parts])
        timers = parts[0].timers
        return Judged(
            covered=covered,
            tombstones=merged_runs([part.tombstones for part in parts]),
            timers=timers[~np.isin(timers.offset, fresh.offset[covered[fresh.row]])],
            hits=hits[once],
        )

    def _judge_ids(self, known: Known, batch: _Batch, finished: Callable[[Positions], Bools]) -> Judged | None:
        payload, fresh, is_unfinished, now_ms = batch
        ids = payload.column("id")
        if ids.null_count == len(ids):
            return None
        kept = ids.is_valid().to_numpy(zero_copy_only=False)[fresh.row]
        rows, is_unfinished = fresh[kept], is_unfinished[kept]
        if not len(rows):
            return None
        index, offset = rows.row, rows.offset
        keys = digest(ids.take(pa.array(index)))
        kind = payload.column("kind").to_numpy()[index]
        origin = payload.column("origin").to_numpy()[index]
        replaces = payload.column("replace").to_numpy(zero_copy_only=False)[index]
        is_timer = kind == Kind.TIMER
        makes = (kind == Kind.CANCEL) | (is_timer & (replaces == True))  # noqa: E712 - may hold None
        expire_ms = np.full(int(np.count_nonzero(makes)), now_ms + self._keep_ms)
        new = _run(keys[makes], offset[makes], expire_ms)

        # Timers of the batch, covered by earlier tombstones, or by the batch itself.
        timer = np.flatnonzero(is_timer & is_unfinished)
        by, until_ms = self._cover(known.lookup, new, keys[timer], origin[timer])
        is_covered = by > origin[timer]
        covered = np.zeros(len(ids), dtype=np.bool_)
        covered[index[timer[is_covered]]] = True
        at = rows.at[timer]
        raised = [_run(keys[timer[is_covered]], by[is_covered], np.maximum(until_ms, at)[is_covered])]
        live = timer[~is_covered]
        timers = timers_of(keys[live], rows[live], origin[live], labels(payload).take(pa.array(index[live])))

        hits = no_timers()
        if len(new):
            hits, reached = self._hits(known, new, finished)
            raised.append(_run(hits.keys, new.offset[reached], hits.at))
        return Judged(
            covered=covered,
            # Each is kept at least until the latest time of the timers that it covers.
            tombstones=merged_runs([new, *raised]),
            timers=timers[timers.keys.order()],
            hits=hits,
        )

    def _judge_origins(self, known: Known, batch: _Batch, pending_of: PendingOf) -> Judged | None:
        """Covers timers of the batch by new and earlier cancels by origin, and pending timers by new ones."""
        payload, fresh, is_unfinished, now_ms = batch
        index, offset = fresh.row, fresh.offset
        kind, origin = payload.column("kind").to_numpy()[index], payload.column("origin").to_numpy()[index]
        makes = kind == Kind.CANCEL
        if makes.any():
            makes &= payload.column("id").is_null().to_numpy(zero_copy_only=False)[index] & (origin != NO_ORIGIN)
        timer = (kind == Kind.TIMER) & is_unfinished & ((origin < known.lookup.highest.by_origin) | makes.any())
        if not (makes.any() or timer.any()):
            return None
        expire_ms = np.full(int(np.count_nonzero(makes)), now_ms + self._keep_ms)
        at, named = named_by(payload, index[makes], origin[makes])
        earlier = named < offset[makes][at]  # a cancel does not cover later messages
        at, named = at[earlier], named[earlier]
        new = _run(keys_of(ORIGIN, named), offset[makes][at], expire_ms[at])
        rows = np.flatnonzero(timer)
        keys = keys_of(ORIGIN, origin[rows])
        by, until_ms = self._cover(known.lookup, new, keys, origin[rows])
        is_covered = by > origin[rows]
        covered = np.zeros(len(payload), dtype=np.bool_)
        covered[index[rows[is_covered]]] = True
        raised = _run(keys[is_covered], by[is_covered], np.maximum(until_ms, fresh.at[rows])[is_covered])
        hits = pending_of(new.keys.lo.astype(np.int64))
        at = index_of(new.keys, hits.keys)
        reached = _run(hits.keys, new.offset[at], hits.at)
        return Judged(covered=covered, tombstones=merged_runs([new, raised, reached]), timers=no_timers(), hits=hits)

    def _judge_commands(
        self, known: Known, batch: _Batch, pending_of: PendingOf, uncopyable_of: UncopyableOf
    ) -> Judged | None:
        """Covers rows by finished commands by origin: those of the batch, which is read once more, and earlier ones."""
        payload, fresh, is_unfinished, now_ms = batch
        index, offset = fresh.row, fresh.offset
        kind, origin = payload.column("kind").to_numpy()[index], payload.column("origin").to_numpy()[index]
        makes = np.isin(kind, DECIDED) & ~is_unfinished & (origin != NO_ORIGIN) & (origin < offset)
        if makes.any():
            makes &= payload.column("id").is_null().to_numpy(zero_copy_only=False)[index]
        timer = (kind == Kind.TIMER) & is_unfinished
        timer &= (offset < known.lookup.highest.by_command) | makes.any()
        if not (makes.any() or timer.any()):
            return None
        expire_ms = np.full(int(np.count_nonzero(makes)), now_ms + self._keep_ms)
        at, named = named_by(payload, index[makes], origin[makes])
        by, is_move = offset[makes][at], (kind[makes] == Kind.MOVE)[at]
        rows = np.flatnonzero(timer)
        later = is_move & (payload.column("due").to_numpy() > payload.column("ts").to_numpy())[index[makes]][at]
        if later.any():  # a move to a later time leaves a message alone that is too large for a copy
            large = rows[payload.column("rolls").to_numpy()[index[rows]] == UNCOPYABLE]
            fixed = np.concatenate((uncopyable_of(named[later]), fresh.offset[large]))
            acted = ~(later & np.isin(named, fixed))
            at, named, by, is_move = at[acted], named[acted], by[acted], is_move[acted]
        covered = np.zeros(len(payload), dtype=np.bool_)
        runs: list[Run] = []
        hits = [no_timers()]
        for what, mine in ((MOVE, is_move), (RECALL, ~is_move)):
            mine = mine & (named < by)
            new = _run(keys_of(what, named[mine]), by[mine], expire_ms[at][mine])
            keys = keys_of(what, origin[rows])
            until, until_ms = known.lookup.look_up(keys)
            if len(new):
                until, until_ms = _later((until, until_ms), new.look_up(keys))
            is_covered = until > offset[rows]
            covered[index[rows[is_covered]]] = True
            latest_ms = np.maximum(until_ms, fresh.at[rows])[is_covered]
            runs += [new, _run(keys[is_covered], until[is_covered], latest_ms)]
            if len(new):
                reached = pending_of(new.keys.lo.astype(np.int64))
                which = index_of(new.keys, keys_of(what, reached.origin))
                below = reached.offset < new.offset[which]
                reached, which = reached[below], which[below]
                hits.append(reached)
                runs.append(_run(new.keys[which], new.offset[which], reached.at))
        both = concat_timers(hits)
        _, once = np.unique(both.offset, return_index=True)
        return Judged(covered=covered, tombstones=merged_runs(runs), timers=no_timers(), hits=both[once])

    def add_decided(self, is_move: Bools, origin: Int64s, offset: Int64s, until_ms: Int64s, now_ms: int) -> None:
        """Add tombstones of finished commands at `offset`, moves or recalls, for the originals `origin`; `until_ms` are
        the times of the rows that they cover. All are vectors of one length."""
        moves, recalls = keys_of(MOVE, origin), keys_of(RECALL, origin)
        keys = Digests(np.where(is_move, moves.hi, recalls.hi), moves.lo)
        self.tombstones.add(_run(keys, offset, np.maximum(until_ms, now_ms + self._keep_ms)))

    def take_in(self, judged: Judged, resident: Resident, in_hand: Int64s) -> tuple[Tally, Tally]:
        """Add a judgement. Returns the counts of newly covered pending timers, and of those among them that the open
        transaction has (`in_hand` are the offsets of its rows)."""
        self.tombstones.add(judged.tombstones)
        self.unstored.add(judged.timers, lambda timers: _is_gone(resident, timers))
        hits = judged.hits[~resident.finished(judged.hits)]
        lent = hits[np.isin(hits.offset, in_hand)]
        self.cancelled += int(np.count_nonzero(judged.covered)) + len(hits) - len(lent)
        return _tally(hits), _tally(lent)

    def take_in_originals(self, timers: Timers, low: int, resident: Resident) -> bool:
        """Add originals with ids, at offsets from `low` on, which replace no others. Returns whether no tombstone can
        cover them; else nothing was added."""
        if self.tombstones.highest.any > low:
            return False
        self.unstored.add(timers, lambda each: _is_gone(resident, each))
        return True

    def forget_stored(self, resident: Resident) -> None:
        """Drop timers that a flush has put into a segment."""
        self.unstored.prune(lambda timers: _is_gone(resident, timers))

    def _cover(self, lookup: Lookup, new: Run, keys: Digests, origin: Int64s) -> tuple[Int64s, Int64s]:
        """(offset, expire_ms) of the tombstone of each timer; -1: none."""
        by, until_ms = np.full(len(keys), -1, np.int64), np.full(len(keys), -1, np.int64)
        # Originals above every tombstone, the usual case, need no look-up.
        below = np.flatnonzero(origin < lookup.highest.any)
        if len(below):
            by[below], until_ms[below] = lookup.look_up(keys[below])
        return _later((by, until_ms), new.look_up(keys)) if len(new) else (by, until_ms)

    def _hits(self, known: Known, new: Run, finished: Callable[[Positions], Bools]) -> tuple[Timers, Int64s]:
        """Pending timers that only `new` covers, and the index in `new` for each.

        Each occurs once, because a flush moves timers from memory to a segment in one step.
        """
        before, _ = known.lookup.look_up(new.keys)
        parts: list[Timers] = []
        reached: list[Int64s] = []
        holders: tuple[Timers | SegmentIds, ...] = (*known.unstored, *known.segments)
        for query, timers in chain.from_iterable(holder.matches(new.keys) for holder in holders):
            mask = (timers.origin < new.offset[query]) & (timers.origin >= before[query])
            mask[mask] = ~(finished(timers[mask]) | self._are_covered_otherwise(known.lookup, timers[mask]))
            if mask.any():
                parts.append(timers[mask])
                reached.append(query[mask])
        for segment in known.segments:
            segment.drop_pages()
        if not parts:
            return no_timers(), np.empty(0, np.int64)
        return concat_timers(parts), np.concatenate(reached)

    def _are_covered_otherwise(self, lookup: Lookup, timers: Timers) -> Bools:
        """Mask of the timers that cancels by origin or commands cover."""
        decided = self.decided(lookup, timers.offset, timers.origin)
        mask: Bools = timers.origin < lookup.highest.by_origin
        if mask.any():
            rows = timers[mask]
            offset, _ = lookup.look_up(keys_of(ORIGIN, rows.origin))
            mask[mask] = offset > rows.origin
        return mask | decided

    # ---- opening, maintenance

    def covered_by_id(self, ids: SegmentIds) -> Iterator[Timers]:
        """The timers of a segment that tombstones of their ids cover, each once, in pieces of bounded size. The smaller
        set is looked up in the larger one."""
        lookup = self.tombstones.lookup()
        if len(lookup) and len(self.tombstones) < len(ids):
            for run in lookup.merged():
                for query, timers in ids.matches(run.keys):
                    yield timers[run.offset[query] > timers.origin]
        elif len(lookup):
            for timers in ids.pieces():
                offset, _ = lookup.look_up(timers.keys)
                yield timers[offset > timers.origin]
        ids.drop_pages()

    def named_origins(self) -> Int64s | None:
        """The origins that tombstones name, in order, each once; None: more than ORIGINS_HELD_MAX."""
        lookup, origins = self.tombstones.lookup(), np.empty(0, np.int64)
        if max(lookup.highest.by_origin, lookup.highest.by_command) >= 0:
            for run in lookup.pieces():
                named = run.keys[are_of(ORIGIN, run.keys) | are_commands(run.keys)]
                origins = np.union1d(origins, named.lo.astype(np.int64))
                if len(origins) > ORIGINS_HELD_MAX:
                    return None
        return origins

    @staticmethod
    def tally_unfinished(timers: Timers, finished: Callable[[Positions], Bools]) -> Tally:
        """Counts of the unfinished timers."""
        return _tally(timers[~finished(timers)])

    def expired_before_ms(self, resident: Resident, on_loan: RowRefs, now_ms: int) -> int:
        """The time (ms) before which an expired tombstone may be dropped. It is past, and all rows before it are
        finished; a tombstone does not expire before the rows that it covers. While copies of an earlier process may be
        unread, it is AT_MIN.

        `on_loan` are the rows of the open transaction.
        """
        if self.inherited is None or resident.end < self.inherited:
            return AT_MIN
        waiting = np.concatenate([resident.overtaken.all().at, on_loan.at])
        first = int(waiting[waiting > AT_MIN].min(initial=now_ms))
        ready_ms = resident.ready.nearest_ms()
        return min([now_ms, resident.frontier.at_ms, first, *([] if ready_ms is None else [ready_ms])])


def _later(some: tuple[Int64s, Int64s], others: tuple[Int64s, Int64s]) -> tuple[Int64s, Int64s]:
    """The larger offsets and expiries of two look-ups of the same keys."""
    return np.maximum(some[0], others[0]), np.maximum(some[1], others[1])


def _below(lookup: Lookup, what: np.uint64, offset: Int64s, origin: Int64s) -> Bools:
    """Mask of the rows with offsets below the tombstones of their origins; `what` is MOVE or RECALL."""
    mask: Bools = offset < lookup.highest.by_command
    if mask.any():
        until, _ = lookup.look_up(keys_of(what, origin[mask]))
        mask[mask] = until > offset[mask]
    return mask


def named_by(payload: pa.RecordBatch, index: npt.NDArray[Any], origin: Int64s) -> tuple[Int64s, Int64s]:
    """The originals that commands by origin name; the commands are rows `index` of `entry.PAYLOAD`. Returns pairs: the
    command's number, and the named offset, for each command in order and once."""
    several = np.flatnonzero(origin == SEVERAL)
    if not len(several):
        return np.arange(len(origin)), origin
    texts = payload.column("value").take(pa.array(index[several])).to_pylist()
    lists = [origin[i : i + 1] for i in range(len(origin))]
    for i, text in zip(several.tolist(), texts, strict=True):
        lists[i] = np.unique(np.array(text.split(b","), dtype=np.int64))
    return np.repeat(np.arange(len(origin)), list(map(len, lists))), np.concatenate(lists)


def _run(keys: Digests, offset: Int64s, expire_ms: Int64s) -> Run:
    return merged_runs([Run(keys=keys, offset=offset, expire_ms=expire_ms)])


def _is_gone(resident: Resident, timers: Timers) -> Bools:
    return resident.is_stored(timers) | resident.finished(timers)


def _tally(timers: Timers) -> Tally:
    return tally_coded(timers.at, timers.target, timers.names)
