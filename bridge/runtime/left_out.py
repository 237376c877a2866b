"""Partitions that are temporarily left out, as if another instance owned them, so that they do not block others.

A partition of a delay topic that accepts no writes keeps its own P (`Stores.hold`). If it has pending rows that are
output by offset (rejects, cancels to be forwarded), its O stops as well, and later rows cannot be flushed. In the end
they leave no room for others. Then a new pipeline starts without the partition, and later one with it.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Final

import structlog

from bridge.stores.names import SourceName
from timerstore.clock import Clock

LOOKS: Final = 3
"""The number of consecutive looks at which the partition must leave no room."""
WAIT_S: Final = 60.0
WAIT_S_MAX: Final = 600.0

log = structlog.get_logger("bridge.runtime.left_out")


class LeftOut:
    """Decides which partitions are left out. For one thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._until_s: dict[SourceName, float] = {}
        self._wait_s: dict[SourceName, float] = {}
        self._blocking: tuple[frozenset[SourceName], int] = (frozenset(), 0)

    def without(self, owned: frozenset[SourceName]) -> frozenset[SourceName]:
        """The owned partitions that are not left out; all of them if none would remain."""
        return (owned - self._until_s.keys()) or owned

    def look(self, blocking: Set[SourceName], owned: Set[SourceName]) -> bool:
        """Note which of the pipeline's partitions (`owned`) leave no room. Returns whether a new pipeline must start
        without or with them. Partitions that block no others stay."""
        now_s = self._clock.monotonic_s()
        if blocking >= owned:
            blocking = frozenset()
        over = [name for name, until_s in self._until_s.items() if now_s >= until_s]
        for name in over:
            del self._until_s[name]
            log.info("partition-taken-on-again", topic=name[0], partition=name[1])
        before, times = self._blocking
        times = times + 1 if blocking and blocking == before else int(bool(blocking))
        self._blocking = (frozenset(blocking), times)
        if times < LOOKS:
            return bool(over)
        self._blocking = (frozenset(), 0)
        for name in blocking:
            wait_s = self._wait_s[name] = min(WAIT_S_MAX, 2 * self._wait_s.get(name, WAIT_S / 2))
            self._until_s[name] = now_s + wait_s
            log.error("partition-left-out", topic=name[0], partition=name[1], wait_s=wait_s)
        return True

    def alarms(self) -> tuple[str, ...]:
        """A sentence about the partitions that are left out, for /readyz."""
        if not self._until_s:
            return ()
        names = ", ".join(f"{topic}/{partition}" for topic, partition in sorted(self._until_s))
        return (f"temporarily left out, since they accept no writes and leave no room for others: {names}",)
