"""bridge.snapshot: what the gauges say of a store."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

from bridge.errors import EnvironmentFailure
from bridge.kafka.admin import Watermarks
from bridge.runtime.gauges import Lag, snapshot
from bridge.settings.model import Settings
from bridge.start.identity import Looked
from tests.manual_clock import ManualClock
from tests.unit.bridge.stores.rig import BILLS, NOW_MS, ORDERS, Rig
from tests.unit.timerstore.entries import Record
from timerstore.rows.position import ORIGIN, Progress

LATE_MS = 3_000_000
SLOT_S = 10


@pytest.mark.parametrize("stored", [False, True], ids=["in the memtable", "in a segment"])
def test_what_is_overdue_beyond_the_frontier_is_seen(tmp_path: Path, stored: bool) -> None:
    """Maintenance hangs, so no window is loaded: what falls due on disk is in no queue, and overdue all the same."""
    rig = Rig(tmp_path)
    rig.load()
    rig.produce(ORDERS, *range(NOW_MS + 100_000, NOW_MS + 101_000))
    rig.ingest()
    rig.deliver()
    if stored:
        rig.stores.flush(NOW_MS)
    now_ms = NOW_MS + 100_000 + LATE_MS
    shown = snapshot(rig.stores, Settings.of({}), now_ms, Lag(ManualClock()), None)
    assert shown.pending_total == 1_000
    assert LATE_MS / 1_000 - SLOT_S <= shown.oldest_overdue_s <= LATE_MS / 1_000
    rig.finish(now_ms)
    assert snapshot(rig.stores, Settings.of({}), now_ms, Lag(ManualClock()), None).oldest_overdue_s == 0


@pytest.mark.parametrize("where", ["late", "hot", "in a transaction", "memtable"])
def test_what_a_producer_dates_back_waits_since_it_was_written(tmp_path: Path, where: str) -> None:
    """A due time of years ago is delivered at once, and nothing is late: that must raise no alarm, wherever the row is
    while somebody looks."""
    rig = Rig(tmp_path)
    if where != "memtable":
        rig.load()
    if where == "late":
        rig.produce(ORDERS, NOW_MS - 1)
        rig.ingest()
        rig.deliver()
    for i in range(1_000):
        rig.logs[ORDERS].append(Record(*ORDERS, len(rig.logs[ORDERS]), NOW_MS // 10 - i, ts_ms=NOW_MS - i))
    rig.ingest()
    transaction = rig.stores.begin(NOW_MS)
    if where == "in a transaction":
        assert len(transaction.take(NOW_MS, 2_000)) == 1_000
    shown = snapshot(rig.stores, Settings.of({}), NOW_MS + 7_000, Lag(ManualClock()), None)
    assert shown.pending_total == 1_000
    assert shown.oldest_overdue_s <= 7 + 0.999
    if where != "memtable":
        assert shown.oldest_overdue_s == 7 + 0.999


def test_a_dead_letter_that_cannot_be_written_hides_nothing(tmp_path: Path) -> None:
    """A reject has no due time; it waits since it was written, and what else is overdue is seen beside it."""
    rig = Rig(tmp_path)
    rig.load()
    rig.logs[ORDERS].append(Record(*ORDERS, 0, None, ts_ms=NOW_MS - 20_000))
    rig.ingest()
    assert snapshot(rig.stores, Settings.of({}), NOW_MS, Lag(ManualClock()), None).oldest_overdue_s == 20
    rig.logs[ORDERS].append(Record(*ORDERS, 1, NOW_MS - 50_000, ts_ms=NOW_MS - 90_000))
    rig.ingest()
    assert snapshot(rig.stores, Settings.of({}), NOW_MS, Lag(ManualClock()), None).oldest_overdue_s == 50


def test_a_quiet_partition_makes_no_checkpoint_old(tmp_path: Path) -> None:
    """A restart would read nothing of it again. The age is that of the oldest checkpoint that lacks something."""
    rig = Rig(tmp_path)
    later_ms = NOW_MS + 3_600_000

    def age_s() -> float | None:
        return snapshot(rig.stores, Settings.of({}), later_ms, Lag(ManualClock()), None).checkpoint_age_s

    for name in (ORDERS, BILLS):
        rig.produce(name, NOW_MS + 36_000_000)
    rig.ingest()
    rig.deliver()
    rig.stores.flush(NOW_MS)
    rig.produce(ORDERS, NOW_MS + 36_000_000)
    rig.ingest()
    rig.deliver()
    assert age_s() == 3_600
    assert rig.stores.upkeep.flush(later_ms - 5_000, only_due=True).rows == 1
    assert age_s() == 5


def test_what_is_held_back_is_overdue(tmp_path: Path) -> None:
    """Rows of a partition that takes nothing are in no queue when they are stored: the counts tell of them."""
    rig = Rig(tmp_path)
    rig.load()
    rig.produce(ORDERS, NOW_MS + 1_000)
    rig.produce(BILLS, NOW_MS + 2_000)
    rig.ingest()
    rig.deliver()
    rig.stores.flush(NOW_MS)
    rig.stores.hold_named([ORDERS])
    rig.load(NOW_MS + 2_000)
    rig.deliver(NOW_MS + 2_000)
    now_ms = NOW_MS + LATE_MS
    shown = snapshot(rig.stores, Settings.of({}), now_ms, Lag(ManualClock()), None)
    assert shown.pending_total == 1
    assert LATE_MS / 1_000 - 1 - SLOT_S <= shown.oldest_overdue_s <= LATE_MS / 1_000


def test_a_look_at_the_logs_tells_what_is_committed_and_not_read_again_yet() -> None:
    """What was read once is compared with the log, however far a start has caught up. Without an answer the ends of the
    look before stay."""
    store, cluster, clock, name = mock.Mock(), mock.Mock(), ManualClock(), ("delay", 0)
    store.next_offsets.return_value = {name: 10, ("delay", 1): 0}  # which has come just now
    store.committed.return_value = {name: Progress(60, ORIGIN), ("delay", 2): Progress(5)}  # which has gone
    mark = Watermarks(start=0, end=45, epoch=1)
    cluster.watermarks.side_effect = [{name: mark}, EnvironmentFailure("no answer", hint="Wait.")]
    lag = Lag(clock)
    assert lag.refresh(cluster, store) == {name: Looked(expected=10, marks=mark, committed=60)}
    assert lag.refresh(cluster, store) is None, "it is not time"
    told = lag.refresh(cluster, store, at_once=True)
    assert told == {name: Looked(expected=10, marks=None, committed=60)} and told[name].read == 60
    assert lag.marks([name]) == {name: mark}
