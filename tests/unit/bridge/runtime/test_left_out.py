"""bridge.runtime.left_out: when a partition is left out, and when it is tried again."""

from __future__ import annotations

from bridge.runtime.left_out import LOOKS, WAIT_S, WAIT_S_MAX, LeftOut
from tests.manual_clock import ManualClock

A, B = ("delay", 0), ("delay", 1)
OWNED = frozenset({A, B})


def looks(left_out: LeftOut, times: int, *blocking: tuple[str, int], owned: frozenset[tuple[str, int]] = OWNED) -> bool:
    """Whether one of so many looks asks for another pipeline."""
    return any(left_out.look(frozenset(blocking), owned) for _ in range(times))


def test_a_partition_is_left_out_when_it_leaves_no_room_for_a_while() -> None:
    """Not at the first sight: a flush may be under way. It is tried again later and later."""
    clock = ManualClock()
    left_out = LeftOut(clock)
    assert not looks(left_out, LOOKS - 1, B)
    assert not looks(left_out, 1) and not looks(left_out, LOOKS - 1, B), "in a row"
    assert left_out.without(OWNED) == OWNED and left_out.alarms() == ()
    wait_s = WAIT_S
    for _ in range(6):
        assert looks(left_out, LOOKS, B)
        assert left_out.without(OWNED) == {A}
        assert "delay/1" in left_out.alarms()[0]
        clock.advance(int(wait_s * 1000) - 1)
        assert not looks(left_out, 5, owned=frozenset({A}))
        clock.advance(1)
        assert left_out.look(frozenset(), frozenset({A}))
        assert left_out.without(OWNED) == OWNED
        wait_s = min(WAIT_S_MAX, 2 * wait_s)


def test_a_partition_that_holds_up_no_other_stays() -> None:
    """Alone, or when all of them leave no room."""
    left_out = LeftOut(ManualClock())
    assert not looks(left_out, 2 * LOOKS, A, owned=frozenset({A}))
    assert not looks(left_out, 2 * LOOKS, A, B)
    assert looks(left_out, LOOKS, A)
    assert left_out.without(frozenset({A})) == {A}, "of what is owned then, no other would be left"
