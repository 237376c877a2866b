"""Sources that are held: what must be written for them, a roll or a retry, is not taken. Each keeps its own P and holds
up no other (`TimerStore.hold`); this file decides for how long.

A source is released when one of the places that it waits for takes records again, or may do so, and it has waited for
a second, each time twice as long up to WAIT_S_MAX: going back to the smallest P costs a look at everything since. One
with rows in doubt (doubt/doubts.py) waits until these are looked up.
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
from bridge.telemetry.metrics import Metrics
from timerstore.clock import Clock
from timerstore.rows.sources import SourceName, Sources
from timerstore.store import TimerStore

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

    def __init__(self, targets: Targets, clock: Clock, doubts: Doubts, metrics: Metrics) -> None:
        self._targets = targets
        self._clock = clock
        self._doubts = doubts
        self._metrics = metrics
        self._holds: dict[int, _Hold] = {}

    def now(self) -> frozenset[int]:
        """Those that wait for a place, or for the time."""
        return frozenset(source for source, hold in self._holds.items() if not hold.is_over)

    def begin(self, states: States, sources: Sources) -> None:
        """Another store, opened on these states: other numbers. Raises EnvironmentFailure."""
        self._holds.clear()
        self._doubts.begin(states, sources)
        self.tell()

    def forget(self, names: Collection[SourceName], sources: Sources) -> None:
        """These are not ours now."""
        for name in names:
            self._holds.pop(sources.index(*name), None)
        self._doubts.go(names, sources)
        self.tell()

    def tell(self) -> None:
        """The metric: it is 0 while the sources may be another instance's."""
        self._metrics.partitions_held(len(self.now()) + len(self._doubts.held()))

    def hold(self, store: TimerStore) -> None:
        """Deliver nothing of the sources that cannot be written to, and of those in doubt; all others go on."""
        in_doubt = {store.sources.index(*name) for name in self._doubts.held() if name in store.sources}
        store.hold(self.now() | in_doubt)
        self.tell()

    def add(self, unwritable: Mapping[int, Unwritable], sources: Sources) -> None:
        """These cannot be written to; `hold` follows."""
        now_s = self._clock.monotonic_s()
        for source, why in unwritable.items():
            old = self._holds.get(source)
            relapses = old is not None and now_s - old.until_s <= RELAPSE_S
            wait_s = min(WAIT_S_MAX, 2 * old.wait_s) if old is not None and relapses else WAIT_S
            self._holds[source] = _Hold(now_s + wait_s, wait_s, why.places)
            topic, partition = sources.name(source)
            log.warning("partition-held", topic=topic, partition=partition, detail=why.detail, wait_s=wait_s)

    def release(self, sources: Sources, joined: States) -> bool:
        """Release those that may go on; returns whether there are any, or others have `joined`, on these states."""
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
        found = self._targets.resolve({topic for topic, _ in places})
        return bool(places) and all(found[topic].is_down(partition) for topic, partition in places)
