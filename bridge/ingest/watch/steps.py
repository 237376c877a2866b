"""The steps of a query until it serves, and the report of the present one every few seconds.

    session -> slots -> plan -> batches -> begin -> tasks -> relief --serves--> end -> (slots ...)
                                                                      '-fails-> pause -> (slots ...)

Three threads take part, so that a JVM that stands still silences nobody: the query's thread enters the steps, a thread
of its own asks Spark for its state, and the plain reader's thread reports.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final, NamedTuple

from timerstore.clock import Clock

REPORT_S: Final = 5.0
"""The interval of reports while the query does not serve."""
SILENT_S: Final = 2 * REPORT_S
"""The age of Spark's last answer from which on the report gives it."""

Facts = Mapping[str, object]


class QueryStep(Enum):
    """The table: the awaited result of each step, as the log gives it."""

    SESSION = "Spark's session"
    SLOTS = "a slot for each partition"
    PLAN = "the plan, and a task that compiles it on an executor"
    BATCHES = "batches that are read one by one"
    BEGIN = "the query's begin"
    TASKS = "a task for each partition"
    RELIEF = "the records that the plain reader has read"
    END = "the query's end"
    PAUSE = "the pause after a failure"


class _Present(NamedTuple):
    step: QueryStep
    since_s: float
    facts: Facts


class Steps:
    """See the module. Each value is replaced as a whole, by one thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._present: _Present | None = None
        self._spark: Facts = {}
        self._asked_s: float | None = None
        self._report_s = 0.0

    # ---- the query's thread

    def enter(self, step: QueryStep, **facts: object) -> None:
        """The thread waits for the result of this step. Call it again with later `facts`, which describe the wait."""
        now_s, present = self._clock.monotonic_s(), self._present
        if present is None:
            self._report_s = now_s + REPORT_S
        self._present = _Present(step, present.since_s if present and present.step is step else now_s, facts)

    def serve(self) -> None:
        """The query serves: nothing is reported until the next step."""
        self._present, self._asked_s, self._spark = None, None, {}

    # ---- the thread that asks Spark

    @property
    def is_over(self) -> bool:
        return self._present is None

    def ask(self) -> None:
        """Spark is being asked."""
        self._asked_s = self._asked_s or self._clock.monotonic_s()

    def answer(self, spark: Facts) -> None:
        """Spark's state at this moment. An answer that comes when the query serves is too old for the next report."""
        self._spark, self._asked_s = {} if self.is_over else spark, None

    # ---- the plain reader's thread

    def report(self) -> Facts | None:
        """The fields of a report, if one is due."""
        now_s, present = self._clock.monotonic_s(), self._present
        if present is None or now_s < self._report_s:
            return None
        self._report_s = now_s + REPORT_S
        fields = {"waits_for": present.step.value, "seconds": round(now_s - present.since_s), **present.facts}
        asked_s = self._asked_s
        if asked_s is not None and now_s - asked_s > SILENT_S:
            return fields | {"spark_silent_s": round(now_s - asked_s)}
        return {**self._spark, **fields}
