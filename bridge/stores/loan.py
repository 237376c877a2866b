"""One transaction over the stores of all partitions: rows in the order of (due, topic, partition, offset), and the
committed states that finish them.

    take      overtaken rows first, for each partition a share of half the room; then on-time rows
    on time   all due rows, if they fit. Else a bisection over the stores' counts finds the millisecond in which the
              room ends: all earlier rows are taken, and rows of this millisecond in the order of partitions
    states    of partitions with output; of other partitions, if their O must follow ingest

It works on whole columns, and touches only stores with due rows. A store opens its transaction at the first touch;
`acknowledge` and `rollback` go to the open ones.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from bridge.stores.names import OFFSET_BITS, offsets_of, sources_of
from timerstore.cancels.commands import Decided
from timerstore.memory.chunks import joined
from timerstore.operations.transaction import DueCounts, Taken, Transaction
from timerstore.rows.entry import NO_PAYLOAD
from timerstore.rows.position import AT_MIN, OFFSET_MAX, Bools, Int64s, Position, Progress, end_of
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
        self, lenders: Sequence[Lender], now_ms: int, *, only_output: bool, on_end: Callable[[], None]
    ) -> None:
        """`lenders` are in the order of their numbers. `only_output`: if it has output, only the committed states of
        the partitions with output change."""
        self._lenders = {each.source: each for each in lenders}
        self._now_ms = now_ms
        self._only_output = only_output
        self._on_end = on_end
        self._open: dict[int, Transaction] = {}
        self._moves: dict[int, Progress] = {}
        self._has_followed = only_output

    def take(self, until_ms: int, max_rows: int) -> Rows:
        """About `max_rows` rows, at most, that are due at `until_ms`, which is not in the future. An empty result means
        that there are no due rows, or a great many cancelled ones only.

        (A partition's share of overtaken rows is at least one row, so a hundred partitions may exceed a limit of ten.)
        """
        lenders = [each for each in self._lenders.values() if not each.is_held]
        parts = self._take([each for each in lenders if each.is_for_commands], AT_MIN, max_rows)
        if (room := max_rows - sum(len(taken) for _, taken in parts)) > 0:
            parts += self._take([each for each in lenders if not each.is_for_commands], until_ms, room)
        return _merged(parts)

    def _take(self, lenders: Sequence[Lender], until_ms: int, max_rows: int) -> list[tuple[int, Taken]]:
        parts: list[tuple[int, Taken]] = []
        until = end_of(until_ms)
        ready = [each.source for each in lenders if _is_due(each.store, until_ms)]
        due = {source: self._transaction(source).due(until) for source in ready}
        overtaken, on_time = sum(each.overtaken for each in due.values()), sum(each.on_time for each in due.values())
        if overtaken + on_time <= max_rows:
            bounds = dict.fromkeys(due, (max_rows, until, max_rows))
        else:
            bounds = self._bounds(due, until, max_rows)
        for source, (overtaken_max, bound, on_time_max) in bounds.items():
            taken = self._open[source].take(until_ms, overtaken_max, bound, on_time_max)
            if len(taken):
                parts.append((source, taken))
        return parts

    def _bounds(
        self, due: Mapping[int, DueCounts], until: Position, max_rows: int
    ) -> dict[int, tuple[int, Position, int]]:
        """For each partition the limit of overtaken rows, the last position of on-time rows, and their limit."""
        on_time = sum(each.on_time for each in due.values())
        left = max(max_rows - on_time, (max_rows + 1) // 2)
        shares = dict.fromkeys(due, 0)
        waiting = sorted((each.overtaken, source) for source, each in due.items() if each.overtaken)
        for at, (overtaken, source) in enumerate(waiting):  # a small demand leaves room to the others
            shares[source] = min(overtaken, max(1, left // (len(waiting) - at)))
            left -= shares[source]
        room = max(0, max_rows - sum(shares.values()))
        last_ms = self._last_ms(due, until.at_ms, room)
        before, inside = end_of(max(AT_MIN, last_ms - 1)), end_of(last_ms)
        whole = {source: self._open[source].due(before).on_time for source in due}
        left = room - sum(whole.values())
        bounds = {}
        for source in due:  # in the order of partitions
            within = min(left, self._open[source].due(inside).on_time - whole[source])
            left -= within
            bound = inside if within else before
            bounds[source] = shares[source], bound, whole[source] + within
        return bounds

    def _last_ms(self, due: Mapping[int, DueCounts], until_ms: int, room: int) -> int:
        """The first millisecond up to which the due rows exceed `room`; `until_ms` if none does."""
        low = min(
            (each.store.next_due_ms() or until_ms for each in map(self._lenders.__getitem__, due)), default=until_ms
        )
        high = until_ms
        while low < high:
            middle = (low + high) // 2
            if sum(self._open[source].due(end_of(middle)).on_time for source in due) > room:
                high = middle
            else:
                low = middle + 1
        return low

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
        has_output = any(each.rows for each in self._open.values())
        self._moves = {}
        for source, transaction in sorted(self._open.items()):
            after = transaction.progress()
            is_moved = after != self._lenders[source].store.committed and not (self._only_output and has_output)
            if transaction.rows or is_moved:
                self._moves[source] = after
        return dict(self._moves)

    def _follow(self) -> None:
        """Move O in partitions without output."""
        is_pure = not any(each.rows for each in self._open.values())
        for source, each in self._lenders.items():
            if source in self._open or not each.store.offset_behind():
                continue
            waited_ms = self._now_ms - each.followed_ms
            if is_pure or not 0 <= waited_ms < FOLLOW_MS or each.store.needs_offset_commit():
                self._transaction(source).move_offset()

    def acknowledge(self) -> None:
        """Finish the rows, after a successful commit of the last `progress`."""
        with self._ending() as ends:
            for source, transaction in self._open.items():
                ends.callback(transaction.acknowledge if source in self._moves else transaction.rollback)
                self._lenders[source].followed_ms = self._now_ms

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


def _is_due(store: TimerStore, until_ms: int) -> bool:
    due_ms = store.next_due_ms()
    return due_ms is not None and due_ms <= until_ms


def _by_source(keys: Int64s) -> Iterator[tuple[int, Int64s]]:
    """(partition, indices of its keys) for each partition among keys."""
    sources = sources_of(keys)
    if not len(keys):
        return
    if (sources == sources[0]).all():
        yield int(sources[0]), np.arange(len(keys))
        return
    for source in np.unique(sources).tolist():
        yield source, np.flatnonzero(sources == source)


def _merged(parts: Sequence[tuple[int, Taken]]) -> Rows:
    """Overtaken rows by partition and offset; then the others in the order of delivery."""
    if not parts:
        return Rows(at=_NO_KEYS, source=_NO_KEYS.astype(np.int32), offset=_NO_KEYS, payload=NO_PAYLOAD)
    if len(parts) == 1:
        [(source, taken)] = parts
        sources = np.full(len(taken), source, dtype=np.int32)
        return Rows(at=taken.at, source=sources, offset=taken.offset, payload=taken.payload)
    at = np.concatenate([taken.at for _, taken in parts])
    numbers = np.repeat(np.array([number for number, _ in parts], np.int32), [len(taken) for _, taken in parts])
    offset = np.concatenate([taken.offset for _, taken in parts])
    is_late = np.concatenate([np.arange(len(taken)) < taken.overtaken for _, taken in parts])
    order = np.lexsort((offset, numbers, np.where(is_late, AT_MIN, at), ~is_late))
    payload = joined([piece for _, taken in parts for piece in taken.pieces]).take(pa.array(order))
    return Rows(at=at[order], source=numbers[order], offset=offset[order], payload=payload)
