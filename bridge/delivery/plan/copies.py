"""Copies: records that the bridge writes back into the delay topic, into the partition they came from.

A roll is an entry that is due beyond the roll window: it is written again, so that a year's delay never depends on a
year's retention. A retry is an entry whose target fails for now: its copy comes up again later. An overdue entry gets a
later time as well, when others must not wait for it. All keep the absolute due time and the origin's offset, hence the
order of cancels and the origin that is delivered.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bridge.delivery.plan.due_rows import Batch, DueRows, Ids, Record, batches_by_topic, chunks, integers
from bridge.wire import headers as h
from timerstore.rows.position import Int64s

_FRAMING_BYTES: Final = 260
"""Names, numbers and framing of the copy headers, at most; text comes on top."""


def copies(
    rows: DueRows, ids: Ids, *, rolled: int = 0, failed: Int64s | None = None, at_ms: Int64s | None = None
) -> Iterator[Batch]:
    """Copies of the rows `ids`, with `rolled` more rolls and `failed` int64[m] more attempts (None: with none), to come
    up at `at_ms` int64[m] (None: when they are due, or have to roll again).
    """
    for chunk in chunks(rows.sizes[ids]):
        chosen = ids[chunk]
        names = ("value", "key", "target", "target_partition", "id", "origin", "due", "rolls", "attempt")
        column = {name: rows.column(name, chosen) for name in names}
        sources = rows.source[chosen].tolist()
        when = [None] * len(chosen) if at_ms is None else at_ms[chunk].tolist()
        more = [0] * len(chosen) if failed is None else failed[chunk].tolist()
        records: list[Record] = []
        for i, own in enumerate(rows.headers(chosen).lists()):
            control = h.copy_headers(
                origin=column["origin"][i],
                due_ms=column["due"][i],
                rolls=column["rolls"][i] + rolled,
                attempt=column["attempt"][i] + more[i],
                target=column["target"][i] or rows.columns.defaults[sources[i]],
                at_ms=when[i],
                partition=column["target_partition"][i],
                id=column["id"][i],
            )
            records.append((column["value"][i], column["key"][i], [*own, *control]))
        yield from batches_by_topic(chosen, *rows.places(chosen), records)


def copy_sizes(rows: DueRows, ids: Ids) -> Int64s:
    """Size of each row's copy, int64[m]: an upper bound, as if it were alone in its batch."""
    texts: Int64s = np.zeros(len(ids), dtype=np.int64)
    for name in ("target", "id"):
        texts += integers(pc.binary_length(rows.payload.column(name).take(pa.array(ids))), 0)
    defaults = np.array([len(name or "") for name in rows.columns.defaults], dtype=np.int64)
    return rows.sizes[ids] + _FRAMING_BYTES + texts + defaults[rows.source[ids]]
