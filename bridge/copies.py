"""Copies: records that the bridge writes back into the delay topic, into the partition they came from (rolls; retries).

A roll is an entry whose due time lies beyond the roll window: it is written again, with its absolute due time and its
origin's offset, so that a year's delay never depends on a year's retention.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from bridge import headers as h
from bridge.outgoing import Batch, Outgoing, pieces
from timerstore.position import Int64s


def rolls(outgoing: Outgoing, ids: npt.NDArray[np.intp], sizes: Int64s) -> Iterator[Batch]:
    """Copies of the rows `ids`, one roll further."""
    for part in pieces(ids, sizes):
        chosen = ids[part]
        names = ("value", "key", "target", "target_partition", "id", "origin", "due", "rolls", "attempt")
        column = {name: outgoing.column(name, chosen) for name in names}
        sources = outgoing.rows.source[chosen].tolist()
        headers = []
        for i, own in enumerate(outgoing.headers(chosen).lists()):
            partition = column["target_partition"][i]
            control = h.copy_headers(
                origin=int(column["origin"][i]),
                due_ms=int(column["due"][i]),
                rolls=int(column["rolls"][i]) + 1,
                attempt=int(column["attempt"][i]),
                target=column["target"][i] or outgoing.columns.defaults[sources[i]],
                partition=None if partition is None or partition != partition else int(partition),  # noqa: PLR0124 - NaN: null
                id=column["id"][i],
            )
            headers.append([*own, *control])
        by_topic = [outgoing.sources.name(source) for source in sources]
        for topic in dict.fromkeys(name for name, _ in by_topic):
            mine = [i for i, (name, _) in enumerate(by_topic) if name == topic]
            yield Batch(
                topic=topic,
                ids=chosen[mine],
                values=[column["value"][i] for i in mine],
                keys=[column["key"][i] for i in mine],
                headers=[headers[i] for i in mine],
                partitions=[by_topic[i][1] for i in mine],
            )
