"""timerstore.memory.overtaken: overtaken rows leave by offset."""

from __future__ import annotations

import numpy as np

from timerstore.memory.chunks import Chunks
from timerstore.memory.overtaken import Overtaken
from timerstore.memory.sorted_runs import RowRefs


def rows(*at_offset: tuple[int, int]) -> RowRefs:
    at, offset = (np.array(column, dtype=np.int64) for column in zip(*at_offset, strict=True))
    nowhere = np.zeros(len(at), dtype=np.int32)
    return RowRefs(at, offset, nowhere, nowhere)


def taken(overtaken: Overtaken, now_ms: int, limit: int) -> list[int]:
    due = overtaken.count_due(now_ms)
    picked: list[int] = overtaken.take(now_ms, limit).offset.tolist()
    assert len(picked) <= due
    return picked


def test_rows_leave_in_the_order_of_offset_not_of_time() -> None:
    """O moves over them: an earlier time behind a later offset waits."""
    overtaken = Overtaken(Chunks())
    overtaken.insert(rows((5, 12), (9, 10)))
    overtaken.insert(rows((1, 11)))
    assert overtaken.first_offset() == 10
    assert taken(overtaken, 100, 2) == [10, 11]
    assert overtaken.first_offset() == 12
    assert taken(overtaken, 100, 9) == [12]
    assert len(overtaken) == 0 and overtaken.first_offset() is None and overtaken.first_at_ms() is None


def test_a_row_that_is_not_due_stops_those_behind_it() -> None:
    """Nothing is early, and O cannot move past it."""
    overtaken = Overtaken(Chunks())
    overtaken.insert(rows((10, 1), (50, 2), (10, 3)))
    assert overtaken.first_at_ms() == 10
    assert taken(overtaken, 20, 10) == [1]
    assert overtaken.first_at_ms() == 50
    assert taken(overtaken, 20, 10) == []
    assert taken(overtaken, 50, 10) == [2, 3]


def test_rows_that_share_an_offset_leave_together() -> None:
    """A cancel and the timer that takes its target's place: O passes both or none."""
    overtaken = Overtaken(Chunks())
    overtaken.insert(rows((0, 1), (5, 1), (5, 2), (0, 3), (50, 3)))
    assert taken(overtaken, 20, 1) == [1, 1]
    assert taken(overtaken, 20, 9) == [2]
    assert overtaken.first_at_ms() == 50, "not at once, again and again"
    assert taken(overtaken, 50, 9) == [3, 3]


def test_all_rows_come_back_at_once() -> None:
    """After a rollback they may belong in other places."""
    overtaken = Overtaken(Chunks())
    overtaken.insert(rows((1, 1), (2, 2)))
    assert len(overtaken.pop_all()) == 2
    assert len(overtaken) == 0 and overtaken.first_at_ms() is None
