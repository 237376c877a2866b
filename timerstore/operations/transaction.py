"""Transactions: rows handed out for delivery, with the committed state that finishes them.

A transaction outputs exactly the difference between two finished sets (invariant I1), in any number of takes:

    overtaken rows  move O: O' is the offset of the first one that is not taken, or the end of the ingested records
    on-time rows    move P: P' is the position of the last row popped from the ready rows

A popped row that O' does not cover is not output, and becomes an overtaken row. A row that a tombstone covers is passed
over without output (invariant I7), and so is a row on which a command of this transaction acts (cancels/commands.py).

The store keeps every row until `acknowledge`; `rollback` makes all of them pending again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from itertools import starmap
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from timerstore.cancels.commands import (
    Decided,
    Decision,
    Effect,
    InTransit,
    named_among,
    of_all,
    passed_over,
    within_reach,
)
from timerstore.cancels.digests import digests_or_zeros
from timerstore.cancels.effects import ROWS_MAX
from timerstore.cancels.id_index import Timers
from timerstore.cancels.tombstones import Lookup
from timerstore.errors import Inconsistent, Misuse
from timerstore.memory.chunks import joined, pieces_of
from timerstore.memory.pending import TALLIED, tally_timers
from timerstore.memory.sorted_runs import EMPTY, RowRefs, concat
from timerstore.operations.state import Change, RowsOnLoan, StoreState, Taken
from timerstore.rows.entry import PAYLOAD
from timerstore.rows.position import AT_MIN, Bools, Int64s, Position, Positions, Progress, end_of

CANCELLED_TAKES_MAX = 16
"""Limit of successive takes with cancelled rows only; the transaction then ends early."""

COVERED_MAX = 10_000
"""Limit of messages that commands by id cover in one transaction, with repetitions; the first one of each id has no
limit."""

NONE: Mapping[int, int] = {}

LEAVES_MS = 1_000
"""Messages that come up within this time may leave before the commands by origin of a move by id act on them. So no
later move acts in its place."""

GATHERED_AHEAD_MS = 250
"""Rows from many chunks are put together this long before they are due."""

DECIDED_AT_ONCE = 500
"""Estimated messages or rows whose commands are decided in one hold of the lock."""

JUDGED = pa.schema([PAYLOAD.field(name) for name in ("kind", "id", "origin")])


class _Judged(NamedTuple):
    """Masks of a command's rows: finished or handed out; covered by a tombstone; leaving as copies, moved or
    recalled."""

    gone: Bools
    covered: Bools
    copied: Bools


class Transaction:
    """One step of the committed state, for one thread. `TimerStore.begin` makes it, one at a time."""

    def __init__(self, state: StoreState) -> None:
        self._state = state
        self._loan = state.loan = RowsOnLoan()
        self._changing = Change(state, self._must_be_open)
        self._offset = state.resident.committed.offset
        self._delivered: list[Taken] = []
        """Rows that leave the pending counts at `acknowledge`."""
        self._output: list[Positions] = []
        """The rows that were handed out."""
        self._copied: list[Int64s] = [EMPTY.offset]
        """Offsets of the rows, handed out or moved, that leave as copies."""
        self._acted = self._loan.acted
        """Offsets of the rows on which commands of this transaction act."""
        self._recalled: set[int] = set()
        """Originals that recalls act on, or have commands by origin written for."""
        self._hurried: set[int] = set()
        """The same for moves to now."""
        self._decided: dict[int, Decided] = {}
        """The decisions of acting commands by origin, by the command's offset."""
        self._decided_ms = 0
        self._in_transit = InTransit()
        self._refused: list[Int64s] = []
        self._written: list[tuple[bool, Int64s]] = []
        """Commands by origin to write: whether they are moves, and their originals."""
        self._settled: list[Effect] = []
        """Decided commands."""

    def take(self, until_ms: int, overtaken_max: int, bound: Position, on_time_max: int) -> Taken:
        """At most `overtaken_max` overtaken rows that are due at `until_ms`, and at most `on_time_max` rows up to
        `bound`, which is not later (no row is output before it is due). An empty result means that there are no due
        rows, or a great many cancelled ones only."""
        for _ in range(CANCELLED_TAKES_MAX):
            rows, is_end = self._take(until_ms, overtaken_max, bound, on_time_max)
            if is_end or len(rows):
                break
        return rows

    def _take(self, until_ms: int, overtaken_max: int, bound: Position, on_time_max: int) -> tuple[Taken, bool]:
        """The rows of one take, and whether no row was due."""
        with self._changing:
            resident = self._state.resident
            overtaken = resident.overtaken.take(until_ms, overtaken_max, self._end())
            self._offset = min(resident.reachable(), self._end())
            due = EMPTY
            if on_time_max:
                due = resident.ready.pop_until(min(bound, resident.frontier), on_time_max)
            is_end = not len(due) + len(overtaken)
            due = self._covered(due)
            resident.ready.gather_near(due, min(end_of(until_ms + GATHERED_AHEAD_MS), resident.frontier))
            rows = concat([overtaken, due])
            self._loan.taken.append(rows)
            payloads = resident.chunks.payloads(rows.chunk)
            # Later cancels come too late for these rows.
            lookup = self._state.cancels.tombstones.lookup()
        pieces = pieces_of(payloads, rows.chunk, rows.row)
        self._output.append(rows)
        cancelled = self.passed_over(lookup, rows, lambda: joined(pieces))
        first = len(overtaken)
        if cancelled is not None:
            first = int(np.count_nonzero(~cancelled[: len(overtaken)]))
            rows, pieces = rows[~cancelled], [joined(pieces).filter(pa.array(~cancelled))]
        taken = Taken(at=rows.at, offset=rows.offset, pieces=pieces, overtaken=first)
        self._delivered.append(taken)
        return taken, is_end

    def lend(self, due: RowRefs) -> tuple[RowRefs, Lookup | None]:
        """Take ready rows, which the caller has popped in order of position; it holds the lock. Returns the rows that
        O' covers, and what `passed_over` needs if a look is necessary."""
        self._offset = min(self._state.resident.reachable(), self._end())
        due = self._covered(due)
        self._loan.taken.append(due)
        self._output.append(due)
        tombstones = self._state.cancels.tombstones
        return due, tombstones.lookup() if tombstones.is_any or self._decided else None

    def _covered(self, due: RowRefs) -> RowRefs:
        """Move P' to the last of some popped rows; the ones that O' does not cover become overtaken rows. (O' is the
        offset of the first overtaken row that is left, else the end of the ingested records.)"""
        resident = self._state.resident
        if len(due):
            resident.passed = due.last()
        if self._offset == resident.end:
            return due
        covered = due.offset < self._offset
        resident.overtaken.insert(due.where(~covered))
        return due.where(covered)

    def passed_over(self, lookup: Lookup, rows: RowRefs, payload: Callable[[], pa.RecordBatch]) -> Bools | None:
        """Mask of the rows of the last take that are not handed out: cancelled ones, and those on which a command acts.
        None: all are."""
        passed = self._state.cancels.covered(lookup, rows.offset, payload()) if len(lookup) else None
        if self._decided:
            acted = np.isin(rows.offset, np.fromiter(self._acted, np.int64, len(self._acted)))
            passed = acted if passed is None else acted | passed
        if passed is not None:
            self._output[-1] = rows[~passed]
        return passed

    def late(self, until_ms: int) -> int:
        """The number of overtaken rows that a take would have, without a limit; the caller holds the lock."""
        return self._state.resident.overtaken.count_due(until_ms, self._end())

    def _end(self) -> int:
        """The offset of the first command that is left to a later transaction; the caller holds the lock."""
        return min(self._state.waiting_offset(), self._state.commands.enough_offset(COVERED_MAX))

    def move_offset(self) -> None:
        """Move O up to the first overtaken row, without a take."""
        with self._changing:
            self._offset = self._state.resident.reachable()

    def copied(self, offset: Int64s, origin: Int64s, ids: pa.Array) -> None:
        """Note rows, handed out or moved, that leave as copies: their offsets, their origins, their ids."""
        self._copied.append(offset)
        self._in_transit.add(origin, digests_or_zeros(ids))

    def are_waited_for(self, origin: Int64s) -> Bools:
        """Mask of the originals for which the bridge has written commands that are not yet decided."""
        written: Bools = np.isin(origin, np.concatenate([EMPTY.offset, *(origins for _, origins in self._written)]))
        with self._state.lock:
            sent_on = self._state.commands.sent_on
            return written | named_among(origin, sent_on) if sent_on else written

    def refused(self, origin: Int64s) -> None:
        """Note originals whose copies were read as rejects, and so are no longer in transit."""
        self._refused.append(origin)

    def decide(
        self,
        commands: Int64s,
        now_ms: int,
        passed: Mapping[int, int] = NONE,
        silent: Collection[int] = (),
    ) -> list[Decided]:
        """Decide commands among the handed out rows at `now_ms`. Returns the decisions: for a command that names
        several originals, up to one of each kind. Rows on which commands act are not handed out later. An acting move
        by origin needs a copy of each of its rows.

        `commands` are the offsets, in order. `passed` maps a move to the one among these that acts in its place: it
        names the same originals, or the same id. For the `silent`, no command can be written."""
        self._decided_ms, decided = now_ms, list[Decided]()
        left = deque(commands.tolist())
        while left:
            with self._changing:
                unfinished, effects, count = self._state.commands.effects, list[Effect](), 0
                while left and count < DECIDED_AT_ONCE:
                    if (effect := unfinished.get(left.popleft())) is not None:
                        effects.append(effect)
                        count += self._size(effect)
                if not effects:  # all name records of other logs
                    continue
                by_origin = [effect for effect in effects if effect.named is not None]
                judged = dict(zip([each.offset for each in by_origin], self._judged(by_origin), strict=True))
                self._settled += effects
                for effect in effects:
                    can_write = effect.offset not in silent
                    later = unfinished.get(passed.get(effect.offset, -1))
                    later = None if later is None or later.is_too_many else later
                    for result in (
                        self._decisions_by_id(effect, later)
                        if effect.named is None
                        else self._decisions(effect, judged[effect.offset], later)
                    ):
                        decided.append(result)
                        if can_write:
                            self._written.append((effect.is_move, within_reach(result.written)))
                        if result.decision is Decision.ACT or (can_write and result.decision is Decision.SENT_ON):
                            self._act(result)
        return decided

    def _size(self, effect: Effect) -> int:
        """The number of rows or messages to examine."""
        if effect.upto is not None:
            return max(1, effect.upto)
        return max(1 if effect.named is None else len(effect.named), len(effect.rows))

    def _judged(self, effects: Sequence[Effect]) -> list[_Judged]:
        """The masks of the rows of effects by origin, in one pass."""
        if not effects:
            return []
        state = self._state
        at, offset = [effect.rows.at for effect in effects], [effect.rows.offset for effect in effects]
        rows = Positions(np.concatenate([EMPTY.at, *at]), np.concatenate([EMPTY.offset, *offset]))
        columns = [effect.payload.select(JUDGED.names) for effect in effects]
        table = pa.Table.from_batches(columns, JUDGED).combine_chunks()
        lookup, covered = state.cancels.tombstones.lookup(), None
        for batch in table.to_batches():
            covered = state.cancels.covered(lookup, rows.offset, batch)
        none: Bools = np.zeros(len(rows), np.bool_)
        gone, copied = self._left(rows, np.concatenate([effect.origin for effect in effects]))
        ends = np.cumsum([len(effect.rows) for effect in effects])[:-1]
        parts = (np.split(mask, ends) for mask in (gone, none if covered is None else covered, copied))
        return list(starmap(_Judged, zip(*parts, strict=True)))

    def _judged_by_id(self, effect: Effect) -> _Judged:
        """The masks of the rows of one effect by id."""
        assert isinstance(effect.rows, Timers)
        timers = effect.rows[: effect.upto]
        lookup = self._state.cancels.tombstones.lookup()
        gone, copied = self._left(timers, timers.origin)
        return _Judged(gone, self._state.cancels.are_covered(lookup, timers), copied)

    def _left(self, rows: Positions, origin: Int64s) -> tuple[Bools, Bools]:
        """Masks of rows: finished or handed out; leaving as copies, moved or recalled."""
        state = self._state
        lookup = state.cancels.tombstones.lookup()
        # A message without a key replaces others by a cancel row, which has the message's own offset.
        output = [each.offset[each.at > AT_MIN] for each in self._output]
        gone = state.resident.finished(rows) | np.isin(rows.offset, np.concatenate([EMPTY.offset, *output]))
        copied = np.isin(rows.offset, np.concatenate(self._copied))
        return gone, copied | state.cancels.decided(lookup, rows.offset, origin)

    def _decisions_by_id(self, effect: Effect, later: Effect | None) -> list[Decided]:
        """The decisions of one command by id. `later` is the move that may act in its place. The caller holds the
        lock."""
        if effect.is_too_many:
            return of_all(effect, Decision.TOO_MANY)
        if self._state.is_unread():
            return of_all(effect, Decision.UNKNOWN)
        named, first_ms = self._pending_of_id(effect)
        recalled = named_among(named, self._recalled)
        if later is not None and not (recalled.any() or self._leave_before(named)):
            is_near = first_ms <= self._decided_ms + LEAVES_MS
            if len(named) and not is_near and len(self._pending_of_id(later)[0]) <= ROWS_MAX:
                return passed_over(effect, later, named)
        if len(named) > ROWS_MAX:
            return of_all(effect, Decision.TOO_MANY)
        if len(named):
            # Recalls cover all of its messages: one command by origin is enough for the answer.
            chosen = named[:1] if recalled.all() else named[~recalled]
            return [Decided(effect=effect, decision=Decision.SENT_ON, live=EMPTY.offset, named=chosen)]
        gone, _, _ = self._judged_by_id(effect)
        return of_all(effect, Decision.LEFT if gone.any() else Decision.NOTHING)

    def _leave_before(self, named: Int64s) -> bool:
        """Whether a move to now, or a recall that was sent earlier, takes any of these originals."""
        cancels = self._state.cancels
        recalled = cancels.recalled(cancels.tombstones.lookup(), named, named)
        recalled |= named_among(named, self._state.commands.recalling)
        return bool((recalled | named_among(named, self._hurried)).any())

    def _pending_of_id(self, effect: Effect) -> tuple[Int64s, int]:
        """The originals of an id that are pending, or have copies in transit; and the time (ms) at which the first one
        that was read comes up."""
        gone, covered, copied = self._judged_by_id(effect)
        origin, acted = effect.origin[: effect.upto], self._are_acted(effect)
        is_live = ~(gone | acted | covered)
        moving = origin[acted | copied], effect.copied.origins, *self._moving(effect)
        named: Int64s = np.unique(np.concatenate((origin[is_live], *moving)))
        first_ms = effect.rows.at[: effect.upto][is_live].min(initial=effect.copied.first_ms)
        return named[named < effect.offset], int(first_ms)

    def _are_acted(self, effect: Effect) -> Bools:
        """Mask of its rows on which commands of this transaction act."""
        return np.array([each in self._acted for each in effect.rows.offset[: effect.upto].tolist()], dtype=np.bool_)

    def _moving(self, effect: Effect) -> tuple[Int64s, Int64s]:
        """The originals of an effect whose copies this transaction writes, and those with copies in transit."""
        return self._in_transit.of(effect), self._state.commands.in_transit.of(effect)

    def _decisions(self, effect: Effect, judged: _Judged, later: Effect | None) -> list[Decided]:
        """The decisions of one command by origin, one for all originals that share it. `later` is the move that may act
        in its place. The caller holds the lock."""
        state = self._state
        gone, covered, copied = judged
        acted = self._are_acted(effect)
        is_live = ~(gone | acted | covered)
        fixed = is_live & effect.are_fixed()
        is_live &= ~fixed
        act = effect.have(is_live)
        if later is not None and self._is_passed(effect, later, is_live):
            return [Decided(effect=effect, decision=Decision.PASSED, live=EMPTY.offset, named=effect.named)]
        assert effect.named is not None
        again = effect.have(acted | copied) | (effect.copied.is_unsure or state.is_unread())
        for moving in (effect.copied.origins, *self._moving(effect)):
            if len(moving):
                again |= np.isin(effect.named, moving)
        which = [
            (act, Decision.ACT),
            (effect.have(fixed), Decision.UNCOPYABLE),
            (again, Decision.SENT_ON),
            (effect.have(gone), Decision.LEFT),
        ]
        decisions = np.full(len(effect.named), Decision.NOTHING.value)
        for mask, decision in reversed(which):
            decisions[mask] = decision.value
        return [
            Decided(
                effect=effect,
                decision=decision,
                live=np.flatnonzero(is_live & (decision is Decision.ACT)),
                named=effect.named[decisions == decision.value],
                behind=effect.named[act & again & (decision is Decision.ACT)],
            )
            for decision in map(Decision, sorted(set(decisions.tolist())))
        ]

    def _act(self, found: Decided) -> None:
        """Note the rows and originals on which a command acts, or will; the caller holds the lock."""
        effect, live = found.effect, found.live
        if effect.is_now or not effect.is_move:
            acted = within_reach(np.concatenate((found.written, effect.origin[live])))
            (self._hurried if effect.is_now else self._recalled).update(acted.tolist())
        if found.decision is Decision.ACT:
            self._acted.update(effect.rows.offset[live].tolist())
            self._decided[effect.offset] = found

    def _is_passed(self, effect: Effect, later: Effect, is_live: Bools) -> bool:
        """Whether the `later` move acts, or has acted, on all pending rows of a move by origin. (This one's tombstone
        then covers them.) A move that was sent later may have been read earlier, and so may not know all rows."""
        if later.is_now != effect.is_now and effect.are_uncopyable().any():
            return False  # only one of the two can move messages that are too large for a copy
        if later.offset > effect.offset:
            return bool(effect.have(is_live).all())
        decided = self._decided.get(later.offset)
        acted = np.isin(effect.rows.offset, EMPTY.offset if decided is None else later.rows.offset[decided.live])
        return not is_live.any() and bool(effect.have(acted).all())

    @property
    def references(self) -> Sequence[RowRefs]:
        """All rows taken, with cancelled ones."""
        return self._loan.taken

    @property
    def has_rows(self) -> bool:
        """Whether rows were taken, even if all are cancelled."""
        return any(map(len, self._loan.taken))

    def progress(self) -> Progress:
        """(O', P'), with the frozen steps; it may equal the committed state. Raises Inconsistent."""
        with self._state.lock:
            self._state.must_be_consistent()
            return self._state.resident.committed.moved(self._offset, self._state.resident.passed)

    def acknowledge(self) -> None:
        """Finish the rows taken, after a successful commit. Raises Misuse, Inconsistent."""
        with self._state.lock:
            self.finish(self.progress())
            self._state.resident.chunks.release(self._loan.rows().chunk)
            self._state.changed.notify_all()

    def finish(self, progress: Progress) -> None:
        """As `acknowledge`, for a caller who holds the lock and releases the chunks. `progress` is committed."""
        with self._changing:
            state = self._state
            state.loan = None
            for timers in self._loan.cancelled:  # a cancel that came too late has counted them out
                state.pending.add(timers)
            for taken in self._delivered:
                state.pending.remove_rows(taken.at, taken.pieces)
            self._apply()
            state.resident.commit(progress)

    def rollback(self) -> None:
        """Make the rows taken pending again, after an abort. Raises Misuse. After a failed change it does nothing, so
        that the error of that change stays the visible one."""
        state = self._state
        with suppress(Inconsistent), self._changing:
            state.loan = None
            state.cancels.cancelled += sum(int(timers.counts.sum()) for timers in self._loan.cancelled)
            state.resident.replace_all(self._loan.rows())
            state.wake()

    def _apply(self) -> None:
        """Apply the decisions of commands, and note the copies; the caller holds the lock."""
        state, commands = self._state, self._state.commands
        if self._decided:
            lives = [(each.effect, each.live) for each in self._decided.values()]
            at = np.concatenate([effect.rows.at[live] for effect, live in lives])
            origin = np.concatenate([effect.origin[live] for effect, live in lives])
            offset = np.repeat([effect.offset for effect, _ in lives], [len(live) for _, live in lives])
            is_move = np.repeat([effect.is_move for effect, _ in lives], [len(live) for _, live in lives])
            begins = np.cumsum([0, *(len(effect.rows) for effect, _ in lives)])
            index = np.concatenate([begin + live for begin, (_, live) in zip(begins[:-1].tolist(), lives, strict=True)])
            table = pa.Table.from_batches([effect.payload.select(TALLIED) for effect, _ in lives]).combine_chunks()
            state.pending.remove(tally_timers(at, table.take(pa.array(index))))
            state.cancels.add_decided(is_move, origin, offset, at, self._decided_ms)
            state.cancels.cancelled += sum(len(live) for effect, live in lives if not effect.is_move)
        if not (
            len(self._copied) > 1
            or self._written
            or self._settled
            or self._refused
            or commands.effects
            or commands.sent_on
        ):
            return
        commands.note_copied(
            np.concatenate(self._copied), self._in_transit, np.concatenate([EMPTY.offset, *self._loan.copies_read])
        )
        if self._refused:
            commands.in_transit.remove(np.concatenate(self._refused))
        commands.note_written(self._written, self._settled, self._decided_ms)
        commands.forget(self._loan.rows().offset)

    def _must_be_open(self) -> None:
        self._state.must_be_consistent()
        if self._state.loan is not self._loan:
            raise Misuse("the transaction has ended", code="DB-7003")
