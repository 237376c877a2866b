"""How the configuration says that a delay topic's records are read."""

from __future__ import annotations

from bridge.decode import DecodeParameters
from bridge.settings import Settings


def decode_parameters(settings: Settings, topic: str) -> DecodeParameters:
    """What the configuration says about reading a delay topic. Nothing is rolled: the window is the longest delay."""
    return DecodeParameters(
        levels_ms=settings.levels_ms,
        max_delay_ms=settings.delay.max,
        roll_window_ms=settings.delay.max,
        has_default_target=settings.delay_topics[topic].target is not None,
    )
