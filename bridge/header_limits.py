"""Refuses records whose headers are too large (`limits.header_bytes`), in Arrow: a batch's sizes are a few vector
operations there, while Catalyst would have to copy every header to know how long it is.

Only records with headers beside the control ones are looked at: of others nothing travels on. Those of a dialect are
not either, since decoding looks at them: their headers as they were are gone when they arrive here.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bridge.barriers import History
from bridge.decode import AT_MIN
from bridge.dialects import NATIVE
from bridge.headers import RejectReason
from timerstore.entry import Kind
from timerstore.position import Bools, Int64s

_OF_REJECTS: Final[Mapping[str, object]] = {
    "at": AT_MIN,
    "kind": int(Kind.REJECT),
    "target": None,
    "target_partition": None,
    "id": None,
    "replace": False,
    "reason": RejectReason.HEADERS_TOO_LARGE.value,
}


class HeaderLimits:
    """The limits in force, by partition and offset."""

    def __init__(self, histories: Mapping[tuple[str, int], History]) -> None:
        self._histories = histories
        limits = [barrier.parameters.header_bytes_max for history in histories.values() for barrier in history]
        self._least = min((limit for limit in limits if limit), default=None)

    def applied(self, entries: pa.Table) -> pa.Table:
        """`entries` (columns of `timerstore.entry.ENTRY`, control headers still among `headers`), of which originals
        with larger headers than was allowed at their offset are rejects that keep all they have."""
        column = entries.column("headers")
        if self._least is None or column.null_count == len(column):
            return entries
        sizes = np.concatenate([_header_bytes(chunk) for chunk in column.chunks])
        large = np.flatnonzero(sizes > self._least)
        rejected: Bools = np.zeros(len(entries), np.bool_)
        for i, row in zip(large.tolist(), _rows(entries, large), strict=True):
            limit = self._limit(row["topic"], row["partition"], row["offset"])
            is_original = row["kind"] != Kind.REJECT and row["origin"] == row["offset"]
            rejected[i] = is_original and limit is not None and sizes[i] > limit
        return _rejects(entries, rejected) if rejected.any() else entries

    def _limit(self, topic: str, partition: int, offset: int) -> int | None:
        history = self._histories[topic, partition]
        parameters = history[bisect_right(history, offset, key=lambda barrier: barrier.offset) - 1].parameters
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
    found: list[dict[str, Any]] = entries.select(columns).take(pa.array(rows)).to_pylist()
    return found


def _rejects(entries: pa.Table, rejected: Bools) -> pa.Table:
    mask = pa.array(rejected)
    for i, field in enumerate(entries.schema):
        if field.name in _OF_REJECTS:
            value = pa.scalar(_OF_REJECTS[field.name], field.type)
        elif field.name == "due":
            value = entries.column("ts")
        else:
            continue
        entries = entries.set_column(i, field, pc.if_else(mask, value, entries.column(i)))
    return entries
