"""The states of a pending message. Light: programs without an index import it, too."""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class PendingState(StrEnum):
    """The state of a pending message: the first one that applies."""

    CANCELLED = "cancelled"
    """Its cancel has been read; delivery passes over the row when it is due."""
    RETRYING = "retrying"
    """Its target did not take it; it waits for the next attempt."""
    OVERDUE = "overdue"
    """Its delivery, or its roll, is late."""
    ROLLED = "rolled"
    """The bridge has written it again, and will write it once more: it is due beyond the roll window."""
    PAUSED = "paused"
    """Its target is paused; it would be waiting otherwise."""
    WAITING = "waiting"
    """It waits for its delivery, or for its first roll."""


STATES: Final = tuple(PendingState)
PENDING: Final = frozenset(STATES) - {PendingState.CANCELLED}
"""The states of messages that will be delivered, as the gauges count them."""
