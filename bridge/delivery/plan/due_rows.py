"""Rows of the timer store -> arguments of produce. Columns in, columns out; pure.

`TargetRows` are the rows for one topic, in the order of position. Their columns become Python lists by way of numpy
object arrays (several times faster than one conversion a value), some megabytes at a time, so that a window of large
records is not in memory twice."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import repeat
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from bridge.delivery.plan.backoff import IN_DOUBT_MS
from bridge.stores.loan import Rows
from bridge.stores.names import Sources, pack
from bridge.wire import headers as h
from bridge.wire.headers import Headers
from bridge.wire.reasons import RejectReason
from timerstore.rows.position import OFFSET_MAX, Bools, Int64s

Ids = npt.NDArray[np.intp]
"""Indices of rows, in the order of position."""
Record = tuple[bytes | None, bytes | None, Headers]
"""Value, key and headers."""

BATCH_BYTES_MAX: Final = 4 << 20
"""Payload bytes that exist as Python objects at one time."""
BATCH_ROWS_MAX: Final = 5_000
"""Small enough that the client's own thread starts sending during the conversion of the rest."""
BATCH_BYTES: Final = 61
"""Size of a batch without its records."""
RECORD_OVERHEAD_BYTES: Final = 130
"""Upper bound for a batch of one record (61 + up to 21 bytes), with the framing of the bridge's two headers."""
VARINT_LIMITS: Final = (63, 8_191, 1_048_575, 134_217_727)
"""The largest lengths whose zigzag varints have one byte, two, three and four."""
BATCHED_BYTES: Final = 27 + (1 + len(h.ORIGIN) + 2) + (1 + len(h.DUE) + 1)
"""Upper bound for one delivery among others, without key, value, own headers and the text of the bridge's two: lengths
of record, key and value (5 each), attributes (1), differences of timestamp (5) and offset (3), number of headers
(3)."""

TICK_BYTES: Final = (1 + len(h.TICK) + 1) + 10 + 1
"""Upper bound of the header with a tick's number."""

_DELIVERED: Final = ("key", "value", "origin", "due")
_BATCH_COLUMNS: Final = ("ids", "values", "keys", "origins", "dues", "ticks", "headers", "own", "partitions")
_STRING: Final = pa.string()
_EMPTY: Final = pa.scalar("")
_ZERO: Final = np.zeros(1, dtype=np.int64)


@dataclass(slots=True)
class OwnHeaders:
    """Headers of n records: those of record i are pairs[starts[i]:ends[i]]. Tens of thousands of short-lived lists
    would keep the garbage collector busier than the client.
    """

    pairs: Headers
    starts: list[int]
    ends: list[int]

    def __getitem__(self, records: slice) -> OwnHeaders:
        return OwnHeaders(self.pairs, self.starts[records], self.ends[records])

    def lists(self) -> list[Headers]:
        return [self.pairs[a:b] for a, b in zip(self.starts, self.ends, strict=True)]


@dataclass(slots=True, kw_only=True)
class Batch:
    """Arguments of n produce calls to `topic`, each list n long; `ids` int64[n] are indices of the taken rows.

    The headers are either the records' `own` ones, if any, followed by `origins` and `dues` (text of the two delivered
    headers) and, for recurring messages, `ticks` (text, or None); or complete `headers`. `partitions` None: the
    partitioner's choice."""

    topic: str
    ids: Ids
    values: list[bytes | None]
    keys: list[bytes | None]
    origins: list[str] | None = None
    dues: list[str] | None = None
    ticks: list[str | None] | None = None
    headers: list[Headers] | None = None
    own: OwnHeaders | None = None
    partitions: list[int] | None = None
    alone: bool = False
    """The broker has the batch before the next one is sent, so that the client cannot merge them."""
    unreadable: Mapping[str, int] = field(default_factory=dict)
    """Plain dead letters, by the reason of the plan (dead_letters.py)."""

    def __len__(self) -> int:
        return len(self.values)

    @property
    def is_plain(self) -> bool:
        """Whether all its records have only the two delivered headers, and the partitioner's choice of partition."""
        return all(each is None for each in (self.headers, self.own, self.ticks, self.partitions))

    def all_headers(self) -> Iterable[Any]:
        """Each record's headers, made one at a time: see `OwnHeaders`."""
        if self.headers is not None:
            return self.headers
        origins = zip(repeat(h.ORIGIN), self.origins or (), strict=False)
        dues = zip(repeat(h.DUE), self.dues or (), strict=False)
        if self.ticks is not None:
            return self._headers_of_ticks(self.ticks, origins, dues)
        if self.own is None:
            return map(list, zip(origins, dues, strict=True))
        pairs = self.own.pairs
        bounds = zip(self.own.starts, self.own.ends, origins, dues, strict=True)
        return ([*pairs[start:end], origin, due] for start, end, origin, due in bounds)

    def _headers_of_ticks(self, ticks: list[str | None], *delivered: Iterator[tuple[str, str]]) -> Iterator[Any]:
        own = [[]] * len(self) if self.own is None else self.own.lists()
        for mine, origin, due, tick in zip(own, *delivered, ticks, strict=True):
            yield [*mine, origin, due, *([(h.TICK, tick)] if tick is not None else [])]

    def sent(self, first: int) -> Sent:
        """The batch's destination, with its rows numbered from `first` in the transaction."""
        return Sent(first=first, topic=self.topic, ids=self.ids, partitions=self.partitions)

    def part(self, start: int, end: int) -> Batch:
        if start == 0 and end == len(self):
            return self
        columns = {name: getattr(self, name) for name in _BATCH_COLUMNS}
        parts: dict[str, Any] = {name: each[start:end] for name, each in columns.items() if each is not None}
        return replace(self, **parts, unreadable={} if start else self.unreadable)  # counted once


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """The destination of a batch: the rows `first` + `ids` of the transaction; `partitions` as in `Batch`."""

    first: int
    topic: str
    ids: Ids
    partitions: list[int] | None

    def places(self) -> set[tuple[str, int]]:
        """Topic and partitions; -1 for a choice of the partitioner."""
        return {(self.topic, partition) for partition in self.partitions or (-1,)}


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRows:
    """Rows for one topic: `ids` are their indices in `DueRows`, in the order of position."""

    topic: str
    ids: Ids
    partitions: npt.NDArray[np.int32] | None = None
    """Partition of each row, -1: the partitioner's choice. None: the rows' own partitions."""
    chunk_bytes: int | None = None
    """See `SizeLimits.chunk_bytes`."""


class SourceColumns:
    """Facts about a store's sources, as columns; made once, since each takes tens of microseconds."""

    def __init__(self, sources: Sources, default_targets: Mapping[str, str | None]) -> None:
        self.sources = sources
        self.defaults: list[str | None] = [default_targets.get(topic) for topic, _ in sources]
        self.default_column = pa.array(self.defaults, type=pa.string())
        self.prefixes = pa.array([f"{topic}/{partition}/" for topic, partition in sources], type=pa.string())
        self.prefix_bytes: Int64s = integers(pc.binary_length(self.prefixes), 0).astype(np.int64)
        self.default_bytes: Int64s = np.array([len(name or "") for name in self.defaults], dtype=np.int64)
        # Twice: in the origin header, and in a copy's or dead letter's headers.
        self.name_bytes: Int64s = np.array([2 * len(topic) + 60 for topic, _ in sources], dtype=np.int64)


class DueRows:
    """Rows from the store, with delivery's facts about them in vectors of n."""

    def __init__(self, rows: Rows, columns: SourceColumns) -> None:
        payload = rows.payload
        self.payload = payload
        self.at = rows.at
        self.source = rows.source
        self.offset = rows.offset
        self.columns = columns
        self.sources = columns.sources
        self.keys: Int64s = pack(rows.source.astype(np.int64), rows.offset)
        """Their (source, offset), packed as in the store."""
        self.kind: npt.NDArray[np.int8] = payload.column("kind").to_numpy(zero_copy_only=False)
        self.due: Int64s = payload.column("due").to_numpy(zero_copy_only=False)
        self.attempt: npt.NDArray[np.int16] = payload.column("attempt").to_numpy(zero_copy_only=False)
        self.tick: npt.NDArray[np.int32] = payload.column("tick").to_numpy(zero_copy_only=False)
        lists = payload.column("headers")
        counts = integers(pc.list_value_length(lists), 0)
        self._header_bounds: Int64s = np.concatenate((_ZERO, np.cumsum(counts, dtype=np.int64)))
        self._header_keys, self._header_values = lists.flatten().flatten()

    def __len__(self) -> int:
        return len(self.at)

    def redue(self, due_ms: Mapping[int, int]) -> None:
        """Give rows new due times, by row: one of several missed ticks stands for all."""
        self.due = self.due.copy()
        self.due[list(due_ms)] = list(due_ms.values())
        index = self.payload.schema.get_field_index("due")
        self.payload = self.payload.set_column(index, self.payload.schema.field(index), pa.array(self.due))

    def column(self, name: str, ids: Ids | None = None) -> list[Any]:
        """A payload column, or its values for some rows, as Python objects."""
        column = self.payload.column(name)
        return _objects(column if ids is None else column.take(pa.array(ids)))

    def places(self, ids: Ids) -> tuple[list[str], list[int]]:
        """The rows' own topics and partitions."""
        names = [self.sources.name(source) for source in self.source[ids].tolist()]
        return [topic for topic, _ in names], [partition for _, partition in names]

    def decided_ms(self, ids: Ids, now_ms: int) -> Int64s:
        """For each row, the time after which an answer of the brokers supports a lasting verdict, int64[m]: its due
        time, its timestamp, or a second before it came up; the latest counts. So when a row that was put off for the
        next answer comes up, any answer since then is recent enough. (If the brokers' clock is ahead, the present time
        is the limit.)"""
        ts = integers(self.payload.column("ts"), 0)[ids]
        latest = np.maximum(np.maximum(self.due[ids], self.at[ids] - IN_DOUBT_MS), ts)
        result: Int64s = np.minimum(latest, now_ms)
        return result

    def by_producers_clock(self, ids: Ids) -> Bools:
        """The rows that decoding rejected because their topic has producers' timestamps: it would reject their copies,
        too; bool[m]."""
        reason = self.payload.column("reason").take(pa.array(ids))
        mask: Bools = pc.fill_null(pc.equal(reason, RejectReason.CREATE_TIME.value), False).to_numpy(
            zero_copy_only=False
        )
        return mask

    def claimed_origins(self, ids: Ids) -> Int64s:
        """The origins that rejects among the rows claim as copies, packed."""
        texts = [(dict(own).get(h.COPY_ORIGIN) or b"").decode("latin-1") for own in self.headers(ids).lists()]
        claims = np.array([re.fullmatch(h.NUMBER_PATTERN, text) is not None for text in texts], np.bool_)
        origin = [min(int(text), OFFSET_MAX) for text, is_claim in zip(texts, claims, strict=True) if is_claim]
        return pack(self.source[ids][claims].astype(np.int64), np.array(origin, np.int64))

    def keyless(self) -> Bools:
        """The rows without a key, bool[n]."""
        mask: Bools = pc.is_null(self.payload.column("key")).to_numpy(zero_copy_only=False)
        return mask

    @cached_property
    def sizes(self) -> Int64s:
        """Size of each delivery, int64[n]: an upper bound, for a batch of that delivery alone."""
        result: Int64s = self._own_bytes + self.columns.name_bytes[self.source] + RECORD_OVERHEAD_BYTES
        return result

    def batched_sizes(self, ids: Ids) -> Int64s:
        """Growth of a batch by each delivery, int64[m]: an upper bound, for small records far below `sizes`."""
        total = self._own_bytes[ids] + BATCHED_BYTES + self.columns.prefix_bytes[self.source[ids]]
        for name in ("origin", "due"):
            total += integers(pc.binary_length(pc.cast(self.payload.column(name).take(pa.array(ids)), _STRING)), 0)
        return total

    @cached_property
    def _own_bytes(self) -> Int64s:
        """Bytes of key, value and stored headers, with the headers' framing."""
        total: Int64s = np.zeros(len(self), dtype=np.int64)
        for name in ("key", "value"):
            total += integers(pc.binary_length(self.payload.column(name)), 0)
        if len(self._header_keys):
            # Exact: a record may have hundreds of thousands. Callers that need more exactness count one by one.
            lengths = _framed(integers(pc.binary_length(self._header_keys), 0))
            lengths += _framed(integers(pc.binary_length(self._header_values), 0))
            running = np.concatenate((_ZERO, np.cumsum(lengths, dtype=np.int64)))
            total += running[self._header_bounds[1:]] - running[self._header_bounds[:-1]]
        return total + np.where(self.tick > 0, TICK_BYTES, 0)

    @cached_property
    def named_bytes(self) -> Int64s:
        """Bytes of target (or its default), id and schedule, which copies have as headers; int64[n]."""
        total: Int64s = self.columns.default_bytes[self.source]
        for name in ("target", "id", "schedule"):
            total += integers(pc.binary_length(self.payload.column(name)), 0)
        return total

    @cached_property
    def recurs(self) -> Bools:
        """The rows with a schedule, bool[n]."""
        mask: Bools = self.payload.column("schedule").is_valid().to_numpy(zero_copy_only=False)
        return mask

    @cached_property
    def partition(self) -> npt.NDArray[np.int32] | None:
        """Each row's own target partition, int32[n], -1 without one; None if no row has one."""
        column = self.payload.column("target_partition")
        return integers(column, -1) if column.null_count < len(self) else None

    @cached_property
    def targets(self) -> tuple[list[str], npt.NDArray[np.int32]]:
        """Names, and for every row the index of its target in them (-1: no target, and no default of the delay
        topic)."""
        target = self.payload.column("target")
        if target.null_count:
            target = pc.coalesce(target, self.columns.default_column.take(pa.array(self.source)))
        encoded = target.dictionary_encode()
        return encoded.dictionary.to_pylist(), integers(encoded.indices, -1)

    def batches(self, mine: TargetRows) -> Iterator[Batch]:
        """These rows as deliveries, in batches of limited rows and bytes; batches of `chunk_bytes` are sent alone."""
        everything = len(mine.ids) == len(self)
        columns = self.payload.select(_DELIVERED)
        if mine.chunk_bytes is None:
            pieces = chunks(self.sizes[mine.ids])
        else:
            pieces = chunks(self.batched_sizes(mine.ids), mine.chunk_bytes - BATCH_BYTES)
        for chunk in pieces:
            ids = mine.ids[chunk]
            payload = columns.slice(chunk.start, len(ids)) if everything else columns.take(pa.array(ids))
            own = self.headers(ids)
            batch = Batch(
                topic=mine.topic,
                ids=ids,
                values=_objects(payload.column("value")),
                keys=_objects(payload.column("key")),
                origins=self._origins(payload.column("origin"), ids),
                dues=_objects(pc.cast(payload.column("due"), _STRING)),
                ticks=self._tick_texts(ids),
                own=own if own.pairs else None,
                alone=mine.chunk_bytes is not None,
            )
            if mine.partitions is not None:
                batch.partitions = mine.partitions[chunk].tolist()
            elif self.partition is not None:
                batch.partitions = self.partition[ids].tolist()
            yield batch

    def _tick_texts(self, ids: Ids) -> list[str | None] | None:
        numbers = self.tick[ids]
        return [str(tick) if tick else None for tick in numbers.tolist()] if numbers.any() else None

    def headers(self, ids: Ids) -> OwnHeaders:
        """The rows' stored headers, in order, duplicates kept."""
        starts, ends = self._header_bounds[ids], self._header_bounds[ids + 1]
        low, high = int(starts.min()), int(ends.max())
        columns = (_objects(column.slice(low, high - low)) for column in (self._header_keys, self._header_values))
        return OwnHeaders(list(zip(*columns, strict=True)), (starts - low).tolist(), (ends - low).tolist())

    def named_headers(self, name: str) -> tuple[Ids, pa.Array] | None:
        """The rows (ascending) with headers of this name, and the headers' values; None without such rows."""
        places = np.flatnonzero(pc.equal(self._header_keys, name).to_numpy(zero_copy_only=False))
        if not len(places):
            return None
        rows = np.searchsorted(self._header_bounds, places, side="right") - 1
        return rows, self._header_values.take(pa.array(places))

    @cached_property
    def misnamed(self) -> Bools | None:
        """The rows with a header name that holds NUL; None without such rows. The client would cut the name there, and
        the rest could be a control header."""
        matches = pc.match_substring(self._header_keys, "\0")
        if not pc.any(matches).as_py():
            return None
        hits = np.concatenate((_ZERO, np.cumsum(matches.to_numpy(zero_copy_only=False), dtype=np.int64)))
        result: Bools = hits[self._header_bounds[1:]] > hits[self._header_bounds[:-1]]
        return result

    def origins(self, ids: Ids) -> list[str]:
        """`topic/partition/offset` of the rows' originals."""
        return self._origins(self.payload.column("origin").take(pa.array(ids)), ids)

    def _origins(self, origin: pa.Array, ids: Ids) -> list[str]:
        prefix = self.columns.prefixes.take(pa.array(self.source[ids]))
        return _objects(pc.binary_join_element_wise(prefix, pc.cast(origin, _STRING), _EMPTY))


def batches_by_topic(
    ids: Ids, topics: Sequence[str], partitions: Sequence[int] | None, records: Sequence[Record]
) -> Iterator[Batch]:
    """Records of the rows `ids`, one batch for each topic. `partitions` None: the partitioner's choice."""
    for topic in dict.fromkeys(topics):
        mine = [i for i, name in enumerate(topics) if name == topic]
        yield Batch(
            topic=topic,
            ids=ids[mine],
            values=[records[i][0] for i in mine],
            keys=[records[i][1] for i in mine],
            headers=[records[i][2] for i in mine],
            partitions=None if partitions is None else [partitions[i] for i in mine],
        )


def chunks(sizes: Int64s, bytes_max: int = BATCH_BYTES_MAX) -> Iterator[slice]:
    """Cut rows of `sizes` int64[m] into slices of up to BATCH_ROWS_MAX rows and `bytes_max` bytes, but at least one
    row."""
    running = np.cumsum(sizes)
    start, before = 0, 0
    while start < len(sizes):
        end = int(np.searchsorted(running, before + bytes_max, side="right"))
        end = min(max(end, start + 1), start + BATCH_ROWS_MAX)
        yield slice(start, end)
        start, before = end, int(running[end - 1])


def _framed(lengths: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Lengths, including the zigzag varints of these."""
    varints = sum((lengths > limit for limit in VARINT_LIMITS), np.ones(len(lengths), dtype=np.int64))
    result: npt.NDArray[Any] = lengths + varints
    return result


def integers(column: pa.Array, null: int) -> npt.NDArray[Any]:
    """An integer column as numpy integers, `null` in place of nulls."""
    if column.null_count:
        column = pc.fill_null(column, null)
    result: npt.NDArray[Any] = column.to_numpy(zero_copy_only=False)
    return result


def _objects(column: pa.Array) -> list[Any]:
    """A column as Python objects, null as None."""
    if column.null_count and pa.types.is_integer(column.type):
        return list(column.to_pylist())  # numpy would convert them to floats
    result: list[Any] = column.to_numpy(zero_copy_only=False).tolist()
    return result
