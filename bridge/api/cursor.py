"""A cursor: the position of the last row of a page, as text that clients hand back unread. Pure."""

from __future__ import annotations

import base64
import binascii
import json
from typing import Final

from timerstore.rows.position import AT_MAX, AT_MIN, OFFSET_MAX
from timerstore.rows.sources import NamedPosition

LENGTH_MAX: Final = 1_000
"""Of the text: a topic's name has at most 249 characters."""


def encode(position: NamedPosition) -> str:
    """The cursor behind a position."""
    text = json.dumps(position, separators=(",", ":"))
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def read(text: str) -> NamedPosition:
    """The position of a parameter `cursor`. Raises ValueError that says what to give."""
    try:
        return decode(text)
    except ValueError:
        raise ValueError("cursor is none of ours: give `next` of the page before, unchanged.") from None


def decode(text: str) -> NamedPosition:
    """The position of a cursor. Raises ValueError for what `encode` has not made."""
    try:
        found = json.loads(base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True))
    except (binascii.Error, ValueError, RecursionError):
        raise ValueError("not a cursor") from None
    match found:
        case [int(at_ms), str(topic), int(partition), int(offset)] if (
            AT_MIN <= at_ms <= AT_MAX and 0 <= offset <= OFFSET_MAX and bool not in map(type, found)
        ):
            return at_ms, topic, partition, offset
    raise ValueError("not a cursor")
