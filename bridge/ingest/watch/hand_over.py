"""The hand-over from the plain reader to the query, once it has a task for each partition, and has read as far.

    tasks begin --each partition has one--> settle --> relief: the plain reader's present offsets --sent--> relieved
                                              ^                       |
                                              '---- sampled again ----'  while the query may still come closer

Records that the query lacks when the plain reader stops are read late. So the relief is sampled again while the query
comes closer, and is final from `Wait.CLOSE` on. Times are arguments.
"""

from __future__ import annotations

from typing import Final

from bridge.errors import EnvironmentFailure
from bridge.ingest.watch.waits import Wait
from bridge.stores.names import Offsets

SETTLE_S: Final = 1.0
"""Grace period after the last task of a query starts, so that it fetches before the plain reader ends."""
CLOSE_S: Final = 0.25
"""The largest lag of the query behind the plain reader at the relief."""


class HandOver:
    """The hand-over of one query, which begins at `start` (offsets), at `now_s`."""

    def __init__(self, start: Offsets, now_s: float) -> None:
        self._start = start
        self._tasks = 0
        self._complete_s: float | None = None if start else now_s
        self._began_s = self._relief_s = now_s
        self._relief: Offsets | None = None

    def task_begins(self, now_s: float) -> None:
        """Any thread. There is one task for each partition, and another one after the loss of an executor."""
        self._tasks += 1
        if self._tasks >= len(self._start) and self._complete_s is None:
            self._complete_s = now_s

    def begin_again(self, now_s: float) -> None:
        """The plain reader has taken over meanwhile."""
        self._relief, self._began_s = None, now_s

    def is_over(self, sent: Offsets, read_to: Offsets, now_s: float) -> bool:
        """Whether the query, with records `sent` up to these offsets, relieves the plain reader, which has
        `read_to` its own. Raises EnvironmentFailure after a deadline."""
        if self._complete_s is None:
            if now_s >= self._began_s + Wait.TASKS.s:
                raise EnvironmentFailure(
                    "Spark has not begun a task for each partition",
                    hint="The plain reader reads meanwhile. Look at Spark's processors, and at the log above.",
                    waited_s=round(Wait.TASKS.s),
                    tasks=self._tasks,
                    partitions=len(self._start),
                    code="DB-3057",
                )
            return False
        if self._relief is not None and all(sent[name] >= end for name, end in self._relief.items()):
            return True
        if self._relief is not None and now_s >= self._relief_s + Wait.RELIEF.s:
            raise EnvironmentFailure(
                "Spark does not catch up with the plain reader",
                hint="The plain reader reads meanwhile. Look at Spark's processors, and at the log above.",
                waited_s=round(Wait.RELIEF.s),
                code="DB-3058",
            )
        is_settled = now_s > self._complete_s + SETTLE_S
        if is_settled and (self._relief is None or self._relief_s + CLOSE_S < now_s < self._began_s + Wait.CLOSE.s):
            self._relief_s = now_s
            self._relief = {name: end for name, end in read_to.items() if end > self._start.get(name, end)}
        return False
