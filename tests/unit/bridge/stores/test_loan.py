"""bridge.stores.loan: one transaction over the stores of all partitions."""

from __future__ import annotations

from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from bridge.stores.loan import FOLLOW_MS
from tests.unit.bridge.stores.rig import BILLS, NOW_MS, ORDERS, RETRY, Rig
from timerstore.errors import Misuse

NAMES = (ORDERS, BILLS, RETRY)
ROWS = st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 12)), max_size=40)


@settings(deadline=None)
@given(rows=ROWS, limits=st.lists(st.integers(1, 9), min_size=1, max_size=6), until=st.integers(0, 12))
def test_rows_come_in_the_order_of_time_then_partition_then_offset(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[tuple[str, int], int]], limits: list[int], until: int
) -> None:
    """However many takes it needs, and whatever their limits: as from one list."""
    rig = Rig(tmp_path_factory.mktemp("stores"))
    rig.load()
    for name, ms in rows:
        rig.produce(name, NOW_MS + 1 + ms)
    rig.ingest()
    due = [(r.at_ms, name, r.offset) for name, log in rig.logs.items() for r in log if r.at_ms <= NOW_MS + 1 + until]
    loan, taken = rig.stores.begin(NOW_MS), list[tuple[int, tuple[str, int], int]]()
    for limit in limits:
        part = rig.take(loan, NOW_MS + 1 + until, limit)
        assert len(part) == min(limit, len(due) - len(taken))
        taken += part
    assert taken == sorted(due)[: len(taken)]
    loan.rollback()
    assert rig.deliver(NOW_MS + 1 + until) == sorted(due)
    rig.stores.close()


def test_a_flood_of_late_rows_in_one_partition_leaves_the_others_their_share(tmp_path: Path) -> None:
    """And half of the room to rows on time."""
    rig = Rig(tmp_path)
    rig.load()
    for name in NAMES:
        rig.produce(name, NOW_MS)
    rig.ingest()
    rig.deliver()
    rig.produce(ORDERS, *[NOW_MS - 1] * 100)
    rig.produce(BILLS, NOW_MS - 1, NOW_MS + 5)
    rig.produce(RETRY, *[NOW_MS + 5] * 20)
    rig.ingest()
    taken = rig.deliver(NOW_MS + 5, [40])
    assert (BILLS, 1) in [(name, offset) for _, name, offset in taken]
    assert sum(at == NOW_MS + 5 for at, *_ in taken) == 20 and len(taken) == 40
    assert [offset for _, name, offset in taken if name == ORDERS] == list(range(1, 20))


def test_offsets_are_sent_for_partitions_with_output(tmp_path: Path) -> None:
    """O of the others follows, a second after it was committed last; alone where there is no output."""
    rig = Rig(tmp_path)
    rig.load()
    for now_ms, sent in (
        (NOW_MS, {ORDERS, BILLS, RETRY}),
        (NOW_MS + 1, {ORDERS}),
        (NOW_MS + FOLLOW_MS, {ORDERS, BILLS}),
    ):
        rig.produce(ORDERS, now_ms)
        rig.produce(BILLS, NOW_MS + 900_000)
        if now_ms == NOW_MS:
            rig.produce(RETRY, NOW_MS + 900_000)
        rig.ingest()
        loan = rig.stores.begin(now_ms)
        assert len(loan.take(now_ms, 10)) == 1
        assert rig.commit(loan) == sent
    rig.produce(BILLS, NOW_MS + 900_000)
    rig.ingest()
    loan = rig.stores.begin(NOW_MS + FOLLOW_MS + 1)
    assert len(loan.take(NOW_MS, 10)) == 0
    assert rig.commit(loan) == {BILLS}
    assert rig.states[BILLS].offset == 4


def test_only_output_is_committed_where_nothing_else_is_wanted(tmp_path: Path) -> None:
    """Other offsets stay uncommitted, in the store as in Kafka."""
    rig = Rig(tmp_path)
    rig.load()
    rig.produce(ORDERS, NOW_MS)
    rig.produce(BILLS, NOW_MS + 900_000)
    rig.ingest()
    loan = rig.stores.begin(NOW_MS, only_output=True)
    assert len(loan.take(NOW_MS, 10)) == 1
    assert rig.commit(loan) == {ORDERS}
    assert rig.stores.committed()[BILLS].offset == 0 and rig.stores.offsets_behind()


def test_a_held_partition_has_no_output_and_its_offset_moves(tmp_path: Path) -> None:
    """So that it can be flushed; the others go on, and it does when it is released."""
    rig = Rig(tmp_path)
    rig.load()
    rig.stores.hold_named([ORDERS])
    rig.produce(ORDERS, NOW_MS + 1, NOW_MS + 900_000)
    rig.produce(BILLS, NOW_MS + 2)
    rig.ingest()
    assert rig.stores.next_wakeup_ms() == NOW_MS + 2
    assert rig.deliver(NOW_MS + 5) == [(NOW_MS + 2, BILLS, 0)]
    assert rig.states[ORDERS].offset == 2 and rig.states[ORDERS].position is None
    rig.stores.flush(NOW_MS)
    rig.stores.hold_named([])
    assert rig.deliver(NOW_MS + 5) == [(NOW_MS + 1, ORDERS, 0)]


def test_one_transaction_at_a_time(tmp_path: Path) -> None:
    """Nothing comes, goes or is held while one is open."""
    rig = Rig(tmp_path)
    loan = rig.stores.begin(NOW_MS)
    for call in (
        lambda: rig.stores.begin(NOW_MS),
        lambda: rig.stores.hold([]),
        lambda: rig.stores.close_partitions([ORDERS]),
        lambda: rig.stores.go_live([ORDERS]),
    ):
        with pytest.raises(Misuse, match="open"):
            call()
    loan.rollback()
    rig.stores.begin(NOW_MS).acknowledge()


def test_a_crash_anywhere_loses_and_doubles_nothing(tmp_path: Path) -> None:
    """Partitions that are far ahead of others go on from their own P."""
    rig, taken = Rig(tmp_path), list[tuple[int, tuple[str, int], int]]()
    random = np.random.default_rng(7)
    for turn in range(40):
        name = NAMES[int(random.integers(3))]
        rig.produce(name, *(NOW_MS + 10 * turn + int(ms) for ms in random.integers(-20, 60, 3)))
        rig.ingest()
        rig.load(NOW_MS + 10 * turn)
        taken += rig.deliver(NOW_MS + 10 * turn, [2])
        if turn % 3 == 0:
            rig.stores.flush(NOW_MS)
        if turn % 5 == 0:
            rig.reopen()
            rig.ingest()
            rig.stores.join()
    for _ in range(40):
        rig.load(NOW_MS + 1_000)
        taken += rig.deliver(NOW_MS + 1_000, [7, 7])
    expected = [(r.at_ms, name, r.offset) for name, log in rig.logs.items() for r in log]
    assert sorted(taken) == sorted(expected)
