"""bridge.retention: how much longer records are kept than they are needed, and what is said when it is too short."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from bridge.errors import EnvironmentFailure, StateError
from bridge.kafka.admin import Cluster, Watermarks
from bridge.runtime.gauges import Lag
from bridge.settings.model import Settings
from bridge.start.first_commits import StartFacts, StartPlan, TopicFacts, decide
from bridge.start.oldest import Oldest, OldestRecords
from bridge.start.retention import (
    GONE_INTERVAL_S,
    UNANSWERED_MS,
    RetentionGuard,
    ingest_start,
    kept_ms,
    must_hold_what_is_gone,
    must_hold_what_is_pending,
)
from bridge.start.roll_window import COPY_BYTES, TopicLimits, Windows
from bridge.wire.committed_state import initial_state
from bridge.wire.decode_epochs import DecodeParameters
from tests.manual_clock import ManualClock
from tests.unit.bridge.stores.rig import NOW_MS, ORDERS, Rig
from tests.unit.timerstore.entries import Record

HOUR = 3_600_000
DAY_MS = 24 * HOUR
FAR = NOW_MS + 10 * HOUR
MARKS = {ORDERS: Watermarks(start=0, end=10)}
DELAY = ORDERS[0]
PARAMETERS = DecodeParameters(max_delay_ms=1_000, roll_window_ms=4_000, has_default_target=False)
STATE = initial_state(offset=9, topic_id="a", partitions=1, parameters=PARAMETERS)


def no_batches(*_: object) -> Iterator[Any]:
    return iter(())


class Bench:
    """A guard over a store, with a window of one hour."""

    def __init__(self, directory: Path, **tree: Any) -> None:
        self.clock = ManualClock(now_ms=NOW_MS)
        self.rig = Rig(directory)
        windows = {DELAY: Windows(current_ms=HOUR, largest_ms=2 * HOUR)}
        self.raised = 0
        settings = Settings.of({"roll": {"window": "1h"}, **tree})
        self.guard = RetentionGuard(
            settings, windows, self.clock, OldestRecords(no_batches, self.clock), self.on_raised
        )

    def on_raised(self) -> None:
        self.raised += 1

    def look(
        self, retention_ms: int, marks: Mapping[tuple[str, int], Watermarks] = MARKS, lag_s: float = 0.0
    ) -> list[str]:
        """Look once; returns the events logged."""
        with capture_logs() as entries:
            limits = {DELAY: TopicLimits(retention_ms=retention_ms)}
            self.guard.look(self.rig.stores, limits, marks, {}, {ORDERS: lag_s})
        return [entry["event"] for entry in entries]

    def must_flush(self) -> bool:
        return self.guard.must_flush


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_headroom_is_what_the_largest_window_lag_and_lateness_leave(bench: Bench) -> None:
    """The largest window that records in the log were read with, not the one that is configured now."""
    assert bench.look(5 * HOUR) == []
    assert bench.guard.headroom_s == {DELAY: 3 * 3_600}
    bench.rig.produce(ORDERS, NOW_MS - 500_000)
    bench.rig.ingest()
    bench.rig.load()
    bench.look(5 * HOUR, lag_s=600)
    assert bench.guard.headroom_s == {DELAY: 3 * 3_600 - 600 - 500}


@pytest.mark.fault("a delay topic whose `max.message.bytes` is raised under the bridge")
def test_the_size_of_copies_follows_the_topic(bench: Bench) -> None:
    """A minute after the change, no record is refused for the old limit."""
    largest = TopicLimits().message_bytes - COPY_BYTES
    bench.look(5 * HOUR)
    for known, raised in ((largest, 0), (largest + 1, 0), (largest - 1, 1)):
        parameters = replace(PARAMETERS, roll_bytes_max=known)
        bench.guard.expect({ORDERS: initial_state(offset=9, topic_id="a", partitions=1, parameters=parameters)})
        assert bench.look(5 * HOUR) == ["roll-size-raised"] * raised and bench.raised == raised


def test_a_refusal_for_the_size_needs_a_look_at_the_present_limit(bench: Bench) -> None:
    """The brokers are asked about each topic after the time of its refused record, once. While they do not answer, a
    refusal stands; no reader waits for them again within the minute. A raised limit stops all readers."""
    largest, asked = TopicLimits().message_bytes - COPY_BYTES, list[list[str]]()
    answer: dict[str, dict[str, str]] | EnvironmentFailure = {DELAY: {}}

    def topic_configs(names: list[str]) -> dict[str, dict[str, str]]:
        asked.append(names)
        if isinstance(answer, EnvironmentFailure):
            raise answer
        return answer

    cluster = cast(Cluster, SimpleNamespace(topic_configs=topic_configs))
    parameters = replace(PARAMETERS, roll_bytes_max=largest)
    bench.guard.expect({ORDERS: initial_state(offset=9, topic_id="a", partitions=1, parameters=parameters)})
    for ts, raised in ((NOW_MS - 9, False), (NOW_MS - 1, False), (NOW_MS + 5, False)):
        assert bench.guard.has_outgrown(cluster, {DELAY: ts}) is raised
    assert asked == [[DELAY]]
    answer = EnvironmentFailure("no answer", hint="", code="DB-3002")
    for ms in (1, UNANSWERED_MS - 1, 2):
        bench.clock.advance(ms)
        assert not bench.guard.has_outgrown(cluster, {DELAY: bench.clock.now_ms()})
    assert len(asked) == 3
    bench.clock.advance(UNANSWERED_MS + 2)
    answer = {DELAY: {"max.message.bytes": "9000000"}}
    for _ in range(2):  # each reader of the same record, until the new decoder is there
        assert bench.guard.has_outgrown(cluster, {DELAY: bench.clock.now_ms() - 1})
    assert (len(asked), bench.raised) == (4, 1)


@pytest.mark.fault("a partition that comes with records of a longer roll window")
def test_a_partition_that_comes_may_lower_the_headroom(bench: Bench) -> None:
    """The headroom counts the longest roll window of any partition here, also of one that another instance has read."""
    for largest_ms, headroom_s in ((4 * HOUR, 3_600), (3 * HOUR, 3_600)):
        bench.guard.expect({ORDERS: STATE}, {DELAY: Windows(current_ms=HOUR, largest_ms=largest_ms)})
        bench.look(5 * HOUR)
        assert bench.guard.headroom_s == {DELAY: headroom_s}


def test_a_message_that_was_dated_back_uses_up_no_retention(bench: Bench) -> None:
    bench.rig.logs[ORDERS].append(Record(*ORDERS, 0, 1, ts_ms=NOW_MS - 1_000))
    bench.rig.ingest()
    bench.rig.load()
    assert bench.look(3 * HOUR) == []
    assert bench.guard.headroom_s == {DELAY: 3_600 - 1}
    assert bench.guard.alarms() == ()
    bench.look(-1)
    assert bench.guard.headroom_s == {DELAY: math.inf}


def test_a_retention_that_is_too_short_is_told_once(bench: Bench) -> None:
    """When it becomes so, not every minute; again after it was long enough."""
    assert bench.look(2 * HOUR - 1_000) == ["retention-too-short"]
    assert bench.look(2 * HOUR - 1_000) == []
    assert bench.guard.alarms() == (f"{DELAY}: retention is too short by 1s",)
    assert bench.look(3 * HOUR) == []
    assert bench.look(2 * HOUR - 2_000) == ["retention-too-short"]


@pytest.mark.fault("records of pending messages that leave the log")
def test_pending_messages_without_a_record_are_an_alarm_and_not_the_end(bench: Bench) -> None:
    """The messages are in the index alone, at first in memory: log, gauge, /readyz and the committed state report that
    until they are delivered."""
    bench.rig.produce(ORDERS, FAR, FAR + 1, FAR + 2)
    bench.rig.ingest()
    assert bench.look(5 * HOUR) == []
    trimmed = {ORDERS: Watermarks(start=2, end=10)}
    assert bench.look(5 * HOUR, trimmed) == ["unfinished-records-deleted"]
    assert bench.look(5 * HOUR, trimmed) == []
    assert bench.guard.trimmed == {DELAY: 1} and bench.guard.gone == {ORDERS: 2}
    assert "delivered from memory alone" in bench.guard.alarms()[0]
    assert not bench.must_flush(), "O is not behind them yet"
    bench.rig.deliver()
    bench.look(5 * HOUR, trimmed)
    assert bench.must_flush()
    bench.rig.stores.flush(NOW_MS)
    assert bench.look(5 * HOUR, trimmed) == ["unfinished-records-deleted"]
    assert "delivered from store.directory alone" in bench.guard.alarms()[0]
    assert not bench.must_flush() and bench.guard.gone == {ORDERS: 2}, "the last row of the segment is still there"
    bench.rig.finish(FAR + 1)
    bench.look(5 * HOUR, trimmed)
    assert bench.guard.gone == {ORDERS: 2}, "a segment does not tell which of its rows are unfinished"
    bench.rig.finish(FAR + 2)
    bench.look(5 * HOUR, trimmed)
    assert (bench.guard.trimmed, bench.guard.alarms(), bench.guard.gone) == ({DELAY: 0}, (), {ORDERS: 0})


@pytest.mark.fault("a retention too short, and a segment with deleted and remaining records")
def test_a_mark_is_not_late_by_a_segment_while_the_retention_is_too_short(bench: Bench) -> None:
    """Then any row below the log's start may be pending: without the mark, another instance would go on without this
    index, and this one would remove it."""
    bench.rig.produce(ORDERS, FAR, FAR + 1)
    bench.rig.ingest()
    bench.rig.deliver()
    bench.rig.stores.flush(NOW_MS)
    bench.rig.reopen()
    trimmed = {ORDERS: Watermarks(start=1, end=10)}
    bench.look(5 * HOUR, trimmed)
    assert bench.guard.gone == {}, "the last row of the segment is still there, and the retention is long enough"
    assert "unfinished-records-deleted" in bench.look(HOUR, trimmed)
    assert bench.guard.gone == {ORDERS: 1} and bench.guard.trimmed == {DELAY: 1}


def test_what_is_gone_is_known_after_a_start(bench: Bench) -> None:
    """From the committed states, though the log alone would not tell."""
    bench.rig.produce(ORDERS, FAR, FAR + 1)
    bench.rig.ingest()
    bench.guard.expect({ORDERS: replace(STATE, gone_below=1)})
    bench.look(5 * HOUR)
    assert bench.guard.gone == {ORDERS: 1} and bench.guard.trimmed == {DELAY: 1}
    bench.rig.finish(FAR)
    bench.look(5 * HOUR)
    assert bench.guard.gone == {ORDERS: 0}


def test_the_end_of_what_is_gone_is_soon_known(bench: Bench) -> None:
    """It is committed, and a start without the index goes on then: the guard does not wait for its minute."""

    class Brokers:
        def topic_configs(self, names: list[str]) -> dict[str, dict[str, str]]:
            return {name: {"retention.ms": str(5 * HOUR)} for name in names}

    def refresh() -> None:
        bench.guard.refresh(cast(Cluster, Brokers()), bench.rig.stores, MARKS, {ORDERS: 0.0})

    bench.rig.produce(ORDERS, FAR, FAR + 1)
    bench.rig.ingest()
    bench.guard.expect({ORDERS: replace(STATE, gone_below=1)})
    refresh()
    assert bench.guard.trimmed == {DELAY: 1}
    bench.rig.finish(FAR)
    bench.clock.advance(int(1_000 * GONE_INTERVAL_S))
    refresh()
    assert (bench.guard.trimmed, bench.guard.gone) == ({DELAY: 0}, {ORDERS: 0})


@pytest.mark.parametrize(
    ("gone_below", "held", "is_refused"), [(7, 0, True), (7, 6, True), (7, 7, False), (0, 0, False)]
)
def test_a_start_without_what_is_gone_is_refused(gone_below: int, held: int, is_refused: bool) -> None:
    """However short the bridge was down."""
    states = {ORDERS: replace(STATE, gone_below=gone_below)}
    with pytest.raises(StateError) if is_refused else nullcontext() as raised:
        must_hold_what_is_gone(states, {ORDERS: held}, MARKS)
    assert raised is None or raised.value.code == "DB-4012"


def test_a_window_that_a_start_would_change_is_told_and_kept(tmp_path: Path) -> None:
    """W changes at a start, where a decode epoch begins; a retention that is altered meanwhile is a warning."""
    bench = Bench(tmp_path, roll={"window": "auto"})
    assert bench.look(2 * HOUR + 1) == []
    assert bench.look(3 * HOUR) == ["roll-window-outdated"]
    assert bench.look(3 * HOUR) == []
    assert bench.look(1) == ["retention-too-short", "roll-window-outdated"]
    assert bench.look(2 * HOUR) == []


@pytest.mark.parametrize(
    ("records", "age_ms", "expected_ms"),
    [
        (100_000, HOUR, HOUR),  # full: the oldest record's age is all there is
        (50_000, HOUR, 2 * HOUR),  # half full
        (200_000, HOUR, HOUR),  # records are smaller on disk than here
        (999, 1_000, 100 * HOUR),  # nearly empty: nothing can be said
        (2_000, HOUR, 50 * HOUR),
    ],
)
def test_retention_by_size_is_turned_into_a_time(records: int, age_ms: int, expected_ms: int) -> None:
    """By the age of the oldest record, and how full the log is."""
    limits = TopicLimits(retention_ms=100 * HOUR, retention_bytes=10_000_000)
    oldest = {0: Oldest(timestamp_ms=NOW_MS - age_ms, mean_bytes=100.0)}
    assert kept_ms(limits, oldest, {0: Watermarks(start=7, end=7 + records)}, NOW_MS) == expected_ms


class Log:
    """Stands in for the cluster: offsets by timestamp, of a partition with a record each second."""

    def __init__(self, end_ms: int, start_ms: int = 0) -> None:
        self.end_ms = end_ms
        self.start_ms = start_ms

    def first_after(self, partitions: list[tuple[str, int]], timestamp_ms: int) -> dict[tuple[str, int], int | None]:
        assert timestamp_ms >= 0, "brokers take negative times for other questions"
        first_ms = max(timestamp_ms, self.start_ms)
        return dict.fromkeys(partitions, first_ms // 1000 if first_ms <= self.end_ms else None)


def test_a_start_without_index_is_refused_when_the_bridge_was_down_for_too_long() -> None:
    """Records of pending messages are gone then; for how long it was down is told by what it has not read."""
    cluster: Any = Log(end_ms=10_000_000)
    marks = {ORDERS: Watermarks(start=500, end=10_001)}

    noted: list[list[tuple[str, int]]] = []

    def start(offset: int, spare_ms: int, now_ms: int) -> None:
        must_hold_what_is_pending(
            cluster, {ORDERS: offset}, marks, {ORDERS: spare_ms}, {ORDERS: 500_000}, now_ms,
            lambda names: noted.append([*names]),
        )  # fmt: skip

    start(9_900, spare_ms=200_000, now_ms=10_000_000)
    with pytest.raises(StateError, match="reset-offsets --to committed"):
        start(9_700, spare_ms=200_000, now_ms=10_000_000)
    # All that is not read is older than that; and where nothing is, nothing can be said.
    with pytest.raises(StateError, match="local index does not cover them"):
        start(9_900, spare_ms=200_000, now_ms=90_000_000)
    start(10_001, spare_ms=200_000, now_ms=90_000_000)
    start(500, spare_ms=2**62, now_ms=90_000_000)
    assert noted == [[ORDERS], [ORDERS]]
    start(10_000, spare_ms=-1, now_ms=10_000_001)
    with pytest.raises(StateError, match="window_of_deleted"):  # down for longer than an hour
        start(6_000, spare_ms=-1, now_ms=10_000_001)
    assert noted[2:] == [[ORDERS]]
    must_hold_what_is_pending(cluster, {ORDERS: 0}, marks, {}, {ORDERS: 500_000}, 90_000_000)


@pytest.mark.fault("a lowered retention, and a quiet partition whose index is lost")
@pytest.mark.parametrize(
    ("start_ms", "end_ms", "is_refused"),
    [
        pytest.param(9_900_000, 10_000_000, True, id="the oldest record is younger than W"),
        pytest.param(9_400_000, 10_000_000, False, id="the oldest record is older: no deleted one was pending"),
        pytest.param(9_400_000, 9_450_000, False, id="all records are older"),
        pytest.param(1, 0, True, id="no record is left"),
    ],
)
def test_a_start_without_index_is_refused_after_a_retention_below_the_window_of_deleted_records(
    start_ms: int, end_ms: int, *, is_refused: bool
) -> None:
    """All is read, and messages beyond the new retention are pending: their records are gone with the index."""
    cluster: Any = Log(end_ms, start_ms)
    marks, noted = {ORDERS: Watermarks(start=500, end=10_001)}, list[list[tuple[str, int]]]()

    def start() -> None:
        must_hold_what_is_pending(
            cluster, {ORDERS: 10_001}, marks, {ORDERS: -1}, {ORDERS: 500_000}, 10_000_000,
            lambda names: noted.append([*names]),
        )  # fmt: skip

    with pytest.raises(StateError, match="window_of_deleted") if is_refused else nullcontext():
        start()
    assert noted == ([[ORDERS]] if is_refused else []), "other instances keep an index that may have them"


@pytest.mark.fault("a retention that was raised to an unlimited one, and an index that is lost")
@pytest.mark.parametrize("unread", [0, 1])
@pytest.mark.parametrize(
    ("window_ms", "oldest_ms", "is_refused"),
    [
        pytest.param(365 * DAY_MS, 399 * DAY_MS, False, id="the oldest record is older than W"),
        pytest.param(365 * DAY_MS, 364 * DAY_MS, True, id="it is younger: the retention was lowered for a time"),
        pytest.param(7 * DAY_MS, DAY_MS, False, id="a W that an unlimited retention explains"),
    ],
)
def test_an_unlimited_retention_refuses_no_start_for_an_unread_record(
    unread: int, window_ms: int, oldest_ms: int, *, is_refused: bool
) -> None:
    """A start without an index is refused only if the oldest record that is left is younger than the window of the
    deleted ones."""
    now_ms = 500 * DAY_MS
    log, parameters = Watermarks(start=500, end=now_ms // 1_000), replace(PARAMETERS, roll_window_ms=window_ms)
    state = initial_state(offset=log.end - unread, topic_id="a", partitions=1, parameters=parameters)
    plan = decide(
        StartFacts(
            owned=frozenset({ORDERS}),
            topics={DELAY: TopicFacts(topic_id="a", logs=(log,))},
            parameters={DELAY: parameters},
            committed={ORDERS: replace(state, position=(99, 59))},
            limits={DELAY: TopicLimits(retention_ms=-1)},
        )
    )
    assert isinstance(plan, StartPlan)
    cluster: Any = Log(now_ms - 1_000, now_ms - oldest_ms)
    with pytest.raises(StateError, match="window_of_deleted") if is_refused else nullcontext():
        ingest_start(cluster, plan, {ORDERS: None}, {ORDERS: 0}, now_ms, lambda _: None)


def test_ingest_is_behind_by_the_age_of_the_oldest_end_it_has_not_reached() -> None:
    """A few records that are always unread, because more come all the time, are no growing lag."""
    clock = ManualClock()
    lag = Lag(clock)
    for second in range(1, 2_001):
        clock.advance(1_000)
        lag.note(clock.monotonic_s(), {ORDERS: Watermarks(start=0, end=10 * second)}, {ORDERS: 10 * second - 5})
        assert lag.behind_s({ORDERS: 10 * second - 5}) == {ORDERS: 0.0}
    for second in range(2_001, 4_001):
        clock.advance(1_000)
        lag.note(clock.monotonic_s(), {ORDERS: Watermarks(start=0, end=10 * second)}, {ORDERS: 20_001})
    assert lag.behind_s({ORDERS: 20_001})[ORDERS] == pytest.approx(1_999, abs=20)
    assert lag.behind_s({ORDERS: 40_000}) == {ORDERS: 0.0}
