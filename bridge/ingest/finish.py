"""The second half of decoding, in Arrow: in Catalyst it would need a lambda, or a copy of every header.

A lambda keeps its whole stage out of generated code. Here each step is a few vector operations, and none for records
with control headers only (`decode` leaves their `headers` null). In this order:

1. Originals with headers beyond `limits.header_bytes` become rejects, with all their headers. Those of a dialect are
   left to `decode`: their original headers do not arrive here.
2. The schedule headers of a recurring message become one text, the column `schedule`; a header that is no text makes
   it a reject. The schedule is judged when it comes up, which is at once (plan/ticks.py): countries change time zones,
   and a record must be decoded the same way each time.
3. The control headers are taken out of the timers' headers; order and duplicates of the others stay. A dialect's
   headers are control headers where it was in force, by partition and offset. That holds for originals only: the
   bridge's copies carry native ones, and headers there that look like a dialect's are the message's own.
4. A timer that replaces without a key gets a second row, the cancel of the earlier ones (plan/forwarded_cancels.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bridge.wire import headers as h
from bridge.wire.decode_epochs import DecodeEpochs, parameters_at
from bridge.wire.dialects import DIALECTS, NATIVE
from bridge.wire.reasons import RejectReason
from bridge.wire.schedule import TEXT_LENGTH_MAX, packed
from timerstore.rows.entry import DECIDED, Kind
from timerstore.rows.position import AT_MIN, Bools, Int64s

_STRIPPED: Final = pa.array(h.STRIPPED, pa.string())
_FOREIGN: Final = [pa.array(dialect.names, pa.string()) for dialect in DIALECTS.values()]
_CODES: Final = {NATIVE: -1} | {name: code for code, name in enumerate(DIALECTS)}

_OF_REJECTS: Final[Mapping[str, object]] = {
    "at": AT_MIN,
    "kind": int(Kind.REJECT),
    "target": None,
    "target_partition": None,
    "id": None,
    "replace": False,
    "schedule": None,
    "rolls": 0,
    "tick": 0,
}


class Finish:
    """All four steps, with the decode parameters that were in force at each record's offset."""

    def __init__(self, all_epochs: Mapping[tuple[str, int], DecodeEpochs]) -> None:
        self._limits = HeaderLimits(all_epochs)
        self._control_headers = ControlHeaders(all_epochs)

    def __call__(self, entries: pa.Table) -> pa.Table:
        """The entries of `decode`, in the store's form."""
        return with_cancels(self._control_headers.taken_out(with_schedules(self._limits.applied(entries))))


class HeaderLimits:
    """The limits in force, by partition and offset."""

    def __init__(self, all_epochs: Mapping[tuple[str, int], DecodeEpochs]) -> None:
        self._all_epochs = all_epochs
        limits = [epoch.parameters.header_bytes_max for epochs in all_epochs.values() for epoch in epochs]
        self._least = min((limit for limit in limits if limit), default=None)

    def applied(self, entries: pa.Table) -> pa.Table:
        """`entries` (columns of `names.NAMED_ENTRY`, control headers still among `headers`); originals with larger
        headers than allowed at their offset become rejects that keep all columns."""
        column = entries.column("headers")
        if self._least is None or column.null_count == len(column):
            return entries
        sizes = np.concatenate([_header_bytes(chunk) for chunk in column.chunks])
        large = np.flatnonzero(sizes > self._least)
        rejected: Bools = np.zeros(len(entries), np.bool_)
        for i, row in zip(large.tolist(), _rows(entries, large), strict=True):
            limit = self._limit(row["topic"], row["partition"], row["offset"])
            is_command = row["kind"] in (Kind.CANCEL, *DECIDED)
            is_original = is_command or (row["kind"] == Kind.TIMER and row["origin"] == row["offset"])
            rejected[i] = is_original and limit is not None and sizes[i] > limit
        return _rejects(entries, rejected, RejectReason.HEADERS_TOO_LARGE) if rejected.any() else entries

    def _limit(self, topic: str, partition: int, offset: int) -> int | None:
        parameters = parameters_at(self._all_epochs[topic, partition], offset)
        return parameters.header_bytes_max or None if parameters.dialect == NATIVE else None


def _header_bytes(lists: pa.ListArray) -> Int64s:
    """Size of each record's names and values, int64[n]."""
    names, values = lists.flatten().flatten()
    lengths = pc.add(pc.binary_length(names), pc.fill_null(pc.binary_length(values), 0))
    running: Int64s = np.concatenate(([0], np.cumsum(lengths.to_numpy(), dtype=np.int64)))
    counts = pc.fill_null(pc.list_value_length(lists), 0).to_numpy()
    ends = np.cumsum(counts, dtype=np.int64)
    result: Int64s = running[ends] - running[ends - counts]
    return result


def _rows(entries: pa.Table, rows: Any) -> list[dict[str, Any]]:
    columns = ["topic", "partition", "offset", "origin", "kind"]
    result: list[dict[str, Any]] = entries.select(columns).take(pa.array(rows)).to_pylist()
    return result


def _rejects(entries: pa.Table, rejected: Bools, reason: RejectReason) -> pa.Table:
    mask = pa.array(rejected)
    for i, field in enumerate(entries.schema):
        if field.name in _OF_REJECTS:
            value = pa.scalar(_OF_REJECTS[field.name], field.type)
        elif field.name == "reason":
            value = pa.scalar(reason.value, field.type)
        elif field.name == "due":
            value = entries.column("ts")
        elif field.name == "origin":
            value = entries.column("offset")
        else:
            continue
        entries = entries.set_column(i, field, pc.if_else(mask, value, entries.column(i)))
    return entries


def with_schedules(entries: pa.Table) -> pa.Table:
    """`entries` with the schedules of recurring messages; `decode` leaves an empty text for each."""
    column = entries.column("schedule")
    if column.null_count == len(column):
        return entries
    rows = np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False))
    texts: list[str | None] = [None] * len(entries)
    wrong: Bools = np.zeros(len(entries), np.bool_)
    few = entries.select(["headers", "offset", "origin"]).take(pa.array(rows)).to_pylist()
    for i, row in zip(rows.tolist(), few, strict=True):
        by_name = {header["key"]: header["value"] for header in row["headers"] or ()}
        is_start_given = row["origin"] != row["offset"] or bool(by_name.keys() & {h.UNTIL, h.FOR})
        try:
            said = {name: _schedule_text(by_name[name]) for name in h.SCHEDULE if name in by_name}
        except ValueError:
            wrong[i] = True
            continue
        texts[i] = packed(said, is_start_given=is_start_given)
    index = entries.schema.get_field_index("schedule")
    entries = entries.set_column(index, entries.schema.field(index), pa.array(texts, pa.string()))
    return _rejects(entries, wrong, RejectReason.BAD_SCHEDULE) if wrong.any() else entries


def _schedule_text(value: bytes | None) -> str:
    text = h.text_of(value)
    if len(text) > TEXT_LENGTH_MAX:
        raise ValueError(f"longer than {TEXT_LENGTH_MAX} characters")
    return text


class ControlHeaders:
    """The control headers, by partition and offset."""

    def __init__(self, all_epochs: Mapping[tuple[str, int], DecodeEpochs]) -> None:
        self._steps = {  # the offsets at which dialects begin, if any
            source: (_int64s([b.offset for b in epochs]), _int64s([_CODES[b.parameters.dialect] for b in epochs]))
            for source, epochs in all_epochs.items()
            if any(epoch.parameters.dialect != NATIVE for epoch in epochs)
        }

    def taken_out(self, entries: pa.Table) -> pa.Table:
        """`entries` (columns of `names.NAMED_ENTRY`) without the control headers of the timers' `headers`.

        Order and duplicates stay. Rejects and commands keep all headers: they may have to leave byte for byte."""
        column = entries.column("headers")
        if column.null_count == len(column):
            return entries
        # A table of these columns only, so that all have the same chunks.
        places = ["topic", "partition", "offset", "origin"] if self._steps else []
        stripped = [self._stripped(batch) for batch in entries.select(["headers", "kind", *places]).to_batches()]
        index = entries.schema.get_field_index("headers")
        return entries.set_column(index, entries.schema.field(index), pa.chunked_array(stripped, column.type))

    def _stripped(self, batch: pa.RecordBatch) -> pa.ListArray:
        lists = batch.column("headers")
        parents = pc.list_parent_indices(lists).to_numpy()
        headers = pc.list_flatten(lists)
        names = headers.field("key")
        control = _are_in(names, _STRIPPED)
        if self._steps:
            dialect = self._dialects(batch)
            for code in np.unique(dialect[dialect >= 0]).tolist():
                control |= _are_in(names, _FOREIGN[code]) & (dialect == code)[parents]
        control &= (batch.column("kind").to_numpy() == Kind.TIMER)[parents]
        counts = np.bincount(parents[~control], minlength=len(lists))
        offsets = np.concatenate(([0], np.cumsum(counts)))
        return pa.ListArray.from_arrays(
            pa.array(offsets, pa.int32()), headers.filter(pa.array(~control)), type=lists.type, mask=lists.is_null()
        )

    def _dialects(self, batch: pa.RecordBatch) -> Int64s:
        """Each record's dialect, as an index of `_FOREIGN`, -1 for none; int64[n]."""
        result: Int64s = np.full(len(batch), -1, dtype=np.int64)
        topic, offset = batch.column("topic").dictionary_encode(), batch.column("offset").to_numpy()
        names, codes = topic.dictionary.to_pylist(), topic.indices.to_numpy().astype(np.int64)
        places, which = np.unique(codes << 32 | batch.column("partition").to_numpy(), return_inverse=True)
        for i, place in enumerate(places.tolist()):
            steps = self._steps.get((names[place >> 32], place & 0xFFFFFFFF))
            if steps is not None:
                starts, dialects = steps
                mine = np.flatnonzero(which == i)
                result[mine] = dialects[np.searchsorted(starts, offset[mine], side="right") - 1]
        result[batch.column("origin").to_numpy() != offset] = -1
        return result


def _int64s(numbers: list[int]) -> Int64s:
    return np.array(numbers, dtype=np.int64)


def _are_in(names: pa.Array, wanted: pa.Array) -> Bools:
    mask: Bools = pc.is_in(names, wanted).to_numpy(zero_copy_only=False)
    return mask


def with_cancels(entries: pa.Table) -> pa.Table:
    """A batch of `names.NAMED_ENTRY` rows, with a row of kind CANCEL for every timer that replaces without a key.

    The new row has the timer's offset. It covers lower origins, hence never the timer itself."""
    replaces = entries.column("replace")
    if not pc.any(replaces, min_count=0).as_py():
        return entries
    rows = entries.filter(pc.and_(replaces, pc.is_null(entries.column("key"))))
    if not len(rows):
        return entries
    constants = {"at": AT_MIN, "kind": int(Kind.CANCEL), "replace": False, "attempt": 0, "rolls": 0, "tick": 0}
    for i, field in enumerate(entries.schema):
        if field.name in constants:
            rows = rows.set_column(i, field, pa.array([constants[field.name]] * len(rows), field.type))
        elif field.name == "due":
            rows = rows.set_column(i, field, rows.column("ts"))
        elif field.name in ("target", "target_partition", "key", "value", "headers", "reason", "schedule"):
            rows = rows.set_column(i, field, pa.nulls(len(rows), field.type))
    return pa.concat_tables([entries, rows])
