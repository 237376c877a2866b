"""Cancels without a key: the messages that they name may be in any partition, so they are forwarded to all the others.

With the key of its target, a cancel reaches the same partition. Without a key it need not: the store applies it in its
own partition, and the transaction that finishes it writes it to every other partition of the delay topic, with a header
that ends the forwarding.

A timer without a key that replaces another is two entries from the beginning: itself, due when it is due, and a cancel
at the same offset, which is due at once. So what it replaces in other partitions is cancelled before it is due.

The number of partitions is looked up when a cancel is forwarded: producers may know of a new partition earlier than the
bridge's group does. What a cancel covers was written before it, hence to a partition that existed when it was read, and
is in the answer; in a partition added after the answer, everything is later than the cancel. (A broker may itself lag
behind the controller, by milliseconds.)

Kafka promises no order across partitions: a record without a key and with the same id that is sent *while* a cancel is
being forwarded (some tenths of a second) may be cancelled by it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np

from bridge.delivery.plan.due_rows import Batch, DueRows, Ids, Record, batches_by_topic, chunks
from bridge.errors import EnvironmentFailure
from bridge.wire import headers as h
from timerstore.rows.entry import Kind
from timerstore.rows.sources import SourceName

FORWARDED_BYTES: Final = 400
"""Size of a forwarded cancel, beside the id."""


class Forwards:
    """The cancels `ids` among rows that are forwarded: those without a key, not forwarded already. `records` is how
    many records that makes, `bytes` about how large they are; `unknown`, by source, why the partitions are not known.
    """

    def __init__(self, rows: DueRows, count: Callable[[str], int]) -> None:
        """`count` asks how many partitions a topic has now, or raises EnvironmentFailure."""
        self.ids = _keyless_cancels(rows)
        self.records = self.bytes = 0
        self.unknown: dict[int, str] = {}
        self._rows = rows
        self._partitions: dict[str, int] = {}
        if len(self.ids):
            known = Counter(topic for topic, _ in rows.sources)
            source = rows.source[self.ids]
            topic_of = {each: rows.sources.name(each)[0] for each in np.unique(source).tolist()}
            for topic in set(topic_of.values()):
                try:
                    self._partitions[topic] = max(known[topic], count(topic))
                except EnvironmentFailure as failure:
                    self.unknown |= {each: failure.message for each, name in topic_of.items() if name == topic}
            others = [self._partitions.get(topic, 1) - 1 for topic, _ in rows.sources]
            self.records = int(np.array(others, dtype=np.int64)[source].sum())
            self.bytes = FORWARDED_BYTES * self.records

    def places(self) -> dict[int, set[SourceName]]:
        """Where the cancels of each source (by index) go to."""
        return {
            source: {(topic, partition) for partition in range(self._partitions.get(topic, 0))} - {(topic, own)}
            for source in np.unique(self._rows.source[self.ids]).tolist()
            for topic, own in (self._rows.sources.name(source),)
        }

    def batches(self) -> Iterator[Batch]:
        """The cancels for every partition but their own."""
        rows = self._rows
        for chunk in chunks(rows.sizes[self.ids]):
            chosen = self.ids[chunk]
            topics, partitions = rows.places(chosen)
            origins = map(h.origin_text, topics, partitions, rows.offset[chosen].tolist())
            cancelled = zip(rows.column("id", chosen), origins, strict=True)
            records: list[Record] = [
                (None, None, list(h.cancel_headers(id, forwarded=origin))) for id, origin in cancelled
            ]
            counts = [self._partitions.get(topic, 0) for topic in topics]
            for partition in range(max(counts)):
                mine = [i for i, own in enumerate(partitions) if partition != own and partition < counts[i]]
                yield from batches_by_topic(
                    chosen[mine], [topics[i] for i in mine], [partition] * len(mine), [records[i] for i in mine]
                )


def _keyless_cancels(rows: DueRows) -> Ids:
    """Cancels without a key that were not forwarded already."""
    cancels = rows.kind == Kind.CANCEL.value
    if not cancels.any():
        return np.empty(0, np.intp)
    ids = np.flatnonzero(cancels & rows.keyless())
    if len(ids):
        own = rows.headers(ids).lists()
        ids = ids[[all(name != h.COPY_FORWARDED for name, _ in headers) for headers in own]]
    return ids
