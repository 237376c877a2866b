"""Cron expressions in a time zone: which moments they name, and which comes next. Pure.

cronsim reads the five fields and walks the calendar, on wall clocks that know no zone; it was made to say when Debian's
cron would run. What daylight saving does to them is decided here, since zones are shifted by half an hour and at
midnight, too. As in Debian's cron (cron(8)), it depends on whether the minute or the hour field begins with `*`:

    wall clocks         neither does: times of day       one does: a rhythm
    skipped, 02:30      at the end of the gap, 03:00     not at all
    repeated, 02:30     the first time only              both times

    Europe/Berlin, 28 March 2027, when 02:00 becomes 03:00
    30 2 * * *          27 March 02:30 +01   28 March 03:00 +02   29 March 02:30 +02
    */30 * * * *        28 March 01:30 +01   28 March 03:00 +02   28 March 03:30 +02

Two differences from Debian's cron: several times within one gap are one moment at its end, where cron runs the job for
each of them; and gaps of three hours and more, as where a zone crosses the date line, are treated like others.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Final
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

EXPRESSION_LENGTH_MAX: Final = 256
ZONE_LENGTH_MAX: Final = 64
YEARS_MAX: Final = 10
"""An expression names a moment within so many years (29 February is eight years from the next at most), or none."""

_FIELDS_PATTERN: Final = r"[0-9A-Za-z*,/#-]+(?:[ \t]+[0-9A-Za-z*,/#-]+){4}"
_ZONE_PATTERN: Final = r"[A-Za-z][A-Za-z0-9_+-]*(?:/[A-Za-z0-9_+-]+)*"
_SECOND: Final = timedelta(seconds=1)
_YEARS: Final = timedelta(days=366 * YEARS_MAX)
_FURTHEST: Final = _YEARS + timedelta(days=2)
"""Whatever clocks do, a moment that seems to be further away lies beyond _YEARS."""
_STEP: Final = timedelta(days=7)
"""No zone changes its clock twice within it."""
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Cron:
    """Five fields (minute, hour, day of month, month, day of week) and an IANA zone. Raises ValueError if one of them
    is none.
    """

    expression: str
    zone: str = "UTC"
    _zone: ZoneInfo = field(init=False, repr=False, compare=False)
    _is_rhythm: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.expression) > EXPRESSION_LENGTH_MAX:
            raise ValueError(f"longer than {EXPRESSION_LENGTH_MAX} characters")
        if not re.fullmatch(_FIELDS_PATTERN, self.expression):
            raise ValueError(f"{self.expression!r} is not five fields, such as 0 9 * * MON-FRI")
        try:
            fields = CronSim(self.expression, datetime(2000, 1, 1)).parts  # noqa: DTZ001 - a wall clock
        except CronSimError as error:
            raise ValueError(f"{self.expression!r}: {error}") from None
        object.__setattr__(self, "_zone", zone_of(self.zone))
        object.__setattr__(self, "_is_rhythm", fields[1].startswith("*") or fields[2].startswith("*"))

    def next_after(self, moment_ms: int) -> int | None:
        """The first moment after `moment_ms`, epoch ms; None: there is none within YEARS_MAX."""
        moment = _EPOCH + timedelta(milliseconds=moment_ms)
        try:
            found = (self._next_of_rhythm if self._is_rhythm else self._next_time_of_day)(moment)
        except (StopIteration, OverflowError):
            return None
        if found - moment > _YEARS:
            return None
        return (found - _EPOCH) // timedelta(milliseconds=1)

    def last_until(self, moment_ms: int, now_ms: int) -> int | None:
        """The last moment in (moment_ms, now_ms], epoch ms; None: there is none. As quick for a year as for a day."""
        found = self.next_after(moment_ms)
        if found is None or found > now_ms:
            return None
        low, high = moment_ms, now_ms  # what follows `low` is no later than now, what follows `high` is
        while high - low > 1000:
            middle = (low + high) // 2
            after = self.next_after(middle)
            if after is not None and after <= now_ms:
                low, found = middle, after
            else:
                high = middle
        return found

    def _next_time_of_day(self, moment: datetime) -> datetime:
        walls = CronSim(self.expression, _wall(moment.astimezone(self._zone)))
        while True:
            found = self._first_at(next(walls))
            if found > moment:
                return found

    def _first_at(self, wall: datetime) -> datetime:
        """When clocks in the zone first show `wall`, or jump over it."""
        found = wall.replace(tzinfo=self._zone).astimezone(UTC)
        if _wall(found.astimezone(self._zone)) == wall:
            return found
        # In a gap Python takes the offset from before it, hence a moment behind the gap.
        return self._change(found - timedelta(days=1), found) or found

    def _next_of_rhythm(self, moment: datetime) -> datetime:
        start, offset, end = moment, self._offset(moment), moment + _FURTHEST
        while True:
            wall = next(CronSim(self.expression, _wall(moment + offset)))
            found = wall.replace(tzinfo=UTC) - offset
            if found > end:  # no change of the clocks brings it near, and each costs as much as this
                raise StopIteration
            change = self._change(start, found)
            if change is None:
                return found
            moment, start, offset = change - _SECOND, change, self._offset(change)

    def _change(self, start: datetime, end: datetime) -> datetime | None:
        """When the zone's clocks first change in (start, end]; None: they do not."""
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
