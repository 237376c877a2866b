"""Releases of Kafka: which one the brokers speak, which the bridge supports, and which have a fault that it knows.

A broker names no release. It lists the newest version of each request that it speaks, and each minor release since 3.9
brought a new version of some. Patch releases look alike.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from confluent_kafka import KafkaException, Producer

from bridge.kafka.construction import collecting_logger, made
from bridge.settings.clients import librdkafka
from bridge.settings.model import Settings


class Release(NamedTuple):
    """A minor release."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"

    @staticmethod
    def of(version: str) -> Release:
        """That of a version such as 4.3.1."""
        major, minor, *_ = version.split(".")
        return Release(int(major), int(minor))


SUPPORTED_MIN: Final = Release(3, 9)
"""The oldest one that `make matrix` runs the tests on."""
LOSES_MARKERS: Final = (Release(4, 3), Release(4, 4))
"""The first and the last with KAFKA-20734: a transaction marker is dropped if its partition has no leader."""

# A release, and the version of a request (by API key) that came with it, from the newest.
_RELEASES: Final = (
    (Release(4, 4), 42, 3),
    (Release(4, 3), 35, 5),
    (Release(4, 2), 2, 11),
    (Release(4, 1), 0, 13),
    (Release(4, 0), 0, 12),
    (Release(3, 9), 2, 9),
    (Release(3, 7), 1, 16),
    (Release(3, 5), 1, 15),
    (Release(3, 1), 1, 13),
    (Release(3, 0), 65, 0),
    (Release(2, 8), 60, 0),
    (Release(2, 5), 28, 3),
    (Release(2, 1), 1, 10),
)
_NEWEST: Final = _RELEASES[0][0]
_API: Final = re.compile(r"ApiKey \S+ \((\d+)\) Versions \d+\.\.(\d+)")
_REDPANDA: Final = "redpanda."


def api_versions(settings: Settings, *, timeout_s: float = 10.0) -> dict[int, int]:
    """Newest version by API key that a broker speaks; empty if it cannot be found out. No client call tells it, so
    this reads what librdkafka says about the connection it makes.
    """
    lines: list[str] = []
    properties: dict[str, Any] = {**librdkafka(settings, "admin"), "debug": "feature"}
    client = made("for look-ups", lambda: Producer(properties, logger=collecting_logger(lines)))
    try:
        client.list_topics(timeout=timeout_s)
    except KafkaException:
        return {}
    client.poll(0)
    return {int(m[1]): int(m[2]) for line in lines if (m := _API.search(line))}


def release(versions: Mapping[int, int]) -> Release | None:
    """The release whose protocol a broker speaks; None if it is older than all that are known here."""
    return next((name for name, key, version in _RELEASES if versions.get(key, -1) >= version), None)


def spoken(found: Release) -> str:
    """In words. The newest one that is known here may stand for a later one."""
    return f"Kafka {found} or later" if found == _NEWEST else f"Kafka {found}"


def loses_markers(found: Release) -> bool:
    """Whether KAFKA-20734 is in that release."""
    return LOSES_MARKERS[0] <= found <= LOSES_MARKERS[1]


def is_redpanda(cluster_id: str) -> bool:
    """Redpanda says so in the cluster's id; by its protocol it is like an old Kafka."""
    return cluster_id.startswith(_REDPANDA)
