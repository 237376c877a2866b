"""bridge.start.identity: whether a log is still the one that was read, as a table."""

from __future__ import annotations

import pytest

from bridge.kafka.admin import Watermarks
from bridge.start.identity import Doubt, Looked, findings, suspects

A, B = ("a", 0), ("b", 3)
WELL = Looked(expected=5, marks=Watermarks(start=0, end=9))


def looked(expected: int, start: int, end: int, epoch: int = -1) -> Looked:
    return Looked(expected=expected, marks=Watermarks(start=start, end=end, epoch=epoch))


@pytest.mark.fault("a delay topic that becomes another one, or loses records, at run time")
@pytest.mark.parametrize(
    ("id_now", "now", "doubt"),
    [
        ("id", looked(5, 0, 5), None),
        ("id", looked(5, 5, 5), None),
        ("id", looked(5, 0, 9), None),
        ("id", looked(5, 6, 9), Doubt.DELETED),
        ("id", looked(5, 0, 4), Doubt.TRUNCATED),
        ("id", looked(5, 0, 0), Doubt.TRUNCATED),
        ("id", Looked(expected=5, marks=None), None),
        ("other", looked(5, 0, 9), Doubt.REPLACED),
        ("other", looked(5, 0, 4), Doubt.REPLACED),
        ("other", Looked(expected=5, marks=None), Doubt.REPLACED),
        (None, looked(5, 0, 9), Doubt.MISSING),
        (None, Looked(expected=5, marks=None), Doubt.MISSING),
    ],
)
def test_a_partition_is_in_doubt_as_the_table_says(id_now: str | None, now: Looked, doubt: Doubt | None) -> None:
    """Topic id, log start and log end against what was read; of the others nothing is said."""
    ids = {"b": "well"} | ({} if id_now is None else {"a": id_now})
    found = findings({"a": "id", "b": "well"}, ids, {A: now, B: WELL})
    assert found == ({} if doubt is None else {A: doubt})


def test_an_election_makes_a_partition_suspect() -> None:
    """With what was known under the leader before it; brokers that tell no epochs tell of no elections."""
    before = {A: looked(5, 0, 9, epoch=1), B: looked(7, 0, 9)}
    assert suspects(before, {A: looked(8, 0, 9, epoch=1), B: looked(8, 0, 9)}) == {}
    assert suspects(before, {A: looked(8, 0, 9, epoch=2), B: looked(8, 0, 9, epoch=4)}) == {A: before[A]}
    assert suspects({}, {A: looked(8, 0, 9, epoch=2)}) == {}
    assert suspects(before, {A: Looked(expected=8, marks=None)}) == {}
