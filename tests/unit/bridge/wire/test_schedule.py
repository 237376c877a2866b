"""Which tick is next, and what becomes of those that were missed."""

from __future__ import annotations

import pytest

from bridge.wire import headers as h
from bridge.wire.cron import Cron
from bridge.wire.schedule import MISSED_MAX, Missed, Schedule, TickStep, packed, parse_schedule, unpacked

HOUR = 3_600_000
T = 500_000 * HOUR  # 2027-01-15T08:00:00Z


def every(missed: Missed = Missed.LAST, end_ms: int | None = None, times: int | None = None) -> Schedule:
    return Schedule(every_ms=HOUR, missed=missed, end_ms=end_ms, times=times)


def test_first_tick_of_an_interval() -> None:
    """It is due after one interval, or when it is asked for; what was asked for in the past keeps its rhythm, and no
    tick is due before the message was written."""
    assert every().first(T, None) == T + HOUR
    assert every().first(T, T) == T
    assert every().first(T, T + 5) == T + 5
    assert every().first(T, T - 5) == T + HOUR - 5
    assert every().first(T, T - 3 * HOUR) == T


def test_first_tick_of_a_cron_expression() -> None:
    """It is the first moment not before the one that is asked for, nor before the message was written."""
    nine = parse_schedule({h.CRON: "0 9 * * *"})
    assert nine.first(T, None) == T + HOUR
    assert nine.first(T + HOUR, None) == T + HOUR
    assert nine.first(T, T + HOUR + 1) == T + 25 * HOUR
    assert nine.first(T, T - 900 * HOUR) == T + HOUR


def test_an_anchor_gives_the_rhythm() -> None:
    """Ticks are due whole intervals from it, wherever it lies, and also after one that was moved."""
    for anchor_ms in (T + 5, T + 5 - 900 * HOUR, T + 5 + 900 * HOUR):
        anchored = Schedule(every_ms=HOUR, anchor_ms=anchor_ms)
        assert anchored.first(T, None) == T + 5
        assert anchored.first(T + 5, None) == T + 5
        assert anchored.first(T, T + 6) == T + 5 + HOUR
        assert anchored.next_after(T + 5) == T + 5 + HOUR
        assert anchored.next_after(T + 7) == T + 5 + HOUR
        assert anchored.step(T + 7, 2, T + 9) == TickStep(
            is_delivered=True, due_ms=T + 7, next_ms=T + 5 + HOUR, was_missed=False
        )
        assert anchored.step(T + 7, 2, T + 3 * HOUR).due_ms == T + 5 + 2 * HOUR
    with pytest.raises(ValueError, match=r"delay-anchor: only delay-every has one"):
        parse_schedule({h.CRON: "0 9 * * *", h.ANCHOR: "1"})
    with pytest.raises(ValueError, match=r"^delay-anchor: 'x'"):
        parse_schedule({h.EVERY: "1h", h.ANCHOR: "x"})


def test_no_tick_after_the_end() -> None:
    """The end itself is still in time."""
    assert every(end_ms=T).next_after(T - HOUR) == T
    assert every(end_ms=T).next_after(T - HOUR + 1) is None
    assert every(end_ms=T - 1).first(T, T) is None
    assert every(end_ms=0).next_after(T) is None
    assert every(end_ms=0).step(T, 1, T + 10 * HOUR).next_ms is None


def test_ticks_are_due_after_the_due_time_of_the_one_before() -> None:
    """A tick that is late does not shift the next one."""
    assert every().step(T, 1, T + 700) == TickStep(is_delivered=True, due_ms=T, next_ms=T + HOUR, was_missed=False)


@pytest.mark.parametrize(
    ("missed", "expected"),
    [
        (Missed.LAST, TickStep(is_delivered=True, due_ms=T + 2 * HOUR, next_ms=T + 3 * HOUR, was_missed=True)),
        (Missed.ALL, TickStep(is_delivered=True, due_ms=T, next_ms=T + HOUR, was_missed=True)),
        (Missed.NONE, TickStep(is_delivered=False, due_ms=T + 2 * HOUR, next_ms=T + 3 * HOUR, was_missed=True)),
    ],
)
def test_missed_ticks(missed: Missed, expected: TickStep) -> None:
    """One for all that were missed, each of them, or none; the same for intervals and cron expressions."""
    assert every(missed).step(T, 1, T + 2 * HOUR + 600_000) == expected
    cron = parse_schedule({h.CRON: "0 * * * *", h.MISSED: missed.value})
    assert cron.step(T, 1, T + 2 * HOUR + 600_000) == expected


@pytest.mark.parametrize("missed", list(Missed))
def test_missed_to_the_end(missed: Missed) -> None:
    """Of ticks that were missed, the last one in time stands for all."""
    step = every(missed, end_ms=T + HOUR + 5).step(T, 1, T + 10 * HOUR)
    assert step.next_ms == (T + HOUR if missed is Missed.ALL else None)
    assert step.due_ms == (T if missed is Missed.ALL else T + HOUR)


def test_number_of_ticks() -> None:
    """The last of so many has no next one; a tick that is not delivered does not count."""
    assert every(times=3).step(T, 2, T).next_ms == T + HOUR
    assert every(times=3).step(T, 3, T).next_ms is None
    assert every(Missed.NONE, times=3).step(T, 3, T + HOUR).next_ms == T + 2 * HOUR


@pytest.mark.parametrize(
    "texts",
    [
        {h.EVERY: "15m"},
        {h.CRON: "0 9 * * MON-FRI"},
        {h.CRON: "0 9 * * MON-FRI", h.TIME_ZONE: "Europe/Berlin", h.END: str(T), h.TIMES: "7", h.MISSED: "none"},
    ],
)
def test_both_ways(texts: dict[str, str]) -> None:
    """A schedule is written as headers, and packed into a column, and comes back the same."""
    assert parse_schedule(texts).texts() == texts
    assert unpacked(packed(texts, is_start_given=True)) == (texts, True)
    assert unpacked(packed(texts, is_start_given=False)) == (texts, False)


@pytest.mark.parametrize(
    ("texts", "header"),
    [
        ({h.EVERY: "soon"}, h.EVERY),
        ({h.EVERY: "0"}, h.EVERY),
        ({h.EVERY: "999ms"}, h.EVERY),
        ({h.CRON: "x" * 257}, h.CRON),
        ({h.CRON: "0 9 * * FOO"}, h.CRON),
        ({h.CRON: "0 9 * * *", h.TIME_ZONE: "Mars/Base"}, h.TIME_ZONE),
        ({h.EVERY: "1h", h.TIME_ZONE: "UTC"}, h.TIME_ZONE),
        ({h.EVERY: "1h", h.END: "tomorrow"}, h.END),
        ({h.EVERY: "1h", h.TIMES: "0"}, h.TIMES),
        ({h.EVERY: "1h", h.MISSED: "some"}, h.MISSED),
        ({h.EVERY: "1h", h.CRON: "* * * * *"}, "give either"),
        ({h.TIMES: "1"}, "give either"),
    ],
)
def test_no_schedule(texts: dict[str, str], header: str) -> None:
    """What is wrong is named first."""
    with pytest.raises(ValueError, match=f"^{header}"):
        parse_schedule(texts, every_min_ms=1000)


@pytest.mark.parametrize(
    "schedule",
    [
        Schedule(every_ms=1_000, missed=Missed.ALL),
        Schedule(every_ms=1_000, anchor_ms=7, missed=Missed.ALL),
        Schedule(cron=Cron("* * * * *"), missed=Missed.ALL),
        Schedule(cron=Cron("*/10 8-17 * * MON-FRI", "Europe/Berlin"), missed=Missed.ALL),
    ],
)
def test_ticks_of_ten_years_are_not_made_up_for(schedule: Schedule) -> None:
    """Of more missed ticks than a schedule makes up for, those are left out that are the longest ago, and the rhythm
    stays."""
    now_ms = 1_800_000_000_123
    due_ms = schedule.next_after(now_ms - 3_650 * 86_400_000)
    assert due_ms is not None
    delivered = set()
    while due_ms is not None and due_ms <= now_ms:
        step = schedule.step(due_ms, 1, now_ms)
        assert step.is_delivered
        delivered.add(step.due_ms)
        due_ms = step.next_ms
        assert len(delivered) < 2 * MISSED_MAX
    assert MISSED_MAX - 1_500 <= len(delivered) <= MISSED_MAX + 1_500
    assert max(delivered) > now_ms - 4 * 86_400_000
    assert schedule.next_after(min(delivered) - 1) == min(delivered) or schedule.anchor_ms is None


def test_few_missed_ticks_are_all_made_up_for() -> None:
    """However long ago they were due."""
    yearly = Schedule(cron=Cron("0 0 1 1 *"), missed=Missed.ALL)
    now_ms = 1_800_000_000_000
    due_ms = yearly.next_after(now_ms - 3_650 * 86_400_000)
    assert due_ms is not None and yearly.step(due_ms, 1, now_ms).due_ms == due_ms
