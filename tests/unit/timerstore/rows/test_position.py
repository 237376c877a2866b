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
    SEQ_MAX,
    SOURCE_MAX,
    Position,
    Progress,
    Step,
    at_or_below,
    end_of,
    order_by_position,
    pack,
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


@given(
    st.integers(0, 2**32),
    st.sampled_from([AT_MIN, 0, 1_700_000_000_000, AT_MAX - 5_000]),
    st.sampled_from([1, 5_000, 1 << 40]),
    st.sampled_from([1, 4, SOURCE_MAX]),
    st.sampled_from([1, 10_000, OFFSET_MAX]),
)
@settings(max_examples=60)
def test_many_rows_are_sorted_as_a_few_are(seed: int, first_ms: int, times: int, sources: int, offsets: int) -> None:
    """Sorted runs one after the other, near each other or far apart, with the outermost rows among them: the order is
    that of the two keys."""
    random = np.random.default_rng(seed)
    count, last_ms = 2 * PACKED_ROWS_MIN, min(first_ms + times - 1, AT_MAX)
    at = random.integers(first_ms, last_ms, count, dtype=np.int64, endpoint=True)
    seq = pack(random.integers(0, sources, count), random.integers(0, offsets, count))
    at[0], at[-1], seq[0], seq[-1] = first_ms, last_ms, 0, Position(0, sources - 1, offsets - 1).seq
    runs = np.array_split(np.arange(count), 3)
    order = np.concatenate([run[np.lexsort((seq[run], at[run]))] for run in runs])
    at, seq = at[order], seq[order]
    assert order_by_position(at, seq).tolist() == np.lexsort((seq, at)).tolist()


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
    assert finished(Progress(5), AT_MIN, 0, 4) and not finished(Progress(5), 0, 0, 4)


def test_finished_takes_both_coordinates() -> None:
    """An entry is finished exactly when its offset is below O and its position at or below P."""
    state = Progress(10, Position(100, 1, 5))
    assert finished(state, 100, 1, 5) and finished(state, 99, 2, 9)
    assert not finished(state, 100, 1, 6) and not finished(state, 99, 1, 10)


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


COORDINATES = st.tuples(st.integers(0, 5), st.integers(0, 5))
SOURCE = 1


def finished(state: Progress, at_ms: int, source: int, offset: int) -> bool:
    """Whether the entry at that position is finished under a state."""
    return state.finishes(offset + 1, Position(at_ms, source, offset))


def finished_set(state: Progress) -> set[tuple[int, int]]:
    """(at, offset) of the finished entries of source 1, by the plain definition."""
    return {(at, o) for at in range(-1, 7) for o in range(7) if finished(state, at, SOURCE, o)}


@given(st.lists(st.tuples(COORDINATES, st.booleans()), max_size=12), st.integers(0, 2))
def test_a_staircase_never_unfinishes_anything(moves: list[tuple[tuple[int, int], bool]], other: int) -> None:
    """Steps back change nothing, moves only add; what one state includes the other says by its set, and a plain list of
    the states there were says the same."""
    state, seen = Progress(0), [Progress(0)]
    for (offset, at_ms), back in moves:
        before = finished_set(state)
        if back and Position(at_ms, SOURCE, OFFSET_MAX) < state.position:
            state = state.stepped_back(SOURCE, Position(at_ms, SOURCE, OFFSET_MAX))
            assert finished_set(state) == before
        else:
            state = state.moved(max(offset, state.offset), max(Position(at_ms, other, 3), state.position))
            seen.append(Progress(state.offset, state.position))
        assert finished_set(state) == set.union(*map(finished_set, seen))
        assert all(state.includes(each, SOURCE) for each in seen)
    for each in seen:
        is_smaller = each.offset < state.offset or finished_set(each) < finished_set(state)
        assert each.includes(state, SOURCE) <= (not is_smaller)


def test_steps_merge_when_p_gets_there_again() -> None:
    """A frozen step is kept exactly as long as it says something that the current one does not."""
    state = Progress(10, Position(100, 1, 5)).stepped_back(1, Position(49, 1, OFFSET_MAX))
    assert state.frozen == (Step(10, Position(100, 1, 5)),)
    assert state.moved(12, Position(99, 2, 0)).frozen
    assert state.moved(12, Position(100, 1, 5)) == Progress(12, Position(100, 1, 5))


def test_steps_that_are_no_stairs_are_refused() -> None:
    """Offsets rise and positions fall."""
    low, high = Position(10, 0, 0), Position(20, 0, 0)
    for frozen, current in [
        ((Step(5, low),), (6, high)),
        ((Step(7, high),), (6, low)),
        ((Step(5, high), Step(5, low)), (6, ORIGIN)),
    ]:
        with pytest.raises(Misuse):
            Progress(*current, frozen)
