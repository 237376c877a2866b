"""Cursors: the beginning of the next page, as opaque text that clients hand back. Pure.

A cursor of messages is the position of the last row of a page. A cursor of dead letters is the end offset of the next
page in each partition.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Annotated, Final, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter

from bridge.stores.names import NamedPosition, SourceName
from timerstore.rows.position import AT_MAX, AT_MIN, OFFSET_MAX

PARTITION_MAX: Final = 2**31 - 1

T = TypeVar("T")
Time = Annotated[int, Field(ge=AT_MIN, le=AT_MAX)]
Partition = Annotated[int, Field(ge=0, le=PARTITION_MAX)]
Offset = Annotated[int, Field(ge=0, le=OFFSET_MAX)]

_STRICT: Final = ConfigDict(strict=True)
_POSITION: Final = TypeAdapter(tuple[Time, str, int, Offset], config=_STRICT)
_BELOW: Final = TypeAdapter(dict[str, list[tuple[Partition, Offset]]], config=_STRICT)


def encode_position(position: NamedPosition) -> str:
    """The cursor behind a position."""
    return _packed(position)


def decode_position(text: str) -> NamedPosition:
    """The inverse of `encode_position`. Raises ValueError with advice for the client."""
    return _unpacked(_POSITION, text)


def encode_below(below: Mapping[SourceName, int]) -> str:
    """The cursor of a list of dead letters."""
    topics: dict[str, list[list[int]]] = {}
    for (topic, partition), offset in sorted(below.items()):
        topics.setdefault(topic, []).append([partition, offset])
    return _packed(topics)


def decode_below(text: str) -> dict[SourceName, int]:
    """The inverse of `encode_below`. Raises ValueError with advice for the client."""
    topics = _unpacked(_BELOW, text)
    return {(topic, partition): offset for topic, places in topics.items() for partition, offset in places}


def _packed(content: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(content, separators=(",", ":")).encode()).decode().rstrip("=")


def _unpacked(form: TypeAdapter[T], text: str) -> T:
    try:
        return form.validate_json(base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True))
    except ValueError:
        raise ValueError("invalid cursor: pass the previous page's `next` unchanged.") from None
