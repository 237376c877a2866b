"""Cancels without a key: what they name may be in any partition, so they are sent on to all the others.

A producer sends a cancel with the key of its target, and the partitioner brings both together. Without a key they need
not meet. The store does what it can in the partition that the cancel came to; the transaction that finishes the cancel
then writes it to every other partition of the delay topic, with a header that says that it need not go any further.

A timer without a key that replaces another is two entries from the beginning: itself, due when it is due, and a cancel
at the same offset, which is due at once. So what it replaces in other partitions is gone before that is due.

Which partitions there are is asked when a cancel is sent on, since some may have been added that this bridge does not
read yet, and producers may know of them earlier than its group does. What a cancel covers was written before it, hence
to a partition that existed when it was read, and so is in the answer; in a partition that is added after the answer,
everything is later than the cancel. (A broker that is asked may itself lag behind the controller, by milliseconds.)

In an order across partitions Kafka promises nothing: what is sent without a key and with the same id *while* a cancel
is on its way (some tenths of a second) may be cancelled by it. With a key nothing of this applies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from bridge.delivery.plan.due_rows import Batch, Outgoing, pieces
from bridge.errors import EnvironmentFailure
from bridge.wire import headers as h
from timerstore.rows.entry import Kind
from timerstore.rows.position import Int64s
from timerstore.rows.sources import SourceName

FORWARDED_BYTES: Final = 400
"""Of a record that carries a cancel on, beside the id."""

Rows = npt.NDArray[np.intp]


class Forwards:
    """The cancels among rows that have to be sent on: those without a key, not sent on already. `records` is how many
    records that makes, `bytes` about how large they are; `unknown` why it cannot be told where they must go, by source.
    """

    def __init__(self, outgoing: Outgoing, count: Callable[[str], int]) -> None:
        """`count` asks how many partitions a topic has now, or raises EnvironmentFailure."""
        self.records = self.bytes = 0
        self.unknown: dict[int, str] = {}
        self._outgoing = outgoing
        self._partitions: dict[str, int] = {}
        self._rows = self._find()
        if len(self._rows):
            known = Counter(topic for topic, _ in outgoing.sources)
            source = outgoing.rows.source[self._rows]
            topic_of = {each: outgoing.sources.name(each)[0] for each in np.unique(source).tolist()}
            for topic in set(topic_of.values()):
                try:
                    self._partitions[topic] = max(known[topic], count(topic))
                except EnvironmentFailure as failure:
                    self.unknown |= {each: failure.message for each, name in topic_of.items() if name == topic}
            others = [self._partitions.get(topic, 1) - 1 for topic, _ in outgoing.sources]
            self.records = int(np.array(others, dtype=np.int64)[source].sum())
            self.bytes = FORWARDED_BYTES * self.records

    def places(self) -> dict[int, set[SourceName]]:
        """Where the cancels of each source (by index) go to."""
        sources = self._outgoing.sources
        return {
            source: {(topic, partition) for partition in range(self._partitions.get(topic, 0))} - {(topic, own)}
            for source in np.unique(self._outgoing.rows.source[self._rows]).tolist()
            for topic, own in (sources.name(source),)
        }

    def batches(self, sizes: Int64s) -> Iterator[Batch]:
        """The cancels for every partition but their own; `sizes` int64[n] are of the rows they come from."""
        if not len(self._rows):
            return
        source, offset = self._outgoing.rows.source, self._outgoing.rows.offset
        names = list(self._outgoing.sources)
        for topic, partitions in self._partitions.items():
            partition_of = np.array([partition if name == topic else -1 for name, partition in names])
            here = partition_of[source[self._rows]]
            for partition in range(partitions):
                mine = self._rows[(here >= 0) & (here != partition)]
                for part in pieces(mine, sizes):
                    chosen = mine[part]
                    places = zip(here[np.searchsorted(self._rows, chosen)], offset[chosen], strict=True)
                    origins = [h.origin_text(topic, int(came_to), int(at)) for came_to, at in places]
                    ids = self._outgoing.column("id", chosen)
                    nothing: list[bytes | None] = [None] * len(chosen)
                    yield Batch(
                        topic=topic,
                        ids=chosen,
                        values=nothing,
                        keys=nothing,
                        headers=[
                            list(h.cancel_headers(id, forwarded=origin))
                            for id, origin in zip(ids, origins, strict=True)
                        ],
                        partitions=[partition] * len(chosen),
                    )

    def _find(self) -> Rows:
        cancels = self._outgoing.kind == Kind.CANCEL
        if not cancels.any():
            return np.empty(0, np.intp)
        keyless = pc.is_null(self._outgoing.rows.payload.column("key")).to_numpy(zero_copy_only=False)
        rows = np.flatnonzero(cancels & keyless)
        if len(rows):
            own = self._outgoing.headers(rows).lists()
            rows = rows[[all(name != h.COPY_FORWARDED for name, _ in headers) for headers in own]]
        return rows
