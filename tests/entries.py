"""Entries for tests of delivery: one row each as a dictionary, and several as decoding and the store hand them out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from bridge.stores.loan import Rows
from bridge.stores.names import NAMED_ENTRY
from timerstore.rows.entry import PAYLOAD, Kind
from timerstore.rows.position import AT_MIN

DEFAULTS: dict[str, Any] = {
    "kind": int(Kind.TIMER),
    "target": None,
    "target_partition": None,
    "key": None,
    "value": b"value",
    "headers": [],
    "id": None,
    "replace": False,
    "attempt": 0,
    "rolls": 0,
    "reason": None,
    "schedule": None,
    "tick": 0,
}


def timer(topic: str, partition: int, offset: int, due: int, target: str | None, **more: Any) -> dict[str, Any]:
    """An entry of an original timer; `headers` as pairs."""
    entry = {**DEFAULTS, "topic": topic, "partition": partition, "offset": offset, "at": due, "due": due, "ts": due - 1}
    return {**entry, "origin": offset, "target": target, **more}


def reject(topic: str, partition: int, offset: int, ts: int, reason: str, **more: Any) -> dict[str, Any]:
    """An entry of a record that decoding refused."""
    entry = timer(topic, partition, offset, ts, None, kind=int(Kind.REJECT), reason=reason, **more)
    return {**entry, "at": AT_MIN, "ts": ts}


def table_of(entries: Sequence[dict[str, Any]]) -> pa.Table:
    """Entries as decoding hands them to the store."""
    columns = {f.name: pa.array([_cell(f.name, entry) for entry in entries], type=f.type) for f in NAMED_ENTRY}
    return pa.table(columns, schema=NAMED_ENTRY)


def rows_of(rows: list[tuple[int, int, int, dict[str, Any]]]) -> Rows:
    """Entries as the store hands them out."""
    columns = {
        field.name: pa.array([_cell(field.name, entry) for *_, entry in rows], type=field.type) for field in PAYLOAD
    }
    return Rows(
        at=np.array([row[0] for row in rows], dtype=np.int64),
        source=np.array([row[1] for row in rows], dtype=np.int32),
        offset=np.array([row[2] for row in rows], dtype=np.int64),
        payload=pa.RecordBatch.from_pydict(columns, schema=PAYLOAD),
    )


def _cell(name: str, entry: dict[str, Any]) -> Any:
    if name == "headers":
        return [{"key": key, "value": value} for key, value in entry["headers"]]
    return entry[name]
