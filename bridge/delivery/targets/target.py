"""Facts about a target: the look-up (look_up.py) finds them, the cache (cache.py) keeps them, the plan uses them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from bridge.kafka.errors import Refusal
from bridge.wire.committed_state import Pause
from bridge.wire.reasons import RejectReason

UNAVAILABLE: Final = RejectReason.TARGET_UNAVAILABLE

Place = tuple[str, int]
"""A topic and a partition, or EVERY (breakers.py)."""


@dataclass(frozen=True, slots=True)
class Leader:
    """A node and its address."""

    node: int
    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A topic, as far as delivery is concerned."""

    partitions: int
    bytes_max: int | None
    """Its largest batch; None: unknown."""
    refusal: Refusal | None = None
    """Why it takes nothing from the bridge at all; None: it takes records."""
    down: Mapping[int, str] = field(default_factory=dict)
    """The partitions that take nothing now, with the reasons."""
    leaders: Mapping[int, Leader] = field(default_factory=dict, compare=False)
    needs_key: bool = False
    """Whether it is compacted, and takes no record without a key."""
    told_ms: int | None = field(default=None, compare=False)
    """The time of the question to the brokers (epoch ms); None: just now."""
    is_wary: bool = False
    """Whether it has refused many records for their size lately: those that may be too large wait."""

    @property
    def is_well(self) -> bool:
        """Whether it takes all records."""
        return self.refusal is None and not self.down and not self.is_wary

    def is_down(self, partition: int) -> bool:
        """Whether a partition, or any (negative), takes nothing now. False for an unanswered target."""
        is_refused = self.refusal is not None and not self.is_unanswered
        return is_refused or partition in self.down or (partition < 0 and bool(self.down))

    def takes_less_than(self, other: Target) -> bool:
        """Whether it refuses records that it took according to `other`, an earlier look at it."""
        is_refused = self.refusal is not None and other.refusal is None
        return is_refused or not self.down.keys() <= other.down.keys() or (self.is_wary and not other.is_wary)

    @property
    def is_unanswered(self) -> bool:
        """Whether the brokers have said nothing about it."""
        return not self.partitions and self.refusal is not None and self.refusal.reason is UNAVAILABLE


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetReport:
    """A target and its trouble, for people. `failing_partitions` take nothing now, of all `partitions` (0: unknown);
    `reason` and `detail` are of the last error; `retry_s`: the earliest end of its open breaker, in seconds from now
    (0: at the next look), None without one; `pause` is in force."""

    name: str
    partitions: int
    failing_partitions: int = 0
    reason: RejectReason | None = None
    detail: str | None = None
    open_breakers: int = 0
    retry_s: float | None = None
    pause: Pause | None = None
