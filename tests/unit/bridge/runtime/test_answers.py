"""bridge.runtime.answers: what the API is told of a real store."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from bridge.runtime.answers import Answers
from bridge.runtime.gauges import Lag, snapshot
from bridge.settings.model import Settings
from bridge.telemetry.health import Health
from tests.manual_clock import ManualClock
from tests.unit.timerstore.rig import NOW_MS, Rig
from timerstore.operations.find import Query


def answers(rig: Rig, health: Health, clock: ManualClock) -> Answers:
    """Of a pipeline that has the rig's store."""
    lag = Lag(clock)
    return Answers(
        pipeline=lambda: cast(Any, SimpleNamespace(store=rig.store)),
        targets=lambda: None,
        gauges=lambda: snapshot(rig.store, Settings.of({}), clock.now_ms(), lag, None),
        health=health,
        lag=lag,
        clock=clock,
    )


def test_what_is_overdue_and_what_comes_next(tmp_path: Path) -> None:
    """Overdue is counted in whole slots of ten seconds, so that nothing is counted before its time."""
    rig, clock, health = Rig(tmp_path), ManualClock(NOW_MS), Health()
    rig.load()
    rig.produce(NOW_MS + 20_000, NOW_MS + 20_001, NOW_MS + 500_000)
    rig.ingest()
    health.enter("running", ready=True)
    seen = answers(rig, health, clock).overview()
    assert seen is not None
    assert (seen.gauges.pending_total, seen.overdue, seen.next_at_ms) == (3, 0, NOW_MS + 20_000)
    clock.advance(40_000)
    seen = answers(rig, health, clock).overview()
    assert seen is not None and (seen.overdue, seen.next_at_ms) == (2, NOW_MS + 20_000)


def test_an_index_that_is_not_complete_tells_nothing(tmp_path: Path) -> None:
    """Before O is reached, less would be told than is pending."""
    rig, clock, health = Rig(tmp_path), ManualClock(), Health()
    rig.produce(NOW_MS + 20_000)
    rig.ingest()
    for phase, is_told in (("recovering", False), ("catching-up", False), ("connecting", True), ("stopping", False)):
        health.enter(phase)
        source = answers(rig, health, clock)
        assert (source.overview() is not None) is (source.pending() is not None) is is_told
    health.enter("running")
    store = answers(rig, health, clock).pending()
    assert store is not None and store.count_where(Query(), NOW_MS).rows == 1
    assert answers(rig, health, clock).targets() == []
