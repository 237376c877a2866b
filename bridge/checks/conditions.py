"""What a start insists on of the bridge's own topics, asked again while it runs.

A topic may be switched to its producers' timestamps, to compaction, or to a retention that is too short at any time. A
start would refuse it. A bridge that runs tells of it and goes on: pending messages are delivered all the same, and
holding them would bring back nothing of what the topic's configuration does to its records.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

import structlog

from bridge.checks.finding import Context, Finding
from bridge.checks.topics import check_dead_letter_topics, check_delay_topics
from bridge.errors import EnvironmentFailure
from bridge.kafka.admin import Cluster
from bridge.settings.model import Settings
from timerstore.clock import Clock

LOOK_S: Final = 15.0

log = structlog.get_logger("bridge.checks.conditions")


class Conditions:
    """See the module. One thread looks, any may ask for the others."""

    def __init__(self, settings: Settings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._looked_s = clock.monotonic_s()
        """The start has just looked."""
        self._failed: tuple[Finding, ...] = ()

    def look(self, cluster: Cluster) -> None:
        """Look if it is time to. Brokers that do not answer leave the old findings."""
        now_s = self._clock.monotonic_s()
        if now_s - self._looked_s < LOOK_S:
            return
        self._looked_s = now_s
        context = Context(
            settings=self._settings, cluster=cluster, connector_jars=tuple, create=False, timeout_s=0.0
        )  # fmt: skip
        try:
            found = [*check_delay_topics(context), *check_dead_letter_topics(context)]
        except EnvironmentFailure as error:
            log.warning("conditions-unknown", reason=error.message)
            return
        failed = tuple(finding for finding in found if finding.status == "failed")
        for finding in failed:
            if finding not in self._failed:
                log.error("start-would-refuse", name=finding.name, detail=finding.detail, remedy=finding.remedy)
        for finding in self._failed:
            if finding not in failed:
                log.info("start-would-refuse-no-more", name=finding.name, detail=finding.detail)
        self._failed = failed

    def alarms(self) -> tuple[str, ...]:
        """In words, for /readyz."""
        return tuple(f"a start would refuse {each.name}: {each.detail}; {each.remedy}" for each in self._failed)

    def counts(self) -> dict[str, int]:
        """How many conditions are not met, by what they are about."""
        return dict(Counter(finding.name for finding in self._failed))
