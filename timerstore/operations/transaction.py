"""Transactions: rows handed out for delivery, together with the committed state that says they are finished.

A transaction outputs exactly the difference between two finished sets (invariant I1), in as many pieces as the
dispatcher likes to take:

    late rows     move O of their source: O' is the first late row that is not taken, or the end of what is ingested
    on-time rows  move P: P' is the position of the last row popped from the ready rows
    a popped row that O' does not cover is not output: it is late from here on
    a row that a tombstone covers is passed like any other, without being output (invariant I7)
    a held source keeps its P, and nothing of it is output; its O moves on as far as no late row stands in the way

Nothing is forgotten before `acknowledge`; `rollback` makes every row pending again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from timerstore.errors import Misuse
from timerstore.memory.chunks import materialize
from timerstore.memory.pending import TALLIED, Tally, tally_timers
from timerstore.memory.sorted_runs import EMPTY, RowRefs, concat
from timerstore.rows.entry import PAYLOAD
from timerstore.rows.position import Int64s, Progress, end_of

if TYPE_CHECKING:
    from timerstore.store import TimerStore

CANCELLED_TAKES_MAX = 16
"""How many takes in a row may find cancelled rows only, before the transaction is better ended."""

GATHERED_AHEAD_MS = 250
"""How far ahead rows that come from many chunks are put together."""

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


class Transaction:
    """One step of the committed state; made by `TimerStore.begin`, one at a time, used by one thread."""

    def __init__(self, store: TimerStore, *, only_output: bool = False) -> None:
        self._store = store
        self._only_output = only_output
        self.position = store.resident.position
        self._offsets = store.resident.offset.copy()
        self._output: list[RowRefs] = []
        self._delivered: list[tuple[Int64s, pa.RecordBatch]] = []
        self._cancelled: list[Tally] = []
        self._ended = False

    def take(self, now_ms: int, max_rows: int) -> Rows:
        """Up to about `max_rows` rows that are due at `now_ms`: late ones first. An empty answer means that nothing is
        due, or nothing but a great many cancelled rows.

        (A source's share of late rows is at least one row, so a hundred sources may exceed a limit of ten.)
        """
        for _ in range(CANCELLED_TAKES_MAX):
            rows, is_end = self._take(now_ms, max_rows)
            if is_end or len(rows):
                break
        return rows

    def _take(self, now_ms: int, max_rows: int) -> tuple[Rows, bool]:
        """One take; and whether nothing was due."""
        with self._store.lock:
            self._must_be_open()
            resident = self._store.resident
            resident.overtake(resident.pop_ready(self.position))
            bound = min(end_of(now_ms), resident.frontier)
            # A flood of late rows leaves half of the room to what is due on time, if there is so much of it.
            late = resident.pop_overtaken(
                now_ms, max(max_rows - resident.ready.count_until(bound), (max_rows + 1) // 2)
            )
            self._cover()
            due = resident.pop_ready(bound, max(0, max_rows - len(late)))
            is_end = not len(due) + len(late)
            if len(due):
                self.position = due.last()
            held = resident.held[due.source]
            if held.any():
                resident.withhold(due[held])
                due = due[~held]
            covered = due.offset < self._offsets[due.source]
            if not covered.all():
                resident.overtake(due[~covered])
                due = due[covered]
            resident.gather_near(due, min(end_of(now_ms + GATHERED_AHEAD_MS), resident.frontier))
            rows = concat([late, due])
            self._output.append(rows)
            payloads = resident.chunks.payloads(rows.chunk)
            # A cancel that is read from now on comes too late for these rows.
            lookup = self._store.cancels.tombstones.lookup()
        payload = materialize(payloads, rows.chunk, rows.row)
        cancelled = self._store.cancels.covered(lookup, rows.source, payload)
        if cancelled is not None:
            rows, payload = rows[~cancelled], payload.filter(pa.array(~cancelled))
        # What leaves the pending counts when the commit is known.
        self._delivered.append((rows.at, payload.select(TALLIED)))
        return Rows(at=rows.at, source=rows.source.astype(np.int32), offset=rows.offset, payload=payload), is_end

    def progress(self) -> dict[int, Progress]:
        """(O', P') of every source that has output, whose O moves, or whose committed P would fall behind for long."""
        with self._store.lock:
            resident = self._store.resident
            with_output = np.zeros(len(resident.owned), dtype=np.bool_)
            with_output[self.rows().source] = True
            is_narrow = self._only_output and bool(with_output.any())
            result = {}
            for source, state in resident.committed.items():
                position = state.position if resident.held[source] else max(state.position, self.position)
                offset = int(self._offsets[source])
                behind = position.at_ms - state.position.at_ms > P_STALE_MS_MAX
                if with_output[source] or (not is_narrow and (offset != state.offset or behind)):
                    result[source] = state.moved(offset, position)
            return result

    def rows(self) -> RowRefs:
        """References of everything taken so far, cancelled rows too."""
        self._output = [concat(self._output)] if self._output else [EMPTY]
        return self._output[0]

    def acknowledge(self) -> None:
        """The commit is known to have happened: what was taken is finished."""
        delivered = self._counted()
        with self._store.lock:
            progress = self.progress()
            self._end()
            self._store.transaction_committed(self.rows(), delivered, self._cancelled, progress, self.position)

    def rollback(self) -> None:
        """The commit is known not to have happened: what was taken is pending again."""
        with self._store.lock:
            self._end()
            self._store.transaction_rolled_back(self.rows(), self._cancelled)

    def cancel(self, timers: Tally) -> None:
        """A cancel was read for timers that are on loan, and they have left the counts: delivered if the commit
        happens, cancelled if it does not."""
        self._cancelled.append(timers)

    def _counted(self) -> Tally:
        """What was output, counted once for all takes."""
        at = [at for at, _ in self._delivered]
        columns = [payload for _, payload in self._delivered]
        payload = pa.Table.from_batches(columns, pa.schema([PAYLOAD.field(name) for name in TALLIED]))
        return tally_timers(np.concatenate([EMPTY.at, *at]), payload)

    def _cover(self) -> None:
        """O' of every source: in front of its first late row that is left, else the end of what is ingested."""
        resident = self._store.resident
        np.copyto(self._offsets, resident.offsets_reachable(), where=resident.owned)

    def _must_be_open(self) -> None:
        if self._ended:
            raise Misuse("the transaction has ended")

    def _end(self) -> None:
        self._must_be_open()
        self._ended = True
