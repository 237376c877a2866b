"""A bridge for the API to ask, whose pending messages are a list."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bridge.api.source import Export, Overview, PendingMessages
from bridge.delivery.targets.target import TargetReport
from bridge.telemetry.health import Phase
from bridge.telemetry.lateness import RecentLateness
from bridge.telemetry.metrics import StoreSnapshot
from bridge.wire.reasons import RejectReason
from timerstore.operations.export import EMPTY
from timerstore.operations.find import Count, Page, PendingRow, PendingState, Query
from timerstore.rows.sources import NamedPosition

NOW_MS = 1_800_000_000_000
ROW = PendingRow(
    topic="delay",
    partition=0,
    offset=0,
    origin=0,
    at_ms=NOW_MS,
    due_ms=NOW_MS,
    ts_ms=NOW_MS - 1,
    state=PendingState.WAITING,
    target="orders",
    target_partition=None,
    key=b"k",
    value=b"v",
    headers=(),
    id=None,
    rolls=0,
    attempt=0,
    reason=None,
)


def message(offset: int, **values: Any) -> PendingRow:
    """A pending message, in the order of its offset unless `values` say otherwise."""
    return replace(ROW, **{"offset": offset, "origin": offset, "at_ms": NOW_MS + offset, **values})


class Store:
    """Pending messages in a list; one page fewer rows than asked for where `short` says so."""

    def __init__(self, *rows: PendingRow) -> None:
        self.rows = sorted(rows, key=_position)
        self.error: Exception | None = None
        self.asked: list[Query] = []

    def find(self, query: Query, now_ms: int, *, after: NamedPosition | None, limit: int, bulky: bool) -> Page:
        """A page; without values and headers unless `bulky`."""
        assert now_ms == NOW_MS
        self._note(query)
        if after is not None and after[1] != "delay":
            raise KeyError(after[1])
        found = [row for row in self.rows if _fits(query, row) and (after is None or _position(row) > after)]
        rows = tuple(row if bulky else replace(row, value=None, headers=()) for row in found[:limit])
        return Page(rows=rows, next=_position(rows[-1]) if len(found) > limit else None)

    def count_where(self, query: Query, now_ms: int) -> Count:
        """An exact count."""
        assert now_ms == NOW_MS
        self._note(query)
        return Count(rows=sum(_fits(query, row) for row in self.rows), is_exact=True)

    def pending_until(self, edges_ms: Sequence[int]) -> tuple[int, ...]:
        """Exact."""
        return tuple(sum(row.at_ms < edge for row in self.rows) for edge in edges_ms)

    def export(self, query: Query, now_ms: int, *, bulky: bool) -> Export:  # noqa: ARG002 - as the store has it
        """One batch, without rows: tests of what is in it have a real store."""
        assert now_ms == NOW_MS
        self._note(query)
        return (batch for batch in [EMPTY])

    def _note(self, query: Query) -> None:
        self.asked.append(query)
        if self.error is not None:
            raise self.error


def _position(row: PendingRow) -> NamedPosition:
    return row.at_ms, row.topic, row.partition, row.offset


def _fits(query: Query, row: PendingRow) -> bool:
    return (
        query.id in (None, row.id)
        and query.origin in (None, (row.topic, row.partition, row.origin))
        and query.key in (None, row.key)
        and query.target in (None, row.target)
        and (query.due_from_ms is None or row.due_ms >= query.due_from_ms)
        and (query.due_until_ms is None or row.due_ms < query.due_until_ms)
        and (query.at_from_ms is None or row.at_ms >= query.at_from_ms)
        and (query.at_until_ms is None or row.at_ms < query.at_until_ms)
        and row.state in query.states
    )


@dataclass
class Bridge:
    """A `Source`."""

    store: Store | None = field(default_factory=Store)
    where: Phase = field(default_factory=lambda: Phase(name="running", ready=True, reader="spark"))
    gauges: StoreSnapshot = field(default_factory=StoreSnapshot)

    def now_ms(self) -> int:
        """The same at all times."""
        return NOW_MS

    def phase(self) -> Phase:
        """As it was set."""
        return self.where

    def pending(self) -> PendingMessages | None:
        """As it was set."""
        return self.store

    def overview(self) -> Overview | None:
        """None without a store."""
        if self.store is None:
            return None
        return Overview(
            now_ms=NOW_MS,
            gauges=self.gauges,
            overdue=2,
            next_at_ms=NOW_MS - 5,
            behind_s={("delay", 0): 1.5},
            by_target=self.gauges.pending_by_topic,
            lateness=RecentLateness(delivered=1_234, p99_ms=41.26, over_s=300.2),
        )

    def targets(self) -> Sequence[TargetReport]:
        """One in trouble, and one that is well."""
        failing = TargetReport(
            name="orders",
            partitions=3,
            failing_partitions=1,
            reason=RejectReason.TARGET_UNAVAILABLE,
            detail="no leader",
            open_breakers=1,
            retry_s=4.26,
        )
        return [failing, TargetReport(name="well", partitions=1)]
