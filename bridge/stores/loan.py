"""One transaction over the stores of all partitions: rows in the order of (due, topic, partition, offset), and the
committed states that finish them.

    take      overtaken rows first, for each partition a share of half the room; then on-time rows
    on time   the next rows of the merged ones (timerstore/memory/ready.py)
    states    of partitions with output; of other partitions, if their O must follow ingest

It works on whole columns, and touches only stores with due rows. A store opens its transaction at the first touch;
`acknowledge` and `rollback` go to the open ones.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from bridge.stores.names import OFFSET_BITS, offsets_of, sources_of
from timerstore.cancels.commands import Decided
from timerstore.cancels.tombstones import Lookup
from timerstore.memory.chunks import joined, materialize
from timerstore.memory.memory import Memory
from timerstore.memory.ready import plain
from timerstore.memory.sorted_runs import EMPTY, RowRefs
from timerstore.operations.state import Taken
from timerstore.operations.transaction import CANCELLED_TAKES_MAX, GATHERED_AHEAD_MS, Transaction
from timerstore.rows.entry import NO_PAYLOAD
from timerstore.rows.position import AT_MIN, KEY_MAX, OFFSET_MAX, Bools, Int64s, Progress, RowBound, end_of, groups
from timerstore.store import TimerStore

FOLLOW_MS: Final = 1_000
"""The longest lag of O behind ingest, in a partition without output."""
NONE: Final[Mapping[int, int]] = {}
_NO_KEYS: Final = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows in the order of their output.

    `at` int64[n] (ms), `source` int32[n] (numbers of partitions), `offset` int64[n]; `payload` is a record batch of
    `entry.PAYLOAD`, n rows.
    """

    at: Int64s
    source: npt.NDArray[np.int32]
    offset: Int64s
    payload: pa.RecordBatch

    def __len__(self) -> int:
        return len(self.at)

    def where(self, mask: Bools) -> Rows:
        """The rows of a mask."""
        payload = self.payload.filter(pa.array(mask))
        return Rows(at=self.at[mask], source=self.source[mask], offset=self.offset[mask], payload=payload)


@dataclass(slots=True, kw_only=True)
class Lender:
    """A partition that a transaction may touch. `is_held`: no rows are taken; `is_for_commands`: only commands and
    rejects are taken; `followed_ms` is the time of the last commit of its O."""

    source: int
    store: TimerStore
    is_held: bool = False
    is_for_commands: bool = False
    followed_ms: int = 0


class Loan:
    """See the module. One at a time, for one thread."""

    def __init__(
        self, lenders: Sequence[Lender], memory: Memory, now_ms: int, *, only_output: bool, on_end: Callable[[], None]
    ) -> None:
        """`lenders` are in the order of their numbers, `memory` is that of their stores. `only_output`: if it has
        output, only the committed states of the partitions with output change."""
        self._lenders = {each.source: each for each in lenders}
        self._memory = memory
        self._now_ms = now_ms
        self._only_output = only_output
        self._on_end = on_end
        self._open: dict[int, Transaction] = {}
        self._delivered: list[Rows] = []
        """Merged rows that leave the pending counts at `acknowledge`."""
        self._moves: dict[int, Progress] = {}
        self._has_followed = only_output

    @property
    def touched(self) -> int:
        """The number of partitions with rows in it."""
        return len(self._open)

    def take(self, until_ms: int, max_rows: int) -> Rows:
        """About `max_rows` rows, at most, that are due at `until_ms`, which is not in the future. An empty result means
        that there are no due rows, or a great many cancelled ones only.

        (A partition's share of overtaken rows is at least one row, so a hundred partitions may exceed a limit of ten.)
        """
        lenders = [each for each in self._lenders.values() if not each.is_held]
        parts, room = list[tuple[int, Taken]](), max_rows
        for each in lenders:
            if each.is_for_commands and room > 0 and _is_due(each.store, AT_MIN):
                taken = self._transaction(each.source).take(AT_MIN, room, end_of(AT_MIN), room)
                parts.append((each.source, taken))
                room -= len(taken)
        live = [each for each in lenders if not each.is_for_commands]
        if room <= 0 or not live:
            return _merged(parts, NOTHING)
        for source, share in self._shares(live, until_ms, room).items():
            parts.append((source, self._transaction(source).take(until_ms, share, end_of(until_ms), 0)))
            room -= share
        return _merged(parts, self._take_merged(live, until_ms, room))

    def _shares(self, lenders: Sequence[Lender], until_ms: int, room: int) -> dict[int, int]:
        """For each partition with due overtaken rows, their limit."""
        with self._memory.changing():
            late = [
                each.source
                for each in lenders
                if len(each.store.state.resident.overtaken) and _is_due(each.store, until_ms)
            ]
            counts = ((self._transaction(source).late(until_ms), source) for source in late)
            waiting = sorted(each for each in counts if each[0])
            if not waiting:
                return {}
            _merge(self._memory, lenders)
            on_time = self._memory.merged.count_until(_end_of(until_ms))
        left, shares = max(room - on_time, (room + 1) // 2), dict[int, int]()
        for at, (overtaken, source) in enumerate(waiting):  # a small demand leaves room to the others
            shares[source] = min(overtaken, max(1, left // (len(waiting) - at)))
            left -= shares[source]
        return dict(sorted(shares.items()))

    def _take_merged(self, lenders: Sequence[Lender], until_ms: int, room: int) -> Rows:
        """The next rows on time, in the order of delivery."""
        for _ in range(CANCELLED_TAKES_MAX):
            with self._memory.changing():
                _merge(self._memory, lenders)
                popped = self._memory.merged.pop_until(_end_of(until_ms), max(0, room))
                self._memory.merged.gather_near(popped, _end_of(until_ms + GATHERED_AHEAD_MS))
                payloads = self._memory.chunks.payloads(popped.chunk)
                open_ = [(mine, self._transaction(source)) for source, mine in _by_source(popped.offset)]
                rows, ends = popped, np.cumsum([0, *(len(mine) for mine, _ in open_)]).tolist()
                if open_:  # one copy, and slices of it
                    rows = plain(popped[np.concatenate([mine for mine, _ in open_])])
                parts = (rows[begin:end] for begin, end in pairwise(ends))
                lent = [(mine, each, *each.lend(part)) for (mine, each), part in zip(open_, parts, strict=True)]
            handed_out = self._handed_out(popped, materialize(payloads, popped.chunk, popped.row), lent)
            if len(handed_out) or not len(popped):
                break
        return handed_out

    def _handed_out(
        self,
        popped: RowRefs,
        payload: pa.RecordBatch,
        lent: Sequence[tuple[npt.NDArray[np.intp], Transaction, RowRefs, Lookup | None]],
    ) -> Rows:
        """Popped rows, without those that O' does not cover, and those that are passed over."""
        left_out: Bools = np.zeros(len(popped), np.bool_)
        for index, transaction, rows, lookup in lent:
            if len(rows) < len(index):
                left_out[index] = ~np.isin(popped.offset[index] & OFFSET_MAX, rows.offset)
            if lookup is not None:
                mine = index[~left_out[index]]
                passed = transaction.passed_over(lookup, rows, lambda: payload.take(pa.array(mine)))  # noqa: B023
                if passed is not None:
                    left_out[mine[passed]] = True
        source, offset = sources_of(popped.offset).astype(np.int32), offsets_of(popped.offset)
        handed_out = Rows(at=popped.at, source=source, offset=offset, payload=payload)
        if left_out.any():
            handed_out = handed_out.where(~left_out)
        if len(handed_out):
            self._delivered.append(handed_out)
        return handed_out

    def _transaction(self, source: int) -> Transaction:
        found = self._open.get(source)
        if found is None:
            lender = self._lenders[source]
            found = lender.store.begin(AT_MIN if lender.is_for_commands else self._now_ms)
            self._open[source] = found
        return found

    # ---- the fate of rows; keys are of names.pack

    def copied(self, keys: Int64s, origin: Int64s, ids: pa.Array) -> None:
        """Note rows, handed out or moved, that leave as copies: their keys, the offsets of their originals, their
        ids."""
        for source, mine in _by_source(keys):
            self._transaction(source).copied(offsets_of(keys[mine]), origin[mine], ids.take(pa.array(mine)))

    def are_waited_for(self, origins: Int64s) -> Bools:
        """Mask of the originals (keys) for which the bridge has written commands that are not yet decided."""
        found: Bools = np.zeros(len(origins), np.bool_)
        for source, mine in _by_source(origins):
            found[mine] = self._transaction(source).are_waited_for(offsets_of(origins[mine]))
        return found

    def refused(self, origins: Int64s) -> None:
        """Note originals (keys) whose copies were read as rejects, and so are no longer in transit."""
        for source, mine in _by_source(origins):
            self._transaction(source).refused(offsets_of(origins[mine]))

    def decide(
        self,
        commands: Int64s,
        now_ms: int,
        passed: Mapping[int, int] = NONE,
        silent: Collection[int] = (),
    ) -> list[tuple[int, Decided]]:
        """As `Transaction.decide`, with keys in place of offsets; and the number of the partition of each."""
        decided = list[tuple[int, Decided]]()
        for source, mine in _by_source(commands):
            decided += (
                (source, each)
                for each in self._transaction(source).decide(
                    offsets_of(commands[mine]),
                    now_ms,
                    {
                        key & OFFSET_MAX: other & OFFSET_MAX
                        for key, other in passed.items()
                        if key >> OFFSET_BITS == source
                    },
                    {key & OFFSET_MAX for key in silent if key >> OFFSET_BITS == source},
                )
            )
        return decided

    # ---- its end

    def progress(self) -> dict[int, Progress]:
        """(O', P') of each partition with output, and of each whose O follows ingest."""
        if not self._has_followed:
            self._has_followed = True
            self._follow()
        has_output = any(each.has_rows for each in self._open.values())
        self._moves = {}
        for source, transaction in sorted(self._open.items()):
            after = transaction.progress()
            is_moved = after != self._lenders[source].store.committed and not (self._only_output and has_output)
            if transaction.has_rows or is_moved:
                self._moves[source] = after
        return dict(self._moves)

    def _follow(self) -> None:
        """Move O in partitions without output."""
        is_pure = not any(each.has_rows for each in self._open.values())
        for source, each in self._lenders.items():
            if source in self._open or not each.store.offset_behind():
                continue
            waited_ms = self._now_ms - each.followed_ms
            if is_pure or not 0 <= waited_ms < FOLLOW_MS or each.store.needs_offset_commit():
                self._transaction(source).move_offset()

    def acknowledge(self) -> None:
        """Finish the rows, after a successful commit of the last `progress`."""
        memory = self._memory
        with memory.lock, self._ending() as ends:
            for rows in self._delivered:  # last: a cancel that came too late is counted in again before
                ends.callback(memory.uncounted.remove, rows.source.astype(np.int64), rows.at, [rows.payload])
            for source, transaction in self._open.items():
                if (progress := self._moves.get(source)) is None:
                    ends.callback(transaction.rollback)
                else:
                    ends.callback(transaction.finish, progress)
                self._lenders[source].followed_ms = self._now_ms
            finished = [self._open[source] for source in self._moves if source in self._open]
            chunks = [rows.chunk for each in finished for rows in each.references]
            memory.chunks.release(np.concatenate([EMPTY.chunk, *chunks]))
            memory.changed.notify_all()

    def rollback(self) -> None:
        """Make the rows pending again, after an abort."""
        with self._ending() as ends:
            for transaction in self._open.values():
                ends.callback(transaction.rollback)

    @contextmanager
    def _ending(self) -> Iterator[ExitStack]:
        """A stack of calls, all of which are made; an error of one is raised afterwards."""
        self._on_end()
        with ExitStack() as ends:
            yield ends
        self._open = {}


def _merge(memory: Memory, lenders: Sequence[Lender]) -> None:
    """Merge rows that were placed since the last take."""
    memory.merged.take_over(each.store.state.resident.ready for each in lenders)


def _is_due(store: TimerStore, until_ms: int) -> bool:
    due_ms = store.next_due_ms()
    return due_ms is not None and due_ms <= until_ms


def _by_source(keys: Int64s) -> Iterator[tuple[int, npt.NDArray[np.intp]]]:
    """(partition, indices of its keys) for each partition among keys."""
    return groups(sources_of(keys))


def _end_of(until_ms: int) -> RowBound:
    """The last bound of a millisecond, for rows of any partition."""
    return RowBound(until_ms, KEY_MAX)


def _merged(parts: Sequence[tuple[int, Taken]], on_time: Rows) -> Rows:
    """Overtaken rows by partition and offset; then the others in the order of delivery."""
    parts = [each for each in parts if len(each[1])]
    if not parts:
        return on_time
    at = np.concatenate([*(taken.at for _, taken in parts), on_time.at])
    source = np.concatenate([*(np.full(len(taken), number, np.int32) for number, taken in parts), on_time.source])
    offset = np.concatenate([*(taken.offset for _, taken in parts), on_time.offset])
    late = [*(np.arange(len(taken)) < taken.overtaken for _, taken in parts), np.zeros(len(on_time), np.bool_)]
    is_late = np.concatenate(late)
    order = np.lexsort((offset, source, np.where(is_late, AT_MIN, at), ~is_late))
    payload = joined([*(piece for _, taken in parts for piece in taken.pieces), on_time.payload])
    return Rows(at=at[order], source=source[order], offset=offset[order], payload=payload.take(pa.array(order)))


NOTHING: Final = Rows(at=_NO_KEYS, source=_NO_KEYS.astype(np.int32), offset=_NO_KEYS, payload=NO_PAYLOAD)
