"""How the configuration, and the delay topic's own, say that the topic's records are read.

The roll window W (`roll.window`) is how long one record of the delay topic may wait at most. `auto` is half of the
topic's retention, so that the other half is there for a bridge that is down or behind; and 7 days at most, whatever the
retention: a rebuild of the index, and the memory for cancels, reach back W, and a roll a week costs nothing. So a topic
that keeps its records for ever gets 7 days too. Retention by size says nothing about time and is not looked at here:
the guard (retention.py) measures how much time it leaves.

It is resolved at a start of the pipeline, where a change begins a decode epoch; never in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from bridge.errors import ConfigurationError, EnvironmentFailure
from bridge.kafka.admin import Cluster
from bridge.settings.clients import librdkafka
from bridge.settings.model import Settings
from bridge.settings.units import AUTO, format_duration_ms
from bridge.wire.decode_epochs import DecodeParameters

ROLL_WINDOW_MS_MAX: Final = 7 * 86_400_000
"""What `auto` gives at most."""
ROLL_WINDOW_MS_MIN: Final = 1_000
COPY_BYTES: Final = 1_024
"""What a copy in the delay topic may be larger than the record that it copies: a batch of its own, and its headers."""
TOO_SHORT: Final = frozenset({"DB-2013", "DB-3014"})
"""The codes of a retention that leaves no room for the roll window."""
MESSAGE_BYTES: Final = 1_048_588
"""`max.message.bytes` of a topic that does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicLimits:
    """What a delay topic keeps and takes: retention in ms and in bytes by partition (-1: no limit), the largest batch
    in bytes.
    """

    retention_ms: int = -1
    retention_bytes: int = -1
    message_bytes: int = MESSAGE_BYTES

    @classmethod
    def of(cls, config: Mapping[str, str]) -> TopicLimits:
        """From a topic's effective configuration."""
        return cls(
            retention_ms=int(config.get("retention.ms", -1)),
            retention_bytes=int(config.get("retention.bytes", -1)),
            message_bytes=int(config.get("max.message.bytes", MESSAGE_BYTES)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """Of one delay topic, in ms: W for what is read now, and the largest that any record in the log was read with."""

    current_ms: int
    largest_ms: int


def limits_of(cluster: Cluster, topics: Iterable[str]) -> dict[str, TopicLimits]:
    """The limits of `topics`; those of one that does not exist are the defaults. Raises EnvironmentFailure."""
    names = list(topics)
    configs = cluster.topic_configs(names)
    return {name: TopicLimits.of(configs.get(name, {})) for name in names}


def roll_window_ms(settings: Settings, topic: str, limits: TopicLimits) -> int:
    """W of a delay topic in ms.

    Raises ConfigurationError when records would be deleted before they are rolled, EnvironmentFailure when the topic
    keeps them too briefly for any W.
    """
    given, kept = settings.roll.window, limits.retention_ms
    if given == AUTO:
        window = ROLL_WINDOW_MS_MAX if kept < 0 else min(kept // 2, ROLL_WINDOW_MS_MAX)
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


def decode_parameters(settings: Settings, topic: str, limits: TopicLimits) -> DecodeParameters:
    """How a delay topic's records are read from now on. Raises as `roll_window_ms`."""
    return DecodeParameters(
        levels_ms=settings.levels_ms,
        max_delay_ms=settings.delay.max,
        roll_window_ms=roll_window_ms(settings, topic, limits),
        has_default_target=settings.delay_topics[topic].target is not None,
        dialect=settings.delay_topics[topic].dialect,
        roll_bytes_max=roll_bytes_max(settings, limits),
        headers_max=settings.limits.headers,
        header_bytes_max=settings.limits.header_bytes,
        payload_bytes_max=settings.limits.payload_bytes,
    )


def roll_bytes_max(settings: Settings, limits: TopicLimits) -> int:
    """How large key, value and headers of a record may be together that is to be rolled.

    All of it counts uncompressed, though brokers look at compressed batches: whether a copy years later compresses as
    well as the original did, in whatever batch it is by then, is not known when the record is first seen.
    """
    largest = min(limits.message_bytes, int(librdkafka(settings, "producer")["message.max.bytes"]))
    return max(1, largest - COPY_BYTES)


def retention_to_create_ms(settings: Settings) -> int:
    """The retention of a delay topic that the bridge makes itself: twice the roll window."""
    return 2 * (ROLL_WINDOW_MS_MAX if settings.roll.window == AUTO else settings.roll.window)
