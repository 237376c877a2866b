"""What the API asks of the bridge, and what it has the bridge do. Pure: the bridge imports this without FastAPI."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

from bridge.dead_letters.listing import LetterPage, PlacedLetter
from bridge.delivery.targets.target import TargetReport
from bridge.telemetry.health import Phase
from bridge.telemetry.lateness import RecentLateness
from bridge.telemetry.metrics import StoreSnapshot
from bridge.wire.answers import Answer
from bridge.wire.headers import Origin
from bridge.wire.letters import Choice, Report
from timerstore.operations.find import Count, Originals, Page, Query
from timerstore.rows.sources import NamedPosition, SourceName


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

    def find_originals(self, query: Query, now_ms: int, *, after: NamedPosition | None, limit: int) -> Originals:
        """See `TimerStore.find_originals`."""

    def count_where(self, query: Query, now_ms: int) -> Count:
        """See `TimerStore.count_where`."""

    def pending_until(self, edges_ms: Sequence[int]) -> tuple[int, ...]:
        """See `TimerStore.pending_until`."""

    def next_offsets(self) -> Mapping[SourceName, int]:
        """See `TimerStore.next_offsets`."""

    def export(self, query: Query, now_ms: int, *, bulky: bool) -> Export:
        """See `TimerStore.export`."""


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be done with messages of one partition of a delay topic, up to `headers.NAMED_MAX`."""

    source: SourceName
    origins: tuple[int, ...]
    """The offsets of their originals, each once."""
    due_ms: int | None
    """When they are to be due; None: they are cancelled."""


class Commands(Protocol):
    """Writes commands into the delay topics, and brings back their answers. Any thread."""

    def send(self, orders: Sequence[Order]) -> Sequence[Future[Sequence[Answer]]]:
        """Write a command for each, in order; blocks while too many are under way. A future has answers
        whose counts add up to as many messages as its command names. It fails with BridgeError where that could not be
        written, and never settles without answers: cancel it to give it up.

        Raises NotOwnedError for an origin of which another instance answers, ValueError for a time that is too far
        away, BridgeError where too many are under way for long.
        """


class NotOwnedError(Exception):
    """The message is of a partition that this instance does not own."""


class DeadLetters(Protocol):
    """The dead-letter topics. Any thread; each call may take seconds, and raises BridgeError."""

    def page(self, choice: Choice, below: Mapping[SourceName, int] | None, limit: int) -> LetterPage:
        """At most `limit` letters; fewer, or none, where many were looked at in vain."""

    def get(self, place: Origin) -> PlacedLetter | None:
        """One; None where there is none."""

    def redrive(self, choice: Choice, *, execute: bool) -> Report:
        """Put back what is chosen, or only count it."""


class Pauses(Protocol):
    """Targets that an operator has paused. Any thread."""

    def names(self) -> frozenset[str]:
        """Those that are paused."""

    def topics(self) -> frozenset[str]:
        """Delay topics whose default target is."""

    def owns(self, name: str) -> bool:
        """Whether it is a topic of the bridge itself, which cannot be paused."""

    def put(self, name: str, *, paused: bool, until_ms: int | None = None, why: str = "") -> bool:
        """Pause one, for ever or until a time, or resume it; whether that changed anything. Raises ValueError for one
        that cannot be, and BridgeError where it could not be written down: then nothing is changed."""


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

    def commands(self) -> Commands | None:
        """None until delivery runs, and between two assignments. At once."""

    def dead_letters(self) -> DeadLetters:
        """At once."""

    def pauses(self) -> Pauses:
        """At once."""
