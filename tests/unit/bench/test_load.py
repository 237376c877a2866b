"""The producer's wait for the append, as the load reports it."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

from bench.load import Appends
from tests.manual_clock import ManualClock


def test_the_wait_for_an_append_counts_in_the_window_of_the_call() -> None:
    """From the call to the broker's timestamp; a refused message has none."""
    failed: list[object] = []
    clock, refusal = ManualClock(), Mock()
    appends = Appends(failed, clock)
    for waited_ms in (5, 9):
        appended: Any = appends.of_one()
        clock.advance(1_000)
        appended(None, Mock(**{"timestamp.return_value": (2, clock.now_ms() - 1_000 + waited_ms)}))
    appends.of_one()(refusal, Mock())
    figures = appends.by_window(["first", "0", "1", "second", "1", "2", "later", "2", "9"])
    assert (figures["first"]["max"], figures["second"]["max"]) == (5, 9)
    assert figures["later"] == {} and failed == [refusal]
