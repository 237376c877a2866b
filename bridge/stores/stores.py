"""The stores of all owned partitions, one for each, merged.

    ingest       append            a batch of all of them (intake.py)
    dispatcher   begin, wait       the due rows of all stores (loan.py)
    maintenance  upkeep.*          windows, flushes, reclaim, compaction, one store at a time (upkeep.py)
    http         stats, find, ...  merged by position (search.py)

A partition's life:

    CATCHING_UP --read up to its committed O--> COMMANDS_FIRST --no command is unread--> LIVE
                                                   |      ^                               |
                                    accepts no writes     | released        accepts no writes
                                                   v      |                               |
                                                    HELD <--------------------------------'
    any --another instance's, or the end--> closed: its directory stays

    CATCHING_UP      no row is delivered (invariant I6)
    COMMANDS_FIRST   commands and rejects are finished, and O moves (delivery/commands_first.py)
    LIVE             all rows are delivered
    HELD             no row is delivered, and O moves
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import partial
from typing import Final, TypeVar

import pyarrow as pa

from bridge.stores import search
from bridge.stores.damage import Damage
from bridge.stores.directory import StoreDirectory
from bridge.stores.intake import Intake
from bridge.stores.loan import Lender, Loan
from bridge.stores.names import NamedPosition, SourceName, Sources
from bridge.stores.opening import Opening, Prepared
from bridge.stores.search import Originals, Page, Query, StoresExport
from bridge.stores.upkeep import Upkeep
from timerstore.errors import Closed, Corrupt, Misuse
from timerstore.limits import Limits
from timerstore.memory.memory import Memory
from timerstore.memory.sorted_runs import EMPTY, RowRefs
from timerstore.operations import stats
from timerstore.operations.find import ORIGINALS_MAX, ROWS_MAX, SCANNED_ROWS_MAX, Count
from timerstore.operations.state import StoreState
from timerstore.operations.stats import Stats, Trimmed
from timerstore.rows.position import AT_MIN, Progress
from timerstore.store import TimerStore

T = TypeVar("T")


class Life(Enum):
    """The state of a partition; see the module."""

    CATCHING_UP = auto()
    COMMANDS_FIRST = auto()
    LIVE = auto()
    HELD = auto()


TRANSITIONS: Final = frozenset(
    {
        (Life.CATCHING_UP, Life.COMMANDS_FIRST),
        (Life.COMMANDS_FIRST, Life.LIVE),
        (Life.COMMANDS_FIRST, Life.HELD),
        (Life.LIVE, Life.HELD),
        (Life.HELD, Life.COMMANDS_FIRST),
    }
)


DELIVERS: Final = (Life.LIVE, Life.HELD)
"""The states of a partition whose messages are delivered, but for a time."""


@dataclass(slots=True)
class _Entry:
    name: SourceName
    lender: Lender
    since: int
    """The first run whose rows are taken in."""
    life: Life = Life.CATCHING_UP

    @property
    def store(self) -> TimerStore:
        return self.lender.store

    def next_due_ms(self) -> int | None:
        """The due time (ms) of the next row that this state delivers, or None. Merged rows do not count."""
        if self.life is Life.LIVE:
            store = self.lender.store
            return store.next_due_ms() if store.state.resident.is_apart() else None
        due_ms = self.store.next_due_ms() if self.life is Life.COMMANDS_FIRST else None
        return due_ms if due_ms == AT_MIN else None

    def become(self, life: Life) -> None:
        """Go to another state. Raises Misuse for a change that is not in the table."""
        if life is self.life:
            return
        if (self.life, life) not in TRANSITIONS:
            raise Misuse(f"{self.name} cannot become {life.name}: it is {self.life.name}", code="DB-7003")
        self.life = life
        self.lender.is_held, self.lender.is_for_commands = life is Life.HELD, life is Life.COMMANDS_FIRST
        self.store.merge(is_merged=life is Life.LIVE)


class Stores:
    """See the module. Any thread may call every public method, unless its docstring says otherwise."""

    def __init__(
        self,
        directory: StoreDirectory,
        partitions: Iterable[SourceName],
        limits: Limits,
        on_damage: Callable[[], None] = lambda: None,
    ) -> None:
        """`partitions` are all partitions of the delay topics. This object releases the directory's lock. `on_damage`
        is called for a new one of `damage.names`."""
        self.directory = directory
        self.sources = Sources(partitions)
        self.limits, self.damage = limits, Damage(on_damage)
        self.memory = Memory(limits)
        self.reports: tuple[str, ...] = ()
        """Mended faults of directories, as sentences for the operator."""
        self._entries: dict[SourceName, _Entry] = {}
        """Replaced, never changed."""
        self.run = 0
        """The number of the present run. A new one begins when partitions come or go, and the readers begin anew."""
        self._news = threading.Condition()
        self._has_news = False
        self._loan: Loan | None = None
        self._is_intake_closed = False
        self._is_closed = False
        self.upkeep = self.upkeep_of(None)

    # ---- partitions that come and go

    def prepare(
        self,
        openings: Mapping[SourceName, Opening],
        now_ms: int,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Prepared:
        """Open the stores of partitions; until `add` only the caller uses them. `progress(done, total)` counts
        partitions, and is called for each segment. Steps of maintenance of earlier stores of these partitions have
        ended. Raises DiskFull, DiskFailure."""
        stores: dict[SourceName, TimerStore] = {}
        with ExitStack() as opened:
            for name, opening in openings.items():
                stores[name] = store = TimerStore.open(
                    opening.found, opening.committed, log_start=opening.log_start, cuts=opening.cuts, now_ms=now_ms,
                    limits=self.limits, on_news=self.wake, memory=self.memory, log=self.sources.index(*name),
                    progress=lambda *_: progress(len(stores), len(openings)),
                )  # fmt: skip
                opened.callback(store.close)
                self.reports += tuple(f"{name[0]}/{name[1]}: {report}" for report in store.reports)
                progress(len(stores), len(openings))
            opened.pop_all()
        return Prepared(stores)

    def add(self, prepared: Prepared) -> None:
        """Add owned partitions, after `start_at`: they catch up from now on."""
        if self._is_intake_closed:
            for store in prepared.stores.values():
                store.close_intake()
        with self._news:
            new = {
                name: _Entry(name, Lender(source=self.sources.index(*name), store=store), self.run + 1)
                for name, store in prepared.stores.items()
            }
            self._entries = dict(sorted({**self._entries, **new}.items()))
            self._begin_run()

    def _begin_run(self) -> None:
        with self._news:
            self.run += 1
            self.wake()

    def close_partitions(self, names: Collection[SourceName]) -> None:
        """Close partitions that another instance owns from now on; between two transactions."""
        self._must_be_between_transactions()
        gone = [self._entries[name] for name in names if name in self._entries]
        self._entries = {name: entry for name, entry in self._entries.items() if name not in names}
        self._give_back(gone)
        for entry in gone:
            entry.store.close()
        self._begin_run()

    def _give_back(self, entries: Iterable[_Entry]) -> None:
        """Have the ready rows of partitions that are no longer delivered apart, by one pass over all."""
        with self.memory.changing():
            self.memory.merged.give_back(entry.store.state.resident.ready for entry in entries)

    def remove_left(self, now_ms: int) -> int:
        """Remove the indexes of partitions that left long ago. Returns their number. Raises DiskFailure."""
        return self.directory.remove_left(self._entries, now_ms)

    def upkeep_of(self, names: Collection[SourceName] | None) -> Upkeep:
        """Maintenance of some partitions (None: of all)."""
        return Upkeep(lambda: [each.store for name, each in self._entries.items() if names is None or name in names])

    def in_life(self, *lives: Life) -> list[SourceName]:
        """The partitions in one of these states."""
        return [name for name, entry in self._entries.items() if entry.life in lives]

    def arrive(self) -> list[SourceName]:
        """Let partitions that have caught up with their committed O deliver their commands; between two transactions.
        Returns the ones that have caught up since the last call."""
        self._must_be_between_transactions()
        arrived = [name for name in self.in_life(Life.CATCHING_UP) if self._entries[name].store.is_caught_up()]
        for name in arrived:
            self._entries[name].become(Life.COMMANDS_FIRST)
        return arrived

    def go_live(self, names: Iterable[SourceName]) -> None:
        """Let arrived partitions deliver all rows; between two transactions."""
        self._must_be_between_transactions()
        for name in names:
            self._entries[name].become(Life.LIVE)

    def hold(self, sources: Collection[int]) -> None:
        """Hold these partitions (numbers), and release all others; between two transactions."""
        self._must_be_between_transactions()
        self._give_back([entry for entry in self._delivered() if entry.lender.source in sources])
        for entry in self._delivered():
            if entry.lender.source in sources:
                entry.become(Life.HELD)
            elif entry.life is Life.HELD:
                entry.become(Life.COMMANDS_FIRST)
        self.wake()

    def read_again(self) -> None:
        """Begin a new run if it is due for partitions that were held without room, and now have room and no hold: they
        are read from their next offsets."""
        entries = [each for name, each in self._entries.items() if name not in self.damage.names]
        if any(each.since > self.run and each.life is not Life.HELD and each.store.has_room() for each in entries):
            self._begin_run()

    def next_offsets(self, run: int | None = None) -> dict[SourceName, int]:
        """The next expected offset of each partition; of a `run`, only of partitions that take its rows in."""
        here = self._entries.items()
        return {name: entry.store.next_offset for name, entry in here if run is None or entry.since <= run}

    def committed(self) -> dict[SourceName, Progress]:
        """The committed state of each partition."""
        return {name: entry.store.committed for name, entry in self._entries.items()}

    # ---- ingest

    def append(
        self,
        entries: pa.Table,
        ends: Mapping[SourceName, int],
        now_ms: int,
        beat: Callable[[], None] = lambda: None,
        run: int | None = None,
    ) -> int:
        """Take in a batch of a run (None: the present one): rows of `entry.ENTRY` with their topics and partitions;
        `ends` are its exclusive end offsets. Rows of closed partitions are left out, and so are rows that may have a
        gap before them: of partitions that came after the run began, or that are read again. Returns the number of new
        rows. Raises as `TimerStore.append`."""
        run = self.run if run is None else run
        here = self._entries
        reached = [(here[name], end) for name, end in ends.items() if name in here and here[name].since <= run]
        intake = Intake(entries, self.sources)
        for entry, _ in reached:  # before the first take, as they share the room
            if not entry.store.has_room():
                with self._unless_left(entry, now_ms):
                    entry.store.wait_for_room(partial(self._must_not_wait, entry, beat))
        reached = [(entry, end) for entry, end in reached if entry.since <= run]
        taken, done = intake.take_in(self.memory, [(entry.lender.source, entry.store, end) for entry, end in reached])
        for entry, end in reached:
            if entry.lender.source in done:
                continue
            with self._unless_left(entry, now_ms):
                batch = intake.part(entry.lender.source)
                taken += entry.store.take_in(batch, end, now_ms, partial(self._must_not_wait, entry, beat))
        if any(entry.life is Life.CATCHING_UP and entry.store.is_caught_up() for entry, _ in reached):
            self.wake()
        return taken

    @contextmanager
    def _unless_left(self, entry: _Entry, now_ms: int) -> Iterator[None]:
        """A context that takes in rows. It leaves out a store that was closed because its partition has left, and until
        the next run the store of a held partition without room, or one with a damaged file."""
        try:
            yield
        except _HeldWithoutRoom:
            entry.since = self.run + 1
        except Corrupt as corrupt:  # a cancel by origin reads segments
            entry.since = self.run + 1
            if self._entries.get(entry.name) is entry:
                self.damage.set_aside(corrupt, now_ms)
        except Closed:
            if self._entries.get(entry.name) is entry:
                raise

    @staticmethod
    def _must_not_wait(entry: _Entry, beat: Callable[[], None]) -> None:
        """The `beat` of a wait for room: ends it for a held partition."""
        beat()
        if entry.life is Life.HELD and not entry.store.has_room():
            raise _HeldWithoutRoom

    def has_room(self) -> bool:
        """Whether `append` need not wait for room."""
        return all(each.life is Life.HELD or each.store.has_room() for each in self._entries.values())

    def behind(self, without: Collection[SourceName] = ()) -> int:
        """The number of offsets up to the committed O of the partitions that catch up, `without` some."""
        here = self._entries
        names = [name for name, each in here.items() if each.life is Life.CATCHING_UP and name not in without]
        return Prepared({name: here[name].store for name in names}).behind()

    # ---- dispatcher

    def begin(self, now_ms: int, *, only_output: bool = False) -> Loan:
        """Start a transaction, one at a time. `only_output`: if it has output, only the committed states of the
        partitions with output change. Raises Misuse while one is open."""
        self._must_be_between_transactions()
        lenders = [entry.lender for entry in self._delivered()]
        self._loan = Loan(lenders, self.memory, now_ms, only_output=only_output, on_end=self._end_loan)
        return self._loan

    def _end_loan(self) -> None:
        self._loan = None

    def _must_be_between_transactions(self) -> None:
        if self._loan is not None:
            raise Misuse("a transaction is open", code="DB-7003")

    def next_wakeup_ms(self) -> int | None:
        """Due time of the next row in memory (ms), or None. A past time means: at once."""
        with self.memory.lock:
            times_ms = [self.memory.merged.first_at_ms(), *(entry.next_due_ms() for entry in self._entries.values())]
        return min((due_ms for due_ms in times_ms if due_ms is not None), default=None)

    def has_commands(self) -> bool:
        """Whether a partition in COMMANDS_FIRST has a command to deliver."""
        here = self._entries
        return any(here[name].next_due_ms() == AT_MIN for name in self.in_life(Life.COMMANDS_FIRST))

    def offsets_behind(self) -> bool:
        """Whether a transaction without rows would move an O that is behind ingest."""
        return any(each.store.offset_behind() for each in self._delivered())

    def needs_offset_commit(self) -> bool:
        """Whether O should be committed at once: a memtable needs a flush, which takes only rows below O."""
        return any(each.store.needs_offset_commit() for each in self._delivered())

    def is_clock_behind(self, now_ms: int) -> bool:
        """Whether the clock has stepped back behind a P by more than `Limits.clock_step_ms`."""
        return any(entry.store.is_clock_behind(now_ms) for entry in self._entries.values())

    def step_back(self, now_ms: int) -> None:
        """Go on after the clock has stepped back (invariant I4); between two transactions."""
        for entry in self._entries.values():
            entry.store.step_back(now_ms)

    def _delivered(self) -> list[_Entry]:
        return [entry for entry in self._entries.values() if entry.life is not Life.CATCHING_UP]

    def wait(self, timeout_s: float | None) -> None:
        """Sleep until a nearer row is appended, `wake` is called, or the time is over."""
        with self._news:
            self._news.wait_for(lambda: self._has_news or self._is_closed, timeout_s)
            self._has_news = False

    def wake(self) -> None:
        """End `wait` now."""
        with self._news:
            self._has_news = True
            self._news.notify_all()

    # ---- http

    @property
    def by_name(self) -> dict[SourceName, TimerStore]:
        """The open stores."""
        return {name: entry.store for name, entry in self._entries.items()}

    def stats(self, edges_ms: Sequence[int] = ()) -> Stats:
        """The sums of all stores' figures; `pending_until` has one count for each of `edges_ms` (epoch ms)."""
        parts = [entry.store.stats(edges_ms) for entry in self._entries.values()]
        return replace(Stats.sum(parts, len(edges_ms)), physical_bytes=self.memory.chunks.physical_bytes)

    def find(
        self, query: Query, now_ms: int, *, after: NamedPosition | None = None, limit: int = 100, bulky: bool = False
    ) -> Page:
        """A page of the matching pending messages, the soonest first, behind the cursor `after`; with values, headers
        and whole keys if `bulky`. A page may have fewer rows than `limit` (1 to 1,000), even none, although others
        follow. Raises KeyError for a cursor of an unknown partition; Corrupt, DiskFailure."""
        self._must_be_known(after)
        if not 1 <= limit <= ROWS_MAX:
            raise Misuse(f"a page has 1 to {ROWS_MAX} rows, not {limit}", code="DB-7003")
        return search.page(self.by_name, query, now_ms, after, limit, bulky=bulky)

    def find_originals(
        self, query: Query, now_ms: int, *, after: NamedPosition | None = None, limit: int = ORIGINALS_MAX
    ) -> Originals:
        """As `find`, with origins and due times only, for up to 10,000 messages (`limit`)."""
        self._must_be_known(after)
        return search.originals(self.by_name, query, now_ms, after, limit)

    def count_where(self, query: Query, now_ms: int, *, scanned_rows_max: int = SCANNED_ROWS_MAX) -> Count:
        """The number of matching pending messages; without IO for all messages, and for a target. Raises Corrupt,
        DiskFailure."""
        return search.count(self.by_name, query, now_ms, scanned_rows_max)

    def export(self, query: Query, now_ms: int, *, bulky: bool) -> StoresExport:
        """All matching pending messages, as Arrow batches of `search.SCHEMA`. Raises Corrupt, DiskFailure."""
        return StoresExport(self.by_name, query, now_ms, bulky=bulky)

    def pending_until(self, edges_ms: Sequence[int]) -> tuple[int, ...]:
        """The number of messages that come up before each of `edges_ms` (epoch ms); exact at whole ten seconds."""
        parts = [entry.store.pending_until(edges_ms) for entry in self._entries.values()]
        return tuple(map(sum, zip(*parts, strict=True))) if parts else (0,) * len(edges_ms)

    def waits_since_ms(self) -> int | None:
        """The time since which the oldest pending message waits (epoch ms); None if no message is pending."""
        found = (entry.store.waits_since_ms() for entry in self._entries.values())
        return min((since_ms for since_ms in found if since_ms is not None), default=None)

    def pending_from(
        self, name: SourceName, offset: int, now_ms: int, is_over: Callable[[], bool] = lambda: False
    ) -> int:
        """See `TimerStore.pending_from`; 0 for a closed partition."""
        entry = self._entries.get(name)
        return 0 if entry is None else entry.store.pending_from(offset, now_ms, is_over)

    def trimmed(self, log_starts: Mapping[SourceName, int]) -> dict[SourceName, Trimmed]:
        """The partitions with unfinished rows that only their stores have, because the records are gone from Kafka."""
        found = self._below(log_starts, stats.trimmed)
        return {name: each for name, each in found.items() if each.is_any}

    def may_hold_below(self, bounds: Mapping[SourceName, int]) -> set[SourceName]:
        """The partitions in which rows below these offsets may be unfinished."""
        return {name for name, is_any in self._below(bounds, stats.may_hold_below).items() if is_any}

    def _below(
        self, bounds: Mapping[SourceName, int], look: Callable[[StoreState, int], Callable[[RowRefs], T]]
    ) -> dict[SourceName, T]:
        """The result of `look` at the rows below an offset of each open partition. One pass over the merged rows,
        without the lock, is enough for all."""
        here = [(entry, bounds[name]) for name, entry in self._entries.items() if name in bounds]
        with self.memory.lock:
            merged_below = self.memory.merged.below({entry.lender.source: bound for entry, bound in here})
            looks = [(entry, look(entry.store.state, bound)) for entry, bound in here]
        merged = merged_below()
        return {entry.name: examine(merged.get(entry.lender.source, EMPTY)) for entry, examine in looks}

    def _must_be_known(self, after: NamedPosition | None) -> None:
        if after is not None:
            self.sources.index(*after[1:3])

    # ---- the end

    def close_intake(self) -> None:
        """Take in no more rows: `append` raises Closed, even while it waits. Delivery and flushes go on."""
        self._is_intake_closed = True
        for entry in self._entries.values():
            entry.store.close_intake()

    def close(self) -> None:
        """Release the directory and end every wait. The next start reads rows without a segment from Kafka again."""
        if self._is_closed:
            return
        self._is_closed = True
        for entry in self._entries.values():
            entry.store.close()
        self.directory.release()
        self.wake()


class _HeldWithoutRoom(Exception):
    """Ends a wait for room in a held partition: deliveries may not make room there for a long time."""
