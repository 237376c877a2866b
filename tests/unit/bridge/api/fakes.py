"""A bridge for the API to ask, whose pending messages are a list."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa

from bridge.api.source import (
    BatchStream,
    CommandChannel,
    DeadLetterTopics,
    NotOwnedError,
    Order,
    Overview,
    PauseControl,
    PendingMessages,
)
from bridge.dead_letters.listing import LetterPage, PlacedLetter
from bridge.delivery.targets.target import TargetReport
from bridge.stores.names import NamedPosition, SourceName
from bridge.stores.search import SCHEMA, Originals, Page, PendingRow, Query
from bridge.telemetry.health import Phase
from bridge.telemetry.lateness import RecentLateness
from bridge.telemetry.metrics import StoreSnapshot
from bridge.wire.answers import Answer, Outcome
from bridge.wire.committed_state import Pause
from bridge.wire.headers import Origin
from bridge.wire.letters import Letter, LetterChoice, RedriveReport
from bridge.wire.reasons import RejectReason
from timerstore.operations.find import Count, PendingState

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
        self.unread: list[PendingRow] = []
        """Messages whose records are in the log."""

    def find(self, query: Query, now_ms: int, *, after: NamedPosition | None, limit: int, bulky: bool) -> Page:
        """A page; without values and headers unless `bulky`."""
        assert now_ms == NOW_MS
        self._note(query)
        if after is not None and after[1] != "delay":
            raise KeyError(after[1])
        found = [row for row in self.rows if _fits(query, row) and (after is None or _position(row) > after)]
        rows = tuple(row if bulky else replace(row, value=None, headers=()) for row in found[:limit])
        return Page(rows=rows, next=_position(rows[-1]) if len(found) > limit else None)

    def find_originals(self, query: Query, now_ms: int, *, after: NamedPosition | None, limit: int) -> Originals:
        """Of a page."""
        page = self.find(query, now_ms, after=after, limit=limit, bulky=False)
        rows = {(row.topic, row.partition): list[tuple[int, int]]() for row in page.rows}
        for row in page.rows:
            rows[row.topic, row.partition].append((row.origin, row.due_ms))
        columns = {source: np.array(each, np.int64).T for source, each in rows.items()}
        return Originals(found={source: (each[0], each[1]) for source, each in columns.items()}, next=page.next)

    def count_where(self, query: Query, now_ms: int) -> Count:
        """An exact count."""
        assert now_ms == NOW_MS
        self._note(query)
        return Count(rows=sum(_fits(query, row) for row in self.rows), is_exact=True)

    def pending_until(self, edges_ms: Sequence[int]) -> tuple[int, ...]:
        """Exact."""
        return tuple(sum(row.at_ms < edge for row in self.rows) for edge in edges_ms)

    def next_offsets(self) -> Mapping[SourceName, int]:
        """Behind all messages."""
        return {("delay", n): max((row.offset + 1 for row in self.rows), default=0) for n in (0, 1)}

    def export(self, query: Query, now_ms: int, *, bulky: bool) -> BatchStream:  # noqa: ARG002 - as the store has it
        """A batch for each row, with little in it: tests of what is in it have a real store."""
        assert now_ms == NOW_MS
        self._note(query)
        found = [row for row in self.rows if _fits(query, row)]
        rows = ([{"partition": row.partition, "offset": row.offset}] for row in found)
        return (pa.RecordBatch.from_pylist(each, schema=SCHEMA) for each in rows)

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
        and (row.schedule is not None or not query.recurring)
    )


@dataclass
class Dispatcher:
    """A `CommandChannel` that answers at once, as the store has it; commands of `silent` offsets have no answer."""

    store: Store
    sent: list[Order] = field(default_factory=list)
    silent: set[int] = field(default_factory=set)
    error: Exception | None = None
    partition: int = 0

    def send(self, orders: Sequence[Order]) -> Sequence[Future[Sequence[Answer]]]:
        """Cancelled messages stay in the store, moved ones come up when they are due."""
        return [self._send(order) for order in orders]

    def _send(self, order: Order) -> Future[Sequence[Answer]]:
        if order.source != ("delay", self.partition):
            raise NotOwnedError(order.source[0])
        future: Future[Sequence[Answer]] = Future()
        self.sent.append(order)
        if self.error is not None:
            future.set_exception(self.error)
        elif not self.silent.intersection(order.origins):
            outcomes = Counter(self._act(origin, order.due_ms) for origin in order.origins)
            command = ("delay", self.partition, 1_000 + len(self.sent))
            future.set_result(
                [Answer(outcome=outcome, count=count, command=command) for outcome, count in outcomes.items()]
            )
        return future

    def _act(self, origin: int, due_ms: int | None) -> Outcome:
        for i, row in enumerate(self.store.rows):
            if row.origin == origin and row.state is not PendingState.CANCELLED:
                moved = replace(row, due_ms=due_ms, at_ms=due_ms, offset=row.offset + 10_000) if due_ms else row
                self.store.rows[i] = moved if due_ms else replace(row, state=PendingState.CANCELLED)
                self.store.rows.sort(key=_position)
                return Outcome.MOVED if due_ms else Outcome.CANCELLED
        return Outcome.NOT_PENDING


def letter(offset: int, **values: Any) -> PlacedLetter:
    """A dead letter of the target `orders`."""
    inner = Letter(
        headers=[("delay-topic", b"orders"), ("own", b"1")],
        reason="unknown-target",
        topic="delay",
        partition=0,
        target="orders",
        origin=f"delay/0/{offset}",
        detail="orders does not exist",
        attempts=16,
    )
    placed = PlacedLetter(
        place=("delay.dlt", 0, offset), ts_ms=NOW_MS + offset, letter=inner, key=b"k", value=b"v", redriven=False
    )
    return replace(placed, **values)


@dataclass
class Letters:
    """`DeadLetterTopics` in a list."""

    rows: list[PlacedLetter] = field(default_factory=list)
    chosen: list[LetterChoice] = field(default_factory=list)

    def page(self, choice: LetterChoice, below: Mapping[SourceName, int] | None, limit: int) -> LetterPage:
        """The newest first."""
        self.chosen.append(choice)
        end = None if below is None else below["delay.dlt", 0]
        fits = [each for each in self.rows if choice.chooses(each.letter, each.ts_ms, each.place)]
        found = sorted((each for each in fits if end is None or each.place[2] < end), key=lambda each: -each.place[2])
        page = found[:limit]
        return LetterPage(letters=page, next={("delay.dlt", 0): page[-1].place[2]} if len(found) > limit else None)

    def get(self, place: Origin) -> PlacedLetter | None:
        """By its place."""
        return next((each for each in self.rows if each.place == place), None)

    def redrive(self, choice: LetterChoice, *, execute: bool) -> RedriveReport:
        """Those that have gone back say so."""
        report = RedriveReport()
        for i, each in enumerate(self.rows):
            if not choice.chooses(each.letter, each.ts_ms, each.place):
                report.left += 1
            elif each.redriven:
                report.before += 1
            elif each.letter.is_cut or (each.letter.reason[:4] == "bad-" and not choice.due_now):
                report.broken[each.letter.reason, each.letter.target] += 1
            else:
                report.back[each.letter.reason, each.letter.target] += 1
                self.rows[i] = replace(each, redriven=execute)
        return report


@dataclass
class Paused:
    """A `PauseControl` with a set."""

    found: set[str] = field(default_factory=set)
    said: list[tuple[int | None, str]] = field(default_factory=list)
    """Until when, and why."""

    def names(self) -> frozenset[str]:
        """As they are."""
        return frozenset(self.found)

    def topics(self) -> frozenset[str]:
        """The default target of `delay` is `orders`."""
        return frozenset(["delay"] if "orders" in self.found else [])

    def owns(self, name: str) -> bool:
        """The delay topic, and its dead letters."""
        return name in ("delay", "delay.dlt")

    def put(self, name: str, *, paused: bool, until_ms: int | None = None, why: str = "") -> bool:
        """In memory."""
        self.said.append((until_ms, why))
        before = name in self.found
        (self.found.add if paused else self.found.discard)(name)
        return before is not paused


@dataclass
class Bridge:
    """A `Source`."""

    store: Store | None = field(default_factory=Store)
    where: Phase = field(default_factory=lambda: Phase(name="running", ready=True, reader="spark"))
    gauges: StoreSnapshot = field(default_factory=StoreSnapshot)
    letters: Letters = field(default_factory=Letters)
    paused: Paused = field(default_factory=Paused)
    dispatcher: Dispatcher | None = None
    joining: list[SourceName] = field(default_factory=list)
    """The partitions that are not read up to their committed offsets."""

    def __post_init__(self) -> None:
        """A dispatcher of the store."""
        if self.dispatcher is None and self.store is not None:
            self.dispatcher = Dispatcher(self.store)

    def commands(self) -> CommandChannel | None:
        """As it was set."""
        return self.dispatcher

    def dead_letters(self) -> DeadLetterTopics:
        """As it was set."""
        return self.letters

    def pauses(self) -> PauseControl:
        """As it was set."""
        return self.paused

    def now_ms(self) -> int:
        """The same at all times."""
        return NOW_MS

    def phase(self) -> Phase:
        """As it was set."""
        return self.where

    def pending(self) -> PendingMessages | None:
        """As it was set."""
        return self.store

    def unread(self) -> Sequence[SourceName]:
        """As it was set."""
        return self.joining

    def log_ends(self) -> Mapping[SourceName, int]:
        """Behind all messages, read or not."""
        if self.store is None:
            return {}
        beyond = {("delay", 0): max((row.offset + 1 for row in self.store.unread), default=0)}
        return {name: max(end, beyond.get(name, 0)) for name, end in self.store.next_offsets().items()}

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
        """One in trouble, one that is well, and all paused ones."""
        failing = TargetReport(
            name="orders",
            partitions=3,
            failing_partitions=1,
            reason=RejectReason.TARGET_UNAVAILABLE,
            detail="no leader",
            open_breakers=1,
            retry_s=4.26,
        )
        known = {each.name: each for each in (failing, TargetReport(name="well", partitions=1))}
        for name in sorted(self.paused.names()):
            report = known.get(name, TargetReport(name=name, partitions=0))
            known[name] = replace(report, pause=Pause(name=name, changed_ms=NOW_MS))
        return list(known.values())
