"""How the Spark session is set up. (What it does is seen wherever a bridge runs.)"""

from __future__ import annotations

from unittest import mock

import pytest

from bridge.errors import BridgeError, EnvironmentFailure
from bridge.spark.session import SPARE_SLOTS, SessionStart, with_slots

P = 4 + SPARE_SLOTS


@pytest.mark.parametrize(
    ("master", "meant"),
    [
        ("local", f"local[{P},1]"),
        ("local[2]", f"local[{P},1]"),
        ("local[200]", "local[200,1]"),
        ("local[*]", f"local[{P},1]"),
        ("local[2,4]", f"local[{P},1]"),
        ("local[*, 8]", f"local[{P},1]"),
        ("local-cluster[1,1,1024]", "local-cluster[1,1,1024]"),
        ("spark://spark:7077", "spark://spark:7077"),
    ],
)
def test_each_partition_has_a_slot_and_each_task_one_attempt(master: str, meant: str) -> None:
    """A task without a slot would never be run, and no error would say so."""
    assert with_slots(master, 4) == meant


def test_a_session_that_does_not_start_is_told() -> None:
    """To who waits for it, and to the application."""
    failure = EnvironmentFailure("Spark does not start", hint="Look.", code="DB-3015")
    told: list[BridgeError] = []
    start = SessionStart(mock.Mock(side_effect=failure), told.append)
    assert start.session.exception(timeout=10) is failure
    start.thread.join(10)
    assert told == [failure]
