"""Records are told by what each says of its row."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from bridge.delivery.doubt.findings import Part
from bridge.delivery.doubt.records import Planned, Wanted
from bridge.stores.names import pack
from bridge.wire import headers as h
from bridge.wire.headers import Headers
from timerstore.rows.entry import Kind

NAME = ("delay", 0)
ROWS = {10: (10, 0, False), 21: (11, 0, False), 22: (12, 3, True)}
BOTH = Part.RECORD | Part.NEXT
EVERY = (h.EVERY, "1s")
PLAIN, RETRIED, TICK = 0, 1, 2
"""A message; one that was a copy before, offset 21 of origin 11; tick 3 of a schedule, offset 22 of origin 12."""


@pytest.fixture
def wanted() -> Wanted:
    return Wanted({NAME: ROWS}, {"dlt"})


def test_what_names_a_row_is_taken_from_its_plan() -> None:
    """The payload is not kept."""
    planned = Planned(
        keys=pack(np.zeros(3, np.int64), np.array([10, 21, 22])),
        at=np.array([5, 6, 7]),
        kind=np.array([Kind.TIMER, Kind.RECALL, Kind.TIMER], np.int8),
        origin=pa.array([10, 11, 12]),
        schedule=pa.array([None, None, "every"]),
        tick=np.array([0, 0, 3], np.int32),
    )
    assert list(planned.rows()) == [(offset, at, ROWS[offset]) for offset, at in ((10, 5), (21, 6), (22, 7))]
    assert planned.commands().tolist() == [21]


CASES = [
    ("orders", 5, [(h.ORIGIN, "delay/0/10")], {10: Part.RECORD}),
    ("orders", 5, [(h.DLT_OFFSET, "x"), (h.ORIGIN, "delay/0/11")], {21: Part.RECORD}),
    ("orders", 5, [(h.ORIGIN, "delay/0/12"), (h.TICK, "3")], {22: Part.RECORD}),
    ("orders", 5, [(h.ORIGIN, "delay/0/12"), (h.TICK, "2")], {}),
    ("orders", 5, [(h.ORIGIN, "delay/0/12"), (h.TICK, "none")], {}),
    ("orders", 5, [(h.ORIGIN, "delay/1/10")], {}),
    ("orders", 5, [(h.ORIGIN, "other/0/10")], {}),
    ("orders", 5, [(h.ORIGIN, "no place")], {}),
    ("orders", 5, [], {}),
    ("dlt", 0, [(h.ORIGIN, "delay/0/11"), (h.DLT_OFFSET, b"\0" * 7 + b"\x15")], {21: Part.RECORD}),
    ("dlt", 0, [(h.ORIGIN, "delay/0/10"), (h.DLT_OFFSET, b"\0" * 8)], {10: Part.RECORD}),
    ("dlt", 0, [(h.REDRIVEN, "")], {}),
    ("delay", 0, [(h.COPY_ORIGIN, "10"), (h.COPY_AT, "9")], {10: Part.RECORD}),
    ("delay", 1, [(h.COPY_ORIGIN, "10")], {}),
    ("delay", 0, [(h.COPY_ORIGIN, "12"), (h.COPY_TICK, "3"), (h.COPY_AT, "9")], {22: Part.RECORD}),
    ("delay", 0, [(h.COPY_ORIGIN, "12"), (h.COPY_TICK, "4"), EVERY], {22: Part.NEXT}),
    ("delay", 0, [(h.COPY_ORIGIN, "12"), (h.COPY_TICK, "3"), (h.COPY_ROLLS, "1"), EVERY], {22: BOTH}),
    ("delay", 0, [(h.COPY_ORIGIN, "12"), (h.COPY_TICK, "3"), (h.COPY_AT, "9"), EVERY], {22: BOTH}),
    ("delay", 0, [(h.COPY_ORIGIN, "ten")], {}),
    ("delay", 0, [(h.UNTIL, "9")], {}),
]


@pytest.mark.parametrize(("topic", "partition", "headers", "seen"), CASES)
def test_a_record_tells_its_row(
    wanted: Wanted, topic: str, partition: int, headers: list[tuple[str, str | bytes]], seen: dict[int, Part]
) -> None:
    """One that another producer wrote, or that belongs to another transaction, tells nothing. One of a transaction
    without an end is recognised, and is not counted."""
    assert wanted.is_sought(topic, partition, 30, encoded(headers)) is bool(seen) and not wanted.take()
    wanted.see(topic, partition, 30, encoded(headers))
    assert dict(wanted.take()) == ({NAME: seen} if seen else {}) and not wanted.take()


@pytest.mark.parametrize("headers", [[(h.COPY_ORIGIN, "12"), (h.COPY_TICK, "3"), EVERY], [(h.COPY_ORIGIN, "11")]])
@pytest.mark.parametrize(("offset", "is_output"), [(20, False), (21, False), (22, False), (23, True)])
def test_a_copy_is_not_its_own_output(
    wanted: Wanted, headers: list[tuple[str, str | bytes]], offset: int, is_output: bool
) -> None:
    """The records that are read may include those that the transaction was made of: they lie before their copies."""
    wanted.see("delay", 0, offset, encoded(headers))
    row = 22 if len(headers) > 1 else 21
    assert (row in wanted.take().get(NAME, {})) is (is_output or (row == 21 and offset == 22))


def encoded(headers: list[tuple[str, str | bytes]]) -> Headers:
    return [(name, text.encode() if isinstance(text, str) else text) for name, text in headers]
