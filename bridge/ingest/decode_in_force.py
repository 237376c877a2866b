"""The decode parameters in force at each record's offset, as columns for decode.py."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from bridge.ingest import sql as F
from bridge.ingest.sql import Column, long
from bridge.wire.decode_epochs import DecodeEpochs, DecodeParameters
from bridge.wire.dialects import NATIVE

_BYTES_MAX: Final = 2**31


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameters:
    """The parameters as columns: literals; or, with several sets in force, fields of `p`, which `lookup` finds once for
    each record in the epochs of its partition (`p_row`, found by `row`)."""

    row: Column | None
    lookup: Column | None
    dialects: tuple[str, ...]
    dialect: Column
    levels_ms: Column
    max_delay_ms: Column
    copy_max_delay_ms: Column
    roll_window_ms: Column
    roll_bytes_max: Column
    headers_max: Column
    header_bytes_max: Column
    payload_bytes_max: Column
    has_default_target: Column

    def level_ms(self, level: Column) -> Column:
        return F.get(self.levels_ms, F.least(level, F.size(self.levels_ms)).cast("int") - 1)


_FIELDS: Final[Mapping[str, tuple[str, Callable[[DecodeParameters], Any]]]] = {
    "dialect": ("string", lambda s: s.dialect),
    "levels_ms": ("array<bigint>", lambda s: s.levels_ms),
    "max_delay_ms": ("bigint", lambda s: s.max_delay_ms),
    "copy_max_delay_ms": ("bigint", lambda s: s.longest_copy_ms),
    "roll_window_ms": ("bigint", lambda s: s.roll_window_ms),
    "roll_bytes_max": ("bigint", lambda s: s.roll_bytes_max or _BYTES_MAX),
    "headers_max": ("bigint", lambda s: s.headers_max or _BYTES_MAX),
    "header_bytes_max": ("bigint", lambda s: s.header_bytes_max or _BYTES_MAX),
    "payload_bytes_max": ("bigint", lambda s: s.payload_bytes_max or _BYTES_MAX),
    "has_default_target": ("boolean", lambda s: s.has_default_target),
}
"""The columns of `Parameters`: Spark's type, and the value of a set."""


def in_force(all_epochs: Mapping[tuple[str, int], DecodeEpochs]) -> Parameters:
    for source, epochs in all_epochs.items():
        if not epochs or epochs[0].offset != 0 or any(a.offset >= b.offset for a, b in pairwise(epochs)):
            raise ValueError(f"the decode epochs of {source} must begin at offset 0 and rise")
    sets = list(dict.fromkeys(epoch.parameters for epochs in all_epochs.values() for epoch in epochs))
    if not sets:
        raise ValueError("there are no decode epochs at all")
    dialects = tuple(dict.fromkeys(s.dialect for s in sets if s.dialect != NATIVE))
    if len(sets) == 1:
        literals = {name: _literal(value_of(sets[0])) for name, (_, value_of) in _FIELDS.items()}
        return Parameters(row=None, lookup=None, dialects=dialects, **literals)
    fields = {name: F.col("p")[name] for name in _FIELDS}
    row, lookup = _looked_up(all_epochs, sets)
    return Parameters(row=row, lookup=lookup, dialects=dialects, **fields)


def _literal(value: Any) -> Column:
    if isinstance(value, tuple):
        return F.array(*map(long, value))
    return F.lit(value) if isinstance(value, str | bool) else long(value)


def _looked_up(
    all_epochs: Mapping[tuple[str, int], DecodeEpochs], sets: Sequence[DecodeParameters]
) -> tuple[Column, Column]:
    """The epochs of a record's partition, and its parameter set. Their tables reach the plan as JSON: thousands of
    literals would not fit."""
    topics = sorted({topic for topic, _ in all_epochs})
    depth = max(map(len, all_epochs.values()))
    tables: list[list[dict[str, list[int]]]] = []
    for topic in topics:
        count = 1 + max(partition for name, partition in all_epochs if name == topic)
        rows = [all_epochs.get((topic, partition), ()) for partition in range(count)]
        tables.append([{"o": [b.offset for b in row], "s": [sets.index(b.parameters) for b in row]} for row in rows])
    set_rows = [{name: value_of(each) for name, (_, value_of) in _FIELDS.items()} for each in sets]
    table = _constant(tables, "array<array<struct<o:array<bigint>,s:array<int>>>>")
    topic_index = F.array_position(_constant(topics, "array<string>"), F.col("topic")).cast("int") - 1
    row = F.col("p_row")
    index = F.lit(None).cast("int")
    for i in range(depth):  # later epochs win; beyond a row's end the offset is null and fails the condition
        index = F.when(F.get(row["o"], i) <= F.col("offset"), F.get(row["s"], i)).otherwise(index)
    unknown = F.raise_error(F.concat("no decode parameters for ", F.col("topic"), "/", F.col("partition")))
    checked = F.coalesce(index, unknown.cast("int"))
    schema = f"array<struct<{','.join(f'{name}:{kind}' for name, (kind, _) in _FIELDS.items())}>>"
    return F.get(F.get(table, topic_index), F.col("partition")), F.get(_constant(set_rows, schema), checked)


def _constant(value: object, schema: str) -> Column:
    return F.from_json(json.dumps(value), schema)
