"""Transactions: rows handed out for delivery, together with the committed state that says they are finished.

A transaction outputs exactly the difference between two finished sets (invariant I1), in as many pieces as the
dispatcher likes to take:

    overtaken rows  move O of their source: O' is the first that is not taken, or the end of what is ingested
    on-time rows    move P: P' is the position of the last row popped from the ready rows
    a popped row that O' does not cover is not output: it is overtaken from here on
    a row that a tombstone covers is passed like any other, without being output (invariant I7); so is one that a
    command of this transaction acts on (cancels/commands.py)
    a held source keeps its P, and nothing of it is output; its O moves on as far as no overtaken row stands in the way

Nothing is forgotten before `acknowledge`; `rollback` makes every row pending again.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import starmap
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from timerstore.cancels.commands import (
    Decided,
    Decision,
    Effect,
    Id,
    InTransit,
    named_among,
    of_all,
    packed_in,
    passed_over,
)
from timerstore.cancels.effects import ROWS_MAX
from timerstore.cancels.id_index import Timers
from timerstore.errors import Inconsistent, Misuse
from timerstore.memory.chunks import materialize
from timerstore.memory.pending import TALLIED, Tally, tally_timers
from timerstore.memory.sorted_runs import EMPTY, concat
from timerstore.operations.state import Loan, StoreState
from timerstore.rows.entry import PAYLOAD
from timerstore.rows.position import AT_MIN, OFFSET_MAX, Bools, Int64s, Positions, Progress, end_of, pack, sources_of

CANCELLED_TAKES_MAX = 16
"""How many takes in a row may find cancelled rows only, before the transaction is better ended."""

NAMED_MAX = 1_000
"""Commands by origin that those by id write in one transaction, before commands of one id wait for each other. (Moves
need not, but for this number: of moves by origin that wait together, the last one acts.)"""

NONE: Mapping[int, int] = {}

LEAVES_MS = 1_000
"""What comes up so soon may leave before the commands that move by an id act on it: no later one stands in for them."""

GATHERED_AHEAD_MS = 250
"""How far ahead rows that come from many chunks are put together."""

DECIDED_AT_ONCE = 500
"""Messages, or rows of them, whose commands are decided in one hold of the lock, about."""

JUDGED = pa.schema([PAYLOAD.field(name) for name in ("kind", "id", "origin")])

P_STALE_MS_MAX = 1_000
"""A source whose committed P lies further behind than this is committed along, though nothing of it was output: a
restart begins at the smallest P."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows in the order in which they are to be produced.

    `at` int64[n] (ms), `source` int32[n], `offset` int64[n]; `payload` is a record batch of `entry.PAYLOAD`, n rows.
    """

    at: Int64s
    source: npt.NDArray[np.int32]
    offset: Int64s
    payload: pa.RecordBatch

    def __len__(self) -> int:
        return len(self.at)


class _Judged(NamedTuple):
    """Of a command's rows: which are finished or handed out, which a tombstone covers, and which leave as copies, or
    have been moved or recalled."""

    gone: Bools
    covered: Bools
    copied: Bools


class Transaction:
    """One step of the committed state; made by `TimerStore.begin`, one at a time, used by one thread."""

    def __init__(self, state: StoreState, *, only_output: bool = False) -> None:
        self._state = state
        self._only_output = only_output
        self._loan = state.loan = Loan(state.resident.position)
        self._offsets = state.resident.offset.copy()
        self._delivered: list[tuple[Int64s, pa.RecordBatch]] = []
        self._output: list[Int64s] = [EMPTY.seq]
        """Rows that were handed out, packed."""
        self._copied: list[Int64s] = [EMPTY.seq]
        """Those of them that leave as copies."""
        self._acted = self._loan.acted
        """Rows that commands of this transaction act on."""
        self._acted_ids: set[Id] = set()
        """Whose further commands wait for the commands by origin that were written."""
        self._named = 0
        """How many these are."""
        self._recalled: set[int] = set()
        """Originals, packed, that recalls act on, or have commands by origin written about: later ones leave them."""
        self._hurried: set[int] = set()
        """The same of moves to now."""
        self._again: Counter[Id] = Counter()
        """Commands by id that it writes again, less those that were, and are decided."""
        self._decided: dict[int, Decided] = {}
        """What commands by origin act on, by their `seq`."""
        self._decided_ms = 0
        self._in_transit = InTransit()
        self._refused: list[Int64s] = []
        self._written: list[tuple[bool, Int64s]] = []
        """Originals (packed) about which commands by origin are written, and whether these are moves;"""
        self._settled: list[tuple[bool, Int64s]] = []
        """and those about which such commands are decided."""

    def take(self, until_ms: int, max_rows: int) -> Rows:
        """Up to about `max_rows` rows that are due at `until_ms`, overtaken ones first. An empty answer means that
        nothing is due then, or nothing but a great many cancelled rows. (Nothing may be output before it is due.)

        (A source's share of overtaken rows is at least one row, so a hundred sources may exceed a limit of ten.)
        """
        for _ in range(CANCELLED_TAKES_MAX):
            rows, is_end = self._take(until_ms, max_rows)
            if is_end or len(rows):
                break
        return rows

    def _take(self, until_ms: int, max_rows: int) -> tuple[Rows, bool]:
        """One take; and whether nothing was due."""
        with self._changing() as loan:
            resident = self._state.resident
            resident.overtake(resident.ready.pop_until(loan.position))
            bound = min(end_of(until_ms), resident.frontier)
            # A flood of overtaken rows leaves half of the room to what is due on time, if there is so much of it.
            on_time = resident.ready.count_until(bound)
            overtaken = resident.overtaken.take(until_ms, max(max_rows - on_time, (max_rows + 1) // 2), resident.held)
            # O' of every source: in front of its first overtaken row that is left, else the end of what is ingested.
            np.copyto(self._offsets, resident.offsets_reachable(), where=resident.owned)
            due = resident.ready.pop_until(bound, max(0, max_rows - len(overtaken)))
            is_end = not len(due) + len(overtaken)
            if len(due):
                loan.position = due.last()
            held = resident.held[due.source]
            if held.any():
                resident.withhold(due[held])
                due = due[~held]
            covered = due.offset < self._offsets[due.source]
            if not covered.all():
                resident.overtake(due[~covered])
                due = due[covered]
            resident.gather_near(due, min(end_of(until_ms + GATHERED_AHEAD_MS), resident.frontier))
            rows = concat([overtaken, due])
            loan.taken.append(rows)
            payloads = resident.chunks.payloads(rows.chunk)
            # A cancel that is read from now on comes too late for these rows.
            lookup = self._state.cancels.tombstones.lookup()
        payload = materialize(payloads, rows.chunk, rows.row)
        cancelled = self._state.cancels.covered(lookup, rows.source, rows.offset, payload)
        if self._decided:
            acted = np.isin(rows.seq, np.fromiter(self._acted, np.int64, len(self._acted)))
            cancelled = acted if cancelled is None else acted | cancelled
        if cancelled is not None:
            rows, payload = rows[~cancelled], payload.filter(pa.array(~cancelled))
        # What leaves the pending counts when the commit is known.
        self._delivered.append((rows.at, payload.select(TALLIED)))
        # What a message without a key replaces is cancelled by a row with the offset of the message itself.
        self._output.append(rows.seq[rows.at > AT_MIN])
        return Rows(at=rows.at, source=rows.source.astype(np.int32), offset=rows.offset, payload=payload), is_end

    def copied(self, seq: Int64s, origin: Int64s, ids: pa.Array) -> None:
        """Rows that were handed out, or are moved, leave as copies: their `seq`, the offsets of their originals, and
        their ids."""
        self._copied.append(seq)
        self._in_transit.add(pack(sources_of(seq), origin), self._state.commands.digests(ids, sources_of(seq)))

    def are_waited_for(self, origin: Int64s, now_ms: int) -> Bools:
        """About which of these originals (packed) commands are on their way that were read before."""
        written: Bools = np.isin(origin, np.concatenate([EMPTY.seq, *(origins for _, origins in self._written)]))
        with self._state.lock:
            waiting = self._state.commands.waiting
            return written | waiting.among(origin, now_ms) if len(waiting) else written

    def refused(self, origin: Int64s) -> None:
        """Copies of these originals (packed) were read as rejects: they are under way no more."""
        self._refused.append(origin)

    def decide(
        self,
        commands: Int64s,
        now_ms: int,
        passed: Mapping[int, int] = NONE,
        sent: Mapping[int, int] = NONE,
        first: Collection[int] = (),
        silent: Collection[int] = (),
    ) -> list[Decided]:
        """What the commands among the rows handed out (their `seq`, in order) come to, at `now_ms`: of one that names
        several originals, up to one of each kind. What they act on is not handed out any more. A move by origin that
        acts needs a copy of each of its rows. `passed` says of moves which other one among these acts in their place:
        it names the same originals; or the same id, which they move for no answer. `sent` says of those by id that
        were written again below what offset what they are about was sent, OFFSET_MAX if it is in another partition.
        `first` are those by origin that no transaction has written. Nothing can be written for the `silent`."""
        self._decided_ms, decided = now_ms, list[Decided]()
        left = deque(commands.tolist())
        while left:
            with self._changing():
                known, effects, count = self._state.commands.effects, list[Effect](), 0
                while left and count < DECIDED_AT_ONCE:
                    if (effect := known.get(left.popleft())) is not None:
                        effects.append(effect)
                        count += self._size(effect)
                if not effects:  # all are about other topics
                    continue
                by_origin = [effect for effect in effects if effect.named is not None]
                judged = dict(zip([each.seq for each in by_origin], self._judged(by_origin), strict=True))
                for effect in effects:
                    if effect.named is not None and effect.seq not in first:
                        self._settled.append((effect.is_move, packed_in(effect.source, effect.named)))
                    later = known.get(passed.get(effect.seq, -1))
                    later = None if later is None or later.is_too_many else later
                    for found in (
                        self._decisions_by_id(effect, sent.get(effect.seq), later)
                        if effect.named is None
                        else self._decisions(effect, judged[effect.seq], later)
                    ):
                        decided.append(found)
                        if effect.seq not in silent:
                            self._written += [(effect.is_move, originals) for originals in found.written()]
                        if found.decision is Decision.ACT:
                            self._act(found)
        return decided

    def _size(self, effect: Effect) -> int:
        """How many rows or messages must be looked at."""
        if effect.upto is not None:
            return 1 if effect.id in self._acted_ids else max(1, effect.upto)
        return max(1 if effect.named is None else len(effect.named), len(effect.rows))

    def _judged(self, effects: Sequence[Effect]) -> list[_Judged]:
        """Of the rows of each of some by origin, in one pass."""
        if not effects:
            return []
        state = self._state
        at, seq = [each.rows.at for each in effects], [each.rows.seq for each in effects]
        rows = Positions(np.concatenate([EMPTY.at, *at]), np.concatenate([EMPTY.seq, *seq]))
        columns = [each.payload.select(JUDGED.names) for each in effects]
        table = pa.Table.from_batches(columns, JUDGED).combine_chunks()
        lookup, covered = state.cancels.tombstones.lookup(), None
        for batch in table.to_batches():
            covered = state.cancels.covered(lookup, rows.source, rows.offset, batch)
        none: Bools = np.zeros(len(rows), np.bool_)
        gone, copied = self._left(rows, np.concatenate([each.origin for each in effects]))
        ends = np.cumsum([len(each.rows) for each in effects])[:-1]
        parts = (np.split(mask, ends) for mask in (gone, none if covered is None else covered, copied))
        return list(starmap(_Judged, zip(*parts, strict=True)))

    def _judged_by_id(self, effect: Effect) -> _Judged:
        """The same, of one by id."""
        assert isinstance(effect.rows, Timers)
        timers = effect.rows[: effect.upto]
        lookup = self._state.cancels.tombstones.lookup()
        gone, copied = self._left(timers, timers.origin)
        return _Judged(gone, self._state.cancels.are_covered(lookup, timers), copied)

    def _left(self, rows: Positions, origin: Int64s) -> tuple[Bools, Bools]:
        """Which rows are finished or handed out, and which leave as copies, or have been moved or recalled."""
        state = self._state
        lookup = state.cancels.tombstones.lookup()
        gone = state.resident.finished(rows) | np.isin(rows.seq, np.concatenate(self._output))
        copied = np.isin(rows.seq, np.concatenate(self._copied))
        return gone, copied | state.cancels.decided(lookup, rows.source, rows.offset, origin)

    def _decisions_by_id(self, effect: Effect, sent: int | None, later: Effect | None) -> list[Decided]:
        """Of one command by id; `sent` is said of one that was written again, and `later` is what is to act in its
        place. The caller holds the lock."""
        known = self._state.commands.again
        is_behind = sent is None and known[effect.id] + self._again[effect.id] > 0
        is_counted = sent != OFFSET_MAX  # what came from another partition has no order among those of this one
        self._again[effect.id] -= sent is not None and is_counted
        found = self._decided_by_id(
            effect, effect.seq & OFFSET_MAX if sent is None else sent, later, is_behind=is_behind
        )
        self._again[effect.id] += found[0].decision is Decision.AGAIN and is_counted
        return found

    def _decided_by_id(self, effect: Effect, below: int, later: Effect | None, *, is_behind: bool) -> list[Decided]:
        if effect.is_too_many:
            return of_all(effect, Decision.TOO_MANY)
        # Of one that has acted nothing was done yet, so that all can wait.
        waits = is_behind or effect.id in self._acted_ids
        waits = waits or effect.copied.is_unsure or self._state.is_unread(effect.source)
        if waits and later is None:
            return of_all(effect, Decision.AGAIN)
        named, first_ms = self._pending_of_id(effect, below)
        recalled = named_among(effect, named, self._recalled)
        if later is not None and not (recalled.any() or self._leave_before(effect, named)):
            is_near = first_ms <= self._decided_ms + LEAVES_MS and not waits
            if len(named) and not is_near:
                return passed_over(effect, later, named, waits=waits)
        if waits:
            return of_all(effect, Decision.AGAIN)
        if len(named) > ROWS_MAX:
            return of_all(effect, Decision.TOO_MANY)
        if not recalled.all():
            return [Decided(effect=effect, decision=Decision.ACT, live=EMPTY.seq, named=named[~recalled])]
        if len(named):
            return of_all(effect, Decision.AGAIN)
        gone, _, _ = self._judged_by_id(effect)
        left_now = gone & (effect.origin[: effect.upto] < below)
        return of_all(effect, Decision.LEFT if left_now.any() else Decision.NOTHING)

    def _leave_before(self, effect: Effect, named: Int64s) -> bool:
        """Whether any of these originals leaves by a move to now, or by a recall that was sent earlier."""
        cancels, originals = self._state.cancels, packed_in(effect.source, named)
        recalled = cancels.recalled(cancels.tombstones.lookup(), sources_of(originals), named, named)
        recalled |= self._state.commands.recalling.among(originals, self._decided_ms)
        return bool((recalled | named_among(effect, named, self._hurried)).any())

    def _pending_of_id(self, effect: Effect, below: int) -> tuple[Int64s, int]:
        """The originals of an id that are pending, or of which a copy is under way; and when the first of the pending
        ones comes up."""
        gone, covered, copied = self._judged_by_id(effect)
        origin, acted = effect.origin[: effect.upto], self._are_acted(effect)
        is_live = ~(gone | acted | covered)
        moving = origin[acted | copied], effect.copied.origins, *self._moving(effect)
        named: Int64s = np.unique(np.concatenate((origin[is_live], *moving)))
        first_ms = effect.rows.at[: effect.upto][is_live].min(initial=OFFSET_MAX)
        return named[named < min(below, effect.seq & OFFSET_MAX)], int(first_ms)

    def _are_acted(self, effect: Effect) -> Bools:
        """Which of its rows commands of this transaction act on."""
        return np.array([seq in self._acted for seq in effect.rows.seq[: effect.upto].tolist()], dtype=np.bool_)

    def _moving(self, effect: Effect) -> tuple[Int64s, Int64s]:
        """The originals that it is about of which a copy is written, or not read yet."""
        return self._in_transit.of(effect), self._state.commands.in_transit.of(effect)

    def _decisions(self, effect: Effect, judged: _Judged, later: Effect | None) -> list[Decided]:
        """Of one command by origin, one for all that share it; `later` is what is to act in its place. The caller holds
        the lock."""
        state = self._state
        gone, covered, copied = judged
        acted = self._are_acted(effect)
        is_live = ~(gone | acted | covered)
        fixed = is_live & effect.are_fixed()
        is_live &= ~fixed
        act = effect.have(is_live)
        if later is not None and self._is_passed(effect, later, is_live):
            return [Decided(effect=effect, decision=Decision.PASSED, live=EMPTY.seq, named=effect.named)]
        assert effect.named is not None
        again = np.isin(effect.named, np.concatenate((effect.copied.origins, *self._moving(effect))))
        again |= effect.have(acted | copied) | (effect.copied.is_unsure or state.is_unread(effect.source))
        which = [
            (act, Decision.ACT),
            (effect.have(fixed), Decision.UNCOPYABLE),
            (again, Decision.AGAIN),
            (effect.have(gone), Decision.LEFT),
        ]
        codes = [decision.value for _, decision in which]
        found = np.select([mask for mask, _ in which], codes, Decision.NOTHING.value)
        return [
            Decided(
                effect=effect,
                decision=decision,
                live=np.flatnonzero(is_live & (decision is Decision.ACT)),
                named=effect.named[found == decision.value],
                behind=effect.named[act & again & (decision is Decision.ACT)],
            )
            for decision in map(Decision, np.unique(found).tolist())
        ]

    def _act(self, found: Decided) -> None:
        """Of what a command acts on; the caller holds the lock."""
        effect, live = found.effect, found.live
        assert found.named is not None
        if effect.named is None:
            self._named += len(found.named)
            if self._named > NAMED_MAX:
                self._acted_ids.add(effect.id)
        if effect.is_now or not effect.is_move:
            acted = found.named if effect.named is None else effect.origin[live]
            (self._hurried if effect.is_now else self._recalled).update(packed_in(effect.source, acted).tolist())
        if effect.named is None:
            return
        self._acted.update(effect.rows.seq[live].tolist())
        self._decided[effect.seq] = found

    def _is_passed(self, effect: Effect, later: Effect, is_live: Bools) -> bool:
        """Whether another move acts, or has acted, on all rows of one by origin that are pending: once this one is
        finished, its tombstone covers them. One that was sent later may have been read earlier, and not know them all.
        """
        if later.is_now != effect.is_now and effect.are_uncopyable().any():
            return False  # of what is too large for a copy only one of them moves anything
        if later.seq > effect.seq:
            return bool(effect.have(is_live).all())
        found = self._decided.get(later.seq)
        acted = np.isin(effect.rows.seq, EMPTY.seq if found is None else later.rows.seq[found.live])
        return not is_live.any() and bool(effect.have(acted).all())

    def progress(self) -> dict[int, Progress]:
        """(O', P') of every source that has output, whose O moves, or whose committed P would fall behind for long."""
        with self._state.lock:
            self._state.must_be_consistent()
            resident = self._state.resident
            with_output = np.zeros(len(resident.owned), dtype=np.bool_)
            with_output[self._loan.rows().source] = True
            is_narrow = self._only_output and bool(with_output.any())
            result = {}
            for source, state in resident.committed.items():
                if resident.joining[source]:
                    continue
                position = state.position if resident.held[source] else max(state.position, self._loan.position)
                offset = int(self._offsets[source])
                behind = position.at_ms - state.position.at_ms > P_STALE_MS_MAX
                if with_output[source] or (not is_narrow and (offset != state.offset or behind)):
                    result[source] = state.moved(offset, position)
            return result

    def acknowledge(self) -> None:
        """The commit is known to have happened: what was taken is finished."""
        delivered = self._counted()
        with self._changing() as loan:
            progress, state = self.progress(), self._state
            state.loan = None
            for timers in loan.cancelled:  # their cancel came too late, and has counted them out
                state.pending.add(timers)
            state.pending.remove(delivered)
            self._apply()
            state.resident.commit(progress, loan.position)
            state.resident.chunks.release(loan.rows().chunk)
            state.changed.notify_all()

    def rollback(self) -> None:
        """The commit is known not to have happened: what was taken is pending again. After a change that failed it does
        nothing: the error of that change is to be seen, and not another."""
        state = self._state
        with suppress(Inconsistent), self._changing() as loan:
            state.loan = None
            state.cancels.cancelled += sum(int(timers.counts.sum()) for timers in loan.cancelled)
            state.resident.replace_all(loan.rows())
            state.wake()

    def _apply(self) -> None:
        """What commands have decided, and what has left as copies; the caller holds the lock."""
        state, commands = self._state, self._state.commands
        if self._decided:
            lives = [(each.effect, each.live) for each in self._decided.values()]
            at = np.concatenate([effect.rows.at[live] for effect, live in lives])
            source = np.concatenate([effect.rows.source[live] for effect, live in lives])
            origin = np.concatenate([effect.origin[live] for effect, live in lives])
            offset = np.repeat([effect.seq & OFFSET_MAX for effect, _ in lives], [len(live) for _, live in lives])
            is_move = np.repeat([effect.is_move for effect, _ in lives], [len(live) for _, live in lives])
            begins = np.cumsum([0, *(len(effect.rows) for effect, _ in lives)])
            index = np.concatenate([begin + live for begin, (_, live) in zip(begins[:-1].tolist(), lives, strict=True)])
            table = pa.Table.from_batches([effect.payload.select(TALLIED) for effect, _ in lives]).combine_chunks()
            state.pending.remove(tally_timers(at, table.take(pa.array(index))))
            state.cancels.add_decided(is_move, origin, source, offset, at, self._decided_ms)
            state.cancels.cancelled += sum(len(live) for effect, live in lives if not effect.is_move)
        commands.note_copied(
            np.concatenate(self._copied), self._in_transit, np.concatenate([EMPTY.seq, *self._loan.copies_read])
        )
        if self._refused:
            commands.in_transit.remove(np.concatenate(self._refused))
        commands.again += self._again
        commands.note_written(self._written, self._settled, self._decided_ms)
        commands.forget(self._loan.rows().seq)

    def _counted(self) -> Tally:
        at = [at for at, _ in self._delivered]
        columns = [payload for _, payload in self._delivered]
        payload = pa.Table.from_batches(columns, pa.schema([PAYLOAD.field(name) for name in TALLIED]))
        return tally_timers(np.concatenate([EMPTY.at, *at]), payload)

    @contextmanager
    def _changing(self) -> Iterator[Loan]:
        with self._state.lock:
            self._state.must_be_consistent()
            if self._state.loan is not self._loan:
                raise Misuse("the transaction has ended", code="DB-7003")
            with self._state.changing():
                yield self._loan
