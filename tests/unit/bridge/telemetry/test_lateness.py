"""bridge.telemetry.lateness: what became of deliveries lately. (test_metrics.py has the histogram.)"""

from __future__ import annotations

import numpy as np
import pytest

from bridge.telemetry.lateness import NOTE_INTERVAL_S, RECENT_S, LatenessHistogram, RecentLateness


def test_only_the_last_minutes_count() -> None:
    """What was late before them does not; before the first look nothing is known."""
    lateness = LatenessHistogram()
    assert lateness.recent(0) is None
    lateness.note(0)
    assert lateness.recent(3) == RecentLateness(delivered=0, p99_ms=None, over_s=3)
    lateness.observe(np.array([900_000]))
    for now_s in range(1, int(RECENT_S + 2 * NOTE_INTERVAL_S)):
        lateness.note(now_s)
    lateness.observe(np.array([3, 3]))
    found = lateness.recent(now_s)
    assert found is not None and found.delivered == 2 and found.p99_ms is not None and 2 < found.p99_ms <= 5
    assert RECENT_S <= found.over_s < RECENT_S + NOTE_INTERVAL_S


@pytest.mark.parametrize(
    ("observed", "p99_ms"),
    [([0] * 100, 0.99), ([15] * 99 + [90_000], 20), ([15] * 50 + [90_000] * 50, 295_200), ([4_000_000], 3_600_000)],
)
def test_the_quantile_is_prometheus_s(observed: list[int], p99_ms: float) -> None:
    """Evenly within a bucket; beyond the last edge, that edge."""
    lateness = LatenessHistogram()
    lateness.note(0)
    lateness.observe(np.array(observed))
    found = lateness.recent(1)
    assert found is not None and found.p99_ms == pytest.approx(p99_ms)
