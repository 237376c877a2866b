"""bridge.delivery.filling: how far ahead rows are taken."""

from __future__ import annotations

from typing import Any, cast
from unittest import mock

import pytest

from bridge.delivery.filling import BUSY_ROWS, Filling
from bridge.delivery.open_transaction import OpenTransaction
from tests.manual_clock import ManualClock
from timerstore.store import TimerStore

INTERVAL_MS = 30


@pytest.mark.parametrize(("rows", "ahead_ms"), [(BUSY_ROWS - 1, INTERVAL_MS), (BUSY_ROWS, INTERVAL_MS // 2)])
def test_where_there_is_much_to_deliver_half_of_the_interval_is_enough(rows: int, ahead_ms: int) -> None:
    """As the transaction before tells."""
    clock = ManualClock()
    budgets, narrowing = mock.Mock(fill_s=1.0), mock.Mock(rows=10_000, until_ms=None, is_careful=False)
    parts: dict[str, Any] = {"writer": mock.Mock(), "planner": mock.Mock(), "narrowing": narrowing, "budgets": budgets}
    filling = Filling(**parts, clock=clock, commit_interval_ms=INTERVAL_MS, is_to_end=lambda: True, beat=lambda: None)
    taken: list[int] = []
    for _ in range(2):
        transaction = mock.Mock(rows=rows, bytes=0, opened_s=clock.monotonic_s())
        transaction.loan.take.return_value = ()
        filling.fill(mock.Mock(spec=TimerStore), cast("OpenTransaction", transaction))
        taken.append(transaction.until_ms - clock.now_ms())
    assert taken == [INTERVAL_MS, ahead_ms]
