"""timerstore.budget: the memory that a flood in one store takes of the others."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from timerstore.budget import Budget


def shared(total: int, *used: int) -> tuple[Budget, list[int]]:
    budget, now = Budget(total), list(used)
    for i in range(len(now)):
        budget.join(i, lambda i=i: now[i])  # type: ignore[misc]
    return budget, now


def test_one_alone_has_all() -> None:
    """As a bridge with one partition."""
    budget, _ = shared(121, 50)
    assert budget.allowed(0) == Budget(121).allowed("nobody") == 121


@pytest.mark.parametrize(("used", "allowed"), [((70, 10, 0), (80, 30, 30)), ((60, 40, 0), (60, 40, 20))])
def test_the_example_of_the_module(used: tuple[int, ...], allowed: tuple[int, ...]) -> None:
    """Half is guaranteed in equal parts, half is for whoever needs it."""
    budget, _ = shared(120, *used)
    assert tuple(budget.allowed(i) for i in range(3)) == allowed


@given(st.integers(1, 10_000), st.lists(st.tuples(st.integers(0, 7), st.integers(0, 400)), max_size=60))
def test_nobody_gets_less_than_its_part_and_all_together_no_more_than_there_is(
    total: int, wishes: list[tuple[int, int]]
) -> None:
    """Whoever asks for how much, in whatever order."""
    budget, used = shared(total, *[0] * 8)
    for i, more in wishes:
        allowed = budget.allowed(i)
        assert allowed >= total // 2 // 8
        used[i] += max(0, min(more, allowed - used[i]))
        assert budget.full() == {each: budget.allowed(each) for each in range(8) if budget.is_used(each)}
    assert sum(used) <= total


def test_what_a_store_had_is_free_when_it_is_closed() -> None:
    """The others' parts grow."""
    budget, _ = shared(120, 60, 0, 0)
    budget.leave(0)
    assert budget.allowed(1) == 90


class Slow:
    """A store that comes while another one goes."""

    def __init__(self, budget: Budget, going: object) -> None:
        self.budget, self.going = budget, going

    def __hash__(self) -> int:
        self.budget.leave(self.going)
        return 7


def test_a_store_that_goes_while_another_one_comes_is_gone() -> None:
    """Memory of a partition that went is common again, also if another one comes at the same moment: the main thread
    opens stores, the membership's thread closes them."""
    budget, used = shared(120, 50)
    budget.join(Slow(budget, 0), lambda: 0)
    used[0] = 100
    assert budget.guaranteed == 60 and budget.allowed("nobody") == 120
