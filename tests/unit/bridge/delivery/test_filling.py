"""bridge.delivery.filling: how far ahead rows are taken, and how many."""

from __future__ import annotations

from typing import Any, cast
from unittest import mock

import pytest

from bridge.delivery.filling import BUSY_ROWS, BUSY_ROWS_EACH, Filling
from bridge.delivery.open_transaction import OpenTransaction
from bridge.delivery.producer.writer import SMALL_RECORDS
from bridge.stores.stores import Stores
from tests.manual_clock import ManualClock

INTERVAL_MS = 30
ROWS_MAX = 10_000


def filling_of(clock: ManualClock, *, is_to_end: bool, is_small: bool = False) -> Filling:
    narrowing = mock.Mock(rows=ROWS_MAX, until_ms=None, is_careful=False)
    parts: dict[str, Any] = {"planner": mock.Mock(), "narrowing": narrowing, "budgets": mock.Mock(fill_s=1.0)}
    parts |= {"writer": mock.Mock(is_to_stay_small=is_small), "is_to_end": lambda: is_to_end, "beat": lambda: None}
    parts["on_taken"] = mock.Mock()
    return Filling(**parts, clock=clock, commit_interval_ms=INTERVAL_MS)


@pytest.mark.parametrize(
    ("rows", "partitions", "is_busy"),
    [
        (BUSY_ROWS - 1, 1, False),
        (BUSY_ROWS, 1, True),
        (32 * BUSY_ROWS_EACH - 1, 32, False),
        (32 * BUSY_ROWS_EACH, 32, True),
    ],
)
def test_where_there_is_much_to_deliver_half_of_the_interval_is_enough(
    rows: int, partitions: int, is_busy: bool
) -> None:
    """As the transaction before tells; many partitions with few rows each are not much."""
    clock = ManualClock()
    filling = filling_of(clock, is_to_end=True)
    taken: list[int] = []
    for _ in range(2):
        transaction = mock.Mock(rows=rows, bytes=0, opened_s=clock.monotonic_s())
        transaction.loan.take.return_value, transaction.loan.touched = (), partitions
        filling.fill(mock.Mock(spec=Stores), cast("OpenTransaction", transaction))
        taken.append(transaction.until_ms - clock.now_ms())
    assert taken == [INTERVAL_MS, INTERVAL_MS // 2 if is_busy else INTERVAL_MS]


@pytest.mark.parametrize(("is_small", "rows"), [(True, SMALL_RECORDS), (False, ROWS_MAX)])
def test_a_transaction_that_is_to_stay_small_is_ended_early(is_small: bool, rows: int) -> None:
    """It began with less than what falls due within its time."""
    clock, pieces = ManualClock(), iter([SMALL_RECORDS - 1])
    filling = filling_of(clock, is_to_end=False, is_small=is_small)
    store = mock.Mock()
    store.next_wakeup_ms.side_effect = clock.now_ms
    transaction = mock.Mock(rows=0, bytes=0, begun=False, opened_s=clock.monotonic_s())
    transaction.loan.touched = 1
    transaction.loan.take.side_effect = lambda _until_ms, room: range(min(room, next(pieces, room)))

    def plan(taken: range, *_: object) -> object:
        return mock.Mock(records=len(taken), weight=len(taken), released=())

    def add(planned: Any) -> int:
        transaction.rows += planned.records
        return 0

    cast("Any", filling.planner).plan.side_effect = plan
    transaction.add.side_effect = add
    with mock.patch("bridge.delivery.filling.Departures") as departures:
        departures().until.return_value, departures().next_ms.return_value = (), None
        filling.fill(store, cast("OpenTransaction", transaction))
    assert transaction.rows == rows
