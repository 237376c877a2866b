"""The overdue policy: messages that have waited too long, and the slots of those that must not come all at once."""

from __future__ import annotations

import numpy as np

from bridge.delivery.plan.overdue import BURST_MS, WAITED_MS_MAX, CatchUp, OverduePolicy

NOW = 1_800_000_000_000


def test_waiting_counts_from_the_due_time_or_from_the_record_if_that_is_later() -> None:
    """Sent with a due time in the past, or written back as a retry: that is not waiting."""
    at = np.array([NOW - 5_000, NOW - 86_400_000, -(2**63)], dtype=np.int64)
    ts = np.array([NOW - 90_000, NOW - 10, NOW - 20], dtype=np.int64)
    assert CatchUp(OverduePolicy()).waited_ms(NOW, at, ts).tolist() == [5_000, 10, 20]


def test_who_has_waited_longer_than_the_limit_is_given_up() -> None:
    """Not at the limit, but beyond it; none without one."""
    waited = np.array([999, 1_000, 1_001])
    assert CatchUp(OverduePolicy(give_up_ms=1_000)).given_up(waited).tolist() == [False, False, True]
    assert not CatchUp(OverduePolicy(rate=5)).given_up(waited).any()


def test_only_a_real_backlog_counts_against_the_rate() -> None:
    """A hiccup of some seconds is delivered as it is; without a rate everything is."""
    waited = np.array([WAITED_MS_MAX, WAITED_MS_MAX + 1])
    assert CatchUp(OverduePolicy(rate=5)).is_behind(waited).tolist() == [False, True]
    assert not CatchUp(OverduePolicy(give_up_ms=1)).is_behind(waited).any()


def test_no_second_gets_more_slots_than_the_rate() -> None:
    """Over several transactions, and while time goes on."""
    catch_up = CatchUp(OverduePolicy(rate=300))
    slots: list[int] = []
    for step in range(20):
        catch_up.begin()
        slots += catch_up.slots_ms(NOW + 5 * step, 137).tolist()
        catch_up.commit()
    assert slots == sorted(slots)
    counts = np.bincount((np.array(slots) - NOW) // 1000)
    assert counts.max() <= 300
    assert slots[299] <= NOW + BURST_MS < slots[301]


def test_slots_of_a_transaction_that_was_not_committed_are_handed_out_again() -> None:
    """An abort leaves no hole in the catch-up."""
    catch_up = CatchUp(OverduePolicy(rate=10))
    for _ in range(3):
        catch_up.begin()
        first = catch_up.slots_ms(NOW, 50)
    catch_up.commit()
    catch_up.begin()
    assert catch_up.slots_ms(NOW, 1)[0] - first[-1] == 100


def test_an_idle_bridge_saves_no_slots_up() -> None:
    """The next backlog begins at its own time."""
    catch_up = CatchUp(OverduePolicy(rate=10))
    catch_up.begin()
    catch_up.slots_ms(NOW, 5)
    catch_up.commit()
    catch_up.begin()
    assert catch_up.slots_ms(NOW + 3_600_000, 2).tolist() == [NOW + 3_600_000, NOW + 3_600_100]
