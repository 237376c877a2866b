"""bridge.stores.stores: batches that concern several partitions, and partitions that leave meanwhile."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from bridge.stores.stores import Life
from dev.harness.waiting import wait_until
from tests.model.stores import State, batch
from tests.unit.bridge.stores.rig import BILLS, NOW_MS, ORDERS, RETRY, Rig
from tests.unit.timerstore.entries import Record
from timerstore.errors import Closed, Misuse
from timerstore.limits import Limits

FAR_MS = NOW_MS + 36_000_000


def flooded(directory: Path) -> Rig:
    """One partition has no room."""
    rig = Rig(directory, limits=Limits(flush_bytes=1 << 16, horizon_ms=1_000))
    rig.load()
    rig.produce(ORDERS, *[FAR_MS] * 2_000)
    rig.ingest()
    assert not rig.stores.has_room()
    return rig


def test_a_partition_that_leaves_holds_up_no_batch(tmp_path: Path) -> None:
    """A batch that waits for its room goes on; rows of other partitions are taken in."""
    rig = flooded(tmp_path)
    records = [Record(*ORDERS, 2_000, FAR_MS), Record(*BILLS, 0, FAR_MS), Record(*BILLS, 1, FAR_MS)]
    beats, taken = threading.Event(), list[int]()

    def append() -> None:
        taken.append(rig.stores.append(batch(records), {ORDERS: 2_001, BILLS: 2, RETRY: 0}, NOW_MS, beats.set))

    reader = threading.Thread(target=append)
    reader.start()
    assert beats.wait(20)
    rig.stores.close_partitions([ORDERS])
    reader.join(20)
    assert taken == [2] and rig.stores.next_offsets() == {BILLS: 2, RETRY: 0}
    assert rig.stores.stats().pending == 2


def test_an_intake_that_is_closed_ends_a_batch(tmp_path: Path) -> None:
    """Delivery and flushes go on."""
    rig = flooded(tmp_path)
    raised: list[BaseException] = []

    def append() -> None:
        try:
            rig.stores.append(batch([]), {ORDERS: 2_001, BILLS: 1}, NOW_MS)
        except Closed as error:
            raised.append(error)

    reader = threading.Thread(target=append)
    reader.start()
    rig.stores.close_intake()
    reader.join(20)
    wait_until(lambda: raised, 20, "it ends")
    rig.deliver()
    rig.stores.flush(NOW_MS)
    assert rig.stores.has_room()


def test_a_partition_lives_by_the_table(tmp_path: Path) -> None:
    """Nothing is delivered before it is caught up; held ones are released; no other change is possible."""
    rig = Rig(tmp_path)
    rig.produce(BILLS, NOW_MS)
    rig.ingest()
    rig.deliver()
    rig.reopen()
    assert rig.stores.catching_up() == [BILLS] and rig.stores.caught_up() == []
    assert len(rig.stores.begin(NOW_MS).take(NOW_MS, 10)) == 0
    rig.stores._end_loan()
    rig.ingest()
    assert rig.stores.go_live([BILLS]) == [BILLS] and rig.stores.catching_up() == []
    entry = rig.stores._entries[BILLS]
    for life in (Life.HELD, Life.LIVE, Life.HELD):
        entry.become(life)
    with pytest.raises(Misuse):
        entry.become(Life.CATCHING_UP)


def test_a_partition_that_comes_to_a_closed_intake_takes_nothing_in(tmp_path: Path) -> None:
    """The pipeline was cancelled while its store was opened."""
    rig = Rig(tmp_path)
    rig.stores.close_partitions([BILLS])
    rig.stores.close_intake()
    assert rig.stores.coming({BILLS: State()}, {}, {}) == {BILLS: None}
    rig.stores.start_at({BILLS: 0}, {BILLS: 1})
    with pytest.raises(Closed):
        rig.stores.append(batch([Record(*BILLS, 0, FAR_MS)]), {BILLS: 1}, NOW_MS)
