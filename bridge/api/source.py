"""What the API asks of the bridge. Pure: the bridge imports this without FastAPI."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

from bridge.delivery.targets.target import TargetReport
from bridge.telemetry.health import Phase
from bridge.telemetry.lateness import RecentLateness
from bridge.telemetry.metrics import StoreSnapshot
from timerstore.operations.find import Count, Page, Query
from timerstore.rows.sources import NamedPosition


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """What the gauges know at `now_ms`, and what only the API tells. Times are epoch milliseconds."""

    now_ms: int
    gauges: StoreSnapshot
    overdue: int
    """Messages whose effective time was over when the clock's current ten seconds began."""
    next_at_ms: int | None
    """When the next message comes up, to ten seconds where it is on disk only; in the past if it is overdue; None:
    nothing is pending."""
    behind_s: Mapping[tuple[str, int], float]
    """For how long records wait to be read, by partition of the delay topics."""
    by_target: Mapping[str, int]
    """The largest targets; "" is the delay topic's default, as a search takes it."""
    lateness: RecentLateness | None
    """None: too little is known yet."""


class Export(Protocol):
    """A `timerstore.operations.export.Export`, as far as it is used here."""

    def __next__(self) -> pa.RecordBatch:
        """The next batch."""

    def close(self) -> None:
        """Close the files."""


class PendingMessages(Protocol):
    """A `TimerStore`, as far as it is asked here."""

    def find(self, query: Query, now_ms: int, *, after: NamedPosition | None, limit: int, bulky: bool) -> Page:
        """See `TimerStore.find`."""

    def count_where(self, query: Query, now_ms: int) -> Count:
        """See `TimerStore.count_where`."""

    def pending_until(self, edges_ms: Sequence[int]) -> tuple[int, ...]:
        """See `TimerStore.pending_until`."""

    def export(self, query: Query, now_ms: int, *, bulky: bool) -> Export:
        """See `TimerStore.export`."""


class Source(Protocol):
    """The bridge. For any thread; what may take long is called on a thread that may wait."""

    def now_ms(self) -> int:
        """The bridge's clock."""

    def phase(self) -> Phase:
        """Where the bridge is; at once."""

    def pending(self) -> PendingMessages | None:
        """What is pending here; None until it is complete, and between two assignments. At once."""

    def overview(self) -> Overview | None:
        """None as for `pending`."""

    def targets(self) -> Sequence[TargetReport]:
        """Targets that are known, those in trouble first."""
