"""The data source of the API (bridge/api/source.py), backed by the present pipeline."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Final

from bridge.api.source import CommandChannel, DeadLetterTopics, Overview, PauseControl
from bridge.delivery.targets.cache import Targets
from bridge.delivery.targets.target import TargetReport
from bridge.runtime.gauges import Lag, largest
from bridge.runtime.pipeline import Pipeline
from bridge.stores.names import SourceName
from bridge.stores.stores import Stores
from bridge.telemetry.health import Health, Phase
from bridge.telemetry.lateness import LatenessHistogram
from bridge.telemetry.metrics import StoreSnapshot
from timerstore.clock import Clock
from timerstore.memory.pending import SLOT_MS

TARGETS_MAX: Final = 1_000
COMPLETE: Final = ("connecting", "running")
"""Phases in which the index has all records below O, except in partitions that have just come (`Answers.unread`)."""


class Answers:
    """Implements `Source` for any thread."""

    def __init__(
        self,
        *,
        pipeline: Callable[[], Pipeline | None],
        targets: Callable[[], Targets | None],
        gauges: Callable[[], StoreSnapshot],
        lateness: LatenessHistogram,
        health: Health,
        lag: Lag,
        clock: Clock,
        letters: DeadLetterTopics,
        pauses: PauseControl,
        commands: Callable[[], CommandChannel | None],
        log_ends: Callable[[Collection[SourceName]], Mapping[SourceName, int]],
    ) -> None:
        self._pipeline, self._targets, self._gauges = pipeline, targets, gauges
        self._letters, self._pauses, self._commands = letters, pauses, commands
        self._log_ends = log_ends
        self._lateness, self._health, self._lag, self._clock = lateness, health, lag, clock

    def now_ms(self) -> int:
        return self._clock.now_ms()

    def phase(self) -> Phase:
        return self._health.phase

    def pending(self) -> Stores | None:
        """The store, once it is complete; None before."""
        pipeline = self._pipeline()
        return None if pipeline is None or self._health.phase.name not in COMPLETE else pipeline.store

    def unread(self) -> list[SourceName]:
        store = self.pending()
        if store is None:
            return []
        committed = store.committed()
        at = store.next_offsets()  # second: both grow, and O stays below
        return [name for name, reached in committed.items() if at.get(name, reached.offset) < reached.offset]

    def log_ends(self) -> Mapping[SourceName, int]:
        store = self.pending()
        return {} if store is None else self._log_ends(store.next_offsets())

    def overview(self) -> Overview | None:
        store, now_ms = self.pending(), self._clock.now_ms()
        if store is None:
            return None
        stats = store.stats([now_ms - now_ms % SLOT_MS])
        # From the list of targets: the metric merges names that no broker knows.
        failing = {(target.name, str(target.reason)): target.failing_partitions for target in self.targets()}
        failing = {key: partitions for key, partitions in failing.items() if partitions}
        return Overview(
            now_ms=now_ms,
            gauges=replace(self._gauges(), failing=failing),
            overdue=stats.pending_until[0],
            next_at_ms=store.waits_since_ms(),
            behind_s=self._lag.behind_s(store.next_offsets()),
            by_target=largest(stats.pending_by_target),
            lateness=self._lateness.recent(self._clock.monotonic_s()),
        )

    def targets(self) -> list[TargetReport]:
        targets = self._targets()
        return [] if targets is None else targets.reports(TARGETS_MAX)

    def commands(self) -> CommandChannel | None:
        """The command sender, once the index is complete: before, no command finishes."""
        return None if self.pending() is None else self._commands()

    def dead_letters(self) -> DeadLetterTopics:
        """The dead letters, which are read from the brokers on request."""
        return self._letters

    def pauses(self) -> PauseControl:
        return self._pauses
