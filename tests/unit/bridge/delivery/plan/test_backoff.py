"""bridge.retry: when a message is tried again, and when it is given up."""

from __future__ import annotations

import numpy as np
import pytest

from bridge.delivery.plan.backoff import RetryPolicy, parked_ms
from bridge.delivery.targets.pauses import ENDED_MS_MAX


def test_waits_double_up_to_the_longest_and_are_shortened_by_a_quarter_at_most() -> None:
    """The table in the module, for any number of failures that fits into a header."""
    policy = RetryPolicy(backoff_ms=1_000, backoff_max_ms=600_000)
    failures = np.array([1, 2, 3, 10, 11, 15, 32_767], dtype=np.int64)
    full = np.array([1_000, 2_000, 4_000, 512_000, 600_000, 600_000, 600_000])
    for seed in range(50):
        waits = policy.waits_ms(failures, np.full(len(failures), seed, dtype=np.int64))
        assert (waits <= full).all()
        assert (waits >= full * 0.75).all()


def test_what_fails_together_does_not_come_back_together() -> None:
    """Neighbouring offsets are spread over the whole quarter, the same way each time."""
    policy = RetryPolicy()
    keys = np.arange(10_000, dtype=np.int64)
    waits = policy.waits_ms(np.full(len(keys), 5), keys)
    counts, _ = np.histogram(waits, bins=20, range=(12_000, 16_000))
    assert counts.min() > 350
    assert (waits == policy.waits_ms(np.full(len(keys), 5), keys)).all()


def test_the_last_attempt_is_the_configured_one() -> None:
    """16 attempts are 15 retries."""
    assert RetryPolicy(attempts=16).is_over(np.array([14, 15, 16, 17])).tolist() == [False, False, True, True]


def test_large_waits_do_not_overflow() -> None:
    """The largest backoff that can be configured, after as many failures as there can be."""
    policy = RetryPolicy(backoff_ms=3_600_000, backoff_max_ms=86_400_000)
    waits = policy.waits_ms(np.array([40, 32_767]), np.array([1, 2**62], dtype=np.int64))
    assert (waits >= 64_800_000).all()
    assert (waits <= 86_400_000).all()


@pytest.mark.fault("a roll window that is longer than the end of a pause is remembered")
def test_a_message_for_a_paused_target_does_not_wait_for_the_whole_of_a_long_window() -> None:
    """A message for a paused target comes up by itself before the end of the pause is forgotten, though its record may
    stay for years."""
    keys = np.arange(100, dtype=np.int64)
    waits = parked_ms(np.full(len(keys), 3_650 * 86_400_000), keys)
    assert waits.max() < ENDED_MS_MAX and waits.min() > 5 * 86_400_000
    assert (parked_ms(np.full(len(keys), 8_000_000), keys) <= 8_000_000).all()
