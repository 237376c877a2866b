"""What a transaction did, in numbers: made by the plan, added up by the transaction, taken by the metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

import numpy as np
import numpy.typing as npt

from bridge.wire.reasons import RejectReason


@dataclass(slots=True, kw_only=True)
class Counts:
    """Messages `delivered` by target, dead letters (`rejected`) and `retried` records by reason, copies
    that were `rolled` or `deferred`, and `forwarded` cancels, one for each partition. So many of `delivered` were
    `ticks` of recurring messages; `missed` are schedules that had missed ticks, by policy. `lateness_ms` int64[] are of
    those that were delivered, from due to produced. `commands` that were answered, by what they do and what came of it.
    """

    delivered: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)
    retried: Counter[str] = field(default_factory=Counter)
    rolled: int = 0
    deferred: int = 0
    forwarded: int = 0
    ticks: int = 0
    missed: Counter[str] = field(default_factory=Counter)
    commands: Counter[tuple[str, str]] = field(default_factory=Counter)
    lateness_ms: list[npt.NDArray[np.int64]] = field(default_factory=list)

    def __iadd__(self, other: Counts) -> Counts:
        for each in fields(self):
            mine = getattr(self, each.name)
            mine += getattr(other, each.name)
            setattr(self, each.name, mine)
        return self

    def are_unreadable(self, planned: Mapping[str, int]) -> None:
        """So many dead letters turned out to be plain ones, by the reason that they were counted with."""
        for reason, count in planned.items():
            if self.rejected[reason]:
                self.rejected[reason] -= count
                self.rejected[RejectReason.UNREADABLE] += count
