"""A batch of several partitions on its way into their stores.

The stores of partitions that are delivered take in a batch of originals as a whole: it is sorted and counted once, and
is one chunk of memory. Each other store takes in its part by itself: it has commands, finished or late rows, or the
partition is not delivered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from bridge.stores.names import Sources, sources_of
from timerstore.cancels.digests import digest
from timerstore.cancels.id_index import Timers, timers_of, timers_with_ids
from timerstore.memory.batch import LogPart, MergedBatch, RowBatch
from timerstore.memory.memory import Memory
from timerstore.memory.pending import labels
from timerstore.memory.ready import plain
from timerstore.memory.resident import Resident
from timerstore.memory.sorted_runs import select
from timerstore.rows.entry import payload_of
from timerstore.rows.position import AT_MAX
from timerstore.store import TimerStore


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenIn:
    """The number of rows that were taken in as a whole, the partitions (numbers) whose stores are done, and whether
    delivery has work."""

    rows: int
    stores: frozenset[int]
    has_news: bool


class Intake:
    """The rows of `names.NAMED_ENTRY`, with the numbers of their partitions."""

    def __init__(self, entries: pa.Table, sources: Sources) -> None:
        self._source = sources.of_columns(entries.column("topic"), entries.column("partition"))
        self._rows, self._payload = select(entries), payload_of(entries)

    def take_in(self, memory: Memory, stores: Sequence[tuple[int, TimerStore, int]]) -> TakenIn:
        """Let stores take in their parts, if they need no look at single rows. `stores` has (number, store, end offset)
        of each partition. Raises Inconsistent."""
        batch = MergedBatch.of_originals(self._source, self._rows, self._payload)
        if batch is None:
            return TakenIn(rows=0, stores=frozenset(), has_news=False)
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
            has_work = [store.part_is_placed() for store in done.values()]
        return TakenIn(rows=rows, stores=frozenset(done), has_news=has_news or any(has_work))

    def parts(self) -> dict[int, RowBatch]:
        """The parts, by partition (number)."""
        source, rows, payload = self._source, self._rows, self._payload
        if not len(rows):
            return {}
        order = np.lexsort((rows.offset, rows.at, source))
        if (order[1:] < order[:-1]).any():
            payload, rows, source = payload.take(pa.array(order)), rows[order], source[order]
        whole = RowBatch.sorted(rows, payload)
        begins = [0, *(np.flatnonzero(source[1:] != source[:-1]) + 1).tolist()]
        ends = [*begins[1:], len(source)]
        return {int(source[begin]): whole.part(begin, end) for begin, end in zip(begins, ends, strict=True)}


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
    source, order = sources_of(batch.rows.offset[index]), keys.order()
    order = order[np.argsort(source[order], kind="stable")]
    timers, source = timers[order], source[order]
    begins = [0, *(np.flatnonzero(np.diff(source)) + 1).tolist()]
    spans = zip(begins, [*begins[1:], len(source)], strict=True)
    return {int(source[begin]): timers[begin:end] for begin, end in spans}
