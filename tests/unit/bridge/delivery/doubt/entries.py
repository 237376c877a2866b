"""Doubts for tests."""

from __future__ import annotations

from typing import Any

from bridge.delivery.doubt.doubt_file import Doubt
from bridge.delivery.doubt.records import Row


def doubt(rows: dict[int, Row], **other: Any) -> Doubt:
    """Of rows that were sent to `orders`, and are due at 1,000 ms."""
    told: dict[str, Any] = {
        "topic_id": "id", "cut": 0, "began_ms": 900, "since": 5, "last": (1_000, max(rows)), "rows": rows,
        "unread": {"orders": tuple(rows)}, "written": {},
    }  # fmt: skip
    return Doubt(**told | other)
