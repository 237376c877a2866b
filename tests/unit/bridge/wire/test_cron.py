"""Cron expressions in time zones, beside an independent reader of them, and over daylight saving."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from croniter import croniter
from cronsim import CronSim
from hypothesis import given
from hypothesis import strategies as st

from bridge.wire.cron import Cron

ZONES = (
    "Europe/Berlin",
    "America/New_York",
    "Australia/Lord_Howe",  # half an hour
    "Africa/Cairo",  # at midnight
    "Asia/Beirut",
    "America/Havana",
    "America/Santiago",
    "Antarctica/Troll",  # two hours
    "Africa/Casablanca",  # around Ramadan
    "Europe/Dublin",  # winter is the exception
    "Asia/Kolkata",  # never
    "Pacific/Chatham",  # 45 minutes beside the hour
)
EXPRESSIONS = (
    "30 2 * * *",
    "0 9 * * MON-FRI",
    "0 0 * * *",
    "0 23 * * *",
    "59 23 31 12 *",
    "0 12 1 * *",
    "30 1 * * SUN",
    "15 3 * * 7",
    "0 0 1 1,7 *",
    "0 0 29 2 *",
    "0 3 13 * FRI",
    "0 8 L * *",
    "45 1 * MAR,OCT *",
    "10 4 */5 * *",
    "0 6 * * MON#1",
    "0 6 * * 5L",
    "20 22 1-7 * *",
    "5 5 31 * *",
    "15,45 1-3 * 3,4,9,10,11 *",
    "0 0,12 * * SAT,SUN",
    "0 8-18/2 * * WED",
    "*/30 2 * * *",
    "5 */6 * * MON",
    "*/20 0 * * *",
    "*/15 1-3 * 3,4,9-11 *",
    "0 * * 3,10 SUN",
    "7 */1 1-10 11 *",
    "*/59 * * * SUN",
    "*/10 0-1 * * SAT,SUN",
    "30 * 25-31 3,10 *",
)
FROM, UNTIL = datetime(2026, 6, 1, tzinfo=UTC), datetime(2028, 6, 1, tzinfo=UTC)


def ms(moment: datetime) -> int:
    return int(moment.timestamp()) * 1000


def ticks(cron: Cron, start: datetime, end: datetime) -> list[int]:
    found, at = [], ms(start)
    while (after := cron.next_after(at)) is not None and after <= ms(end):
        assert after > at
        found.append(at := after)
    return found


def local(zone: str, *texts: str) -> list[int]:
    return [ms(datetime.fromisoformat(text).astimezone(ZoneInfo(zone))) for text in texts]


@pytest.mark.parametrize("zone", ZONES)
def test_two_years_of_thirty_expressions_agree_with_croniter(zone: str) -> None:
    """croniter names the same moments, but for two differences that the documentation has: it repeats times of day with
    the hour that comes twice, and moves rhythms out of the hour that is skipped. And where clocks go back by two hours,
    it has a rhythm of the second hour only once."""
    info = ZoneInfo(zone)
    compared = 0
    for expression in EXPRESSIONS:
        mine = ticks(Cron(expression, zone), FROM, UNTIL)
        other = croniter(expression.replace("5L", "L5"), FROM.astimezone(info), ret_type=datetime)
        theirs = []
        while (each := other.get_next(datetime)) <= UNTIL:
            theirs.append(ms(each))
        for missing in set(mine) - set(theirs):
            assert zone == "Antarctica/Troll" and datetime.fromtimestamp(missing / 1000, info).fold == 1
        is_rhythm = any(field.startswith("*") for field in expression.split()[:2])
        for extra in set(theirs) - set(mine):
            at = datetime.fromtimestamp(extra / 1000, info)
            before = datetime.fromtimestamp(extra / 1000 - 1, info)
            skipped = (at.utcoffset() or timedelta()) > (before.utcoffset() or timedelta())
            assert skipped if is_rhythm else at.fold == 1, (expression, at.isoformat())
        compared += len(mine)
    assert compared > 10_000


@pytest.mark.parametrize(
    ("zone", "expression", "start", "expected"),
    [
        (
            "Europe/Berlin",
            "30 2 * * *",
            "2027-03-27T00:00:00+01:00",
            ["2027-03-27T02:30:00+01:00", "2027-03-28T03:00:00+02:00", "2027-03-29T02:30:00+02:00"],
        ),
        (
            "Europe/Berlin",
            "0,30 2,3 * * *",
            "2027-03-28T00:00:00+01:00",
            ["2027-03-28T03:00:00+02:00", "2027-03-28T03:30:00+02:00", "2027-03-29T02:00:00+02:00"],
        ),
        (
            "Europe/Berlin",
            "*/30 * * * *",
            "2027-03-28T01:00:00+01:00",
            ["2027-03-28T01:30:00+01:00", "2027-03-28T03:00:00+02:00", "2027-03-28T03:30:00+02:00"],
        ),
        (
            "Europe/Berlin",
            "30 2 * * *",
            "2027-10-31T00:00:00+02:00",
            ["2027-10-31T02:30:00+02:00", "2027-11-01T02:30:00+01:00"],
        ),
        (
            "Europe/Berlin",
            "*/30 2 * * *",
            "2027-10-31T00:00:00+02:00",
            [
                "2027-10-31T02:00:00+02:00",
                "2027-10-31T02:30:00+02:00",
                "2027-10-31T02:00:00+01:00",
                "2027-10-31T02:30:00+01:00",
                "2027-11-01T02:00:00+01:00",
            ],
        ),
        (
            "Africa/Cairo",
            "0 0 * * *",
            "2027-04-29T12:00:00+02:00",
            ["2027-04-30T01:00:00+03:00", "2027-05-01T00:00:00+03:00"],
        ),
        (
            "Australia/Lord_Howe",
            "*/15 2 * * *",
            "2026-10-04T01:00:00+10:30",
            ["2026-10-04T02:30:00+11:00", "2026-10-04T02:45:00+11:00", "2026-10-05T02:00:00+11:00"],
        ),
    ],
)
def test_daylight_saving(zone: str, expression: str, start: str, expected: list[str]) -> None:
    """Times of day that are skipped come at the end of the gap, those that are repeated once; rhythms follow the clock:
    the dates of docs/schedules.md."""
    found = ticks(Cron(expression, zone), datetime.fromisoformat(start), datetime.fromisoformat(expected[-1]))
    assert found == local(zone, *expected)


def test_from_within_the_hour_that_is_repeated() -> None:
    """Asked in the second of two equal hours, a time of day that came in the first one is over."""
    after = Cron("45 2 * * *", "Europe/Berlin").next_after(local("UTC", "2027-10-31T02:15:00+01:00")[0])
    assert [after] == local("UTC", "2027-11-01T02:45:00+01:00")


def test_milliseconds() -> None:
    """The next moment is after the one that is given, to the millisecond."""
    cron = Cron("0 9 * * *")
    nine = ms(datetime(2027, 1, 1, 9, tzinfo=UTC))
    assert cron.next_after(nine - 1) == nine
    assert cron.next_after(nine) == nine + 86_400_000


@pytest.mark.parametrize("expression", ["*/7 * * * *", "0 9 * * MON-FRI", "* 9 * * *", "0 0 1 1 *"])
@pytest.mark.parametrize("hours", [1, 20, 400])
def test_the_last_moment_until_now(expression: str, hours: int) -> None:
    """It is the last of all, however long it was."""
    cron, start = Cron(expression, "Europe/Berlin"), datetime(2027, 3, 27, 8, 13, 22, tzinfo=UTC)
    end = start + timedelta(hours=hours)
    found = ticks(cron, start, end)
    assert cron.last_until(ms(start), ms(end)) == (found[-1] if found else None)


@pytest.mark.parametrize(
    "expression",
    ["", "* * * *", "* * * * * *", "@daily", "60 * * * *", "0 9 * * FOO", "0 0 30 2 *", "*/0 * * * *", "5-1 * * * *",
     "0 9 * * *\n", "0 9 * * " + "1," * 200 + "1", "0 9 \u0661 * *"],
)  # fmt: skip
def test_no_expression(expression: str) -> None:
    """Whatever is not five fields that name a moment is refused, in a sentence."""
    with pytest.raises(ValueError, match=r"\w"):
        Cron(expression)


def test_never() -> None:
    """An expression that names no moment within ten years has no next one."""
    assert Cron("0 0 * 2 MON#5").next_after(ms(datetime(2028, 3, 1, tzinfo=UTC))) is None


EXHAUSTING = (
    ("0 0 */31 * MON#5", "UTC"),
    ("* * */2 2 MON#5", "Europe/Berlin"),
    ("*/5 * */31 * MON#5", "Africa/Casablanca"),
    ("*/5 * 29 2 *", "Africa/Casablanca"),
    ("59 23 29 2 *", "Antarctica/Troll"),
    ("0-59 0-23 * * *", "Pacific/Apia"),
    ("0-58 0-23 */30 FEB *", "Pacific/Apia"),
    ("0 0 LW 2 SUN", "America/Havana"),
)
CALLS_MAX = 2_000
"""For one question, whatever the expression: a few hundred microseconds."""


def calls(ask: Callable[[], object]) -> int:
    """How many functions are called for an answer, Python's own included."""
    count = 0

    def counted(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counted)
    try:
        ask()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.fault("cron expressions that take the processor")
@pytest.mark.parametrize(("expression", "zone"), EXHAUSTING)
@pytest.mark.parametrize("start", ["1995-06-01", "2011-12-29", "2026-10-25", "2028-03-01", "9999-12-30"])
def test_an_expression_costs_little_even_if_it_never_fires(expression: str, zone: str, start: str) -> None:
    """The next tick of any expression, after any time and in any zone, takes a bounded number of steps, and the last of
    ten missed years a few dozen times as many: thousands of such records may come at once."""
    cron, moment = Cron(expression, zone), ms(datetime.fromisoformat(start).replace(tzinfo=UTC))
    assert calls(lambda: cron.next_after(moment)) < CALLS_MAX
    assert calls(lambda: cron.last_until(moment - 3_650 * 86_400_000, moment)) < 20 * CALLS_MAX


@given(st.sampled_from(EXPRESSIONS), st.sampled_from(ZONES), st.integers(0, 4_000_000_000_000), st.integers(0, 1_439))
def test_no_moment_takes_many_steps(expression: str, zone: str, moment: int, spread: int) -> None:
    """Whatever clocks do there and then."""
    cron = Cron(f"{spread % 60} {spread // 60} {expression.split(maxsplit=2)[2]}" if spread % 2 else expression, zone)
    assert calls(lambda: cron.next_after(moment)) < CALLS_MAX


_DAYS = st.sampled_from(["*", "L", "LW", "1", "29", "31", "*/7", "*/31", "5-9", "1,15,L", "28-31"])
_WEEKDAYS = st.sampled_from(
    ["*", "MON", "0", "7", "5L", "0L", "7L", "MON#5", "7#1", "0#2", "MON-FRI", "*/2", "SAT,MON#1"]
)


@given(_DAYS, st.sampled_from(["*", "2", "FEB,NOV", "*/5", "12"]), _WEEKDAYS, st.integers(1_980, 2_100))
def test_the_days_are_those_that_cronsim_walks(day: str, month: str, weekday: str, year: int) -> None:
    """Every day of a year is named, or not, as in Debian's cron."""
    try:
        cron = Cron(f"0 12 {day} {month} {weekday}")
    except ValueError:
        return
    fields = CronSim(f"0 12 {day} {month} {weekday}", datetime(year, 1, 1))  # noqa: DTZ001 - a wall clock
    days = (date(year, 1, 1) + timedelta(days=n) for n in range(365))
    expected = [each for each in days if each.month in fields.months and fields.match_day(each)]
    start, end = datetime(year - 1, 12, 31, 12, tzinfo=UTC), datetime(year, 12, 30, 13, tzinfo=UTC)
    found = [datetime.fromtimestamp(each / 1000, UTC).date() for each in ticks(cron, start, end)]
    assert found == [each for each in expected if each <= end.date()]


@pytest.mark.parametrize("zone", ["", "Mars/Base", "../etc/passwd", "/etc/localtime", "europe berlin", "A" * 65])
def test_no_zone(zone: str) -> None:
    """Whatever is not a zone's name is refused, in a sentence; none is looked for outside of the zones."""
    with pytest.raises(ValueError, match="time zone"):
        Cron("* * * * *", zone)
