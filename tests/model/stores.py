"""What the machines ask of a bridge's stores, by partition, and what they look at inside.

The machines know partitions by name and a committed P as (at, offset) in its partition. How many stores there are, and
where each keeps what, is told here alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

import pyarrow as pa

from tests.unit.timerstore.entries import Record, entries
from timerstore.disk.checkpoint import Identity
from timerstore.limits import Limits
from timerstore.log.segment import Segment
from timerstore.log.timerlog import Window
from timerstore.memory.resident import Resident
from timerstore.memory.sorted_runs import RowRefs
from timerstore.operations import recovery
from timerstore.operations.export import SCHEMA as SCHEMA
from timerstore.operations.export import Export as Export
from timerstore.operations.find import PendingRow as PendingRow
from timerstore.operations.find import Query as Query
from timerstore.operations.state import StoreState
from timerstore.operations.transaction import Rows, Transaction
from timerstore.rows.position import AT_MIN, Position, Progress
from timerstore.rows.sources import Cuts, NamedPosition, NamedStep, SourceName, Sources
from timerstore.store import TimerStore

batch: Callable[[Sequence[Record]], pa.Table] = entries
"""A batch of records, as ingest has it."""

Place = tuple[str, int, int, bool]
"""Topic, partition, offset of a row, and whether it is a reject or a command."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The committed state of a partition: O, P as (at, offset) in it (None: nothing is finished), the frozen steps;
    `written` is P as Kafka has it, which may be a position of another partition."""

    offset: int = 0
    position: tuple[int, int] | None = None
    frozen: tuple[NamedStep, ...] = ()
    written: NamedPosition | None = None

    @classmethod
    def of(cls, name: SourceName, progress: Progress, sources: Sources) -> Self:
        """As a transaction has it for a partition."""
        mine, written = progress.position.within(sources.index(*name)), sources.named(progress.position)
        position = None if written is None else (mine.at_ms, mine.offset)
        return cls(
            offset=progress.offset,
            position=position,
            frozen=sources.named_steps(progress.frozen),
            written=written,
        )

    @classmethod
    def at(cls, name: SourceName, offset: int, position: tuple[int, int] | None) -> Self:
        """P is a row of the partition itself."""
        written = None if position is None else (position[0], *name, position[1])
        return cls(offset=offset, position=position, written=written)

    def finishes(self, offset: int, at_ms: int) -> bool:
        """Whether a row of the partition is finished (I1)."""
        steps = [(self.offset, self.position), *((end, (last_ms, last)) for end, last_ms, last in self.frozen)]
        return any(
            offset < end and (at_ms == AT_MIN or (position is not None and (at_ms, offset) <= position))
            for end, position in steps
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The inside of one store, and the partitions that it has."""

    state: StoreState
    names: frozenset[SourceName]

    @property
    def resident(self) -> Resident:
        return self.state.resident

    @property
    def memtable_bytes(self) -> int:
        return self.resident.memtable_bytes

    @property
    def segments(self) -> list[Segment]:
        return list(self.state.timerlog)

    def holders(self) -> list[RowRefs]:
        """All rows in memory, but for those on loan."""
        each = self.resident
        return [each.ready.all(), each.memtable.all(), each.overtaken.all(), each.withheld.all()]

    def places(self, *parts: RowRefs) -> list[Place]:
        """Of rows."""
        return [
            (*self.state.sources.name(source), offset, at == AT_MIN)
            for rows in parts
            for source, offset, at in zip(rows.source.tolist(), rows.offset.tolist(), rows.at.tolist(), strict=True)
        ]

    def places_of(self, table: pa.Table) -> list[Place]:
        """Of what a segment holds."""
        columns = (table.column(name).to_pylist() for name in ("topic", "partition", "offset", "at"))
        return [(topic, partition, offset, at == AT_MIN) for topic, partition, offset, at in zip(*columns, strict=True)]

    def is_beyond(self, name: SourceName, at_ms: int, offset: int) -> bool:
        """Whether a row lies beyond the frontier."""
        return self._position(name, at_ms, offset) > self.resident.frontier

    def is_left_on_disk(self, name: SourceName, at_ms: int, offset: int) -> bool:
        """Whether a row may be in a segment alone, though the frontier has passed it: its partition is held."""
        source = self.state.sources.index(*name)
        is_above = self._position(name, at_ms, offset) > self.resident.committed[source].position
        return bool(self.resident.held[source]) and is_above

    def can_flush(self, now_ms: int, elsewhere_ms: int) -> bool:
        """Whether a flush would write something, or let something go."""
        resident, state = self.resident, self.state
        moves = bool((resident.covered() > resident.stored)[resident.owned].any())
        leaves = now_ms - state.assigned_ms >= elsewhere_ms and bool(state.elsewhere().any())
        return moves or leaves or state.cancels.tombstones.memory_rows > 0

    def unstored(self) -> int:
        """How many rows a flush would write."""
        resident = self.resident
        runs = [*resident.ready, *resident.memtable, *resident.withheld, self.state.rows_on_loan()]
        covered = resident.covered()
        return sum(
            int((~resident.is_stored(run) & (run.offset < covered[run.source])).sum()) for run in runs if len(run)
        )

    def can_reclaim(self) -> bool:
        return bool(self.state.timerlog.finished(self.resident.committed, self.state.elsewhere()))

    def retreat(self, budget_bytes: int) -> None:
        """The ready rows give some back, as when ingest has overfilled them."""
        with self.state.lock:
            self.resident.retreat_frontier(budget_bytes, self.state.floor())

    def _position(self, name: SourceName, at_ms: int, offset: int) -> Position:
        return Position(at_ms, self.state.sources.index(*name), offset)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """A window that is being read, and of what."""

    view: View
    window: Window


class ModelStores(TimerStore):
    """Today: one store for all partitions."""

    def views(self) -> list[View]:
        return [View(state=self.state, names=frozenset(self.next_offsets()))]

    def view_of(self, name: SourceName) -> View:
        return next(view for view in self.views() if name in view.names)

    # ---- dispatcher

    def open_loan(self, now_ms: int, *, only_output: bool = False) -> Transaction:  # noqa: ARG002 - may be needed
        """A transaction begins."""
        return self.begin(only_output=only_output)

    def hold_named(self, names: Collection[SourceName]) -> None:
        self.hold([self.sources.index(*name) for name in names])

    def sources_of(self, rows: Rows) -> list[SourceName]:
        """The partition of each row that was taken."""
        return [self.sources.name(source) for source in rows.source.tolist()]

    def states_after(self, transaction: Transaction) -> dict[SourceName, State]:
        """What a commit of it leads to."""
        progress = {self.sources.name(source): each for source, each in transaction.progress().items()}
        return {name: State.of(name, each, self.sources) for name, each in progress.items()}

    # ---- maintenance

    def flush_due(self, now_ms: int) -> bool:
        return self.maintenance.flush_due(now_ms)

    def flush(self, now_ms: int) -> None:
        self.maintenance.flush(now_ms)

    def reclaim(self, now_ms: int) -> None:
        self.maintenance.reclaim(now_ms)

    def next_loading(self, now_ms: int) -> Loading | None:
        window = self.wheel.next_window(now_ms)
        return None if window is None else Loading(view=self.views()[0], window=window)

    def admit(self, loading: Loading, entries: pa.Table) -> bool:
        return self.wheel.admit(loading.window, entries)

    def next_compaction(self, now_ms: int) -> Loading | None:
        window = self.maintenance.compaction_window(now_ms)
        return None if window is None else Loading(view=self.views()[0], window=window)

    def compact(self, loading: Loading, entries: pa.Table) -> None:
        self.maintenance.compact(loading.window, entries)

    def set_limits(self, limits: Limits) -> None:
        self.state.limits = limits

    def named_files(self, directory: Path) -> Iterator[Path]:
        """The files that checkpoints name."""
        checkpoint = self.state.checkpoint
        return (directory / each.name for each in (*checkpoint.segments, *checkpoint.tombstones))

    # ---- partitions that come and go

    def coming_up(self) -> list[SourceName]:
        """The partitions of which nothing is delivered until they are read up to their committed O."""
        return self.assignment.joining()

    def leave(self, names: Collection[SourceName], now_ms: int) -> None:
        self.assignment.give_up(names, now_ms)
        assert self.assignment.settle()

    def coming(
        self, states: Mapping[SourceName, State], log_starts: Mapping[SourceName, int], cuts: Mapping[SourceName, Cuts]
    ) -> dict[SourceName, int | None] | None:
        """Where ingest of partitions that come has to start; None: the stores must be opened anew."""
        return self.assignment.resume_offsets(*_named(states), log_starts, cuts)

    def come(
        self,
        states: Mapping[SourceName, State],
        log_starts: Mapping[SourceName, int],
        cuts: Mapping[SourceName, Cuts],
        offsets: Mapping[SourceName, int],
        log_ends: Mapping[SourceName, int],
        now_ms: int,
    ) -> None:
        """Partitions come, and are held until `join`."""
        arrival = self.assignment.arrival(*_named(states), {name: cuts.get(name, ()) for name in states})
        self.assignment.join(arrival, log_starts, offsets, log_ends, now_ms)

    def join(self) -> list[SourceName]:
        """Those that have come and are read up to their committed O are delivered from now on."""
        return self.assignment.joined(self.assignment.arrived())


def _named(
    states: Mapping[SourceName, State],
) -> tuple[dict[SourceName, tuple[int, NamedPosition | None]], dict[SourceName, tuple[NamedStep, ...]]]:
    committed = {name: (state.offset, state.written) for name, state in states.items()}
    return committed, {name: state.frozen for name, state in states.items()}


S = TypeVar("S", bound=ModelStores)


def open_stores(
    kind: type[S],
    directory: Path,
    identity: Identity,
    partitions: Collection[SourceName],
    states: Mapping[SourceName, State],
    *,
    log_starts: Mapping[SourceName, int],
    cuts: Mapping[SourceName, Cuts],
    now_ms: int,
    limits: Limits,
) -> S:
    """The stores of a directory, for the partitions of `states`."""
    committed, frozen = _named(states)
    opened = kind.open(
        recovery.find(directory, identity, now_ms),
        partitions=partitions,
        committed=committed,
        frozen=frozen,
        log_starts=log_starts,
        cuts=cuts,
        now_ms=now_ms,
        limits=limits,
    )
    assert isinstance(opened, kind)
    return opened
