"""Which sources have unfinished rows whose records are gone from Kafka: they live in this store alone.

By offset: a record is gone when its offset lies below the log's start. Rows in memory are looked at one by one; of a
segment only the footer is, which names one unfinished row of each source, the last. That says too little rather than
too much: no alarm is false, but one may come a segment's length late.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from timerstore.memory.sorted_runs import RowRefs
from timerstore.rows.position import Int64s
from timerstore.rows.sources import SourceName

if TYPE_CHECKING:
    from timerstore.store import TimerStore


def trimmed(store: TimerStore, log_starts: Mapping[SourceName, int]) -> list[SourceName]:
    """The owned sources of which something unfinished is gone; `log_starts` are the first offsets that Kafka still
    has."""
    with store.lock:
        resident, sources = store.resident, store.sources
        starts: Int64s = np.zeros(len(sources), dtype=np.int64)
        for source in resident.committed:
            starts[source] = log_starts.get(sources.name(source), 0)
        gone = np.zeros(len(sources), dtype=np.bool_)
        last = [position for segment in store.timerlog for position in segment.largest.values()]
        nowhere = np.zeros(len(last), dtype=np.int32)
        at = np.array([position.at_ms for position in last], dtype=np.int64)
        seq = np.array([position.seq for position in last], dtype=np.int64)
        stored = RowRefs(at, seq, nowhere, nowhere)
        unfinished = stored[~resident.finished(stored)]
        for rows in (
            unfinished,
            resident.ready.all(),
            resident.memtable.all(),
            resident.withheld.all(),
            resident.overtaken.all(),
        ):
            gone[rows.source[rows.offset < starts[rows.source]]] = True
        return [sources.name(source) for source in np.flatnonzero(gone).tolist()]
