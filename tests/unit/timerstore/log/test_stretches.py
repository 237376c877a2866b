"""Stretches of slots: bounded, without a miss, and with the long gaps."""

from __future__ import annotations

import numpy as np
import pytest

from timerstore.log import stretches
from timerstore.log.stretches import STRETCHES_MAX, STRETCHES_MIN, Stretches


@pytest.mark.fault("memory for the times of messages that are due far apart")
def test_an_open_segment_keeps_a_bounded_number_of_stretches() -> None:
    """An open segment takes at most 64 KB for the times of its messages, however many and however far apart they are.
    The longest gaps stay, so that a day without messages needs no read."""
    slots = np.arange(0, 3_000_000, 3)
    slots = slots[(slots < 1_000_000) | (slots >= 1_000_000 + 8_640)]
    kept = Stretches.of(np.array_split(slots, 20), len(slots))
    assert kept.first.nbytes + kept.last.nbytes <= 1 << 16
    assert len(kept.first) == STRETCHES_MAX
    assert kept.meet(999_998, 999_999) and not kept.meet(1_000_000, 1_008_639)


@pytest.mark.parametrize("rows", [1, 1_000, 10_000, 60_000])
def test_a_small_segment_keeps_a_byte_a_row(rows: int) -> None:
    """Beside a kilobyte for itself: a thousand small segments of messages far apart take the memory of their rows."""
    kept = Stretches.of([np.arange(0, 9 * rows, 9)], rows)
    assert kept.first.nbytes + kept.last.nbytes <= rows + 16 * STRETCHES_MIN


@pytest.mark.parametrize("most", [1, 2, 3, 5, 100])
def test_no_slot_is_missed_and_only_the_shortest_gaps_are_closed(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """For each pair of bounds, from pieces of any size; with room for all stretches the answer is exact."""
    monkeypatch.setattr(stretches, "STRETCHES_MAX", most)
    slots = np.array([-7, 1, 2, 3, 7, 10, 31, 32, 90])
    kept = Stretches.of([slots], len(slots))
    assert len(kept.first) == min(most, 6)
    for size in (1, 2, 4):
        pieces = (slots[i : i + size] for i in range(0, len(slots), size))
        in_pieces = Stretches.of(pieces, len(slots))
        assert (in_pieces.first.tolist(), in_pieces.last.tolist()) == (kept.first.tolist(), kept.last.tolist())
    for first in range(-9, 95):
        nearest = kept.first_from(first)
        later = slots[slots >= first]
        assert (nearest is None) == (len(later) == 0)
        assert nearest is None or first <= nearest <= later[0]
        for last in range(first, 95):
            is_any = bool(((slots >= first) & (slots <= last)).any())
            assert kept.meet(first, last) >= is_any
            assert most < 6 or kept.meet(first, last) == is_any
    assert most == 1 or not kept.meet(33, 89)
