"""What is known of a target: said by the look-up (look_up.py), kept by the cache (cache.py), used by the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from bridge.kafka.errors import Refusal
from bridge.wire.reasons import RejectReason

UNAVAILABLE: Final = RejectReason.TARGET_UNAVAILABLE

Place = tuple[str, int]
"""A topic and a partition, or EVERY (breakers.py)."""


@dataclass(frozen=True, slots=True)
class Leader:
    """A node, and where it listens."""

    node: int
    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A topic: its partition count, the largest batch it takes in bytes (None: not known), why it takes nothing from
    the bridge at all (None: it does), which partitions take nothing now, and why, and the leader of each.
    """

    partitions: int
    bytes_max: int | None
    refusal: Refusal | None = None
    down: Mapping[int, str] = field(default_factory=dict)
    leaders: Mapping[int, Leader] = field(default_factory=dict, compare=False)
    needs_key: bool = False
    """Whether it is compacted, and takes no record without a key."""
    is_wary: bool = False
    """Whether it has refused many records for their size lately: those that may be too large wait."""

    @property
    def is_well(self) -> bool:
        """Whether everything can go there."""
        return self.refusal is None and not self.down and not self.is_wary

    def is_down(self, partition: int) -> bool:
        """Whether a partition takes nothing now (a negative one: whether any does not); not where it is not known."""
        is_refused = self.refusal is not None and not self.is_unanswered
        return is_refused or partition in self.down or (partition < 0 and bool(self.down))

    def takes_less_than(self, other: Target) -> bool:
        """Whether something cannot go there that could with `other`, an earlier look at it."""
        is_refused = self.refusal is not None and other.refusal is None
        return is_refused or not self.down.keys() <= other.down.keys() or (self.is_wary and not other.is_wary)

    @property
    def is_unanswered(self) -> bool:
        """Whether the brokers have not said anything of it."""
        return not self.partitions and self.refusal is not None and self.refusal.reason is UNAVAILABLE


class LookUp(Protocol):
    """`lookup.TargetLookUp`."""

    def __call__(self, names: Sequence[str]) -> Mapping[str, Target]:
        """Each topic as it is now. Raises EnvironmentFailure when the brokers do not answer."""

    def leaders(self, name: str) -> Mapping[int, Leader]:
        """The leader of each partition of a topic now. Raises EnvironmentFailure without an answer."""

    def count_partitions(self, name: str) -> int:
        """How many partitions a topic has now. Raises EnvironmentFailure without an answer."""

    def ask(self, leaders: Mapping[Place, Leader | None], *, doubtful: bool) -> Mapping[Place, Future[Any]]:
        """Ask the leader of each partition something small, without waiting. An answer may be an error; one that says
        that there was none is not an answer. `doubtful`: some of them may be dead.
        """

    def is_answered(self, answer: Future[Any]) -> bool | None:
        """Whether the leader has answered by now; None: there is an answer, and it is an error."""

    def is_refused(self, answer: Future[Any]) -> bool:
        """Whether the leader has refused the connection."""
