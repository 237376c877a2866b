"""bridge.start.identity: whether a log is still the one that was read, as a table."""

from __future__ import annotations

import pytest

from bridge.kafka.admin import Watermarks
from bridge.kafka.leader_epochs import ReadStretch
from bridge.start.identity import Looked, PartitionDoubt, believed, findings, stretches

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
        ("id", looked(5, 6, 9), PartitionDoubt.DELETED),
        ("id", looked(5, 0, 4), PartitionDoubt.TRUNCATED),
        ("id", looked(5, 0, 0), PartitionDoubt.TRUNCATED),
        ("id", Looked(expected=5, marks=None), None),
        ("other", looked(5, 0, 9), PartitionDoubt.REPLACED),
        ("other", looked(5, 0, 4), PartitionDoubt.REPLACED),
        ("other", Looked(expected=5, marks=None), PartitionDoubt.REPLACED),
        (None, looked(5, 0, 9), PartitionDoubt.MISSING),
        (None, Looked(expected=5, marks=None), PartitionDoubt.MISSING),
    ],
)
def test_a_partition_is_in_doubt_as_the_table_says(
    id_now: str | None, now: Looked, doubt: PartitionDoubt | None
) -> None:
    """Topic id, log start and log end are compared with the bridge's record of them; healthy partitions cause no
    report."""
    ids = {"b": "well"} | ({} if id_now is None else {"a": id_now})
    found = findings({"a": "id", "b": "well"}, ids, {A: now, B: WELL})
    assert found == ({} if doubt is None else {A: doubt})


@pytest.mark.parametrize(
    ("old", "now", "shorter", "searched"),
    [
        pytest.param(looked(5, 0, 9, epoch=1), looked(8, 0, 9, epoch=1), False, None, id="no election"),
        pytest.param(looked(5, 0, 9, epoch=1), looked(8, 2, 9, epoch=4), False, (1, 2, 5), id="what was read before"),
        pytest.param(looked(5, 0, 9, epoch=1), looked(8, 0, 4, epoch=4), True, (1, 0, 4), id="what is left of that"),
        pytest.param(looked(7, 0, 9), looked(8, 0, 9, epoch=4), False, None, id="no epoch was told"),
        pytest.param(looked(7, 0, 9), looked(8, 0, 6, epoch=4), True, None, id="so that nothing tells what is new"),
        pytest.param(None, looked(8, 0, 9, epoch=2), False, None, id="the first look"),
        pytest.param(None, looked(8, 0, 6, epoch=2), True, (1, 0, 6), id="and an earlier leader wrote what is gone"),
        pytest.param(looked(5, 0, 9, epoch=1), Looked(expected=8, marks=None), False, None, id="no answer"),
    ],
)
def test_an_election_has_what_was_read_before_it_searched(
    old: Looked | None, now: Looked, shorter: bool, searched: tuple[int, int, int] | None
) -> None:
    """For records of later leaders: an offset that was read since may have been theirs already."""
    found = stretches({} if old is None else {A: old}, {A: now, B: WELL}, {A} if shorter else set())
    epoch, start, end = searched or (0, 0, 0)
    assert found == ({A: ReadStretch(epoch=epoch, start=start, end=end)} if searched else {})


@pytest.mark.parametrize(
    ("old", "now", "is_believed"),
    [
        (looked(5, 0, 9, epoch=2), looked(8, 0, 9, epoch=2), True),
        (looked(5, 0, 9, epoch=2), looked(8, 0, 4, epoch=3), True),
        (looked(5, 0, 9, epoch=2), looked(8, 0, 7, epoch=2), False),
        (looked(5, 0, 9, epoch=2), looked(8, 0, 9, epoch=1), False),
        (looked(5, 0, 9, epoch=2), looked(8, 0, 4), True),
        (looked(5, 0, 9), looked(8, 0, 4), True),
        (looked(5, 0, 9), looked(8, 0, 4, epoch=0), True),
        (None, looked(8, 0, 4, epoch=0), True),
        (Looked(expected=5, marks=None), looked(8, 0, 4, epoch=0), True),
        (looked(5, 0, 9, epoch=2), Looked(expected=8, marks=None), True),
    ],
)
def test_a_former_leader_is_not_believed(old: Looked | None, now: Looked, is_believed: bool) -> None:
    """One with an earlier epoch than was known, or whose log ends below what was read, while none after it is known."""
    assert believed(now, old) == (now if is_believed else Looked(expected=8, marks=None))
