"""The states of a pending message. Light: programs without an index import it, too."""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class PendingState(StrEnum):
    """The state of a pending message: the first of these that fits."""

    CANCELLED = "cancelled"
    """A cancel has been read; delivery passes it when it is due."""
    RETRYING = "retrying"
    """Its target did not take it; it waits for the next attempt."""
    OVERDUE = "overdue"
    """It should have been delivered, or rolled, by now."""
    ROLLED = "rolled"
    """The bridge has written it again, and does so once more: it is due beyond the roll window."""
    PAUSED = "paused"
    """It would be waiting, but its target is paused."""
    WAITING = "waiting"
    """Its record is as its producer sent it, or the time of its delivery comes next."""


STATES: Final = tuple(PendingState)
PENDING: Final = frozenset(STATES) - {PendingState.CANCELLED}
"""What will be delivered, as the gauges count it."""
