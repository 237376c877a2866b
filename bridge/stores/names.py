"""Partitions by name and by number.

Files, Spark and Kafka's metadata say (topic, partition). Within one process partitions have numbers, in the order of
(topic, partition), so that a row is known by one integer: its partition's number above its offset.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from timerstore.errors import Misuse
from timerstore.rows.entry import ENTRY
from timerstore.rows.position import OFFSET_MAX, Int64s

SourceName = tuple[str, int]
"""(topic, partition)."""

Offsets = Mapping[SourceName, int]
"""An offset of each partition."""

NamedPosition = tuple[int, str, int, int]
"""Where a message stands among those of all partitions: (at in ms, topic, partition, offset)."""

PlainPosition = tuple[int, int]
"""P as Kafka's metadata has it: (at in ms, offset)."""

NamedStep = tuple[int, int, int]
"""A frozen step as Kafka's metadata has it: (O, at in ms and offset of P)."""

NAMED_ENTRY: Final = pa.schema([pa.field("topic", pa.string()), pa.field("partition", pa.int32()), *ENTRY])
"""Every column of a record of a delay topic, decoded: its partition, and its entry in that partition's store."""

OFFSET_BITS: Final = OFFSET_MAX.bit_length()
SOURCE_MAX: Final = (1 << 15) - 1


def texts_of(names: Iterable[SourceName]) -> list[str]:
    """The partitions as texts, in order."""
    return [f"{topic}/{partition}" for topic, partition in sorted(names)]


class Sources:
    """The sorted list of partitions that numbers refer to."""

    def __init__(self, names: Iterable[SourceName]) -> None:
        self._names: tuple[SourceName, ...] = tuple(sorted(set(names)))
        if len(self._names) > SOURCE_MAX + 1:
            raise Misuse(f"{len(self._names)} partitions of delay topics; at most {SOURCE_MAX + 1} fit", code="DB-7004")
        self._index = {name: i for i, name in enumerate(self._names)}
        self._tables = {topic: self._table(topic) for topic in {topic for topic, _ in self._names}}

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[SourceName]:
        return iter(self._names)

    def __contains__(self, name: SourceName) -> bool:
        return name in self._index

    def name(self, source: int) -> SourceName:
        return self._names[source]

    def index(self, topic: str, partition: int) -> int:
        """The number of (topic, partition); KeyError for an unknown partition."""
        return self._index[(topic, partition)]

    def of_columns(self, topic: pa.ChunkedArray | pa.Array, partition: pa.ChunkedArray | pa.Array) -> Int64s:
        """Numbers (int64[n]) of a topic and a partition column; -1 for an unknown partition."""
        column = topic.combine_chunks() if isinstance(topic, pa.ChunkedArray) else topic
        encoded = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
        topics = encoded.dictionary.to_pylist()
        partitions = (
            partition.to_numpy(zero_copy_only=False) if isinstance(partition, pa.Array) else partition.to_numpy()
        )
        codes = encoded.indices.to_numpy(zero_copy_only=False)
        result = np.full(len(codes), -1, dtype=np.int64)
        for code, name in enumerate(topics):
            table = self._tables.get(name)
            if table is None:
                continue
            mask = codes == code if len(topics) > 1 else slice(None)
            wanted = partitions[mask]
            in_range = (wanted >= 0) & (wanted < len(table))
            result[mask] = np.where(in_range, table[np.where(in_range, wanted, 0)], -1)
        return result

    def _table(self, topic: str) -> Int64s:
        """Number by partition of one topic, -1 in gaps."""
        partitions = [p for t, p in self._names if t == topic]
        table = np.full(max(partitions) + 1, -1, dtype=np.int64)
        for partition in partitions:
            table[partition] = self._index[(topic, partition)]
        return table


def pack(source: npt.NDArray[np.int32] | Int64s | int, offset: Int64s) -> Int64s:
    """Keys of rows: numbers of partitions above offsets."""
    return (np.asarray(source, dtype=np.int64) << OFFSET_BITS) | offset


def sources_of(keys: Int64s) -> Int64s:
    """Numbers of the partitions of keys."""
    return keys >> OFFSET_BITS


def offsets_of(keys: Int64s) -> Int64s:
    """Offsets of keys."""
    return keys & OFFSET_MAX


def key_of(source: int, offset: int) -> int:
    """The key of one row."""
    return (source << OFFSET_BITS) | offset
