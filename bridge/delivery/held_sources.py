"""Sources that are held: what must be written for them, a roll or a retry, is not taken. Each keeps its own P and holds
up no other (`TimerStore.hold`); this file decides for how long.

A source is released when one of the places that it waits for takes records again, or may do so, and it has waited for
a second, each time twice as long up to WAIT_S_MAX: going back to the smallest P costs a look at everything since.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

import structlog

from bridge.delivery.plan.fates import Unwritable
from bridge.delivery.targets.cache import Targets
from timerstore.clock import Clock
from timerstore.rows.sources import Sources

WAIT_S: Final = 1.0
WAIT_S_MAX: Final = 30.0
RELAPSE_S: Final = 600.0
"""A source that is held again within this time waits for longer."""

log = structlog.get_logger("bridge.delivery.held_sources")


@dataclass(slots=True)
class _Hold:
    until_s: float
    wait_s: float
    places: Collection[tuple[str, int]]
    is_over: bool = False


class HeldSources:
    """The sources of one store that are held, by index. One thread."""

    def __init__(self, targets: Targets, clock: Clock) -> None:
        self._targets = targets
        self._clock = clock
        self._holds: dict[int, _Hold] = {}

    def now(self) -> frozenset[int]:
        return frozenset(source for source, hold in self._holds.items() if not hold.is_over)

    def clear(self) -> None:
        """Another store, other numbers."""
        self._holds.clear()

    def forget(self, sources: Collection[int]) -> None:
        """These are another instance's now."""
        for source in sources:
            self._holds.pop(source, None)

    def add(self, unwritable: Mapping[int, Unwritable], sources: Sources) -> None:
        now_s = self._clock.monotonic_s()
        for source, why in unwritable.items():
            old = self._holds.get(source)
            relapses = old is not None and now_s - old.until_s <= RELAPSE_S
            wait_s = min(WAIT_S_MAX, 2 * old.wait_s) if old is not None and relapses else WAIT_S
            self._holds[source] = _Hold(now_s + wait_s, wait_s, why.places)
            topic, partition = sources.name(source)
            log.warning("partition-held", topic=topic, partition=partition, detail=why.detail, wait_s=wait_s)

    def release(self, sources: Sources) -> bool:
        """Release those that may go on; returns whether there are any."""
        now_s, released = self._clock.monotonic_s(), False
        for source, hold in self._holds.items():
            if hold.is_over or now_s < hold.until_s or self._is_down(hold.places):
                continue
            hold.is_over, hold.until_s, released = True, now_s, True
            topic, partition = sources.name(source)
            log.info("partition-released", topic=topic, partition=partition)
        return released

    def _is_down(self, places: Collection[tuple[str, int]]) -> bool:
        found = self._targets.resolve({topic for topic, _ in places})
        return bool(places) and all(found[topic].is_down(partition) for topic, partition in places)
