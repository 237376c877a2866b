"""Dead letters that fit nowhere whole are cut."""

from __future__ import annotations

from typing import Any

import numpy as np

from bridge.deadletter import CUT_BYTES, CUT_HEADERS, dead_letters
from bridge.outgoing import Batch, Outgoing, SourceColumns
from bridge.redrive import read_letter
from tests.bridge.stores import reject, rows_of
from timerstore.sources import Sources

SOURCES = Sources([("delay", 0)])
TS = 1_800_000_000_000


def letters(cut: set[int], *records: dict[str, Any]) -> Batch:
    """The dead letters of rejects with these columns; those in `cut` are cut."""
    entries = [reject("delay", 0, i, TS, "payload-too-large", **record) for i, record in enumerate(records)]
    outgoing = Outgoing(rows_of([(e["at"], 0, e["offset"], e) for e in entries]), SourceColumns(SOURCES, {}))
    ids = np.arange(len(entries), dtype=np.intp)
    (batch,) = dead_letters(outgoing, ids, {}, {"delay": "delay.dlt"}, np.full(len(ids), 100), cut)
    return batch


def test_the_value_goes_and_whatever_else_is_large() -> None:
    """What is small stays, and the header says what is missing; the letter still tells where the record is."""
    small: dict[str, Any] = {"key": b"k", "headers": [("a", b"1"), ("b", None)], "value": b"v" * 9}
    large: dict[str, Any] = {"key": b"k" * (CUT_BYTES + 1), "headers": [("a", b"1" * CUT_BYTES)], "value": None}
    many: dict[str, Any] = {"key": None, "headers": [("a", b"")] * (CUT_HEADERS + 1)}
    batch = letters({1, 2, 3}, small, small, large, many)
    assert batch.headers is not None
    omitted = [dict(headers).get("delay-omitted") for headers in batch.headers]
    assert batch.values == [b"v" * 9, None, None, None]
    assert batch.keys == [b"k", b"k", None, None]
    key, headers = f"key ({CUT_BYTES + 1} bytes)", f"1 headers ({CUT_BYTES + 1} bytes)"
    assert omitted == [
        None,
        b"value (9 bytes)",
        f"value (0 bytes), {key}, {headers}".encode(),
        f"value (5 bytes), {CUT_HEADERS + 1} headers ({CUT_HEADERS + 1} bytes)".encode(),
    ]
    read = [
        read_letter([(name, v if v is None or isinstance(v, bytes) else v.encode()) for name, v in each])
        for each in batch.headers
    ]
    assert [(each.is_cut, len(each.headers)) for each in read if each] == [(False, 2), (True, 2), (True, 0), (True, 0)]
    assert [dict(each)["delay-origin"] for each in batch.headers] == [f"delay/0/{i}".encode() for i in range(4)]
