"""Partitions that are left out for a while, as if another instance owned them, so that they hold up no others.

A partition of a delay topic that accepts no writes keeps its own P (`TimerStore.hold`). If it has pending rows that
are output by offset (rejects, cancels to be forwarded), its O stands still, too, and nothing behind it can be flushed,
until it leaves no room for others. Then the pipeline is made again without it, and later with it.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Final

import structlog

from timerstore.clock import Clock
from timerstore.rows.sources import SourceName

LOOKS: Final = 3
"""So many times in a row it must be found to leave no room."""
WAIT_S: Final = 60.0
WAIT_S_MAX: Final = 600.0

log = structlog.get_logger("bridge.runtime.left_out")


class LeftOut:
    """See the module. One thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._until_s: dict[SourceName, float] = {}
        self._wait_s: dict[SourceName, float] = {}
        self._blocking: tuple[frozenset[SourceName], int] = (frozenset(), 0)

    def without(self, owned: frozenset[SourceName]) -> frozenset[SourceName]:
        """What of the owned partitions to take on; all of them where none would be left."""
        return (owned - self._until_s.keys()) or owned

    def look(self, blocking: Set[SourceName], owned: Set[SourceName]) -> bool:
        """Note which of the pipeline's partitions (`owned`) leave no room; True where it must be made again, without or
        with them. Partitions that hold up no other stay."""
        now_s = self._clock.monotonic_s()
        if blocking >= owned:
            blocking = frozenset()
        over = [name for name, until_s in self._until_s.items() if now_s >= until_s]
        for name in over:
            del self._until_s[name]
            log.info("partition-taken-on-again", topic=name[0], partition=name[1])
        found, times = self._blocking
        times = times + 1 if blocking and blocking == found else int(bool(blocking))
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
        """In words, for /readyz."""
        if not self._until_s:
            return ()
        names = ", ".join(f"{topic}/{partition}" for topic, partition in sorted(self._until_s))
        return (f"left out for a while, since they take nothing and leave no room for others: {names}",)
