"""The numbers of a transaction. The plan makes them, the transaction adds them up, the metrics take them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

import numpy as np
import numpy.typing as npt

from bridge.wire.reasons import RejectReason


@dataclass(slots=True, kw_only=True)
class Counts:
    """Numbers of records and messages.

    `delivered` messages by target; dead letters (`rejected`) and `retried` records by reason; `rolled` and `deferred`
    copies; `forwarded` cancels, one for each partition. `ticks` of recurring messages, a part of `delivered`; schedules
    with `missed` ticks, by policy. `lateness_ms` int64[] of the delivered messages, from due to produced. Answered
    `commands`, by kind and outcome.
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
        for field_ in fields(self):
            mine = getattr(self, field_.name)
            mine += getattr(other, field_.name)
            setattr(self, field_.name, mine)
        return self

    def are_unreadable(self, planned: Mapping[str, int]) -> None:
        """Count these dead letters as unreadable, in place of their `planned` reasons."""
        for reason, count in planned.items():
            if self.rejected[reason]:
                self.rejected[reason] -= count
                self.rejected[RejectReason.UNREADABLE] += count
