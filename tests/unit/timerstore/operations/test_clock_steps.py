"""The wall clock is set back behind P: a staircase of committed states (invariant I4)."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.unit.timerstore.rig import NOW_MS, Rig
from timerstore.errors import Misuse
from timerstore.rows.position import Position

HOUR_MS = 3_600_000


def passed(rig: Rig, now_ms: int = NOW_MS) -> None:
    """P has come to `now_ms`."""
    rig.produce(now_ms - 10, now_ms)
    rig.ingest()
    rig.finish(now_ms)
    assert len(rig.delivered) == 2


def step(rig: Rig, now_ms: int) -> None:
    """The dispatcher's look at a clock that was set back."""
    assert rig.store.is_clock_behind(now_ms)
    rig.store.step_back(now_ms)
    assert not rig.store.is_clock_behind(now_ms)


def test_what_is_due_does_not_wait_behind_what_is_not(tmp_path: Path) -> None:
    """After an hour back, what comes in is delivered in the order of its times, at its times, and O moves on."""
    rig = Rig(tmp_path)
    passed(rig)
    now_ms = NOW_MS - HOUR_MS
    rig.produce(now_ms + 50_000)
    rig.ingest()
    step(rig, now_ms)
    rig.produce(now_ms + 30_000, now_ms + 10_000, now_ms - 5, None)
    rig.ingest()
    assert [r.due_ms for r in rig.deliver(now_ms)] == [now_ms - 5, None]
    assert rig.committed.offset == 7, "O has moved over what is not due"
    assert [r.due_ms for r in rig.deliver(now_ms + 10_000)] == [now_ms + 10_000]
    assert rig.deliver(now_ms + 29_999) == []
    assert [r.due_ms for r in rig.deliver(now_ms + 60_000)] == [now_ms + 30_000, now_ms + 50_000]
    rig.assert_each_delivered_once()


def test_without_a_step_the_rest_waits(tmp_path: Path) -> None:
    """What the step is for: a late row that is not due holds those behind it."""
    rig = Rig(tmp_path)
    passed(rig)
    now_ms = NOW_MS - HOUR_MS
    rig.produce(now_ms + 50_000, now_ms - 5)
    rig.ingest()
    assert rig.deliver(now_ms) == []


def test_a_small_step_is_waited_for(tmp_path: Path) -> None:
    """Two seconds of lateness are no reason for a step, and a clock that runs on as it should never makes one."""
    rig = Rig(tmp_path)
    passed(rig)
    assert not rig.store.is_clock_behind(NOW_MS) and not rig.store.is_clock_behind(NOW_MS - rig.limits.clock_step_ms)
    assert rig.store.is_clock_behind(NOW_MS - rig.limits.clock_step_ms - 1)


@pytest.mark.parametrize("lost", [False, True], ids=["restart", "directory lost"])
@pytest.mark.parametrize("committed", [False, True], ids=["step not committed", "step committed"])
def test_a_restart_keeps_the_steps(tmp_path: Path, lost: bool, committed: bool) -> None:
    """Nothing that a frozen step has finished is delivered again, nothing else is lost, whether the rows are in memory,
    in a segment or only in Kafka; and the index is not taken for one that was outrun."""
    rig = Rig(tmp_path / "store")
    passed(rig)
    now_ms = NOW_MS - HOUR_MS
    step(rig, now_ms)
    rig.produce(now_ms + 20_000, now_ms + 10_000, NOW_MS + 500)
    rig.ingest()
    if committed:
        rig.produce(now_ms)
        rig.ingest()
        assert len(rig.deliver(now_ms)) == 1
        assert rig.committed.frozen
    rig.store.maintenance.flush(now_ms)
    if lost:
        rig.store.close()
        shutil.rmtree(tmp_path / "store")
        rig.open(now_ms)
    else:
        rig.reopen()
        assert rig.store.reports == ()
    rig.ingest()
    if rig.store.is_clock_behind(now_ms):
        rig.store.step_back(now_ms)
    assert rig.store.stats().pending == 3
    for at_ms in (now_ms + 9_999, now_ms + 10_000, now_ms + 20_000, NOW_MS + 1_000):
        rig.finish(at_ms)
        assert all(r.at_ms <= at_ms for r in rig.delivered if r.offset >= 2)
    rig.assert_each_delivered_once()
    rig.produce(NOW_MS + 2_000)
    rig.ingest()
    rig.finish(NOW_MS + 5_000)
    assert not rig.committed.frozen, "the clock is where it was: the steps have merged"


def test_a_clock_that_swings_makes_no_more_steps_than_it_must(tmp_path: Path) -> None:
    """A step that adds nothing is not kept: forty swings without a commit in between are one step."""
    rig = Rig(tmp_path)
    passed(rig)
    for swing in range(1, 41):
        step(rig, NOW_MS - swing * HOUR_MS)
    [frozen] = rig.store.state.resident.committed.frozen
    assert frozen.position == Position(NOW_MS, 1)
    rig.produce(NOW_MS - 30 * HOUR_MS)
    rig.ingest()
    rig.finish(NOW_MS)
    rig.assert_each_delivered_once()


def test_a_segment_is_reclaimed_when_a_frozen_step_has_finished_it(tmp_path: Path) -> None:
    """Disk space does not wait for the clock to come back."""
    rig = Rig(tmp_path)
    rig.produce(NOW_MS + 70_000, NOW_MS + 80_000)
    rig.ingest()
    rig.deliver(NOW_MS)
    rig.store.maintenance.flush(NOW_MS)
    rig.finish(NOW_MS + 90_000)
    step(rig, NOW_MS)
    assert rig.store.maintenance.reclaim(NOW_MS) == 1


def test_a_step_waits_for_the_open_transaction(tmp_path: Path) -> None:
    """It would move P under it."""
    rig = Rig(tmp_path)
    passed(rig)
    transaction = rig.store.begin()
    with pytest.raises(Misuse):
        rig.store.step_back(NOW_MS - HOUR_MS)
    transaction.rollback()
