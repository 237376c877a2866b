"""Ingest: a batch goes into the store; the flow control of the stream."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import pyarrow as pa

from timerstore.cancels.cancels import Judged
from timerstore.errors import Closed, Misuse
from timerstore.memory.pending import tally_timers
from timerstore.memory.sorted_runs import select
from timerstore.operations.by_origin import pending_of
from timerstore.operations.state import StoreState
from timerstore.rows.entry import payload_of
from timerstore.rows.sources import SourceName


class Ingest:
    """See the module. Batches are taken in one after the other."""

    def __init__(self, state: StoreState) -> None:
        self._state = state
        self._one_at_a_time = threading.Lock()

    def append(self, entries: pa.Table, ends: Mapping[SourceName, int], now_ms: int) -> int:
        """Take in a batch of `entry.ENTRY` rows, read at `now_ms`; `ends` are the exclusive end offsets it
        reaches, by source.

        Blocks while there is no room. Rows below the next expected offset (a batch seen before) and finished ones are
        dropped. Returns how many rows were new. Raises Closed when the store is closed meanwhile; Corrupt, DiskFailure
        where a cancel by origin has segments read.
        """
        state, resident = self._state, self._state.resident
        everything = select(entries, state.sources)
        payload = payload_of(entries)
        with self._one_at_a_time:
            with state.lock:
                self._wait_for_room()
                reached = resident.ends.copy()
                for name, end in ends.items():
                    source = state.sources.index(*name)
                    reached[source] = max(int(reached[source]), end)
                fresh = everything[everything.offset >= resident.ends[everything.source]]
                if not (fresh.offset < reached[fresh.source]).all():
                    raise Misuse("a batch has rows beyond the end offsets that it is said to reach", code="DB-7003")
                # Stays so until the rows are placed: what is not ingested yet cannot become finished.
                unfinished = ~resident.finished(fresh)
                parts = resident.parts(fresh[unfinished].sorted())
                known = state.cancels.known([s.ids for s in state.timerlog if s.ids is not None])
            # Copies and counts are made, and cancels looked up, without the lock: delivery goes on.
            judged = state.cancels.judge(known, payload, fresh, unfinished, state.finished, pending_of(state), now_ms)
            chunks = [(part, payload.take(pa.array(part.row))) for part in parts]
            covered = None if judged is None else judged.covered
            tallies = [
                tally_timers(part.at, chunk, None if covered is None else covered[part.row]) for part, chunk in chunks
            ]
            with state.lock:
                nearest_ms = resident.ready.first_at_ms()
                resident.ends = reached
                for part, chunk in chunks:
                    resident.add(part, chunk)
                for timers in tallies:
                    state.pending.add(timers)
                if judged is not None:
                    self._cancel(judged)
                state.bound_ready_rows()
                first_ms = resident.ready.first_at_ms()
                is_nearer = first_ms is not None and (nearest_ms is None or first_ms < nearest_ms)
                if is_nearer or len(resident.overtaken) or state.needs_offset_commit():
                    state.wake()
        return len(fresh)

    def has_room(self) -> bool:
        """Whether a batch may come in. Room is made by a flush, or by delivery; where neither is possible there is
        nothing to wait for.

        (Delivery waits until ingest has caught up with the committed O: before that only a flush can make room.)
        """
        state = self._state
        with state.lock:
            limits, resident = state.limits, state.resident
            delivers = state.is_caught_up()
            flushes = bool((resident.covered() > resident.stored)[resident.owned].any())
            is_full = resident.memtable_bytes >= limits.memtable_bytes_max and (delivers or flushes)
            is_flooded = resident.overtaken.bytes >= limits.overtaken_bytes and delivers
            return not (is_full or is_flooded or state.cancels.tombstones.memory_rows >= 2 * limits.tombstone_rows)

    def _cancel(self, judged: Judged) -> None:
        """Tombstones, and what they cover leaves the counts."""
        state = self._state
        hits, lent = state.cancels.take_in(judged, state.resident, state.rows_on_loan())
        state.pending.remove(hits)
        if state.loan is not None:
            state.loan.cancelled.append(lent)

    def _wait_for_room(self) -> None:
        state = self._state
        while not (state.is_closed or state.is_intake_closed):
            if self.has_room():
                return
            state.changed.wait(1.0)
        raise Closed("the store was closed while a batch waited for room")
