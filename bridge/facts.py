"""What a start has to know of a delay topic: from the brokers its id and offsets, from the configuration how its
records are read."""

from __future__ import annotations

from bridge.cluster import Cluster
from bridge.decode import DecodeParameters
from bridge.errors import StateError
from bridge.settings import Settings
from bridge.standing import TopicFacts


def topic_facts(cluster: Cluster, topic: str) -> TopicFacts:
    """The topic's id, and log start and end of each partition. Raises StateError when it is gone."""
    found = cluster.topics([topic]).get(topic)
    if found is None:
        raise StateError(
            "a delay topic does not exist any more", hint="Create it, or take it out of delay_topics.", topic=topic
        )
    marks = cluster.watermarks([(topic, partition) for partition in range(found.partitions)])
    return TopicFacts(
        topic_id=found.topic_id,
        log_start=tuple(marks[topic, partition].start for partition in range(found.partitions)),
        log_end=tuple(marks[topic, partition].end for partition in range(found.partitions)),
    )


def decode_parameters(settings: Settings, topic: str) -> DecodeParameters:
    """What the configuration says about reading a delay topic. Nothing is rolled: the window is the longest delay."""
    return DecodeParameters(
        levels_ms=settings.levels_ms,
        max_delay_ms=settings.delay.max,
        roll_window_ms=settings.delay.max,
        has_default_target=settings.delay_topics[topic].target is not None,
    )
