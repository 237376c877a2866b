"""Schedules of recurring messages: interval, beginning, end, and the policy for missed ticks. Pure.

A *tick* is one delivery of a recurring message. The next tick follows from the one before and not from the clock, so a
schedule never drifts, and its state is a due time and a number.

    delay-every: 1h, delay-missed as below; down from 09:30 to 12:10, the tick of 10:00 pending
    last   12:10 delivers the tick of 12:00; the next one is due at 13:00
    all    12:10 delivers the ticks of 10:00, 11:00 and 12:00, one after the other; the next one is due at 13:00. Of
           more than MISSED_MAX ticks it delivers the last ones
    none   12:10 delivers none; the next one is due at 13:00

A tick is *missed* once a later tick of its schedule is also due.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from functools import lru_cache
from typing import Final, Self, TypeVar

from bridge.wire import headers as h
from bridge.wire.cron import CRON_MS_MIN, YEARS_MAX, Cron

TICK_MAX: Final = 2**31 - 1
TICK_DELAY_MS_MAX: Final = 366 * YEARS_MAX * 86_400_000
"""The longest time between two ticks."""
MISSED_MAX: Final = 10_000
"""Approximate limit of missed ticks that are delivered late: a forged copy may be ten years old."""
TEXT_LENGTH_MAX: Final = 256
"""Limit for each header of a schedule."""
_GIVEN: Final = "given"
_T = TypeVar("_T")

_UNITS: Final = ("d", "h", "m", "s", "ms")


class Missed(StrEnum):
    """The policy for missed ticks."""

    LAST = "last"
    ALL = "all"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class TickStep:
    """The outcome for a tick that comes up: whether it is delivered, as the tick of `due_ms`, and the next tick."""

    is_delivered: bool
    due_ms: int
    next_ms: int | None
    """None: it was the last tick."""
    was_missed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Ticks at an interval of `every_ms`, or at the moments of `cron`; none after `end_ms`, and at most `times`. With
    `anchor_ms`, ticks are due whole intervals from it, even after a tick that was moved. Raises ValueError.
    """

    every_ms: int | None = None
    anchor_ms: int | None = None
    cron: Cron | None = None
    end_ms: int | None = None
    times: int | None = None
    missed: Missed = Missed.LAST

    def __post_init__(self) -> None:
        if (self.every_ms is None) == (self.cron is None):
            raise ValueError(f"give either {h.EVERY} or {h.CRON}")
        if self.every_ms is not None and self.every_ms < 1:
            raise ValueError(f"{h.EVERY} must be longer than 0")
        if self.anchor_ms is not None and self.every_ms is None:
            raise ValueError(f"{h.ANCHOR}: only {h.EVERY} has one")
        if self.times is not None and not 1 <= self.times <= TICK_MAX:
            raise ValueError(f"{h.TIMES} is not in 1..{TICK_MAX}")

    def first(self, now_ms: int, not_before_ms: int | None) -> int | None:
        """The due time of the first tick of a schedule written at `now_ms`, and never before then. None: no tick."""
        if self.cron is not None:
            return self._in_time(self.cron.next_after(max(now_ms, not_before_ms or 0) - 1))
        assert self.every_ms is not None
        if self.anchor_ms is not None:
            return self._in_time(self._regular(max(now_ms, not_before_ms or 0)))
        if not_before_ms is None:
            return self._in_time(now_ms + self.every_ms)
        skipped = max(0, -((not_before_ms - now_ms) // self.every_ms))
        return self._in_time(not_before_ms + skipped * self.every_ms)

    def next_after(self, due_ms: int) -> int | None:
        """The due time of the tick after the one of `due_ms`; None: no further tick."""
        if self.cron is not None:
            return self._in_time(self.cron.next_after(due_ms))
        assert self.every_ms is not None
        return self._in_time(due_ms + self.every_ms if self.anchor_ms is None else self._regular(due_ms + 1))

    def step(self, due_ms: int, tick: int, now_ms: int) -> TickStep:
        """The outcome for tick number `tick`, due at `due_ms`, which comes up at `now_ms`."""
        following = self.next_after(due_ms)
        was_missed = following is not None and following <= now_ms
        if was_missed:
            due_ms = self._recent(due_ms, now_ms) if self.missed is Missed.ALL else self._last_until(due_ms, now_ms)
            following = self.next_after(due_ms)
        is_delivered = not was_missed or self.missed is not Missed.NONE
        if is_delivered and tick >= (self.times or TICK_MAX):
            following = None
        return TickStep(is_delivered=is_delivered, due_ms=due_ms, next_ms=following, was_missed=was_missed)

    @classmethod
    def of(
        cls,
        *,
        every: timedelta | None = None,
        anchor: datetime | int | None = None,
        cron: str | None = None,
        time_zone: str = "UTC",
        end: datetime | int | None = None,
        times: int | None = None,
        missed: str = Missed.LAST,
    ) -> Self:
        """A schedule from Python values. Raises ValueError, TypeError."""
        if every is not None and time_zone != "UTC":
            raise ValueError("only cron supports time zones")
        schedule = cls(
            every_ms=None if every is None else -(-every // timedelta(milliseconds=1)),
            anchor_ms=None if anchor is None else h.epoch_ms(anchor),
            cron=None if cron is None else Cron(cron, time_zone),
            end_ms=None if end is None else h.epoch_ms(end),
            times=times,
            missed=_missed(missed),
        )
        if schedule.cron is not None and schedule.cron.next_after(0) is None:
            raise ValueError(f"{cron!r} names no moment")
        return schedule

    def texts(self) -> dict[str, str]:
        """The schedule as headers; the inverse of `parse_schedule`."""
        texts = {h.EVERY: _interval(self.every_ms or 0)} if self.cron is None else {h.CRON: self.cron.expression}
        if self.anchor_ms is not None:
            texts[h.ANCHOR] = str(self.anchor_ms)
        if self.cron is not None and self.cron.zone != "UTC":
            texts[h.TIME_ZONE] = self.cron.zone
        if self.end_ms is not None:
            texts[h.END] = str(self.end_ms)
        if self.times is not None:
            texts[h.TIMES] = str(self.times)
        if self.missed is not Missed.LAST:
            texts[h.MISSED] = self.missed.value
        return texts

    def _recent(self, due_ms: int, now_ms: int) -> int:
        """The due time of the first missed tick that is delivered late."""
        until_ms = now_ms if self.end_ms is None else min(now_ms, self.end_ms)
        if self.cron is None:
            assert self.every_ms is not None
            return due_ms + max(0, (until_ms - due_ms) // self.every_ms + 1 - MISSED_MAX) * self.every_ms
        if (
            until_ms - due_ms < MISSED_MAX * CRON_MS_MIN
            or (recent_ms := self.cron.recent(until_ms, MISSED_MAX)) <= due_ms
        ):
            return due_ms
        return self.cron.next_after(recent_ms - 1) or due_ms

    def _last_until(self, due_ms: int, now_ms: int) -> int:
        until_ms = now_ms if self.end_ms is None else min(now_ms, self.end_ms)
        if self.cron is not None:
            last_ms = self.cron.last_until(due_ms, until_ms)
            return due_ms if last_ms is None else last_ms
        assert self.every_ms is not None
        if self.anchor_ms is not None:
            return max(due_ms, self._regular(until_ms + 1) - self.every_ms)
        return due_ms + (until_ms - due_ms) // self.every_ms * self.every_ms

    def _regular(self, from_ms: int) -> int:
        """The first moment at or after `from_ms` that is a whole number of intervals from the anchor."""
        assert self.every_ms is not None
        assert self.anchor_ms is not None
        return from_ms + (self.anchor_ms - from_ms) % self.every_ms

    def _in_time(self, due_ms: int | None) -> int | None:
        end_ms = h.UNTIL_MS_MAX if self.end_ms is None else min(self.end_ms, h.UNTIL_MS_MAX)
        return None if due_ms is None or due_ms > end_ms else due_ms


def _interval(ms: int) -> str:
    """`ms` in its largest whole unit: `15m`, `36h`, `1500ms`."""
    return next(f"{ms // size}{unit}" for unit, size in zip(_UNITS, h.UNITS_MS, strict=True) if ms % size == 0)


def parse_schedule(given: Mapping[str, str], every_min_ms: int = 1) -> Schedule:
    """The schedule of these headers, by name. Raises ValueError that begins with the name of the invalid header."""
    if h.EVERY in given and h.TIME_ZONE in given:
        raise ValueError(f"{h.TIME_ZONE}: only {h.CRON} supports time zones")
    every_ms = _read(given, h.EVERY, h.parse_duration)
    if every_ms is not None and every_ms < every_min_ms:
        raise ValueError(f"{h.EVERY}: {every_ms} ms is less than the minimum of {every_min_ms} ms")
    if h.ANCHOR in given and h.EVERY not in given:
        raise ValueError(f"{h.ANCHOR}: only {h.EVERY} has one")
    _read(given, h.TIME_ZONE, lambda text: Cron("* * * * *", text))  # so that the error names this header
    return Schedule(
        every_ms=every_ms,
        anchor_ms=_read(given, h.ANCHOR, h.parse_until),
        cron=_read(given, h.CRON, lambda text: Cron(text, given.get(h.TIME_ZONE, "UTC"))),
        end_ms=_read(given, h.END, h.parse_until),
        times=_read(given, h.TIMES, h.parse_times),
        missed=_read(given, h.MISSED, _missed) or Missed.LAST,
    )


def packed(texts: Mapping[str, str], *, is_start_given: bool) -> str:
    """A record's schedule as one text for the column `schedule`; `is_start_given`: the record also has a start time."""
    short = {name.removeprefix("delay-"): text for name, text in texts.items()}
    return json.dumps(short | ({_GIVEN: True} if is_start_given else {}), ensure_ascii=False, separators=(",", ":"))


@lru_cache(10_000)
def schedule_of(text: str, every_min_ms: int = 1) -> tuple[Schedule, bool]:
    """The schedule of a text from `packed`, and whether a start is given. Raises ValueError, as `parse_schedule`."""
    texts, is_start_given = unpacked(text)
    return parse_schedule(texts, every_min_ms), is_start_given


def unpacked(text: str) -> tuple[Mapping[str, str], bool]:
    """The inverse of `packed`: headers, and whether a start is given."""
    short = json.loads(text)
    is_start_given = bool(short.pop(_GIVEN, False))
    return {f"delay-{name}": value for name, value in short.items()}, is_start_given


def _read(given: Mapping[str, str], name: str, parse: Callable[[str], _T]) -> _T | None:
    if name not in given:
        return None
    try:
        return parse(given[name])
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _missed(text: str) -> Missed:
    try:
        return Missed(text.strip(h.WHITE_SPACE))
    except ValueError:
        raise ValueError(f"{text!r} is not one of {', '.join(Missed)}") from None
