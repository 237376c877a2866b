"""Cron expressions in a time zone: their moments, and the next one. Pure.

cronsim parses the five fields as Debian's cron does. Their days are looked up in bit masks of the fourteen kinds of
years (`_Calendar`), so every expression is cheap, even one that never fires. This module handles daylight saving
itself: some zones shift by half an hour, some at midnight. As in Debian's cron (cron(8)), the rule depends on whether
the minute or the hour field begins with `*`:

    wall clocks         neither does: times of day       one does: a rhythm
    skipped, 02:30      at the end of the gap, 03:00     not at all
    repeated, 02:30     the first time only              both times

    Europe/Berlin, 28 March 2027, when 02:00 becomes 03:00
    30 2 * * *          27 March 02:30 +01   28 March 03:00 +02   29 March 02:30 +02
    */30 * * * *        28 March 01:30 +01   28 March 03:00 +02   28 March 03:30 +02

There are two differences from Debian's cron. Several times within one gap are one moment at its end; cron runs the job
for each of them. Gaps of three hours and more, such as a zone's change of the date line, are treated like others.
"""

from __future__ import annotations

import calendar
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from functools import cache, lru_cache
from typing import Final, NamedTuple, TypeVar
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

Name = TypeVar("Name")

EXPRESSION_LENGTH_MAX: Final = 256
ZONE_LENGTH_MAX: Final = 64
CRON_MS_MIN: Final = 60_000
"""The shortest time between two moments, except when clocks go back."""
YEARS_MAX: Final = 10
"""An expression without a moment in this many years has none: 29 February recurs within eight years."""

_FIELDS_PATTERN: Final = r"[0-9A-Za-z*,/#-]+(?:[ \t]+[0-9A-Za-z*,/#-]+){4}"
_ZONE_PATTERN: Final = r"[A-Za-z][A-Za-z0-9_+-]*(?:/[A-Za-z0-9_+-]+)*"
_SECOND: Final = timedelta(seconds=1)
_YEARS: Final = timedelta(days=366 * YEARS_MAX)
_FURTHEST: Final = _YEARS + timedelta(days=2)
"""A moment beyond this by the present clock lies beyond _YEARS after any change of the clock."""
_STEP: Final = timedelta(days=7)
"""No zone changes its clock twice within this time."""
_NEAR: Final = timedelta(days=2)
"""Longer than any change of a zone's clock."""
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Cron:
    """Five fields (minute, hour, day of month, month, day of week) and an IANA zone. Raises ValueError for an invalid
    one.
    """

    expression: str
    zone: str = "UTC"
    _zone: ZoneInfo = field(init=False, repr=False, compare=False)
    _is_rhythm: bool = field(init=False, repr=False, compare=False)
    _walls: _Calendar = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.expression) > EXPRESSION_LENGTH_MAX:
            raise ValueError(f"longer than {EXPRESSION_LENGTH_MAX} characters")
        if not re.fullmatch(_FIELDS_PATTERN, self.expression):
            raise ValueError(f"{self.expression!r} is not five fields, such as 0 9 * * MON-FRI")
        try:
            fields = CronSim(self.expression, datetime(2000, 1, 1))  # noqa: DTZ001 - a wall clock
        except CronSimError as error:
            raise ValueError(f"{self.expression!r}: {error}") from None
        object.__setattr__(self, "_zone", zone_of(self.zone))
        object.__setattr__(self, "_is_rhythm", fields.parts[1].startswith("*") or fields.parts[2].startswith("*"))
        object.__setattr__(self, "_walls", _Calendar(fields))

    def next_after(self, moment_ms: int) -> int | None:
        """The first moment after `moment_ms`, epoch ms; None: no moment within YEARS_MAX."""
        moment = _EPOCH + timedelta(milliseconds=moment_ms)
        try:
            following = (self._next_of_rhythm if self._is_rhythm else self._next_time_of_day)(moment)
        except OverflowError:
            return None
        if following is None or following - moment > _YEARS:
            return None
        return (following - _EPOCH) // timedelta(milliseconds=1)

    def last_until(self, moment_ms: int, now_ms: int) -> int | None:
        """The last moment in (moment_ms, now_ms], epoch ms; None: no such moment. A year takes as long as a day."""
        last = self.next_after(moment_ms)
        if last is None or last > now_ms:
            return None
        low, high = moment_ms, now_ms  # the moment after `low` has come, the one after `high` has not
        while high - low > 1000:
            middle = (low + high) // 2
            after = self.next_after(middle)
            if after is not None and after <= now_ms:
                low, last = middle, after
            else:
                high = middle
        return last

    def recent(self, now_ms: int, moments: int) -> int:
        """A time, epoch ms, such that about `moments` moments lie between it and `now_ms`, and never fewer. 0 if the
        last YEARS_MAX years have fewer."""
        today = (_EPOCH + timedelta(milliseconds=now_ms)).astimezone(self._zone).date()
        first = self._walls.back(today, -(-moments // self._walls.daily))
        if first is None:
            return 0
        start = datetime(first.year, first.month, first.day, tzinfo=self._zone)
        return (start - _EPOCH) // timedelta(milliseconds=1)

    def _next_time_of_day(self, moment: datetime) -> datetime | None:
        after = _wall(moment.astimezone(self._zone))
        while (wall := self._walls.next_after(after)) is not None:
            first = self._first_at(wall)
            if first > moment:
                return first
            # Clocks went back and show this wall clock again, as every one until the moment of that change.
            change = self._change(first, moment)
            after = wall if change is None else max(wall, _wall((change - _SECOND).astimezone(self._zone)))
        return None

    def _first_at(self, wall: datetime) -> datetime:
        """The moment at which clocks in the zone first show `wall`, or jump over it."""
        moment = wall.replace(tzinfo=self._zone).astimezone(UTC)
        if _wall(moment.astimezone(self._zone)) == wall:
            return moment
        # In a gap Python uses the offset from before it, so the moment lies behind the gap.
        return self._change(moment - timedelta(days=1), moment) or moment

    def _next_of_rhythm(self, moment: datetime) -> datetime | None:
        start, offset, end = moment, self._offset(moment), moment + _FURTHEST
        while (wall := self._walls.next_after(_wall(moment + offset))) is not None:
            candidate = wall.replace(tzinfo=UTC) - offset
            if candidate > end:  # no change of the clocks brings it near
                return None
            change = self._change(start, min(candidate, start + _NEAR))
            if change is not None:
                moment, start, offset = change - _SECOND, change, self._offset(change)
            elif candidate <= start + _NEAR:
                return candidate
            else:  # no change of the clocks puts a named moment in between
                moment = start = candidate - _NEAR
                offset = self._offset(start)
        return None

    def _change(self, start: datetime, end: datetime) -> datetime | None:
        """The first change of the zone's clocks in (start, end]; None: no change."""
        offset = self._offset(start)
        while start < end:
            step = min(start + _STEP, end)
            if self._offset(step) != offset:
                low, high = start.replace(microsecond=0), step
                while high - low > _SECOND:
                    middle = (low + (high - low) / 2).replace(microsecond=0)
                    low, high = (middle, high) if self._offset(middle) == offset else (low, middle)
                return high.replace(microsecond=0)
            start = step
        return None

    def _offset(self, moment: datetime) -> timedelta:
        offset = moment.astimezone(self._zone).utcoffset()
        assert offset is not None
        return offset


@lru_cache(1_000)
def zone_of(name: str) -> ZoneInfo:
    """An IANA time zone. Raises ValueError."""
    if len(name) > ZONE_LENGTH_MAX or not re.fullmatch(_ZONE_PATTERN, name):
        raise ValueError(f"{name!r} is not an IANA time zone, such as Europe/Berlin")
    try:
        return ZoneInfo(name)
    except (OSError, ValueError):  # ZoneInfoNotFoundError is a KeyError
        raise ValueError(f"{name!r} cannot be read as a time zone") from None
    except KeyError:
        raise ValueError(f"{name!r} is not an IANA time zone that this installation knows") from None


def _wall(local: datetime) -> datetime:
    return local.replace(tzinfo=None, microsecond=0, fold=0)


class _Calendar:
    """The wall clocks (whole minutes) that five fields name. Each kind of year has a mask with one bit a day."""

    __slots__ = ("_days", "_fields", "_hours", "_minutes")

    def __init__(self, fields: CronSim) -> None:
        self._fields = fields
        self._hours, self._minutes = sorted(fields.hours), sorted(fields.minutes)
        self._days: dict[tuple[int, bool], int] = {}

    def next_after(self, wall: datetime) -> datetime | None:
        """The first wall clock after `wall`; None: no such one within YEARS_MAX."""
        day = wall.date()
        if self._days_of(day.year) >> (day.timetuple().tm_yday - 1) & 1 and (later := self._later(wall)) is not None:
            return later
        first = self._day_after(day)
        if first is None:
            return None
        return datetime(first.year, first.month, first.day, self._hours[0], self._minutes[0])  # noqa: DTZ001 - a wall clock

    @property
    def daily(self) -> int:
        """The number of wall clocks on each named day."""
        return len(self._hours) * len(self._minutes)

    def back(self, day: date, count: int) -> date | None:
        """The first of the last `count` named days up to `day`; None: fewer in YEARS_MAX years."""
        kept = (1 << day.timetuple().tm_yday) - 1
        for year in range(day.year, max(day.year - YEARS_MAX, date.min.year) - 1, -1):
            days = self._days_of(year) & kept
            named = days.bit_count()
            if named >= count:
                for _ in range(named - count):
                    days &= days - 1
                return date(year, 1, 1) + timedelta(days=(days & -days).bit_length() - 1)
            count, kept = count - named, -1
        return None

    def _later(self, wall: datetime) -> datetime | None:
        """The next wall clock of the same day."""
        if wall.hour in self._fields.hours and wall.minute < self._minutes[-1]:
            minute = self._minutes[bisect_right(self._minutes, wall.minute)]
            return wall.replace(minute=minute, second=0)
        if wall.hour >= self._hours[-1]:
            return None
        hour = self._hours[bisect_left(self._hours, wall.hour + 1)]
        return wall.replace(hour=hour, minute=self._minutes[0], second=0)

    def _day_after(self, day: date) -> date | None:
        """The next named day."""
        passed = day.timetuple().tm_yday
        for year in range(day.year, min(day.year + YEARS_MAX + 1, date.max.year) + 1):
            left = self._days_of(year) >> passed << passed
            if left:
                return date(year, 1, 1) + timedelta(days=(left & -left).bit_length() - 1)
            passed = 0
        return None

    def _days_of(self, year: int) -> int:
        """The days of a year, counted from 0, as bits."""
        kind = date(year, 1, 1).weekday(), calendar.isleap(year)
        if kind not in self._days:
            self._days[kind] = _named(self._fields, _year(*kind))
        return self._days[kind]


class _Year(NamedTuple):
    """The days of a kind of year as bits, for each value of a field: a month, a day of the month or its last day, a day
    of the week (Sunday is 0 and 7), or the nth such day of a month."""

    months: dict[int, int]
    days: dict[int, int]
    weekdays: dict[int | tuple[int, int], int]


@cache
def _year(weekday: int, is_leap: bool) -> _Year:
    """The kind of year that begins with the day `weekday` (0: Monday)."""
    months, days = dict[int, int](), dict.fromkeys(range(1, 32), 0)
    begin = last = last_week = 0
    for month, length in enumerate((31, 29 if is_leap else 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31), 1):
        months[month] = (1 << length) - 1 << begin
        for day in range(1, length + 1):
            days[day] |= 1 << begin + day - 1
        begin += length
        last |= 1 << begin - 1
        last_week |= 0b111_1111 << begin - 7
    once_a_week = sum(1 << day for day in range(0, begin, 7))
    weekdays: dict[int | tuple[int, int], int] = {
        day: (once_a_week << (day - 1 - weekday) % 7) & ((1 << begin) - 1) for day in range(8)
    }
    workdays = _union(weekdays, range(1, 6))
    days[CronSim.LAST] = last
    days[CronSim.LAST_WEEKDAY] = (workdays & last) | (weekdays[5] & (last >> 1 | last >> 2))
    weeks = {nth: _union(days, range(7 * nth - 6, min(7 * nth, 31) + 1)) for nth in range(1, 6)}
    weeks[CronSim.LAST] = last_week
    weekdays |= {(day, nth): weekdays[day] & week for day in range(8) for nth, week in weeks.items()}
    return _Year(months, days, weekdays)


def _named(fields: CronSim, year: _Year) -> int:
    """The days of a year that the fields name, as bits. A day must match both its day of month and its day of week if
    one of these fields begins with `*`, else either."""
    by_day, by_week = _union(year.days, fields.days), _union(year.weekdays, fields.weekdays)
    return _union(year.months, fields.months) & (by_day & by_week if fields.day_and else by_day | by_week)


def _union(masks: Mapping[Name, int], names: Iterable[Name]) -> int:
    union = 0
    for name in names:
        union |= masks[name]
    return union
