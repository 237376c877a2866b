"""The cursor of a list of dead letters: for each partition, the offset below which the next page begins. Pure."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping

from bridge.api.models import PARTITION_MAX
from timerstore.rows.position import OFFSET_MAX
from timerstore.rows.sources import SourceName


def encode(below: Mapping[SourceName, int]) -> str:
    """As text that clients hand back unread."""
    topics: dict[str, list[list[int]]] = {}
    for (topic, partition), offset in sorted(below.items()):
        topics.setdefault(topic, []).append([partition, offset])
    return base64.urlsafe_b64encode(json.dumps(topics, separators=(",", ":")).encode()).decode().rstrip("=")


def read(text: str) -> dict[SourceName, int]:
    """What `encode` was given. Raises ValueError that says what to give."""
    try:
        found = json.loads(base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True))
        below = {(topic, partition): offset for topic, pairs in found.items() for partition, offset in pairs}
    except (AttributeError, binascii.Error, RecursionError, TypeError, ValueError):
        below = None
    if below is None or not all(_is_place(*place, offset) for place, offset in below.items()):
        raise ValueError("cursor is none of ours: give `next` of the page before, unchanged.")
    return below


def _is_place(topic: object, partition: object, offset: object) -> bool:
    numbers = ((partition, PARTITION_MAX), (offset, OFFSET_MAX))
    return isinstance(topic, str) and all(type(n) is int and 0 <= n <= most for n, most in numbers)
