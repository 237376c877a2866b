"""timerstore.wheel and timerstore.pending: counts by slot and by target, that add up."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
from hypothesis import given

from timerstore.entry import PAYLOAD, Kind
from timerstore.pending import OTHER_TARGETS, TARGETS_MAX, Pending, tally, tally_timers
from timerstore.position import AT_MIN
from timerstore.wheel import PAGE_SLOTS, SLOT_MS

DAY_MS = SLOT_MS * PAGE_SLOTS
TIMES = st.lists(
    st.one_of(st.integers(-3, 3), st.integers(-3, 3).map(lambda d: d * DAY_MS + 5), st.integers(0, 10 * DAY_MS))
)


@given(TIMES, st.integers(-2 * DAY_MS // SLOT_MS, 11 * DAY_MS // SLOT_MS))
def test_until_counts_what_lies_before_a_slot(times: list[int], slot: int) -> None:
    """Exact at the edges of slots, across days and before 1970."""
    pending = Pending()
    pending.add(tally(np.array(times, dtype=np.int64), pa.array(["t"] * len(times), pa.string())))
    assert len(pending) == len(times)
    assert pending.wheel.until(slot * SLOT_MS) == sum(time < slot * SLOT_MS for time in times)


@given(TIMES)
def test_what_goes_in_goes_out(times: list[int]) -> None:
    """Nothing is left, memory included."""
    pending = Pending()
    counted = tally(np.array(times, dtype=np.int64), pa.array(["t"] * len(times), pa.string()))
    pending.add(counted)
    pending.remove(counted)
    assert len(pending) == 0 and pending.by_target() == {} and not pending.wheel._pages


def test_within_a_slot_the_count_is_pro_rata() -> None:
    """Gauges by time to go need no exactness within ten seconds."""
    pending = Pending()
    pending.add(tally(np.arange(0, SLOT_MS, 100), pa.nulls(SLOT_MS // 100, pa.string())))
    assert pending.wheel.until(SLOT_MS // 4) == SLOT_MS // 400


def test_targets_are_counted_by_name_and_the_rest_together() -> None:
    """A producer that invents names cannot grow the metrics without bound; null is the default target."""
    names = [f"t{i}" for i in range(TARGETS_MAX)] + ["more", "evenmore", None]
    pending = Pending()
    pending.add(tally(np.zeros(2, dtype=np.int64), pa.array([None, "t0"], pa.string())))
    pending.add(tally(np.zeros(len(names), dtype=np.int64), pa.array(names, pa.string())))
    counts = pending.by_target()
    assert counts[""] == 2 and counts["t0"] == 2
    assert len(counts) == TARGETS_MAX + 1 and sum(counts.values()) == len(names) + 2
    assert counts[OTHER_TARGETS] == 3


def test_rejects_and_cancels_are_not_pending_deliveries() -> None:
    """Only timers are counted; the time of the others, minus infinity, reaches no slot."""
    kinds = [Kind.REJECT, Kind.TIMER, Kind.CANCEL]
    columns = {f.name: pa.nulls(3, f.type) for f in PAYLOAD} | {"kind": pa.array(kinds, pa.int8())}
    payload = pa.RecordBatch.from_arrays([columns[f.name] for f in PAYLOAD], schema=PAYLOAD)
    counted = tally_timers(np.array([AT_MIN, 25_000, AT_MIN]), payload)
    assert (counted.slots.tolist(), counted.counts.tolist(), dict(counted.targets)) == ([2], [1], {"": 1})
    assert len(tally_timers(np.empty(0, np.int64), payload[:0]).slots) == 0
