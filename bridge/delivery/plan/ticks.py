"""Ticks: the next steps of recurring messages that come up. Pure.

The record of a recurring message comes up at once, and delivers nothing: its transaction writes the copy for the first
tick. The transaction that finishes a tick, with any fate, writes the copy for the next one into the same partition. So
a tick and the next one are one atomic fact: a crash leaves both or none, and an abort neither.

    row                       delivered    written for the schedule           the tick itself, if its target fails
    the record                nothing      tick 1                             -
    the same, paused          nothing      a roll of the record               -
    tick n                    tick n       tick n + 1, with its own due time  a retry copy without the schedule
    tick n, missed            by policy    the tick after those missed        the same
    the last tick             tick n       nothing                            the same
    no schedule or due time   dead letter  nothing                            -
    too short an interval     dead letter  nothing: `every_min_ms` also binds schedules that have begun

A move moves the next tick and keeps the rhythm: a moved tick is followed by the first regular time after it. A pause is
a move to the end of time, which keeps rolling. A retried tick has left its schedule: a failing target delays that by no
more than a transaction. All copies have the origin of the record, so that a cancel covers all of them. A rolled or
deferred tick keeps its schedule, since it is not delivered yet. The number's digits are the only growth of copies from
tick to tick.
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
"""In place of a due time: no next tick."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleLimits:
    """The shortest interval, and the longest time to a first tick; ms. `is_exact`: one transaction finishes a row and
    writes its output. Otherwise a crash would leave two next ticks for ever, so no schedule begins."""

    every_min_ms: int = 1
    delay_max_ms: int = h.UNTIL_MS_MAX
    is_exact: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class Ticks:
    """The schedules among n rows. `next_ms` int64[n]: due time of the next tick, or NONE; `is_silent` bool[n]: the row
    delivers nothing; `is_tick` bool[n]: the row is a tick, so its retry leaves the schedule; `wrong`: by row, the
    refusals of invalid schedules; `due_ms`: by row, the due times of ticks that stand for missed ones before them;
    `missed`: schedules with missed ticks, by policy."""

    next_ms: Int64s
    is_silent: Bools
    is_tick: Bools
    wrong: dict[int, Refusal] = field(default_factory=dict)
    due_ms: dict[int, int] = field(default_factory=dict)
    missed: Counter[str] = field(default_factory=Counter)

    @property
    def asked(self) -> int:
        """The number of schedules that were asked for their next tick."""
        return int(np.count_nonzero(self.is_tick | self.is_silent)) + len(self.wrong)

    @property
    def has_next(self) -> Bools:
        """The rows with a next tick; bool[n]."""
        result: Bools = self.next_ms != NONE
        return result

    def ends(self, ids: Ids) -> None:
        """End the schedules of these rows: their next ticks cannot be written."""
        self.next_ms[ids] = NONE


def ticks(rows: DueRows, now_ms: int, limits: ScheduleLimits) -> Ticks | None:
    """The schedules of the rows that come up by `now_ms`; None without schedules."""
    if rows.payload.column("schedule").null_count == len(rows):
        return None
    size = len(rows)
    result = Ticks(np.full(size, NONE, np.int64), np.zeros(size, np.bool_), np.zeros(size, np.bool_))
    is_up = ((rows.tick == 0) & (rows.due != h.NEVER_MS)) | (rows.due <= now_ms)
    ids = np.flatnonzero(rows.recurs & is_up & (rows.kind == Kind.TIMER))
    columns = rows.column("schedule", ids), rows.column("ts", ids), rows.due[ids].tolist(), rows.tick[ids].tolist()
    for row, text, ts_ms, due_ms, tick in zip(ids.tolist(), *columns, strict=True):
        try:
            schedule, is_start_given = schedule_of(text, limits.every_min_ms)
            if tick == 0:
                if not limits.is_exact:
                    raise ValueError(NOT_EXACT)
                result.next_ms[row] = _first_ms(schedule, ts_ms, due_ms if is_start_given else None, limits)
                result.is_silent[row] = True
                continue
        except ValueError as error:
            result.wrong[row] = Refusal(RejectReason.BAD_SCHEDULE, str(error))
            continue
        except _BeyondMax as beyond:
            result.wrong[row] = Refusal(RejectReason.BEYOND_MAX, str(beyond))
            continue
        step = schedule.step(due_ms, tick, now_ms)
        result.is_tick[row] = True
        result.is_silent[row] = not step.is_delivered
        result.next_ms[row] = NONE if step.next_ms is None else step.next_ms
        if step.was_missed:
            result.missed[schedule.missed.value] += 1
        if step.due_ms != due_ms:
            result.due_ms[row] = step.due_ms
    return result


def moved(text: str, tick: int, due_ms: int, to_ms: int, now_ms: int) -> tuple[str, int] | None:
    """The effect of a move to `to_ms`, sent at `now_ms`, on a schedule whose next tick, `tick`, is due at `due_ms`: its
    new column, and the new due time of that tick. None: the schedule is resumed after its end.

    `h.NEVER_MS` pauses a schedule, and `h.NEXT_MS` resumes it at its next regular tick. Any other time moves the one
    tick only, and to no earlier time than `now_ms`: otherwise all ticks since then would be missed. A paused schedule
    that has not begun (tick 0, which comes up at once) begins when it is resumed."""
    try:
        schedule, is_start_given = schedule_of(text)
    except ValueError:
        return text, due_ms  # a dead letter when it comes up
    is_paused, to_ms = due_ms == h.NEVER_MS, max(to_ms, now_ms)
    if to_ms == h.NEXT_MS:
        next_ms = due_ms if not is_paused else schedule.first(now_ms, None) if tick else now_ms
        return None if next_ms is None else (text, next_ms)
    if is_paused or not tick or schedule.every_ms is None or schedule.anchor_ms is not None:
        return text, to_ms
    return packed({**unpacked(text)[0], h.ANCHOR: str(due_ms)}, is_start_given=is_start_given), to_ms


class _BeyondMax(Exception):
    """A first tick or an interval beyond the longest wait of a message."""


def _first_ms(schedule: Schedule, ts_ms: int, not_before_ms: int | None, limits: ScheduleLimits) -> int:
    first_ms = schedule.first(ts_ms, not_before_ms)
    if first_ms is None:
        raise ValueError("it names no moment at which the message is due")
    if max(first_ms - ts_ms, schedule.every_ms or 0) > limits.delay_max_ms:
        raise _BeyondMax(RejectReason.BEYOND_MAX.explanation)
    return first_ms
