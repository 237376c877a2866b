"""Forwarded commands: cancels and moves whose messages are in other partitions.

Without a key, the messages of an id may be in any partition: a cancel by id is forwarded to all other partitions. A
cancel by origin names its partition: it is forwarded to that one, if the bridge reads it, and does nothing otherwise.

With the key of its target, a cancel reaches the same partition. Without a key it need not: the store applies it in its
own partition, and the transaction that finishes it writes it to every other partition of the delay topic, with a header
that ends the forwarding.

A timer without a key that replaces another is two entries from the beginning: the timer with its due time, and a cancel
at the same offset, which is due at once. So the replaced timers in other partitions are cancelled before it is due.

The number of partitions is looked up when a cancel is forwarded: producers may know of a new partition earlier than the
bridge's group does. Messages that a cancel covers were written before it, hence to a partition that existed when it was
read, and is in the answer. In a partition added after the answer, all messages are later than the cancel. (A broker may
itself lag behind the controller, by milliseconds.)

Kafka promises no order across partitions: a record without a key and with the same id that is sent *during* the
forwarding of a cancel (some tenths of a second) may be cancelled by it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import numpy as np

from bridge.delivery.plan.due_rows import Batch, DueRows, Ids, Record, batches_by_topic, chunks, integers
from bridge.errors import EnvironmentFailure
from bridge.stores.names import SourceName
from bridge.wire import headers as h
from bridge.wire.commands import cancel_headers, key_sent_on, sent_on
from timerstore.cancels.cancels import NO_ORIGIN
from timerstore.rows.entry import DECIDED, Kind

FORWARDED_BYTES: Final = 400
"""Size of a forwarded cancel without the id."""


class Forwards:
    """The cancels `ids` among rows that are forwarded: those without a key, and those by an origin elsewhere, unless
    already forwarded. `records`: the number of forwarded records; `bytes`: their estimated size; `unknown`: by source,
    the reason why the partitions are unknown."""

    def __init__(self, rows: DueRows, count: Callable[[str], int]) -> None:
        """`count` returns the present number of a topic's partitions, or raises EnvironmentFailure."""
        cancels, origins, self._said = _commands_elsewhere(rows)
        self._keyless = cancels[[origin is None for origin in origins]]
        self.records = self.bytes = 0
        self.unknown: dict[int, str] = {}
        self._rows = rows
        self._partitions: dict[str, int] = {}
        self._named: dict[int, h.Origins] = {}
        """Origins elsewhere, by row."""
        if len(cancels):
            counts = Counter(topic for topic, _ in rows.sources)
            source = rows.source[cancels]
            named = [None if origin is None else origin[0] for origin in origins]
            wanted = [name or rows.sources.name(n)[0] for name, n in zip(named, source.tolist(), strict=True)]
            for topic in set(wanted) & counts.keys():
                try:
                    self._partitions[topic] = max(counts[topic], count(topic))
                except EnvironmentFailure as failure:
                    asking = (n for n, name in zip(source.tolist(), wanted, strict=True) if name == topic)
                    self.unknown |= dict.fromkeys(asking, failure.message)
            for row, origin in zip(cancels.tolist(), origins, strict=True):
                if origin is not None and origin[1] < self._partitions.get(origin[0], 0):
                    self._named[row] = origin
            others = [self._partitions.get(topic, 1) - 1 for topic, _ in rows.sources]
            self.records = int(np.array(others, dtype=np.int64)[rows.source[self._keyless]].sum()) + len(self._named)
            self.bytes = FORWARDED_BYTES * self.records
        self.ids: Ids = np.union1d(self._keyless, np.array(list(self._named), dtype=np.intp))

    @property
    def topics(self) -> set[str]:
        """The destination topics."""
        return set(self._partitions)

    def places(self) -> dict[int, set[SourceName]]:
        """The destinations of each source's cancels, by the source's index."""
        result = {
            source: {(topic, partition) for partition in range(self._partitions.get(topic, 0))} - {(topic, own)}
            for source in np.unique(self._rows.source[self._keyless]).tolist()
            for topic, own in (self._rows.sources.name(source),)
        }
        for row, (topic, partition, _) in self._named.items():
            result.setdefault(int(self._rows.source[row]), set()).add((topic, partition))
        return result

    def batches(self) -> Iterator[Batch]:
        """The cancels for every partition but their own, or for the partition of their origin."""
        rows = self._rows
        for chunk in chunks(rows.sizes[self._keyless]):
            chosen = self._keyless[chunk]
            topics, partitions = rows.places(chosen)
            origins = map(h.origin_text, topics, partitions, rows.offset[chosen].tolist())
            cancelled = zip(rows.column("id", chosen), origins, strict=True)
            records: list[Record] = [
                (None, None, self._headers(row, id, origin))
                for row, (id, origin) in zip(chosen.tolist(), cancelled, strict=True)
            ]
            counts = [self._partitions.get(topic, 0) for topic in topics]
            for partition in range(max(counts)):
                mine = [i for i, own in enumerate(partitions) if partition != own and partition < counts[i]]
                yield from batches_by_topic(
                    chosen[mine], [topics[i] for i in mine], [partition] * len(mine), [records[i] for i in mine]
                )
        for row, (topic, partition, _) in self._named.items():
            yield Batch(
                topic=topic,
                ids=np.array([row], dtype=np.intp),
                values=[None],
                keys=[key_sent_on(key) for key in self._rows.column("key", np.array([row]))],
                headers=[self._headers(row, None, h.origin_text(*self._place(row)))],
                partitions=[partition],
            )

    def _headers(self, row: int, id: str | None, place: str) -> h.Headers:
        """The headers of a forwarded command; the cancel of a replace (`id`) has no own headers."""
        said = self._said.get(row, {})
        if not said.keys() & set(h.COMMANDS):
            return list(cancel_headers(id or "", forwarded=place))
        if row in self._named:  # in the canonical form: the receiver compares text
            name = h.CANCEL_ORIGIN if h.CANCEL_ORIGIN in said else h.MOVE_ORIGIN
            said = {**said, name: h.origins_text(*self._named[row]).encode()}
        is_move = self._rows.kind[row] == Kind.MOVE.value
        return sent_on(
            said, until_ms=self._rows.column("due", np.array([row]))[0] if is_move else None, forwarded=place
        )

    def _place(self, row: int) -> tuple[str, int, int]:
        return *self._rows.sources.name(int(self._rows.source[row])), int(self._rows.offset[row])


def _commands_elsewhere(rows: DueRows) -> tuple[Ids, list[h.Origins | None], dict[int, Mapping[str, bytes | None]]]:
    """Commands to forward, without a key or by origins of other partitions; those origins; and the headers by row."""
    cancels = np.isin(rows.kind, (Kind.CANCEL, *DECIDED))
    if not cancels.any():
        return np.empty(0, np.intp), [], {}
    by_origin = rows.payload.column("id").is_null().to_numpy(zero_copy_only=False)
    origin = integers(rows.payload.column("origin"), 0)
    ids = np.flatnonzero(cancels & np.where(by_origin, origin == NO_ORIGIN, rows.keyless()))
    if not len(ids):
        return ids, [], {}
    own = [dict(headers) for headers in rows.headers(ids).lists()]
    mine = [h.COPY_FORWARDED not in headers for headers in own]
    said: dict[int, Mapping[str, bytes | None]] = {
        row: each for row, each, is_mine in zip(ids.tolist(), own, mine, strict=True) if is_mine
    }
    names = [_origins_of(each) if by_origin[row] else None for row, each in said.items()]
    return ids[mine], names, said


def _origins_of(said: Mapping[str, bytes | None]) -> h.Origins:
    """The origins of a command by origin, in headers that decoding has already accepted."""
    return h.parse_origins(h.text_of(said[h.CANCEL_ORIGIN if h.CANCEL_ORIGIN in said else h.MOVE_ORIGIN]))
