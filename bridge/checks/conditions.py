"""A start's conditions for the bridge's own topics, checked again while it runs.

At any time, an operator may switch a topic to its producers' timestamps, to compaction, or to a short retention. A
start would refuse the topic. A running bridge reports it and goes on: it can still deliver the pending messages, and a
stop would not undo the effect of the configuration on the records.
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
    """The failed conditions. One thread calls `look`; any thread may call the other methods."""

    def __init__(self, settings: Settings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._looked_s = clock.monotonic_s()
        """The start's own checks count as the first look."""
        self._failed: tuple[Finding, ...] = ()

    def look(self, cluster: Cluster) -> None:
        """Check again if the last look is LOOK_S old. While the brokers do not answer, the old findings stay."""
        now_s = self._clock.monotonic_s()
        if now_s - self._looked_s < LOOK_S:
            return
        self._looked_s = now_s
        context = Context(
            settings=self._settings, cluster=cluster, connector_jars=tuple, create=False, timeout_s=0.0
        )  # fmt: skip
        try:
            findings = [*check_delay_topics(context), *check_dead_letter_topics(context)]
        except EnvironmentFailure as error:
            log.warning("conditions-unknown", reason=error.message)
            return
        failed = tuple(finding for finding in findings if finding.status == "failed")
        for finding in failed:
            if finding not in self._failed:
                log.error("start-would-refuse", name=finding.name, detail=finding.detail, remedy=finding.remedy)
        for finding in self._failed:
            if finding not in failed:
                log.info("start-would-refuse-no-more", name=finding.name, detail=finding.detail)
        self._failed = failed

    def alarms(self) -> tuple[str, ...]:
        """The failed conditions in words, for /readyz."""
        return tuple(
            f"a start would refuse {finding.name}: {finding.detail}; {finding.remedy}" for finding in self._failed
        )

    def counts(self) -> dict[str, int]:
        """The number of failed conditions of each topic."""
        return dict(Counter(finding.name for finding in self._failed))
