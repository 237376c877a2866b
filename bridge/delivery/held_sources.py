"""Held sources: their rows are not taken, since a necessary record, a roll or a retry, cannot be written. Each keeps
its own P and delays no other (`Stores.hold`); this file decides the duration.

A source is released after a wait, once one of its places takes records again, or may do so. The wait is a second, and
doubles each time up to WAIT_S_MAX: going back to the smallest P costs a look at all positions since. A source with rows
in doubt (doubt/doubts.py) waits for their look-up.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

import structlog

from bridge.delivery.doubt.doubts import Doubts
from bridge.delivery.doubt.log_notes import States
from bridge.delivery.plan.fates import Unwritable
from bridge.delivery.targets.cache import Targets
from bridge.stores.names import SourceName, Sources
from bridge.stores.stores import Stores
from bridge.telemetry.metrics import Metrics
from timerstore.clock import Clock

WAIT_S: Final = 1.0
WAIT_S_MAX: Final = 30.0
RELAPSE_S: Final = 600.0
"""A source that is held again within this time waits longer."""

log = structlog.get_logger("bridge.delivery.held_sources")


@dataclass(slots=True)
class _Hold:
    until_s: float
    wait_s: float
    places: Collection[tuple[str, int]]
    is_over: bool = False


class HeldSources:
    """The held sources of one store, by index. One thread."""

    def __init__(self, targets: Targets, clock: Clock, doubts: Doubts, metrics: Metrics) -> None:
        self._targets = targets
        self._clock = clock
        self._doubts = doubts
        self._metrics = metrics
        self._holds: dict[int, _Hold] = {}

    def now(self) -> frozenset[int]:
        """Sources that wait for a place, or for the time."""
        return frozenset(source for source, hold in self._holds.items() if not hold.is_over)

    def begin(self, states: States, sources: Sources) -> None:
        """Begin with another store, opened on these states: source numbers change. Raises EnvironmentFailure."""
        self._holds.clear()
        self._doubts.begin(states, sources)
        self.tell()

    def forget(self, names: Collection[SourceName], sources: Sources) -> None:
        """Forget sources of other instances."""
        for name in names:
            self._holds.pop(sources.index(*name), None)
        self._doubts.go(names, sources)
        self.tell()

    def tell(self) -> None:
        """Set the metric; it is 0 while the sources may belong to another instance."""
        self._metrics.partitions_held.set(len(self.now()) + len(self._doubts.held()))

    def hold(self, store: Stores) -> None:
        """Hold the sources that cannot be written to, and those in doubt; all others go on."""
        in_doubt = {store.sources.index(*name) for name in self._doubts.held() if name in store.sources}
        store.hold(self.now() | in_doubt)
        self.tell()

    def add(self, unwritable: Mapping[int, Unwritable], sources: Sources) -> None:
        """Note sources that cannot be written to; `hold` follows."""
        now_s = self._clock.monotonic_s()
        for source, why in unwritable.items():
            old = self._holds.get(source)
            relapses = old is not None and now_s - old.until_s <= RELAPSE_S
            wait_s = min(WAIT_S_MAX, 2 * old.wait_s) if old is not None and relapses else WAIT_S
            self._holds[source] = _Hold(now_s + wait_s, wait_s, why.places)
            topic, partition = sources.name(source)
            log.warning("partition-held", topic=topic, partition=partition, detail=why.detail, wait_s=wait_s)

    def release(self, sources: Sources, joined: States) -> bool:
        """Release the sources that may go on. Returns whether there is one, or others have `joined`, on these
        states."""
        if joined:
            self._doubts.come(joined, sources)
        now_s, released = self._clock.monotonic_s(), self._doubts.look(sources) or bool(joined)
        for source, hold in self._holds.items():
            if hold.is_over or now_s < hold.until_s or self._is_down(hold.places):
                continue
            hold.is_over, hold.until_s, released = True, now_s, True
            topic, partition = sources.name(source)
            log.info("partition-released", topic=topic, partition=partition)
        return released

    def _is_down(self, places: Collection[tuple[str, int]]) -> bool:
        targets = self._targets.resolve({topic for topic, _ in places})
        return bool(places) and all(targets[topic].is_down(partition) for topic, partition in places)
