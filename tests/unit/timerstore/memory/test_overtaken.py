"""timerstore.memory.overtaken: late rows leave by offset, and no source holds up another."""

from __future__ import annotations

import numpy as np

from timerstore.memory.overtaken import Late
from timerstore.memory.sorted_runs import Selection

NONE_HELD = np.zeros(8, dtype=np.bool_)


def rows(*at_source_offset: tuple[int, int, int]) -> Selection:
    at, source, offset = (np.array(column, dtype=np.int64) for column in zip(*at_source_offset, strict=True))
    nowhere = np.zeros(len(at), dtype=np.int32)
    return Selection(at, (source << 48) | offset, nowhere, nowhere)


def taken(late: Late, now_ms: int, limit: int) -> list[tuple[int, int]]:
    picked = late.take(now_ms, limit, NONE_HELD)
    return list(zip(picked.source.tolist(), picked.offset.tolist(), strict=True))


def test_rows_leave_in_the_order_of_offset_not_of_time() -> None:
    """O moves over them: an earlier time behind a later offset waits."""
    late = Late()
    late.insert(rows((5, 0, 12), (9, 0, 10)))
    late.insert(rows((1, 0, 11)))
    assert late.first_offsets() == {0: 10}
    assert taken(late, 100, 2) == [(0, 10), (0, 11)]
    assert late.first_offsets() == {0: 12}
    assert taken(late, 100, 9) == [(0, 12)]
    assert len(late) == 0 and late.first_offsets() == {} and late.first_at_ms(NONE_HELD) is None


def test_a_row_that_is_not_due_stops_its_source_only() -> None:
    """Nothing is early, and O cannot move past it."""
    late = Late()
    late.insert(rows((50, 0, 1), (10, 0, 2), (10, 1, 1), (50, 1, 2), (10, 1, 3)))
    assert late.first_at_ms(NONE_HELD) == 10
    assert taken(late, 20, 10) == [(1, 1)]
    assert late.first_at_ms(NONE_HELD) == 50
    assert taken(late, 20, 10) == []
    assert taken(late, 50, 10) == [(0, 1), (0, 2), (1, 2), (1, 3)]


def test_a_flood_in_one_source_leaves_the_others_their_share() -> None:
    """Each source gets an equal part of the limit, and one row at least."""
    late = Late()
    late.insert(rows(*((0, 0, i) for i in range(100)), (0, 1, 0), (0, 2, 0)))
    assert taken(late, 0, 9) == [(0, 0), (0, 1), (0, 2), (1, 0), (2, 0)]
    assert taken(late, 0, 1) == [(0, 3)]
    assert taken(late, 0, 0) == []


def test_all_rows_come_back_at_once() -> None:
    """After a rollback they may belong elsewhere."""
    late = Late()
    late.insert(rows((1, 0, 1), (2, 1, 1)))
    assert len(late.pop_all()) == 2
    assert len(late) == 0 and late.first_at_ms(NONE_HELD) is None
