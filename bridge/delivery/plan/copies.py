"""Copies: records that the bridge writes back into the delay topic, into the partition they came from.

A roll is an entry whose due time lies beyond the roll window: it is written again, so that a year's delay never depends
on a year's retention. A retry is an entry whose target fails for now: it is written again with a time at which it is
looked at again. An overdue entry gets a time as well, when others must not wait for it. All keep the absolute due time
and the origin's offset, hence the order of cancels, and what the message is known by when it is delivered.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from bridge.delivery.plan.due_rows import Batch, Outgoing, integers, pieces
from bridge.wire import headers as h
from timerstore.rows.position import Int64s

_FRAMING_BYTES: Final = 260
"""Names, numbers and framing of the copy headers, at most; text comes on top."""


def copies(
    outgoing: Outgoing,
    ids: npt.NDArray[np.intp],
    sizes: Int64s,
    *,
    rolled: int = 0,
    failed: Int64s | None = None,
    at_ms: Int64s | None = None,
    lot_bytes: int | None = None,
) -> Iterator[Batch]:
    """Copies of the rows `ids`, with `rolled` more rolls and `failed` int64[m] more attempts (None: with none), to come
    up at `at_ms` int64[m] (None: when they are due, or have to roll again). With `lot_bytes`, in lots of no more than
    that, each sent alone.
    """
    if lot_bytes:
        sizes = sizes.copy()
        sizes[ids] = copy_sizes(outgoing, ids, sizes)
    for part in pieces(ids, sizes, lot_bytes) if lot_bytes else pieces(ids, sizes):
        chosen = ids[part]
        names = ("value", "key", "target", "target_partition", "id", "origin", "due", "rolls", "attempt")
        column = {name: outgoing.column(name, chosen) for name in names}
        sources = outgoing.rows.source[chosen].tolist()
        when = [None] * len(chosen) if at_ms is None else at_ms[part].tolist()
        more = [0] * len(chosen) if failed is None else failed[part].tolist()
        headers = []
        for i, own in enumerate(outgoing.headers(chosen).lists()):
            partition = column["target_partition"][i]
            control = h.copy_headers(
                origin=int(column["origin"][i]),
                due_ms=int(column["due"][i]),
                rolls=int(column["rolls"][i]) + rolled,
                attempt=int(column["attempt"][i]) + more[i],
                target=column["target"][i] or outgoing.columns.defaults[sources[i]],
                at_ms=when[i],
                partition=None if partition is None or partition != partition else int(partition),  # noqa: PLR0124 - NaN: null
                id=column["id"][i],
            )
            headers.append([*own, *control])
        yield from to_sources(outgoing, chosen, column["value"], column["key"], headers, alone=lot_bytes is not None)


def to_sources(
    outgoing: Outgoing,
    ids: npt.NDArray[np.intp],
    values: list[bytes | None],
    keys: list[bytes | None],
    headers: list[h.HeaderList],
    *,
    alone: bool,
) -> Iterator[Batch]:
    """Records for the partitions that the rows `ids` came from, one batch for each delay topic."""
    by_topic = [outgoing.sources.name(source) for source in outgoing.rows.source[ids].tolist()]
    for topic in dict.fromkeys(name for name, _ in by_topic):
        mine = [i for i, (name, _) in enumerate(by_topic) if name == topic]
        yield Batch(
            topic=topic,
            ids=ids[mine],
            values=[values[i] for i in mine],
            keys=[keys[i] for i in mine],
            headers=[headers[i] for i in mine],
            partitions=[by_topic[i][1] for i in mine],
            alone=alone,
        )


def copy_sizes(outgoing: Outgoing, ids: npt.NDArray[np.intp], sizes: Int64s) -> Int64s:
    """Size of each row's copy, int64[m]: an upper bound, as if it were alone in its batch (`sizes` is of `bytes()`)."""
    texts: Int64s = np.zeros(len(ids), dtype=np.int64)
    for name in ("target", "id"):
        texts += integers(outgoing.lengths(name, ids), 0)
    defaults = np.array([len(name or "") for name in outgoing.columns.defaults], dtype=np.int64)
    return sizes[ids] + _FRAMING_BYTES + texts + defaults[outgoing.rows.source[ids]]
