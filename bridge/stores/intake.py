"""A batch of several partitions on its way into their stores.

The stores of partitions that are delivered take in a batch of originals as a whole: it is sorted and counted once, and
is one chunk of memory. Each other store takes in its part by itself: it has commands, finished or late rows, or the
partition is not delivered.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import pyarrow as pa

from bridge.stores.names import Sources, sources_of
from timerstore.cancels.digests import digest
from timerstore.cancels.id_index import Timers, timers_of, timers_with_ids
from timerstore.memory.batch import LogPart, MergedBatch
from timerstore.memory.memory import Memory
from timerstore.memory.pending import labels
from timerstore.memory.ready import plain
from timerstore.memory.resident import Resident
from timerstore.memory.sorted_runs import select
from timerstore.rows.entry import payload_of
from timerstore.rows.position import AT_MAX, groups
from timerstore.store import TimerStore


class Intake:
    """The rows of `names.NAMED_ENTRY`, with the numbers of their partitions."""

    def __init__(self, entries: pa.Table, sources: Sources) -> None:
        source = sources.of_columns(entries.column("topic"), entries.column("partition"))
        self._batch = MergedBatch.of(source, select(entries), payload_of(entries))
        self.part = self._batch.part

    def take_in(self, memory: Memory, stores: Sequence[tuple[int, TimerStore, int]]) -> tuple[int, Collection[int]]:
        """Let stores take in their parts, if they need no look at single rows. `stores` has (number, store, end offset)
        of each partition. Returns the number of rows, and the partitions (numbers) that are done. Raises
        Inconsistent."""
        batch = self._batch
        if not batch.is_whole:
            return 0, ()
        timers = _with_ids(batch)
        parts, done = list[tuple[Resident, LogPart, int]](), dict[int, TimerStore]()
        with memory.changing():
            next_ms = memory.merged.first_at_ms()
            for source, store, end in stores:
                part = batch.parts.get(source)
                near = store.take_in_part(batch, part, timers.get(source), end)
                if near is not None:
                    done[source] = store
                    if part is not None:
                        parts.append((store.state.resident, part, near))
            rows = memory.take_in(batch, parts)
            first_ms = min((part.first[0] for _, part, near in parts if near), default=AT_MAX)
            has_news = first_ms < (AT_MAX if next_ms is None else next_ms)
            states = [store.state for store in done.values()]
            memory.bound_ready_rows()
            has_work = (len(each.resident.overtaken) or each.needs_offset_commit() for each in states)
            if states and (has_news or any(has_work)):
                states[0].wake()
        return rows, done.keys()


def _with_ids(batch: MergedBatch) -> dict[int, Timers]:
    """The timers with ids of each partition, sorted by key."""
    payload = batch.payload
    if payload.column("id").null_count == len(payload):
        return {}
    index = np.flatnonzero(timers_with_ids(payload.column("kind"), payload.column("id")))
    if not len(index):
        return {}
    keys = digest(payload.column("id").take(pa.array(index)))
    rows, origin = plain(batch.rows[index]), payload.column("origin").to_numpy()[index]
    timers = timers_of(keys, rows, origin, labels(payload).take(pa.array(index)))
    order = keys.order()
    timers, source = timers[order], sources_of(batch.rows.offset[index[order]])
    return {log: timers[mine] for log, mine in groups(source)}
