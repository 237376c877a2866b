"""bridge.delivery.resuming: what a pause has put off comes forward at a bounded rate, however often it begins anew."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from bridge.delivery import resuming
from bridge.delivery.resuming import Named, Resuming
from bridge.delivery.targets.pauses import ENDED_MS_MAX, Pauses
from bridge.wire.committed_state import Pause
from tests.manual_clock import ManualClock
from tests.unit.bridge.stores.rig import NOW_MS, ORDERS, Rig
from tests.unit.timerstore.entries import Record
from timerstore.limits import Limits

LATER_MS = NOW_MS + 1_000_000


class Bench:
    """An instance with messages that were put off, on disk, and a pause of their target."""

    def __init__(self, directory: Path, count: int, rate: int = 100) -> None:
        self.clock = ManualClock(NOW_MS)
        self.rig = Rig(directory / "store", [ORDERS], Limits(horizon_ms=1_000))
        log = self.rig.logs[ORDERS]
        for target in ("orders", "bills"):
            log += [self._put_off(len(log) + n, target) for n in range(count)]
        log.append(Record(*ORDERS, len(log), LATER_MS))
        self.rig.ingest()
        self.rig.deliver()
        self.rig.stores.flush(NOW_MS)
        self.pauses = Pauses(self.clock)
        self.sent: list[int] = []
        self.has_gone = False
        self.log_ends = {ORDERS: len(log)}
        self.resuming = Resuming(
            pauses=self.pauses,
            store=lambda: self.rig.stores,
            bring=self._bring,
            read=lambda _: (),
            log_ends=lambda _: self.log_ends,
            clock=self.clock,
            rate=rate,
        )

    @staticmethod
    def _put_off(offset: int, target: str) -> Record:
        return Record(*ORDERS, offset, NOW_MS - 5, target, ts_ms=NOW_MS - 3, put_off_ms=LATER_MS)

    def _bring(self, named: Named) -> list[Future[Any]] | None:
        if self.has_gone:
            return None
        self.sent += [origin for _, origin in named]
        answered: list[Future[Any]] = [Future() for _ in named]
        for future in answered:
            future.set_result(())
        return answered

    def resume(self) -> None:
        self.pauses.learn([Pause(name="orders", changed_ms=self.clock.now_ms(), is_paused=False)])

    def brought(self) -> list[int]:
        return self.sent


@pytest.mark.fault("the backlog of a pause that has ended")
def test_what_was_put_off_is_brought_forward_at_the_rate(tmp_path: Path) -> None:
    """A search brings each message of the target forward once, within the rate; other targets are not affected."""
    bench = Bench(tmp_path, 250)
    assert bench.resuming.look() == resuming.LOOK_S and not bench.sent, "it is paused still, or never was"
    bench.resume()
    counts = []
    for _ in range(3):
        before = len(bench.brought())
        assert bench.resuming.look() == (len(bench.brought()) - before) / 100
        counts.append(len(bench.brought()) - before)
    assert counts == [100, 100, 50] and sorted(bench.brought()) == list(range(250))
    assert bench.resuming.look() == resuming.LOOK_S and len(bench.brought()) == 250


def test_it_is_looked_for_again_for_a_minute_and_no_longer(tmp_path: Path) -> None:
    """Copies may have been under way. (What is found once more here was not acted on: nothing delivers it.)"""
    bench = Bench(tmp_path, 10)
    bench.resume()
    for ms in resuming.AGAIN_MS:
        bench.clock.step_wall(ms)
        bench.resuming.look()
        bench.resuming.look()
        bench.clock.step_wall(-ms)
    assert len(bench.brought()) == 10 * len(resuming.AGAIN_MS)
    bench.clock.step_wall(3_600_000)
    bench.resuming.look()
    assert len(bench.brought()) == 10 * len(resuming.AGAIN_MS)


@pytest.mark.fault("copies of a paused target behind a backlog")
def test_what_lies_unread_behind_a_backlog_comes_forward_when_it_is_read(tmp_path: Path) -> None:
    """After a pause its messages come forward, even if their copies lie behind a backlog that takes hours to read."""
    bench = Bench(tmp_path, 10)
    unread = bench.log_ends[ORDERS]
    bench.log_ends = {ORDERS: unread + 1}
    bench.resume()
    for _ in range(10):
        bench.clock.advance(resuming.AGAIN_MS[-1])
        bench.resuming.look()
    bench.rig.logs[ORDERS].append(bench._put_off(unread, "orders"))
    bench.rig.ingest()
    bench.log_ends = {ORDERS: unread + 9}  # later records are of no importance
    for _ in range(2):
        bench.clock.advance(resuming.AGAIN_MS[-1])
        bench.resuming.look()
    assert bench.brought().count(unread) == 1


@pytest.mark.fault("a roll window that is shortened while a target is paused")
def test_after_a_start_it_goes_on_until_nothing_can_wait_any_more(tmp_path: Path) -> None:
    """After a pause its messages come forward, however long ago it ended and under whichever roll window they were put
    off, until the end of the pause is forgotten."""
    bench = Bench(tmp_path, 10)
    bench.resume()
    bench.clock.advance(LATER_MS - NOW_MS - 1)
    bench.resuming.look()
    assert len(bench.brought()) == 10
    bench.clock.advance(ENDED_MS_MAX)
    assert not bench.pauses.ended(), "all have come up by themselves"


def test_partitions_that_have_gone_are_searched_by_their_new_owner(tmp_path: Path) -> None:
    """This instance begins anew with those that it has."""
    bench = Bench(tmp_path, 10)
    bench.resume()
    bench.has_gone = True
    assert bench.resuming.look() == resuming.LOOK_S and not bench.sent
    bench.has_gone = False
    bench.resuming.look()
    assert len(bench.brought()) == 10


def test_a_partition_that_takes_long_to_join_holds_up_no_other(tmp_path: Path) -> None:
    """A corrupt batch below its committed offset, say. What it holds comes forward when it has joined."""
    bench = Bench(tmp_path, 10)
    bench.resume()
    with mock.patch.object(bench.rig.stores, "in_life", return_value=[ORDERS]):
        bench.resuming.look()
    assert not bench.sent
    with mock.patch.object(bench.rig.stores, "in_life", return_value=[("elsewhere", 0)]):
        bench.resuming.look()
    assert len(bench.brought()) == 10
