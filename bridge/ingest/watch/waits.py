"""Waits between the workers of a start, a hand-over, a query and a rebuild; their deadlines, and the actions after.

`Wait` is the table, and the code takes its deadlines from it. Each wait has a deadline. The *watcher* of a wait, which
detects the deadline and acts, does not depend on the awaited worker. So two workers that wait for each other are
separated after the shorter of their times.

A call into the JVM has no time-out of its own: if the JVM stands still, so does the query's thread. That thread notes
its waits in a `Watch`, and its progress; the thread of the plain reader checks the deadlines.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Final, NamedTuple

from timerstore.clock import Clock


class Then(Enum):
    """The action after the deadline."""

    PLAIN_READS = "the plain reader reads, until Spark is back"
    SPARK_READS = "Spark starts, and reads it"
    ANEW = "the query is started anew after a pause; after five failures in a row the process ends"
    ENDS = "the process ends, with an error"
    GOES_ON = "it goes on without"
    AGAIN = "it is tried again later"
    CLOSES = "the connection is closed"


class _Row(NamedTuple):
    who: str
    waits_for: str
    s: float
    then: Then


class Wait(Enum):
    """The table. Seconds count from the last progress."""

    OTHERS_COMMITS = _Row("start", "the first commits, by the owner of partition 0", 60.0, Then.ENDS)
    SESSION = _Row("query", "Spark's session", 600.0, Then.ENDS)
    SLOTS = _Row("query", "a slot for each partition", 120.0, Then.ANEW)
    UP_TO_COMMITTED = _Row(
        "query", "a partition that the plain reader reads up to the committed O", 10.0, Then.SPARK_READS
    )
    CALL = _Row("query", "Spark's answer: a plan, a query's begin or end", 600.0, Then.ENDS)
    TASKS = _Row("hand-over", "a task of the query for each partition", 120.0, Then.ANEW)
    CLOSE = _Row("hand-over", "the query, to come close to the plain reader", 20.0, Then.GOES_ON)
    RELIEF = _Row("hand-over", "the query, to send all that the plain reader had by then", 300.0, Then.ANEW)
    LOOK = _Row("delivery", "the JVM's answer about a query that serves", 5.0, Then.PLAIN_READS)
    JVM = _Row("query", "the JVM's answer about its query", 120.0, Then.ENDS)
    ENDS_OF_QUIET = _Row("plain reader", "the brokers, for the ends of quiet partitions", 3.0, Then.AGAIN)
    BACKLOG = _Row(
        "plain reader", "the query, to read a large backlog of a partition that comes", 3.0, Then.PLAIN_READS
    )
    """Shorter than COMMANDS_STILL: a backlog without a reader makes no progress."""
    STARVING = _Row("partition", "records that the query does not send", 15.0, Then.PLAIN_READS)
    STEP_OF_MAINTENANCE = _Row("partition that comes", "the present step of maintenance", 10.0, Then.AGAIN)
    FLUSH_OF_GONE = _Row("partition that goes", "its flush", 2.0, Then.GOES_ON)
    TOKEN = _Row("frames", "the token of a connection", 10.0, Then.CLOSES)
    DESCRIPTORS = _Row("frames", "a descriptor or thread for a connection", 60.0, Then.ANEW)
    JOB = _Row("rebuild", "progress of Spark's job: its plan, read or sent rows, a task that ends", 300.0, Then.ENDS)
    """Longer than Spark's own wait for records, two minutes, whose end has a reason."""
    COMMANDS = _Row("messages after a start", "commands written meanwhile (`start.read_commands`)", 30.0, Then.GOES_ON)
    COMMANDS_STILL = _Row("messages after a start", "the next record of any other partition", 5.0, Then.GOES_ON)
    COMMANDS_ROOM = _Row("messages after a start", "room for new rows", 5.0, Then.GOES_ON)

    @property
    def waits_for(self) -> str:
        return self.value.waits_for

    @property
    def s(self) -> float:
        return self.value.s

    @property
    def then(self) -> Then:
        return self.value.then


GAP_S: Final = 1.0
"""A watcher with a longer gap between two looks stood still itself, perhaps with the whole machine: that time does not
count."""


class Watch:
    """The waits of the query's thread. It calls `waiting` and `progress`, the watcher calls `over`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waits: tuple[Wait, ...] = ()
        self._since_s = 0.0
        self._looked_s = clock.monotonic_s()
        self._told: set[Wait] = set()
        self._is_news = True

    @contextmanager
    def waiting(self, *waits: Wait) -> Iterator[None]:
        """These waits count meanwhile, in place of the earlier ones."""
        before = self._waits
        self._begin(waits)
        try:
            yield
        finally:
            self._begin(before)

    def progress(self) -> None:
        """Note progress of the awaited worker."""
        self._since_s, self._is_news = self._clock.monotonic_s(), True

    def over(self) -> list[tuple[Wait, float]]:
        """The waits whose deadline has passed since the last look, each once, and their durations."""
        now_s = self._clock.monotonic_s()
        gap_s, self._looked_s = now_s - self._looked_s, now_s
        if gap_s > GAP_S:
            self._since_s += gap_s
        if self._is_news:
            self._is_news = False
            self._told.clear()
        waited_s = now_s - self._since_s
        over = [wait for wait in self._waits if waited_s >= wait.s and wait not in self._told]
        self._told.update(over)
        return [(wait, waited_s) for wait in over]

    def _begin(self, waits: tuple[Wait, ...]) -> None:
        self._waits = waits
        self.progress()
