"""timerstore.memory.pending: counts by slot and by target, that add up."""

from __future__ import annotations

import tracemalloc

import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings

from timerstore.clock import SystemClock
from timerstore.memory.pending import (
    DAY_MS,
    OTHER_TARGETS,
    SLOT_MS,
    TARGETS_MAX,
    Pending,
    PendingHistogram,
    tally,
    tally_timers,
)
from timerstore.rows.entry import PAYLOAD, Kind
from timerstore.rows.position import AT_MIN

DAY_SLOTS = DAY_MS // SLOT_MS
TIMES = st.lists(
    st.one_of(st.integers(-3, 3), st.integers(-3, 3).map(lambda d: d * DAY_MS + 5), st.integers(0, 10 * DAY_MS))
)
SINCE_MS = -3 * DAY_MS
YEARS = st.lists(st.integers(-(1 << 62), 1 << 62).map(lambda ms: ms // DAY_MS * DAY_MS))


@given(TIMES, st.integers(-2 * DAY_MS // SLOT_MS, 11 * DAY_MS // SLOT_MS))
def test_until_counts_what_lies_before_a_slot(times: list[int], slot: int) -> None:
    """Exact at the edges of slots, across days and before 1970."""
    pending = Pending(SINCE_MS)
    pending.add(tally(np.array(times, dtype=np.int64), pa.array(["t"] * len(times), pa.string())))
    assert len(pending) == len(times)
    assert pending.histogram.until(slot * SLOT_MS)[0] == sum(time < slot * SLOT_MS for time in times)


@given(TIMES, st.lists(st.integers(-2 * DAY_MS, 11 * DAY_MS)))
def test_many_times_are_answered_as_each_of_them(times: list[int], asked: list[int]) -> None:
    """In any order, in one pass over the days."""
    pending = Pending(SINCE_MS)
    pending.add(tally(np.array(times, dtype=np.int64), pa.array(["t"] * len(times), pa.string())))
    assert pending.histogram.until(*asked) == tuple(pending.histogram.until(each)[0] for each in asked)


@given(TIMES)
def test_what_goes_in_goes_out(times: list[int]) -> None:
    """Nothing is left, memory included."""
    pending = Pending(SINCE_MS)
    counted = tally(np.array(times, dtype=np.int64), pa.array(["t"] * len(times), pa.string()))
    pending.add(counted)
    pending.remove(counted)
    assert len(pending) == 0 and pending.by_target() == {} and not pending.histogram.slots


@settings(deadline=None)
@given(YEARS, YEARS)
def test_times_far_out_are_counted_in_and_out_of_the_same_slots(some: list[int], others: list[int]) -> None:
    """However far, and whatever else is pending there: the counts never drift."""
    pending = Pending(0)
    counted = [tally(np.array(times, dtype=np.int64), pa.nulls(len(times), pa.string())) for times in (some, others)]
    for each in counted:
        pending.add(each)
    pending.remove(counted[0])
    assert len(pending) == len(others)
    assert pending.histogram.until(0)[0] == sum(time < 0 for time in others)
    pending.remove(counted[1])
    assert len(pending) == 0 and not pending.histogram.slots


def test_forged_times_cost_neither_memory_nor_time() -> None:
    """Sixty thousand distinct days of the past are one slot (they took 543 MB and 0.8 s under the store's lock)."""
    days = np.arange(-60_000, 0, dtype=np.int64) * DAY_SLOTS
    histogram, clock = PendingHistogram(0), SystemClock()
    tracemalloc.start()
    began_s = clock.monotonic_s()
    histogram.add_slots(days, np.ones(len(days), dtype=np.int64))
    took_s = clock.monotonic_s() - began_s
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(histogram) == histogram.until(0)[0] == 60_000
    assert held < 1 << 20 and took_s < 0.4, f"{held} bytes, {took_s} s"
    histogram.add_slots(np.arange(60_000, dtype=np.int64) * DAY_SLOTS, np.ones(60_000, dtype=np.int64))
    assert histogram.slots <= 1 + 11 * 366 + 1, "slots of the future are bounded too"


@pytest.mark.fault("timers on thousands of days, as a long roll window has them")
def test_timers_far_apart_take_memory_for_themselves_and_not_for_their_days() -> None:
    """Timers on each day of ten years take 8 bytes each at most (their days took 126 MB), and leave nothing behind when
    they are gone. In whatever pieces they come and go, the counts are exact."""
    slots = np.arange(3_650 * 8, dtype=np.int64) * (DAY_SLOTS // 8)
    histogram = PendingHistogram(0)
    for part in np.array_split(np.random.default_rng(7).permutation(slots), 30):
        histogram.add_slots(part, np.full(len(part), 2))
    assert histogram.slots == len(slots)
    assert histogram._slots.nbytes + histogram._counts.nbytes <= 8 * len(slots)
    assert histogram.until(DAY_MS, 3 * DAY_MS, 1 << 60) == (16, 48, 2 * len(slots))
    for done in range(0, len(slots) - 8, 1_000):
        histogram.add_slots(slots[done : done + 1_000], np.full(len(slots[done : done + 1_000]), -2))
        left = len(slots) - done - 1_000
        assert histogram.until(1 << 60) == (max(0, 2 * left),)
        assert histogram.slots <= max(0, left) + 5_000
        assert left <= 0 or histogram.first_ms(0) == (int(slots[done + 1_000]) + 1) * SLOT_MS - 1
    assert histogram.slots == 0 and histogram.first_ms(0) is None


@given(TIMES, st.integers(-(1 << 62), 1 << 62) | st.integers(SINCE_MS, SINCE_MS + 1_000_000))
def test_the_first_slot_from_a_time_on_is_known(times: list[int], after_ms: int) -> None:
    """The gauge of what is overdue rests on it: never before the first time, and less than a slot after it."""
    pending = Pending(SINCE_MS)
    pending.add(tally(np.array(times, dtype=np.int64), pa.nulls(len(times), pa.string())))
    first_ms = pending.histogram.first_ms(after_ms)
    slots = [time // SLOT_MS for time in times if time // SLOT_MS >= after_ms // SLOT_MS]
    assert (first_ms is None) == (not slots)
    assert first_ms is None or (first_ms // SLOT_MS == min(slots) and first_ms % SLOT_MS == SLOT_MS - 1)


def test_within_a_slot_the_count_is_pro_rata() -> None:
    """Gauges by time to go need no exactness within ten seconds."""
    pending = Pending(SINCE_MS)
    pending.add(tally(np.arange(0, SLOT_MS, 100), pa.nulls(SLOT_MS // 100, pa.string())))
    assert pending.histogram.until(SLOT_MS // 4)[0] == SLOT_MS // 400


def test_targets_are_counted_by_name_and_the_rest_together() -> None:
    """A producer that invents names cannot grow the metrics without bound; null is the default target."""
    names = [f"t{i}" for i in range(TARGETS_MAX)] + ["more", "evenmore", None]
    pending = Pending(SINCE_MS)
    pending.add(tally(np.zeros(2, dtype=np.int64), pa.array([None, "t0"], pa.string())))
    pending.add(tally(np.zeros(len(names), dtype=np.int64), pa.array(names, pa.string())))
    counts = pending.by_target()
    assert counts[""] == 2 and counts["t0"] == 2
    assert len(counts) == TARGETS_MAX + 1 and sum(counts.values()) == len(names) + 2
    assert counts[OTHER_TARGETS] == 3 and not pending.is_by_target
    for each in (names, [None, "t0"]):
        pending.remove(tally(np.zeros(len(each), dtype=np.int64), pa.array(each, pa.string())))
    assert not pending.by_target() and pending.is_by_target


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 2 * TARGETS_MAX), max_size=8), max_size=8))
def test_more_names_than_are_counted_add_up(batches: list[list[int]]) -> None:
    """A name counted with the others, or by itself, is counted out of what there is; and no name outlives its last
    message."""
    pending = Pending(0)
    crowd = [f"t{i}" for i in range(TARGETS_MAX)]
    counted = [
        tally(np.zeros(len(names), dtype=np.int64), pa.array(names, pa.string()))
        for names in [crowd, *([f"t{i}" for i in batch] for batch in batches)]
    ]
    for each in counted:
        pending.add(each)
    for each in counted:
        assert sum(pending.by_target().values()) == len(pending)
        assert all(count > 0 for count in pending.by_target().values())
        pending.remove(each)
    assert pending.by_target() == {}


def test_rejects_and_cancels_are_not_pending_deliveries() -> None:
    """Only timers are counted; the time of the others, minus infinity, reaches no slot."""
    kinds = [Kind.REJECT, Kind.TIMER, Kind.CANCEL]
    columns = {f.name: pa.nulls(3, f.type) for f in PAYLOAD} | {"kind": pa.array(kinds, pa.int8())}
    payload = pa.RecordBatch.from_arrays([columns[f.name] for f in PAYLOAD], schema=PAYLOAD)
    counted = tally_timers(np.array([AT_MIN, 25_000, AT_MIN]), payload)
    assert (counted.slots.tolist(), counted.counts.tolist(), dict(counted.targets)) == ([2], [1], {"": 1})
    assert len(tally_timers(np.empty(0, np.int64), payload[:0]).slots) == 0
