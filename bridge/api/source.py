"""The bridge as the API sees it: its questions and its actions. Pure: the bridge imports this without FastAPI."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final, Protocol

import pyarrow as pa

from bridge.dead_letters.listing import LetterPage, PlacedLetter
from bridge.delivery.targets.target import TargetReport
from bridge.stores.names import NamedPosition, SourceName
from bridge.stores.search import Originals, Page, Query
from bridge.telemetry.health import Phase
from bridge.telemetry.lateness import RecentLateness
from bridge.telemetry.metrics import StoreSnapshot
from bridge.wire.answers import Answer
from bridge.wire.headers import Origin
from bridge.wire.letters import LetterChoice, RedriveReport
from timerstore.operations.find import Count

PREFIX: Final = "/api/v1"
EXPORT: Final = f"{PREFIX}/export"
BULK: Final = tuple(f"{PREFIX}/messages/{action}" for action in ("cancel", "move", "deliver"))
"""The paths of the export and of the bulk actions, whose requests take long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """The gauges at `now_ms`, and more for the API alone. Times are epoch milliseconds."""

    now_ms: int
    gauges: StoreSnapshot
    overdue: int
    """Messages with an effective time before the start of the clock's current ten seconds."""
    next_at_ms: int | None
    """The time at which the next message comes up: to ten seconds for a message on disk, in the past for an overdue
    one. None: no message is pending."""
    behind_s: Mapping[tuple[str, int], float]
    """The waiting time of unread records, by partition of the delay topics."""
    by_target: Mapping[str, int]
    """Pending messages of the largest targets; "" is the delay topic's default, as in a search."""
    lateness: RecentLateness | None
    """None: not measured yet."""


class BatchStream(Protocol):
    """The used part of `timerstore.operations.export.Export`."""

    def __next__(self) -> pa.RecordBatch:
        """The next batch."""

    def close(self) -> None:
        """Close the files."""


class PendingMessages(Protocol):
    """The used part of `Stores`."""

    def find(self, query: Query, now_ms: int, *, after: NamedPosition | None, limit: int, bulky: bool) -> Page:
        """See `Stores.find`."""

    def find_originals(self, query: Query, now_ms: int, *, after: NamedPosition | None, limit: int) -> Originals:
        """See `Stores.find_originals`."""

    def count_where(self, query: Query, now_ms: int) -> Count:
        """See `Stores.count_where`."""

    def pending_until(self, edges_ms: Sequence[int]) -> tuple[int, ...]:
        """See `Stores.pending_until`."""

    def next_offsets(self) -> Mapping[SourceName, int]:
        """See `Stores.next_offsets`."""

    def export(self, query: Query, now_ms: int, *, bulky: bool) -> BatchStream:
        """See `Stores.export`."""


@dataclass(frozen=True, slots=True)
class Order:
    """An order to cancel at most `headers.NAMED_MAX` messages of one partition of a delay topic, or to move one."""

    source: SourceName
    origins: tuple[int, ...]
    """The offsets of their originals, each once."""
    due_ms: int | None
    """Their new due time; None: cancel them."""


class CommandChannel(Protocol):
    """Writes commands into the delay topics, and receives their answers. Any thread."""

    def send(self, orders: Sequence[Order]) -> Sequence[Future[Sequence[Answer]]]:
        """Write a command for each order, in order; blocks while too many are under way. The result of a future is its
        command's answers, whose counts add up to the number of named messages. A future fails with BridgeError if the
        command could not be written. Without answers it never ends: cancel it to stop waiting.

        Raises NotOwnedError for an origin in another instance's partition, ValueError for a due time too far away,
        BridgeError if too many commands are under way for long.
        """


class NotOwnedError(Exception):
    """This instance does not own the message's partition."""


class DeadLetterTopics(Protocol):
    """The dead-letter topics. Any thread; each call may take seconds, and raises BridgeError."""

    def page(self, choice: LetterChoice, below: Mapping[SourceName, int] | None, limit: int) -> LetterPage:
        """At most `limit` letters; fewer, or none, if many records do not match."""

    def get(self, place: Origin) -> PlacedLetter | None:
        """The letter at `place`, or None."""

    def redrive(self, choice: LetterChoice, *, execute: bool) -> RedriveReport:
        """Put the chosen letters back, or only count them."""


class PauseControl(Protocol):
    """Targets that an operator has paused. Any thread."""

    def names(self) -> frozenset[str]:
        """The paused targets."""

    def topics(self) -> frozenset[str]:
        """The delay topics whose default target is paused."""

    def owns(self, name: str) -> bool:
        """Whether this is a topic of the bridge itself, which cannot be paused."""

    def put(self, name: str, *, paused: bool, until_ms: int | None = None, why: str = "") -> bool:
        """Pause a target, for ever or until a time, or resume it. Returns whether that changed anything. Raises
        ValueError for a target that cannot be paused, and BridgeError if the change could not be written: then nothing
        changes."""


class Source(Protocol):
    """The bridge, for any thread. Methods that are not marked *at once* may block."""

    def now_ms(self) -> int:
        """The bridge's clock."""

    def phase(self) -> Phase:
        """The bridge's phase; at once."""

    def pending(self) -> PendingMessages | None:
        """The pending messages; None until they are complete, and between two assignments. Those of partitions that
        have come later may not be: see `unread`. At once."""

    def unread(self) -> Collection[SourceName]:
        """The partitions of `pending` that are not read up to their committed O: messages may be missing. At once."""

    def log_ends(self) -> Mapping[SourceName, int]:
        """The ends of the logs of the partitions of `pending`. Raises BridgeError."""

    def overview(self) -> Overview | None:
        """The totals; None whenever `pending` is None."""

    def targets(self) -> Sequence[TargetReport]:
        """The known and the paused targets, failing ones first."""

    def commands(self) -> CommandChannel | None:
        """The writer of commands; None until delivery runs, and between two assignments. At once."""

    def dead_letters(self) -> DeadLetterTopics:
        """The dead-letter topics; at once."""

    def pauses(self) -> PauseControl:
        """The pauses; at once."""
