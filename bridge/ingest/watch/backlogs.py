"""Large backlogs of partitions that come: while Java runs, the plain reader leaves them to the query.

A record of the plain reader costs ten times the CPU of a row in a frame, all of it under the interpreter's lock, for
which the delivery of other partitions waits. A JVM that runs starts a query within seconds.

    left --no progress for `Wait.BACKLOG`; read up to O; the query has served--> read by the plain reader, too
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import structlog

from bridge.ingest.watch.stalls import Laggards
from bridge.ingest.watch.waits import Wait
from bridge.stores.names import SourceName
from bridge.stores.stores import Life, Stores
from timerstore.clock import Clock

RECORDS_MAX: Final = 20_000
"""The plain reader reads smaller backlogs within a second, before a query starts."""

log = structlog.get_logger("bridge.ingest.watch.backlogs")


class Backlogs:
    """See the module. For the plain reader's thread."""

    def __init__(self, store: Stores, clock: Clock, can_start: Callable[[], bool]) -> None:
        """`can_start` returns whether a query can start at once."""
        self._store, self._clock, self._can_start = store, clock, can_start
        self._run: int | None = None
        self._left: frozenset[SourceName] = frozenset()
        self._slow = Laggards(Wait.BACKLOG.s)

    def left(self, run: int) -> frozenset[SourceName]:
        """The partitions that the plain reader leaves out now. They are chosen at the first call for a run; if all
        partitions have a large backlog, none is left out."""
        if run == self._run and not self._left:
            return self._left
        at, committed = self._store.next_offsets(run), self._store.committed()
        behind = {n: at[n] for n in self._store.in_life(Life.CATCHING_UP) if n in at and n in committed}
        if run != self._run:
            self._run, self._slow = run, Laggards(Wait.BACKLOG.s)
            large = {name for name, offset in behind.items() if committed[name].offset - offset > RECORDS_MAX}
            self._left = frozenset(large if len(large) < len(at) and self._can_start() else ())
        waiting = {name: behind[name] for name in self._left if name in behind}
        if slow := self._slow.look(waiting, self._clock.monotonic_s()):
            log.warning("plain-reader-takes-over", waits_for=Wait.BACKLOG.waits_for, seconds=Wait.BACKLOG.s)
        self._left = frozenset(waiting).difference(slow)
        return self._left

    def end(self) -> None:
        """Leave out no partition for the rest of the run."""
        self._left = frozenset()
