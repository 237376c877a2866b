"""Cancels without a key: what they name may be in any partition, so they are sent on to all the others.

A producer sends a cancel with the key of its target, and the partitioner brings both together. Without a key they need
not meet. The store does what it can in the partition that the cancel came to; the transaction that finishes the cancel
then writes it to every other partition of the delay topic, with a header that says that it need not go any further.

A timer without a key that replaces another is two entries from the beginning: itself, due when it is due, and a cancel
at the same offset, which is due at once. So what it replaces in other partitions is gone before that is due.

In an order across partitions Kafka promises nothing: what is sent without a key and with the same id *while* a cancel
is on its way (some tenths of a second) may be cancelled by it. With a key nothing of this applies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from bridge import headers as h
from bridge.outgoing import Batch, Outgoing, pieces
from timerstore.entry import Kind
from timerstore.position import AT_MIN, Int64s
from timerstore.sources import Sources

FORWARDED_BYTES: Final = 400
"""Of a record that carries a cancel on, beside the id."""

Rows = npt.NDArray[np.intp]


def partitions_of(sources: Sources) -> dict[str, int]:
    """How many partitions each delay topic has."""
    return dict(Counter(topic for topic, _ in sources))


def with_cancels(entries: pa.Table, partitions: Mapping[str, int]) -> pa.Table:
    """A micro-batch of `entry.ENTRY` rows, and a row of kind CANCEL for every timer that replaces without a key.

    Only for originals of topics with several partitions. The new row has the timer's offset; it covers what has an
    origin below that, hence never the timer itself.
    """
    replaces = entries.column("replace")
    if not pc.any(replaces, min_count=0).as_py():
        return entries
    several = [topic for topic, count in partitions.items() if count > 1]
    keyless = pc.and_(replaces, pc.is_null(entries.column("key")))
    rows = entries.filter(pc.and_(keyless, pc.is_in(entries.column("topic"), pa.array(several, pa.string()))))
    if not len(rows):
        return entries
    constants = {"at": AT_MIN, "kind": int(Kind.CANCEL), "replace": False, "attempt": 0, "rolls": 0}
    for i, field in enumerate(entries.schema):
        if field.name in constants:
            rows = rows.set_column(i, field, pa.array([constants[field.name]] * len(rows), field.type))
        elif field.name == "due":
            rows = rows.set_column(i, field, rows.column("ts"))
        elif field.name in ("target", "target_partition", "key", "value", "headers", "reason"):
            rows = rows.set_column(i, field, pa.nulls(len(rows), field.type))
    return pa.concat_tables([entries, rows])


def to_forward(outgoing: Outgoing, partitions: Mapping[str, int]) -> Rows:
    """The cancels that have to be sent on: without a key, not sent on already, in a topic with other partitions."""
    cancels = outgoing.kind == Kind.CANCEL
    if not cancels.any():
        return np.empty(0, np.intp)
    several = np.array([partitions[topic] > 1 for topic, _ in outgoing.sources])
    keyless = pc.is_null(outgoing.rows.payload.column("key")).to_numpy(zero_copy_only=False)
    ids = np.flatnonzero(cancels & keyless & several[outgoing.rows.source])
    if len(ids):
        own = outgoing.headers(ids).lists()
        ids = ids[[all(name != h.COPY_FORWARDED for name, _ in headers) for headers in own]]
    return ids


def records_of(outgoing: Outgoing, ids: Rows, partitions: Mapping[str, int]) -> int:
    """How many records `forwards` yields."""
    others = np.array([partitions[topic] - 1 for topic, _ in outgoing.sources], dtype=np.int64)
    return int(others[outgoing.rows.source[ids]].sum())


def forwards(outgoing: Outgoing, ids: Rows, partitions: Mapping[str, int], sizes: Int64s) -> Iterator[Batch]:
    """The cancels `ids` for every partition but their own."""
    names = [outgoing.sources.name(source) for source in range(len(outgoing.sources))]
    for topic in dict.fromkeys(topic for topic, _ in names):
        partition_of = np.array([partition if name == topic else -1 for name, partition in names])
        here = partition_of[outgoing.rows.source[ids]]
        for partition in range(partitions[topic]):
            mine = ids[(here >= 0) & (here != partition)]
            for part in pieces(mine, sizes):
                chosen = mine[part]
                sources, offsets = outgoing.rows.source[chosen].tolist(), outgoing.rows.offset[chosen].tolist()
                places = [(*names[source], offset) for source, offset in zip(sources, offsets, strict=True)]
                froms = [h.origin_text(name, came_to, offset) for name, came_to, offset in places]
                cancelled = zip(outgoing.column("id", chosen), froms, strict=True)
                nothing: list[bytes | None] = [None] * len(chosen)
                yield Batch(
                    topic=topic,
                    ids=chosen,
                    values=nothing,
                    keys=nothing,
                    headers=[list(h.cancel_headers(id, forwarded=origin)) for id, origin in cancelled],
                    partitions=[partition] * len(chosen),
                )
