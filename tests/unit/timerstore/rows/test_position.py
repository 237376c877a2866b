"""timerstore.rows.position: one total order, as objects and as vectors."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from timerstore.errors import Misuse
from timerstore.rows.position import (
    AT_MAX,
    AT_MIN,
    OFFSET_MAX,
    ORIGIN,
    PACKED_ROWS_MIN,
    Position,
    Positions,
    Progress,
    Step,
    end_of,
    order_by_position,
    search,
)

POSITIONS = st.builds(
    Position,
    st.sampled_from([AT_MIN, AT_MIN + 1, -1, 0, 1, AT_MAX - 1, AT_MAX]),
    st.sampled_from([0, 1, OFFSET_MAX]),
)


@given(st.lists(POSITIONS, unique=True), POSITIONS)
def test_vectors_agree_with_objects(positions: list[Position], bound: Position) -> None:
    """Sorting, comparing and searching vectors give what the objects' order gives."""
    at = np.array([p.at_ms for p in positions], dtype=np.int64)
    offset = np.array([p.offset for p in positions], dtype=np.int64)
    order = order_by_position(at, offset)
    assert [positions[i] for i in order] == sorted(positions)
    assert Positions(at, offset).at_or_below(bound).tolist() == [p <= bound for p in positions]
    assert search(at[order], offset[order], bound) == sum(p <= bound for p in positions)


@given(
    st.integers(0, 2**32),
    st.sampled_from([AT_MIN, 0, 1_700_000_000_000, AT_MAX - 5_000]),
    st.sampled_from([1, 5_000, 1 << 40]),
    st.sampled_from([1, 10_000, OFFSET_MAX]),
)
@settings(max_examples=60)
def test_many_rows_are_sorted_as_a_few_are(seed: int, first_ms: int, times: int, offsets: int) -> None:
    """Sorted runs one after the other, near each other or far apart, with the outermost rows among them: the order is
    that of the two keys."""
    random = np.random.default_rng(seed)
    count, last_ms = 2 * PACKED_ROWS_MIN, min(first_ms + times - 1, AT_MAX)
    at = random.integers(first_ms, last_ms, count, dtype=np.int64, endpoint=True)
    offset = random.integers(0, offsets, count)
    at[0], at[-1], offset[0], offset[-1] = first_ms, last_ms, 0, offsets - 1
    runs = np.array_split(np.arange(count), 3)
    order = np.concatenate([run[np.lexsort((offset[run], at[run]))] for run in runs])
    at, offset = at[order], offset[order]
    assert order_by_position(at, offset).tolist() == np.lexsort((offset, at)).tolist()


@given(POSITIONS)
def test_nothing_lies_between_a_position_and_the_one_before(position: Position) -> None:
    """`before` is the largest smaller position, across milliseconds."""
    if position == Position(AT_MIN, 0):
        return
    before = position.before()
    assert before < position
    assert (before.at_ms, before.offset + 1) == (position.at_ms, position.offset) or (
        position.offset == 0 and before == Position(position.at_ms - 1, OFFSET_MAX)
    )


def test_the_origin_lies_below_every_timer_and_above_every_reject() -> None:
    """With P at the origin a reject is finished by O alone, a timer is not."""
    assert Position(AT_MIN + 1, 0) > ORIGIN
    assert Position(AT_MIN, OFFSET_MAX) <= ORIGIN
    assert finished(Progress(5), AT_MIN, 4) and not finished(Progress(5), 0, 4)


def test_finished_takes_both_coordinates() -> None:
    """An entry is finished exactly when its offset is below O and its position at or below P."""
    state = Progress(10, Position(100, 5))
    assert finished(state, 100, 5) and finished(state, 99, 9)
    assert not finished(state, 100, 6) and not finished(state, 99, 10)


def test_the_end_of_a_millisecond_covers_it() -> None:
    """Everything due at that millisecond lies at or below, nothing of the next."""
    assert Position(7, OFFSET_MAX) <= end_of(7) < Position(8, 0)


@pytest.mark.parametrize("values", [(0, -1), (0, OFFSET_MAX + 1), (AT_MAX + 1, 0), (AT_MIN - 1, 0)])
def test_a_position_outside_its_ranges_is_refused(values: tuple[int, int]) -> None:
    """It would compare wrongly in a vector."""
    with pytest.raises(Misuse):
        Position(*values)


COORDINATES = st.tuples(st.integers(0, 5), st.integers(0, 5))


def finished(state: Progress, at_ms: int, offset: int) -> bool:
    """Whether the entry at that position is finished under a state."""
    return state.finishes(offset + 1, Position(at_ms, offset))


def finished_set(state: Progress) -> set[tuple[int, int]]:
    """(at, offset) of the finished entries, by the plain definition; vectors say the same."""
    places = [(at, offset) for at in range(-1, 7) for offset in range(7)]
    found = {place for place in places if finished(state, *place)}
    at, offset = (np.array(column, np.int64) for column in zip(*places, strict=True))
    mask = state.finished(Positions(at, offset))
    assert {place for place, is_in in zip(places, mask.tolist(), strict=True) if is_in} == found
    return found


@given(st.lists(st.tuples(COORDINATES, st.booleans()), max_size=12))
def test_a_staircase_never_unfinishes_anything(moves: list[tuple[tuple[int, int], bool]]) -> None:
    """Steps back change nothing, moves only add; what one state includes the other says by its set, and a plain list of
    the states there were says the same."""
    state, seen = Progress(0), [Progress(0)]
    for (offset, at_ms), back in moves:
        before = finished_set(state)
        if back and Position(at_ms, OFFSET_MAX) < state.position:
            state = state.stepped_back(Position(at_ms, OFFSET_MAX))
            assert finished_set(state) == before
        else:
            state = state.moved(max(offset, state.offset), max(Position(at_ms, 3), state.position))
            seen.append(Progress(state.offset, state.position))
        assert finished_set(state) == set.union(*map(finished_set, seen))
        assert all(state.includes(each) for each in seen)
    for each in seen:
        is_smaller = each.offset < state.offset or finished_set(each) < finished_set(state)
        assert each.includes(state) <= (not is_smaller)


def test_steps_merge_when_p_gets_there_again() -> None:
    """A frozen step is kept exactly as long as it says something that the current one does not."""
    state = Progress(10, Position(100, 5)).stepped_back(Position(49, OFFSET_MAX))
    assert state.frozen == (Step(10, Position(100, 5)),)
    assert state.moved(12, Position(99, 0)).frozen
    assert state.moved(12, Position(100, 5)) == Progress(12, Position(100, 5))


def test_steps_that_are_no_stairs_are_refused() -> None:
    """Offsets rise and positions fall."""
    low, high = Position(10, 0), Position(20, 0)
    for frozen, current in [
        ((Step(5, low),), (6, high)),
        ((Step(7, high),), (6, low)),
        ((Step(5, high), Step(5, low)), (6, ORIGIN)),
    ]:
        with pytest.raises(Misuse):
            Progress(*current, frozen)
