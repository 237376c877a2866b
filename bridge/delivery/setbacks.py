"""Setbacks of records, reported once committed: the targets that fail while messages wait for them, and a line in the
log for each new cause, with the place of a record.

    retries       the target fails until the last retry of its messages (`Targets.await_until`): a line at the beginning
    dead letters  a line for each reason, unless it was reported within AGAIN_S
    producers     a line for each lost one; the second that is fenced within a minute ends the process
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import structlog

from bridge.delivery.plan.fates import LETTERS_FAIL, OWN, Fate
from bridge.delivery.plan.planner import Plan
from bridge.delivery.producer.outcomes import Broken, Indefinite
from bridge.delivery.targets.cache import Targets
from bridge.kafka.errors import fenced
from bridge.settings.time_budgets import TimeBudgets
from bridge.telemetry.metrics import Metrics
from timerstore.clock import Clock

AGAIN_S: Final = 600.0
FENCED_AGAIN_S: Final = 60.0

log = structlog.get_logger("bridge.delivery.setbacks")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setback:
    """Records that one reason kept from delivery: `record` is the place of the first (topic/partition/offset), `topic`
    the failing one, if any; `until_ms` is the time of the last retry, None for dead letters."""

    reason: str
    detail: str
    record: str
    topic: str | None
    until_ms: int | None


def setbacks(plan: Plan) -> Iterator[Setback]:
    """The setbacks of a plan: one for each target and reason; for dead letters, one for each reason."""
    rows, fates = plan.rows, plan.fates
    if fates.are_plain:
        return
    names, codes = rows.targets
    waiting = fates.ids(Fate.RETRY, Fate.HOLD)
    waiting = waiting[fates.count_attempts(waiting) > 0]
    for reason in np.unique(fates.reason[waiting]).tolist():
        mine = waiting[fates.reason[waiting] == reason]
        topics = [names[code] if reason != LETTERS_FAIL else None for code in codes[mine].tolist()]
        if reason == LETTERS_FAIL and plan.own is not None:
            topics = [plan.own.letter_topics[topic] for topic in rows.places(mine)[0]]
        for topic in dict.fromkeys(topics):
            ids = mine[[letter_topic == topic for letter_topic in topics]]
            told = ("dead-letter-topic", "takes no dead letters") if reason < 0 else _told(plan, reason)
            yield _setback(plan, ids, *told, topic, int(fates.at_ms[ids].max()))
    dead = fates.ids(Fate.LETTER)
    for reason in np.unique(fates.reason[dead]).tolist():
        ids = dead[fates.reason[dead] == reason]
        if reason != OWN:
            yield _setback(plan, ids, *_told(plan, reason), None, None)
            continue
        own = [named or "held" for named in rows.column("reason", ids)]
        for text in dict.fromkeys(own):
            yield _setback(plan, ids[[named == text for named in own]], text, "", None, None)


def _told(plan: Plan, reason: int) -> tuple[str, str]:
    refusal = plan.fates.refusals[reason]
    return str(refusal.reason), refusal.detail


def _setback(plan: Plan, ids: np.ndarray, reason: str, detail: str, topic: str | None, until_ms: int | None) -> Setback:
    (record,) = plan.rows.origins(ids[:1])
    return Setback(reason=reason, detail=detail, record=record, topic=topic, until_ms=until_ms)


class SetbackLog:
    """See the module. One thread."""

    def __init__(self, targets: Targets, clock: Clock) -> None:
        self._targets, self._clock = targets, clock
        self._told_s: dict[str, float] = {}

    def committed(self, reported: Iterable[Setback]) -> None:
        """These setbacks are in Kafka."""
        for setback in reported:
            told = {"reason": setback.reason, "detail": setback.detail, "record": setback.record}
            if setback.topic is not None and setback.until_ms is not None:
                if self._targets.await_until(setback.topic, setback.until_ms):
                    log.warning("target-failing", topic=setback.topic, **told)
            elif self._is_new(setback.reason):
                log.warning("dead-letter-written", **told)

    def _is_new(self, reason: str) -> bool:
        now_s = self._clock.monotonic_s()
        last_s = self._told_s.get(reason)
        self._told_s[reason] = now_s
        return last_s is None or now_s - last_s >= AGAIN_S


class Breaks:
    """Lost producers. One thread."""

    def __init__(self, budgets: TimeBudgets, clock: Clock, metrics: Metrics) -> None:
        self._budgets, self._clock, self._metrics = budgets, clock, metrics
        self._fenced_s: float | None = None

    def note(self, broken: Broken, opened_s: float | None, rows: int) -> None:
        """Report a lost producer, with the start and the number of rows of its transaction, if any. Raises FencedError
        when a producer is fenced for the second time within a minute, and the age of the transaction does not explain
        it."""
        failure, now_s = broken.failure, self._clock.monotonic_s()
        is_indefinite = isinstance(broken, Indefinite)
        log.warning("producer-lost", code=failure.code, reason=failure.detail, is_indefinite=is_indefinite)
        self._metrics.producers_rebuilt.inc()
        if broken.fenced_by is None:
            return
        age_s = 0.0 if opened_s is None else now_s - opened_s
        if self._budgets.is_timed_out(age_s):
            log.warning("transaction-timed-out", open_s=round(age_s, 1), rows=rows)
            return
        # A transaction that outlived its time-out looks like a rival. A rival fences again.
        if self._fenced_s is not None and now_s - self._fenced_s < FENCED_AGAIN_S:
            raise fenced(broken.fenced_by)
        self._fenced_s = now_s
