"""Ticks: what becomes of the schedules of recurring messages that come up. Pure.

The record of a recurring message comes up at once, and delivers nothing: its transaction writes the copy for the first
tick. The transaction that finishes a tick, whatever becomes of it, writes the copy for the next one into the same
partition. So a tick and the next one are one atomic fact: a crash leaves both or none, and an abort neither.

    row                       delivered    written for the schedule         the tick itself, if its target fails
    its record                nothing      tick 1                           -
    the same, paused          nothing      itself: it rolls                 -
    tick n                    tick n       tick n + 1, due when it is due   a retry copy without the schedule
    tick n, missed            by policy    the tick after those missed      the same
    the last tick             tick n       nothing                          the same
    no schedule, or no time   dead letter  nothing                          -
    of a shorter interval     dead letter  nothing: `every_min_ms` holds for schedules that have begun, too

A move moves the next tick and leaves the rhythm alone: what follows a moved tick is the first regular time after it. A
pause is a move to the end of time, which keeps rolling. A tick that is retried has left its schedule: a target that
fails holds that up no longer than a transaction. All copies have the origin of the record, so that a cancel covers
whatever there is of it. A tick that is rolled or deferred keeps its schedule, since it is not delivered yet. Sizes do
not grow from tick to tick, but for the digits of the number.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from bridge.delivery.plan.due_rows import DueRows, Ids
from bridge.kafka.errors import Refusal
from bridge.wire import headers as h
from bridge.wire.reasons import RejectReason
from bridge.wire.schedule import Schedule, packed, schedule_of, unpacked
from timerstore.rows.entry import Kind
from timerstore.rows.position import Bools, Int64s

NOT_EXACT: Final = "recurring messages need delivery.mode exactly-once"
NONE: Final = -1
"""In place of a due time: there is no next tick."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleLimits:
    """The shortest interval, and the longest time to a first tick; ms. `is_exact`: what is finished and what is written
    for it are one transaction. Otherwise a crash would leave two next ticks, for ever, so that no schedule begins.
    """

    every_min_ms: int = 1
    delay_max_ms: int = h.UNTIL_MS_MAX
    is_exact: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class Ticks:
    """The schedules among n rows. `next_ms` int64[n] is when the next tick is due, or NONE; `is_silent` bool[n]: the
    row delivers nothing; `is_tick` bool[n]: it is a tick, so that its retry is none of the schedule's; `wrong` is why,
    by row, there is no schedule; `due_ms` by row, of ticks that stand for those missed before them; `missed` counts
    schedules that had missed ticks, by policy.
    """

    next_ms: Int64s
    is_silent: Bools
    is_tick: Bools
    wrong: dict[int, Refusal] = field(default_factory=dict)
    due_ms: dict[int, int] = field(default_factory=dict)
    missed: Counter[str] = field(default_factory=Counter)

    @property
    def asked(self) -> int:
        """How many schedules were asked for their next tick."""
        return int(np.count_nonzero(self.is_tick | self.is_silent)) + len(self.wrong)

    @property
    def has_next(self) -> Bools:
        """Which rows have a next tick; bool[n]."""
        result: Bools = self.next_ms != NONE
        return result

    def ends(self, ids: Ids) -> None:
        """No next tick can be written for these rows."""
        self.next_ms[ids] = NONE


def ticks(rows: DueRows, now_ms: int, limits: ScheduleLimits) -> Ticks | None:
    """What becomes of the schedules of the rows that come up by `now_ms`; None: there are none."""
    if rows.payload.column("schedule").null_count == len(rows):
        return None
    size = len(rows)
    found = Ticks(np.full(size, NONE, np.int64), np.zeros(size, np.bool_), np.zeros(size, np.bool_))
    is_up = ((rows.tick == 0) & (rows.due != h.NEVER_MS)) | (rows.due <= now_ms)
    ids = np.flatnonzero(rows.recurs & is_up & (rows.kind == Kind.TIMER))
    columns = rows.column("schedule", ids), rows.column("ts", ids), rows.due[ids].tolist(), rows.tick[ids].tolist()
    for row, text, ts_ms, due_ms, tick in zip(ids.tolist(), *columns, strict=True):
        try:
            schedule, is_start_given = schedule_of(text, limits.every_min_ms)
            if tick == 0:
                if not limits.is_exact:
                    raise ValueError(NOT_EXACT)
                found.next_ms[row] = _first_ms(schedule, ts_ms, due_ms if is_start_given else None, limits)
                found.is_silent[row] = True
                continue
        except ValueError as error:
            found.wrong[row] = Refusal(RejectReason.BAD_SCHEDULE, str(error))
            continue
        except _BeyondMax as beyond:
            found.wrong[row] = Refusal(RejectReason.BEYOND_MAX, str(beyond))
            continue
        step = schedule.step(due_ms, tick, now_ms)
        found.is_tick[row] = True
        found.is_silent[row] = not step.is_delivered
        found.next_ms[row] = NONE if step.next_ms is None else step.next_ms
        if step.was_missed:
            found.missed[schedule.missed.value] += 1
        if step.due_ms != due_ms:
            found.due_ms[row] = step.due_ms
    return found


def moved(text: str, tick: int, due_ms: int, to_ms: int, now_ms: int) -> tuple[str, int] | None:
    """What a move to `to_ms`, of `now_ms`, makes of a schedule whose next tick, `tick`, is due at `due_ms`: its column,
    and when that tick is due now. None: it is resumed after its end.

    `h.NEVER_MS` pauses a schedule, `h.NEXT_MS` resumes it at its next regular tick, any other time moves the one tick
    only, and to no earlier time than `now_ms`: all ticks since then would be missed. One that has not begun (tick 0; it
    comes up at once) and is paused begins when it is resumed.
    """
    try:
        schedule, is_start_given = schedule_of(text)
    except ValueError:
        return text, due_ms  # a dead letter, when it comes up
    is_paused, to_ms = due_ms == h.NEVER_MS, max(to_ms, now_ms)
    if to_ms == h.NEXT_MS:
        next_ms = due_ms if not is_paused else schedule.first(now_ms, None) if tick else now_ms
        return None if next_ms is None else (text, next_ms)
    if is_paused or not tick or schedule.every_ms is None or schedule.anchor_ms is not None:
        return text, to_ms
    return packed({**unpacked(text)[0], h.ANCHOR: str(due_ms)}, is_start_given=is_start_given), to_ms


class _BeyondMax(Exception):
    """A first tick, or an interval, that is longer than a message may wait."""


def _first_ms(schedule: Schedule, ts_ms: int, not_before_ms: int | None, limits: ScheduleLimits) -> int:
    first_ms = schedule.first(ts_ms, not_before_ms)
    if first_ms is None:
        raise ValueError("it names no moment at which the message is due")
    if max(first_ms - ts_ms, schedule.every_ms or 0) > limits.delay_max_ms:
        raise _BeyondMax(RejectReason.BEYOND_MAX.explanation)
    return first_ms
