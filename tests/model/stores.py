"""What the machines ask of a bridge's stores, by partition, and what they look at inside.

The machines know partitions by name and a committed P as (at, offset) in its partition. How many stores there are, and
where each keeps what, is told here alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

import pyarrow as pa

from bridge.stores.directory import StoreDirectory
from bridge.stores.loan import Loan, Rows
from bridge.stores.names import NAMED_ENTRY, SourceName
from bridge.stores.opening import Opening, Prepared
from bridge.stores.search import SCHEMA as SCHEMA
from bridge.stores.search import PendingRow as PendingRow
from bridge.stores.search import Query as Query
from bridge.stores.search import StoresExport as StoresExport
from bridge.stores.stores import Life, Stores
from bridge.stores.upkeep import StoreWindow
from tests.unit.timerstore.entries import Record, entries
from timerstore.budget import Budgets
from timerstore.limits import Limits
from timerstore.log.segment import Segment
from timerstore.log.timerlog import Window
from timerstore.memory.resident import Resident
from timerstore.memory.sorted_runs import RowRefs
from timerstore.operations.state import StoreState
from timerstore.rows.cuts import Cuts
from timerstore.rows.position import AT_MIN, ORIGIN, Position, Progress, Step
from timerstore.store import TimerStore

Place = tuple[str, int, int, bool]
"""Topic, partition, offset of a row, and whether it is a reject or a command."""
NamedStep = tuple[int, int, int]
"""A frozen step: O, and P as (at, offset)."""


def batch(records: Sequence[Record]) -> pa.Table:
    """A batch of records, as ingest has it."""
    topic, partition = [r.topic for r in records], [r.partition for r in records]
    columns = [pa.array(topic, pa.string()), pa.array(partition, pa.int32()), *entries(records).columns]
    return pa.table(columns, schema=NAMED_ENTRY)


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The committed state of a partition: O, P as (at, offset) in it (None: nothing is finished), the frozen steps."""

    offset: int = 0
    position: tuple[int, int] | None = None
    frozen: tuple[NamedStep, ...] = ()

    @classmethod
    def of(cls, progress: Progress) -> Self:
        """As a transaction has it."""
        *frozen, last = progress.steps
        position = None if last.position == ORIGIN else (last.position.at_ms, last.position.offset)
        steps = tuple((step.offset, step.position.at_ms, step.position.offset) for step in frozen)
        return cls(offset=last.offset, position=position, frozen=steps)

    @classmethod
    def at(cls, name: SourceName, offset: int, position: tuple[int, int] | None) -> Self:  # noqa: ARG003
        """P is a row of the partition itself."""
        return cls(offset=offset, position=position)

    def progress(self) -> Progress:
        position = ORIGIN if self.position is None else Position(*self.position)
        return Progress(self.offset, position, tuple(Step(end, Position(at_ms, o)) for end, at_ms, o in self.frozen))

    def finishes(self, offset: int, at_ms: int) -> bool:
        """Whether a row of the partition is finished (I1)."""
        steps = [(self.offset, self.position), *((end, (last_ms, last)) for end, last_ms, last in self.frozen)]
        return any(
            offset < end and (at_ms == AT_MIN or (position is not None and (at_ms, offset) <= position))
            for end, position in steps
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The inside of one store, and the partition that it has."""

    name: SourceName
    store: TimerStore

    @property
    def names(self) -> frozenset[SourceName]:
        return frozenset([self.name])

    @property
    def state(self) -> StoreState:
        return self.store.state

    @property
    def resident(self) -> Resident:
        return self.state.resident

    @property
    def memtable_bytes(self) -> int:
        return self.resident.memtable.bytes

    @property
    def segments(self) -> list[Segment]:
        return list(self.state.timerlog)

    def holders(self) -> list[RowRefs]:
        """All rows in memory, but for those on loan."""
        return [self.resident.ready.all(), self.resident.memtable.all(), self.resident.overtaken.all()]

    def places(self, *parts: RowRefs) -> list[Place]:
        """Of rows."""
        return [
            (*self.name, offset, at == AT_MIN)
            for rows in parts
            for offset, at in zip(rows.offset.tolist(), rows.at.tolist(), strict=True)
        ]

    def places_of(self, table: pa.Table) -> list[Place]:
        """Of what a segment holds."""
        rows = zip(table.column("offset").to_pylist(), table.column("at").to_pylist(), strict=True)
        return [(*self.name, offset, at == AT_MIN) for offset, at in rows]

    def is_beyond(self, name: SourceName, at_ms: int, offset: int) -> bool:
        """Whether a row lies beyond the frontier."""
        assert name == self.name
        return Position(at_ms, offset) > self.resident.frontier

    def is_behind(self, now_ms: int) -> bool:
        """Whether windows before that time are to be loaded."""
        return self.resident.frontier.at_ms < now_ms

    def is_left_on_disk(self, name: SourceName, at_ms: int, offset: int) -> bool:  # noqa: ARG002
        """Whether a row may be in a segment alone, though the frontier has passed it."""
        return False

    def can_flush(self) -> bool:
        """Whether a flush would write something."""
        return self.resident.covered() > self.resident.stored or self.state.cancels.tombstones.memory_rows > 0

    def unstored(self) -> int:
        """How many rows a flush would write."""
        resident = self.resident
        runs = [*resident.ready, *resident.memtable, self.state.rows_on_loan()]
        return sum(int((~resident.is_stored(run) & (run.offset < resident.covered())).sum()) for run in runs)

    def can_reclaim(self) -> bool:
        return bool(self.state.timerlog.finished(self.resident.committed))

    def retreat(self, budget_bytes: int) -> None:
        """The ready rows give some back, as when ingest has overfilled them."""
        with self.state.lock:
            self.resident.retreat_frontier(budget_bytes, self.state.floor())


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """A window that is being read, and of what."""

    view: View
    reading: StoreWindow

    @property
    def window(self) -> Window:
        return self.reading.window


class ModelStores(Stores):
    """A store for each partition."""

    prepared: Prepared
    """What was opened last."""

    def views(self) -> list[View]:
        return [View(name=name, store=store) for name, store in self.by_name.items()]

    # ---- dispatcher

    def open_loan(self, now_ms: int, *, only_output: bool = False) -> Loan:
        """A transaction begins."""
        return self.begin(now_ms, only_output=only_output)

    def hold_named(self, names: Collection[SourceName]) -> None:
        self.hold([self.sources.index(*name) for name in names])
        self.go_live(self.in_life(Life.COMMANDS_FIRST))

    def sources_of(self, rows: Rows) -> list[SourceName]:
        """The partition of each row that was taken."""
        return [self.sources.name(source) for source in rows.source.tolist()]

    def states_after(self, loan: Loan) -> dict[SourceName, State]:
        """What a commit of it leads to."""
        return {self.sources.name(source): State.of(each) for source, each in loan.progress().items()}

    # ---- maintenance

    def flush_due(self, now_ms: int) -> bool:
        return self.upkeep.flush_due(now_ms)

    def flush(self, now_ms: int) -> None:
        self.upkeep.flush(now_ms)

    def reclaim(self, now_ms: int) -> None:
        self.upkeep.reclaim(now_ms)

    def next_loading(self, now_ms: int) -> Loading | None:
        return self._loading(self.upkeep.next_window(now_ms))

    def admit(self, loading: Loading, entries: pa.Table) -> bool:
        return self.upkeep.admit(loading.reading, entries)

    def next_compaction(self, now_ms: int) -> Loading | None:
        return self._loading(self.upkeep.next_compaction(now_ms))

    def compact(self, loading: Loading, entries: pa.Table) -> None:
        self.upkeep.compact(loading.reading, entries)

    def _loading(self, reading: StoreWindow | None) -> Loading | None:
        if reading is None:
            return None
        return Loading(view=next(v for v in self.views() if v.store is reading.store), reading=reading)

    def set_limits(self, limits: Limits) -> None:
        self.limits, self.memory.budgets = limits, Budgets(limits)
        for view in self.views():
            view.state.limits = limits
            view.state.share(self.memory.budgets)

    def named_files(self, directory: Path) -> Iterator[Path]:
        """The files that checkpoints name."""
        for view in self.views():
            checkpoint = view.state.checkpoint
            for each in (*checkpoint.segments, *checkpoint.tombstones):
                yield directory / view.name[0] / str(view.name[1]) / each.name

    # ---- partitions that come and go

    def coming_up(self) -> list[SourceName]:
        """The partitions of which nothing is delivered until they are read up to their committed O."""
        return self.in_life(Life.CATCHING_UP)

    def leave(self, names: Collection[SourceName], now_ms: int) -> None:  # noqa: ARG002
        self.close_partitions(names)

    def coming(
        self, states: Mapping[SourceName, State], log_starts: Mapping[SourceName, int], cuts: Mapping[SourceName, Cuts]
    ) -> dict[SourceName, int | None] | None:
        """Where ingest of partitions that come has to start; None: the stores must be opened anew."""
        self.prepared = self.prepare_named(states, log_starts, cuts, 0)
        return self.prepared.resume_offsets()

    def prepare_named(
        self,
        states: Mapping[SourceName, State],
        log_starts: Mapping[SourceName, int],
        cuts: Mapping[SourceName, Cuts],
        now_ms: int,
    ) -> Prepared:
        openings = {
            name: Opening(
                found=self.directory.find(name, now_ms),
                committed=state.progress(),
                log_start=log_starts.get(name, 0),
                cuts=cuts.get(name, ()),
            )
            for name, state in states.items()
        }
        return self.prepare(openings, now_ms)

    def come(
        self,
        states: Mapping[SourceName, State],  # noqa: ARG002
        log_starts: Mapping[SourceName, int],  # noqa: ARG002
        cuts: Mapping[SourceName, Cuts],  # noqa: ARG002
        offsets: Mapping[SourceName, int],
        log_ends: Mapping[SourceName, int],
        now_ms: int,  # noqa: ARG002
    ) -> None:
        """Partitions come, and are held until `join`."""
        self.start_at(offsets, log_ends)

    def start_at(self, offsets: Mapping[SourceName, int], log_ends: Mapping[SourceName, int]) -> None:
        """What was opened is read from there on."""
        self.prepared.start_at(offsets, log_ends)
        self.add(self.prepared)

    def join(self) -> list[SourceName]:
        """Those that have come and are read up to their committed O are delivered from now on."""
        arrived = self.arrive()
        self.go_live(arrived)
        return arrived

    def may_begin(self) -> bool:
        """Whether a transaction may begin: of partitions that catch up it takes nothing."""
        return True

    def resume_offsets(self) -> dict[SourceName, int | None]:
        return self.prepared.resume_offsets()


S = TypeVar("S", bound=ModelStores)


def open_stores(
    kind: type[S],
    directory: Path,
    identity: Mapping[str, str],
    partitions: Collection[SourceName],
    states: Mapping[SourceName, State],
    *,
    log_starts: Mapping[SourceName, int],
    cuts: Mapping[SourceName, Cuts],
    now_ms: int,
    limits: Limits,
) -> S:
    """The stores of a directory, for the partitions of `states`."""
    taken = StoreDirectory.take(directory, "cluster", identity)
    stores = kind(taken, partitions, limits)
    try:
        stores.prepared = stores.prepare_named(states, log_starts, cuts, now_ms)
    except BaseException:
        stores.close()
        raise
    return stores
