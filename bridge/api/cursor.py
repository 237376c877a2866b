"""Cursors: the beginning of the next page, as opaque text that clients hand back. Pure.

A cursor of messages is the position of the last row of a page. A cursor of dead letters is the end offset of the next
page in each partition.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from typing import Any, Final

from bridge.stores.names import NamedPosition, SourceName
from timerstore.rows.position import AT_MAX, AT_MIN, OFFSET_MAX

PARTITION_MAX: Final = 2**31 - 1
_FOREIGN: Final = "invalid cursor: pass the previous page's `next` unchanged."


def encode_position(position: NamedPosition) -> str:
    """The cursor behind a position."""
    return _packed(position)


def read_position(text: str) -> NamedPosition:
    """The position of a parameter `cursor`. Raises ValueError with advice for the client."""
    try:
        return decode_position(text)
    except ValueError:
        raise ValueError(_FOREIGN) from None


def decode_position(text: str) -> NamedPosition:
    """The position of a cursor. Raises ValueError unless `encode` has made it."""
    match fields := _unpacked(text):
        case [int(at_ms), str(topic), int(partition), int(offset)] if (
            AT_MIN <= at_ms <= AT_MAX and 0 <= offset <= OFFSET_MAX and bool not in map(type, fields)
        ):
            return at_ms, topic, partition, offset
    raise ValueError("not a cursor")


def encode_below(below: Mapping[SourceName, int]) -> str:
    """The cursor of a list of dead letters."""
    topics: dict[str, list[list[int]]] = {}
    for (topic, partition), offset in sorted(below.items()):
        topics.setdefault(topic, []).append([partition, offset])
    return _packed(topics)


def read_below(text: str) -> dict[SourceName, int]:
    """The inverse of `encode_below`. Raises ValueError with advice for the client."""
    try:
        topics = _unpacked(text)
        below = {(topic, partition): offset for topic, pairs in topics.items() for partition, offset in pairs}
    except (AttributeError, TypeError, ValueError):
        below = None
    if below is None or not all(_is_place(*place, offset) for place, offset in below.items()):
        raise ValueError(_FOREIGN)
    return below


def _is_place(topic: object, partition: object, offset: object) -> bool:
    numbers = ((partition, PARTITION_MAX), (offset, OFFSET_MAX))
    return isinstance(topic, str) and all(type(n) is int and 0 <= n <= most for n, most in numbers)


def _packed(content: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(content, separators=(",", ":")).encode()).decode().rstrip("=")


def _unpacked(text: str) -> Any:
    """Raises ValueError unless `_packed` has made it."""
    try:
        return json.loads(base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True))
    except (binascii.Error, ValueError, RecursionError):
        raise ValueError("not a cursor") from None
