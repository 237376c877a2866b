"""Cron expressions in time zones, beside an independent reader of them, and over daylight saving."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from croniter import croniter
from cronsim import CronSim

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


def test_never_is_said_after_one_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not after one for each change of the clocks until 2044: thousands of such records may come at once."""
    rhythm, walks = Cron("* * */2 2 MON#5", "Europe/Berlin"), 0

    def walk(*arguments: Any) -> CronSim:
        nonlocal walks
        walks += 1
        return CronSim(*arguments)

    monkeypatch.setattr("bridge.wire.cron.CronSim", walk)
    assert rhythm.next_after(ms(datetime(2028, 3, 1, tzinfo=UTC))) is None
    assert walks == 1


@pytest.mark.parametrize("zone", ["", "Mars/Base", "../etc/passwd", "/etc/localtime", "europe berlin", "A" * 65])
def test_no_zone(zone: str) -> None:
    """Whatever is not a zone's name is refused, in a sentence; none is looked for outside of the zones."""
    with pytest.raises(ValueError, match="time zone"):
        Cron("* * * * *", zone)
