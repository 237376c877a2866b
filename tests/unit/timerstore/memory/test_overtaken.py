"""timerstore.memory.overtaken: overtaken rows leave by offset, and no source holds up another."""

from __future__ import annotations

import numpy as np

from timerstore.memory.chunks import Chunks
from timerstore.memory.overtaken import Overtaken
from timerstore.memory.sorted_runs import RowRefs

NONE_HELD = np.zeros(8, dtype=np.bool_)


def rows(*at_source_offset: tuple[int, int, int]) -> RowRefs:
    at, source, offset = (np.array(column, dtype=np.int64) for column in zip(*at_source_offset, strict=True))
    nowhere = np.zeros(len(at), dtype=np.int32)
    return RowRefs(at, (source << 48) | offset, nowhere, nowhere)


def taken(overtaken: Overtaken, now_ms: int, limit: int) -> list[tuple[int, int]]:
    picked = overtaken.take(now_ms, limit, NONE_HELD)
    return list(zip(picked.source.tolist(), picked.offset.tolist(), strict=True))


def test_rows_leave_in_the_order_of_offset_not_of_time() -> None:
    """O moves over them: an earlier time behind a later offset waits."""
    overtaken = Overtaken(Chunks())
    overtaken.insert(rows((5, 0, 12), (9, 0, 10)))
    overtaken.insert(rows((1, 0, 11)))
    assert overtaken.first_offsets() == {0: 10}
    assert taken(overtaken, 100, 2) == [(0, 10), (0, 11)]
    assert overtaken.first_offsets() == {0: 12}
    assert taken(overtaken, 100, 9) == [(0, 12)]
    assert len(overtaken) == 0 and overtaken.first_offsets() == {} and overtaken.first_at_ms(NONE_HELD) is None


def test_a_row_that_is_not_due_stops_its_source_only() -> None:
    """Nothing is early, and O cannot move past it."""
    overtaken = Overtaken(Chunks())
    overtaken.insert(rows((50, 0, 1), (10, 0, 2), (10, 1, 1), (50, 1, 2), (10, 1, 3)))
    assert overtaken.first_at_ms(NONE_HELD) == 10
    assert taken(overtaken, 20, 10) == [(1, 1)]
    assert overtaken.first_at_ms(NONE_HELD) == 50
    assert taken(overtaken, 20, 10) == []
    assert taken(overtaken, 50, 10) == [(0, 1), (0, 2), (1, 2), (1, 3)]


def test_a_flood_in_one_source_leaves_the_others_their_share() -> None:
    """Each source gets an equal part of the limit, and one row at least."""
    overtaken = Overtaken(Chunks())
    overtaken.insert(rows(*((0, 0, i) for i in range(100)), (0, 1, 0), (0, 2, 0)))
    assert taken(overtaken, 0, 9) == [(0, 0), (0, 1), (0, 2), (1, 0), (2, 0)]
    assert taken(overtaken, 0, 1) == [(0, 3)]
    assert taken(overtaken, 0, 0) == []


def test_all_rows_come_back_at_once() -> None:
    """After a rollback they may belong elsewhere."""
    overtaken = Overtaken(Chunks())
    overtaken.insert(rows((1, 0, 1), (2, 1, 1)))
    assert len(overtaken.pop_all()) == 2
    assert len(overtaken) == 0 and overtaken.first_at_ms(NONE_HELD) is None
