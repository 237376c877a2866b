"""timerstore.position: one total order, as objects and as vectors."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from timerstore.errors import Misuse
from timerstore.position import (
    AT_MAX,
    AT_MIN,
    OFFSET_MAX,
    ORIGIN,
    SEQ_MAX,
    SOURCE_MAX,
    Position,
    Progress,
    at_or_below,
    end_of,
    order_by_position,
    search,
)

POSITIONS = st.builds(
    Position,
    st.sampled_from([AT_MIN, AT_MIN + 1, -1, 0, 1, AT_MAX - 1, AT_MAX]),
    st.sampled_from([0, 1, SOURCE_MAX]),
    st.sampled_from([0, 1, OFFSET_MAX]),
)


@given(POSITIONS)
def test_a_position_survives_packing(position: Position) -> None:
    """(at, seq) of the vectors is the position, to the ends of their ranges."""
    assert Position.of(position.at_ms, position.seq) == position
    assert 0 <= position.seq <= SEQ_MAX == np.iinfo(np.int64).max


@given(st.lists(POSITIONS, unique=True), POSITIONS)
def test_vectors_agree_with_objects(positions: list[Position], bound: Position) -> None:
    """Sorting, comparing and searching vectors give what the objects' order gives."""
    at = np.array([p.at_ms for p in positions], dtype=np.int64)
    seq = np.array([p.seq for p in positions], dtype=np.int64)
    order = order_by_position(at, seq)
    assert [positions[i] for i in order] == sorted(positions)
    assert at_or_below(at, seq, bound.at_ms, bound.seq).tolist() == [p <= bound for p in positions]
    assert search(at[order], seq[order], bound) == sum(p <= bound for p in positions)


@given(POSITIONS)
def test_nothing_lies_between_a_position_and_the_one_before(position: Position) -> None:
    """`before` is the largest smaller position, across partitions and milliseconds."""
    if position == Position(AT_MIN, 0, 0):
        return
    before = position.before()
    assert before < position
    assert (before.at_ms, before.seq + 1) == (position.at_ms, position.seq) or (
        position.seq == 0 and before == Position(position.at_ms - 1, SOURCE_MAX, OFFSET_MAX)
    )


def test_the_origin_lies_below_every_timer_and_above_every_reject() -> None:
    """With P at the origin a reject is finished by O alone, a timer is not."""
    assert Position(AT_MIN + 1, 0, 0) > ORIGIN
    assert Position(AT_MIN, SOURCE_MAX, OFFSET_MAX) <= ORIGIN
    assert Progress(5).finished(AT_MIN, 0, 4) and not Progress(5).finished(0, 0, 4)


def test_finished_takes_both_coordinates() -> None:
    """An entry is finished exactly when its offset is below O and its position at or below P."""
    state = Progress(10, Position(100, 1, 5))
    assert state.finished(100, 1, 5) and state.finished(99, 2, 9)
    assert not state.finished(100, 1, 6) and not state.finished(99, 1, 10)


def test_the_end_of_a_millisecond_covers_it() -> None:
    """Everything due at that millisecond lies at or below, nothing of the next."""
    assert Position(7, SOURCE_MAX, OFFSET_MAX) <= end_of(7) < Position(8, 0, 0)


@pytest.mark.parametrize(
    "values",
    [(0, -1, 0), (0, SOURCE_MAX + 1, 0), (0, 0, -1), (0, 0, OFFSET_MAX + 1), (AT_MAX + 1, 0, 0), (AT_MIN - 1, 0, 0)],
)
def test_a_position_outside_its_ranges_is_refused(values: tuple[int, int, int]) -> None:
    """It would compare wrongly once packed."""
    with pytest.raises(Misuse):
        Position(*values)
