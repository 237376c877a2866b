"""What is known of real topics: looked up before a record for them enters a transaction, and kept for a while.

One missing or forbidden topic aborts everything in its transaction (and a missing one first blocks it for seconds), so
nothing is produced to a topic that was not seen to exist. What is known here may be outdated; then the abort brings it
up again (`forget`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, replace
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # public, but not marked as exported
    AdminClient,
    ConfigResource,
    ResourceType,
)

from bridge.errors import EnvironmentFailure
from timerstore.clock import Clock

KNOWN_FOR_S: Final = 60.0
MISSING_FOR_S: Final = 5.0
REFUSED_FOR_S: Final = 10.0
TARGETS_MAX: Final = 10_000
"""Names come from headers, so anybody can make up any number of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """An existing topic: its partition count, the largest batch it takes in bytes (None: we may not look), and why it
    takes nothing from us.
    """

    partitions: int
    bytes_max: int | None
    refusal: str | None = None


LookUp = Callable[[Collection[str]], Mapping[str, Target | None]]
"""Topics by name -> what they are, None for one that does not exist. Raises EnvironmentFailure when the brokers do not
answer.
"""


class Targets:
    """A cache of `Target` by name with an expiry. One thread."""

    def __init__(self, look_up: LookUp, clock: Clock) -> None:
        self._look_up = look_up
        self._clock = clock
        self._known: dict[str, tuple[Target | None, float]] = {}

    def resolve(self, names: Iterable[str]) -> dict[str, Target | None]:
        """What each name is; asks the brokers only for names not asked for lately. Raises EnvironmentFailure."""
        wanted = list(names)
        now_s = self._clock.monotonic_s()
        ask = [name for name in wanted if self._must_ask(name, now_s)]
        if ask:
            self._learn(ask, now_s)
        return {name: self._known[name][0] for name in wanted}

    def refresh(self) -> None:
        """Ask again for what has expired; for the time between transactions. Keeps what it knew when the brokers do not
        answer.
        """
        now_s = self._clock.monotonic_s()
        expired = [name for name, (target, until_s) in self._known.items() if target is not None and until_s < now_s]
        if not expired:
            return
        try:
            self._learn(expired[:100], now_s)
        except EnvironmentFailure:
            for name in expired:
                self._known[name] = (self._known[name][0], now_s + MISSING_FOR_S)

    def refuse(self, name: str, refusal: str) -> None:
        """Send nothing there for a while: the brokers do not take it."""
        target = self._known.get(name, (None, 0.0))[0]
        if target is not None:
            self._known[name] = (replace(target, refusal=refusal), self._clock.monotonic_s() + REFUSED_FOR_S)

    def forget(self, name: str) -> None:
        """Ask again at the next use: the brokers did not agree with what is known."""
        self._known.pop(name, None)

    def _must_ask(self, name: str, now_s: float) -> bool:
        """A target that is known and takes records is used until `refresh` finds time; the others are asked about when
        they expire.
        """
        target, until_s = self._known.get(name, (None, 0.0))
        return (target is None or target.refusal is not None) and until_s <= now_s

    def _learn(self, names: list[str], now_s: float) -> None:
        for name, target in self._look_up(names).items():
            self._known.pop(name, None)
            self._known[name] = (target, now_s + (MISSING_FOR_S if target is None else KNOWN_FOR_S))
        if len(self._known) > TARGETS_MAX + len(names):
            for name in list(self._known)[: len(self._known) - TARGETS_MAX]:
                if name not in names:
                    del self._known[name]


class TargetLookUp:
    """Looks targets up with an admin client, all names in two requests."""

    def __init__(self, properties: Mapping[str, Any], timeout_s: float = 3.0) -> None:
        """`timeout_s` must stay well below the transaction time-out: a transaction may be open meanwhile."""
        self._admin = AdminClient(dict(properties), logger=logging.getLogger("bridge.librdkafka"))
        self._timeout_s = timeout_s

    def __call__(self, names: Collection[str]) -> Mapping[str, Target | None]:
        described = self._admin.describe_topics(TopicCollection(list(names)), request_timeout=self._timeout_s)
        found = {name: self._result(name, future) for name, future in described.items()}
        resources = [ConfigResource(ResourceType.TOPIC, name) for name, topic in found.items() if topic is not None]
        limits: dict[str, int | None] = {}
        if resources:
            configs = self._admin.describe_configs(resources, request_timeout=self._timeout_s)
            for resource, future in configs.items():
                entries = self._result(resource.name, future)
                limits[resource.name] = None if entries is None else int(entries["max.message.bytes"].value)
        return {
            name: None if topic is None else Target(partitions=len(topic.partitions), bytes_max=limits[name])
            for name, topic in found.items()
        }

    def _result(self, name: str, future: Future[Any]) -> Any | None:
        """The answer; None for a topic that is missing, or that we may not see."""
        try:
            return future.result(timeout=self._timeout_s + 1)
        except KafkaException as exception:
            error: KafkaError = exception.args[0]
            if error.code() in (
                KafkaError.UNKNOWN_TOPIC_OR_PART,
                KafkaError.TOPIC_AUTHORIZATION_FAILED,
                KafkaError.TOPIC_EXCEPTION,
            ):
                return None
            reason = error.str()
        except FutureTimeout:
            reason = "no answer in time"
        raise EnvironmentFailure(
            "the target topics cannot be looked up",
            hint="Check that the brokers are reachable; delivery goes on by itself then.",
            topic=name,
            reason=reason,
        )
