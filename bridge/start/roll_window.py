"""The decode parameters of a delay topic, from the bridge's configuration and the topic's; above all the roll window.

The roll window W (`roll.window`) is the longest time that one record of the delay topic waits. `auto` depends on the
topic's retention:

    retention.ms                                retention.bytes    W
    none, or delay.max + retention.headroom     none               delay.max, at least 7 days: nothing is rolled
    any other, or not said                      any                half of the retention, at most 7 days

Half of a retention leaves the other half for a bridge that is down or behind. Retention by size has no time, so W does
not follow from it: the guard (retention.py) measures the time that it leaves. W is never shorter than in the last row:
copies of messages from before a lowered `delay.max` would roll more often.

W is resolved at a start of the pipeline, where a change begins a decode epoch; never in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import structlog

from bridge.errors import ConfigurationError, EnvironmentFailure
from bridge.kafka.admin import Cluster
from bridge.settings.clients import librdkafka
from bridge.settings.model import Settings
from bridge.settings.units import AUTO, format_duration_ms
from bridge.wire.decode_epochs import DecodeParameters

ROLL_WINDOW_MS_MAX: Final = 7 * 86_400_000
"""The largest window for `auto` with rolls."""
ROLL_WINDOW_MS_MIN: Final = 1_000
COPY_BYTES: Final = 1_024
"""The largest growth of a copy over its original: a separate batch, and the copy's headers."""
TOO_SHORT: Final = frozenset({"DB-2013", "DB-3014"})
"""The codes of a retention that leaves no room for the roll window."""
MESSAGE_BYTES: Final = 1_048_588
"""The default of a topic's `max.message.bytes`."""

log = structlog.get_logger("bridge.start.roll_window")


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicLimits:
    """The limits of a delay topic: retention in ms and in bytes of a partition (-1: no limit), the largest batch in
    bytes. `is_said`: whether the brokers say its retention.
    """

    retention_ms: int = -1
    retention_bytes: int = -1
    message_bytes: int = MESSAGE_BYTES
    is_said: bool = True

    @classmethod
    def of(cls, config: Mapping[str, str]) -> TopicLimits:
        """The limits in a topic's effective configuration."""
        return cls(
            retention_ms=int(config.get("retention.ms", -1)),
            retention_bytes=int(config.get("retention.bytes", -1)),
            message_bytes=int(config.get("max.message.bytes", MESSAGE_BYTES)),
            is_said="retention.ms" in config,
        )

    def keeps(self, span_ms: int) -> bool:
        """Whether the topic certainly keeps each record for this time. A limit in bytes makes it uncertain."""
        by_time = self.is_said and (self.retention_ms < 0 or self.retention_ms >= span_ms)
        return by_time and self.retention_bytes < 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """The roll windows of one delay topic, in ms: W for new records, and the largest W of any record in the log."""

    current_ms: int
    largest_ms: int

    @property
    def cancels_ms(self) -> int:
        """The time for which the store keeps every cancel. The cancel of a later message stays as long as that message
        would; so a longer time is only for copies that were being written when the cancel was read."""
        return min(self.largest_ms, ROLL_WINDOW_MS_MAX)


def limits_of(cluster: Cluster, topics: Iterable[str]) -> dict[str, TopicLimits]:
    """The limits of `topics`; a missing topic gets the defaults. Raises EnvironmentFailure."""
    names = list(topics)
    configs = cluster.topic_configs(names)
    return {name: TopicLimits.of(configs.get(name, {})) for name in names}


def roll_window_ms(settings: Settings, topic: str, limits: TopicLimits) -> int:
    """W of a delay topic in ms.

    Raises ConfigurationError if records would be deleted before they are rolled, EnvironmentFailure if the topic's
    retention is too short for any W.
    """
    given, kept = settings.roll.window, limits.retention_ms
    if given == AUTO:
        window, longest = ROLL_WINDOW_MS_MAX if kept < 0 else min(kept // 2, ROLL_WINDOW_MS_MAX), settings.delay.max
        if limits.keeps(longest + settings.retention.headroom):
            return max(window, longest)
        if window < ROLL_WINDOW_MS_MIN:
            raise EnvironmentFailure(
                "the delay topic's retention is too short for any roll window",
                hint=f"Raise its retention.ms: 14d ({2 * ROLL_WINDOW_MS_MAX}) suits roll.window: auto.",
                topic=topic,
                retention_ms=kept,
                code="DB-3014",
            )
        return window
    if 0 <= kept <= given:
        raise ConfigurationError(
            "roll.window is not shorter than the delay topic's retention: records would be deleted before they roll",
            hint=f"Raise the topic's retention.ms to {2 * given} or more, or set roll.window: auto.",
            topic=topic,
            roll_window=format_duration_ms(given),
            retention=format_duration_ms(kept),
            code="DB-2013",
        )
    return given


def times_written(delay_ms: int, window_ms: int) -> int:
    """The number of records of a message with this delay, with the first one. A roll moves it on by three quarters of W
    to the whole of it, by seven eighths on average."""
    return 1 + max(0, -(-8 * (delay_ms - window_ms) // (7 * window_ms)))


def decode_parameters(settings: Settings, topic: str, limits: TopicLimits) -> DecodeParameters:
    """The decode parameters for a delay topic's new records. Raises as `roll_window_ms`."""
    window_ms, bytes_max = roll_window_ms(settings, topic, limits), roll_bytes_max(settings, limits)
    return settings.decode_parameters(topic, roll_window_ms=window_ms, roll_bytes_max=bytes_max)


def decode_parameters_of(settings: Settings, limits: Mapping[str, TopicLimits]) -> dict[str, DecodeParameters]:
    """`decode_parameters` of each delay topic; the log has W, and the number of records that a long delay takes."""
    parameters = {topic: decode_parameters(settings, topic, limit) for topic, limit in limits.items()}
    for topic, decoding in parameters.items():
        log.info(
            "roll-window",
            topic=topic,
            window_ms=decoding.roll_window_ms,
            retention_ms=limits[topic].retention_ms,
            longest_delay_ms=decoding.max_delay_ms,
            times_written=times_written(decoding.max_delay_ms, decoding.roll_window_ms),
        )
    return parameters


def roll_bytes_max(settings: Settings, limits: TopicLimits) -> int:
    """The largest size of a rolled message: key, value and headers together.

    All of it counts uncompressed, though brokers check compressed batches: a copy may compress worse than the original,
    years later and in another batch.
    """
    largest = min(limits.message_bytes, int(librdkafka(settings, "producer")["message.max.bytes"]))
    return max(1, largest - COPY_BYTES)


def retention_to_create_ms(settings: Settings) -> int:
    """The retention of a delay topic that the bridge creates: twice the roll window."""
    return 2 * (ROLL_WINDOW_MS_MAX if settings.roll.window == AUTO else settings.roll.window)
