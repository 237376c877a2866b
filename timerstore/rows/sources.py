"""Sources: the partitions of the delay topics, numbered in the order of (topic, partition).

The number is valid within one opening of a store: files, Spark and Kafka's metadata always say (topic, partition), so
that a topic or a partition more tomorrow moves no position relative to another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa

from timerstore.errors import Misuse
from timerstore.rows.position import ORIGIN, SOURCE_MAX, Int64s, Position, Progress, Step

SourceName = tuple[str, int]
"""(topic, partition)."""

NamedPosition = tuple[int, str, int, int]
"""A position as files and Kafka's metadata hold it: (at in ms, topic, partition, offset)."""

NamedState = tuple[int, NamedPosition | None]
"""(O, P) of a source as files and Kafka's metadata hold it."""

NamedStep = tuple[int, int, int]
"""A frozen step of a source as files and Kafka's metadata hold it: (O, at in ms and offset of P). P is a position of
the source itself."""

Cuts = tuple[tuple[int, int], ...]
"""Where the log of a source was cut, as files and Kafka's metadata hold it: (number, offset), both of which rise. Cuts
above a later one are left out: what lies above that is another's anyway."""


def unseen_cut(cuts: Cuts, seen: int) -> int | None:
    """From which offset on the log may be another than the one that was read when `seen` was the last cut (0: none had
    been); None where nothing was cut since."""
    last = cuts[-1][0] if cuts else 0
    if seen == last:
        return None
    return next((offset for number, offset in cuts if number > seen), 0)


def named_in(committed: Mapping[SourceName, NamedState]) -> list[SourceName]:
    """The sources that committed states name: a P may be a position of another source."""
    positions = [position for _, position in committed.values() if position is not None]
    return [*committed, *((topic, partition) for _, topic, partition, _ in positions)]


class Sources:
    """The sorted list of (topic, partition) that positions refer to by index."""

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
        """The source of (topic, partition); KeyError when it is none of ours."""
        return self._index[(topic, partition)]

    def position(self, named: NamedPosition | None) -> Position:
        """The position that files and metadata name; None is the origin."""
        if named is None:
            return ORIGIN
        at_ms, topic, partition, offset = named
        return Position(at_ms, self.index(topic, partition), offset)

    def progress(
        self, name: SourceName, offset: int, position: NamedPosition | None, frozen: Sequence[NamedStep]
    ) -> Progress:
        """The committed state of a source as files and metadata name it."""
        source = self.index(*name)
        steps = tuple(Step(end, Position(at_ms, source, o)) for end, at_ms, o in frozen)
        return Progress(offset, self.position(position), steps)

    @staticmethod
    def named_steps(frozen: Sequence[Step]) -> tuple[NamedStep, ...]:
        """How files and metadata name frozen steps."""
        return tuple((step.offset, step.position.at_ms, step.position.offset) for step in frozen)

    def named(self, position: Position) -> NamedPosition | None:
        """How files and metadata name the position of an entry."""
        if position == ORIGIN:
            return None
        topic, partition = self.name(position.source)
        return position.at_ms, topic, partition, position.offset

    def of_columns(self, topic: pa.ChunkedArray | pa.Array, partition: pa.ChunkedArray | pa.Array) -> Int64s:
        """Sources (int64[n]) of a topic and a partition column; -1 where the partition is none of ours."""
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
            known = (wanted >= 0) & (wanted < len(table))
            result[mask] = np.where(known, table[np.where(known, wanted, 0)], -1)
        return result

    def columns(self, source: Int64s) -> tuple[pa.DictionaryArray, pa.Array]:
        """The topic (dictionary of strings) and partition (int32) columns of int64 sources."""
        topics = sorted({topic for topic, _ in self._names})
        number = {topic: i for i, topic in enumerate(topics)}
        topic_of = np.array([number[topic] for topic, _ in self._names], dtype=np.int32)
        partition_of = np.array([partition for _, partition in self._names], dtype=np.int32)
        codes = pa.array(topic_of[source], type=pa.int32())
        return pa.DictionaryArray.from_arrays(codes, pa.array(topics, type=pa.string())), pa.array(partition_of[source])

    def _table(self, topic: str) -> Int64s:
        """Source by partition of one topic, -1 in gaps."""
        partitions = [p for t, p in self._names if t == topic]
        table = np.full(max(partitions) + 1, -1, dtype=np.int64)
        for partition in partitions:
            table[partition] = self._index[(topic, partition)]
        return table
