"""Copies: records that the bridge writes back into their own partition of the delay topic.

A roll is the copy of an entry that is due beyond the roll window: a year's delay never depends on a year's retention. A
retry is the copy of an entry whose target fails for now: it comes up again later. An overdue entry gets a later time as
well, where others must not wait for it. All copies keep the absolute due time and the origin's offset, hence the order
of cancels and the delivered origin. The next tick of a recurring message is a copy, too (ticks.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np

from bridge.delivery.plan.due_rows import Batch, DueRows, Ids, Record, batches_by_topic, chunks
from bridge.wire import headers as h
from bridge.wire.schedule import TICK_MAX, unpacked
from timerstore.rows.position import Bools, Int64s

_FRAMING_BYTES: Final = 300
"""Upper bound of the names, numbers and framing of the copy headers; text comes on top."""
_SCHEDULE_BYTES: Final = 80
"""Upper bound of a schedule's headers, without the text of its column."""
_COLUMNS: Final = ("value", "key", "target", "target_partition", "id", "origin", "schedule", "tick")


def copies(
    rows: DueRows,
    ids: Ids,
    *,
    rolled: int = 0,
    failed: Int64s | None = None,
    at_ms: Int64s | None = None,
    is_single: Bools | None = None,
) -> Iterator[Batch]:
    """Copies of the rows `ids`, with `rolled` more rolls and `failed` int64[m] more attempts (None: no more), and the
    effective times `at_ms` int64[m] (None: their due times, or those of further rolls). Copies that are `is_single`
    bool[m] leave their schedules."""
    for chunk in chunks(rows.sizes[ids]):
        chosen = ids[chunk]
        column = {name: rows.column(name, chosen) for name in (*_COLUMNS, "due", "rolls", "attempt")}
        single = [False] * len(chosen) if is_single is None else is_single[chunk].tolist()
        sources = rows.source[chosen].tolist()
        when = [None] * len(chosen) if at_ms is None else at_ms[chunk].tolist()
        more = [0] * len(chosen) if failed is None else failed[chunk].tolist()
        records: list[Record] = []
        for i, own in enumerate(rows.headers(chosen).lists()):
            control = h.copy_headers(
                origin=column["origin"][i],
                due_ms=column["due"][i],
                rolls=max(column["rolls"][i], 0) + rolled,
                attempt=column["attempt"][i] + more[i],
                target=column["target"][i] or rows.columns.defaults[sources[i]],
                at_ms=when[i],
                partition=column["target_partition"][i],
                id=column["id"][i],
                tick=column["tick"][i] if column["tick"][i] or column["schedule"][i] is not None else None,
                schedule=None if single[i] else _headers_of(column["schedule"][i]),
            )
            records.append((column["value"][i], column["key"][i], [*own, *control]))
        yield from batches_by_topic(chosen, *rows.places(chosen), records)


def next_ticks(rows: DueRows, ids: Ids, next_ms: Int64s, is_counted: Bools) -> Iterator[Batch]:
    """The copies for the next ticks of the rows `ids`, due at `next_ms` int64[m]. `is_counted` bool[m]: the row is a
    tick that counts, so the next one has a new number."""
    for chunk in chunks(rows.sizes[ids]):
        chosen = ids[chunk]
        column = {name: rows.column(name, chosen) for name in _COLUMNS}
        sources, dues = rows.source[chosen].tolist(), next_ms[chunk].tolist()
        numbers = np.minimum(np.maximum(rows.tick[chosen] + is_counted[chunk].astype(np.int64), 1), TICK_MAX).tolist()
        records: list[Record] = []
        for i, own in enumerate(rows.headers(chosen).lists()):
            control = h.copy_headers(
                origin=column["origin"][i],
                due_ms=dues[i],
                rolls=0,
                attempt=0,
                target=column["target"][i] or rows.columns.defaults[sources[i]],
                partition=column["target_partition"][i],
                id=column["id"][i],
                tick=numbers[i],
                schedule=_headers_of(column["schedule"][i]),
            )
            records.append((column["value"][i], column["key"][i], [*own, *control]))
        yield from batches_by_topic(chosen, *rows.places(chosen), records)


def _headers_of(schedule: str | None) -> Mapping[str, str] | None:
    return None if schedule is None else unpacked(schedule)[0]


def copy_sizes(rows: DueRows, ids: Ids) -> Int64s:
    """Size of each row's copy, int64[m]: an upper bound, for a batch of that copy alone."""
    scheduled = np.where(rows.recurs[ids], _SCHEDULE_BYTES, 0)
    return rows.sizes[ids] + _FRAMING_BYTES + rows.named_bytes[ids] + scheduled
