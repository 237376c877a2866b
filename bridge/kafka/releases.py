"""Releases of Kafka: the brokers' release, the supported ones, and those with known faults.

A broker names no release. It lists the newest supported version of each request, and each minor release since 3.9 has
introduced a new version of some request. Patch releases look alike.
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
        """The release of a version such as 4.3.1."""
        major, minor, *_ = version.split(".")
        return Release(int(major), int(minor))


SUPPORTED_MIN: Final = Release(3, 9)
"""The oldest release on which `make matrix` runs the tests."""
LOSES_MARKERS: Final = (Release(4, 3), Release(4, 4))
"""The first and the last release with KAFKA-20734: a transaction marker is dropped if its partition has no leader."""

# A release, and the version of a request (by API key) that it introduced; the newest first.
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
    """The newest version by API key that a broker supports; empty if unknown. No client call returns it, so this parses
    librdkafka's debug log of a connection.
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


def release_of(versions: Mapping[int, int]) -> Release | None:
    """The release with the protocol of a broker; None if it is older than all releases of the table."""
    return next((name for name, key, version in _RELEASES if versions.get(key, -1) >= version), None)


def spoken(release: Release) -> str:
    """The release in words. The newest one of the table may stand for a later one."""
    return f"Kafka {release} or later" if release == _NEWEST else f"Kafka {release}"


def loses_markers(release: Release) -> bool:
    """Whether the release has KAFKA-20734."""
    return LOSES_MARKERS[0] <= release <= LOSES_MARKERS[1]


def is_redpanda(cluster_id: str) -> bool:
    """Whether the cluster's id is one of Redpanda, whose protocol resembles that of an old Kafka."""
    return cluster_id.startswith(_REDPANDA)
