"""What is asked and answered, as the OpenAPI document shows it. Times are epoch milliseconds, or null."""

from __future__ import annotations

import base64
import re
from binascii import Error as Base64Error
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, Final, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from bridge.api import cursor as cursors
from bridge.telemetry.lateness import RecentLateness
from bridge.wire.headers import parse_until
from timerstore.operations.find import KEY_BYTES_MAX, PENDING, ROWS_MAX, PendingRow, PendingState, Query
from timerstore.rows.position import OFFSET_MAX
from timerstore.rows.sources import NamedPosition

PREVIEW_BYTES_MAX: Final = KEY_BYTES_MAX
"""Of a key, a value or a header."""
ANSWER_BYTES_MAX: Final = 1 << 20
"""Of a list in an answer: a page ends before."""
HEADERS_MAX: Final = 100
"""Of a message that is shown."""
NAME_LENGTH_MAX: Final = 250
"""Of a header's name that is shown."""
LIMIT_DEFAULT: Final = 100
EDGES_MAX: Final = 101
TEXT_LENGTH_MAX: Final = 8_192
"""Of a filter's text; a longer one does not fit into a request."""

OWN_PREFIX: Final = "delay-"
"""Of the headers that the bridge reads and writes."""

INCOMPLETE: Final = "Instances that did not answer: what they have is missing here."

Text = Annotated[str, StringConstraints(max_length=TEXT_LENGTH_MAX)]


class Filters(BaseModel):
    """Which messages are wanted: those that fit all that is given."""

    model_config = ConfigDict(extra="forbid")

    id: Annotated[str, StringConstraints(min_length=1, max_length=TEXT_LENGTH_MAX)] | None = Field(
        default=None, description="The value of delay-id."
    )
    origin: Text | None = Field(
        default=None, description="TOPIC/PARTITION/OFFSET of the record that was sent; finds its copies too."
    )
    key: Text | None = Field(default=None, description="The key, if it is text.")
    key_base64: Text | None = Field(default=None, description="The key, if it is not.")
    target: Text | None = Field(default=None, description="The real topic; empty: the delay topic's default.")
    due_from: Text | None = Field(default=None, description="Due then or later: RFC 3339 with a zone, or epoch ms.")
    due_until: Text | None = Field(default=None, description="Due before then.")
    at_from: Text | None = Field(default=None, description="`at`, when the bridge acts on it next, is then or later.")
    at_until: Text | None = Field(default=None, description="`at` is before then.")
    state: list[PendingState] = Field(
        default=[],
        description="In one of these states; without any: in all but cancelled.",
        max_length=len(PendingState),
    )

    def query(self) -> Query:
        """For the store. Raises ValueError that says which parameter is wrong, and what to write."""
        if self.key is not None and self.key_base64 is not None:
            raise ValueError("key and key_base64 are both given: give one of them.")
        key = None if self.key is None else self.key.encode()
        if self.key_base64 is not None:
            key = parsed("key_base64", _base64, self.key_base64)
        return Query(
            id=self.id,
            origin=None if self.origin is None else parsed("origin", _origin, self.origin),
            key=key,
            target=self.target,
            due_from_ms=time("due_from", self.due_from),
            due_until_ms=time("due_until", self.due_until),
            at_from_ms=time("at_from", self.at_from),
            at_until_ms=time("at_until", self.at_until),
            states=frozenset(self.state) or PENDING,
        )


class PageFilters(Filters):
    """The same, and which page of it."""

    cursor: Text | None = Field(default=None, description="`next` of the page before.")
    limit: int = Field(default=LIMIT_DEFAULT, ge=1, le=ROWS_MAX, description="Messages of a page.")

    def after(self) -> NamedPosition | None:
        """Where the page begins. Raises ValueError for what is no cursor."""
        return None if self.cursor is None else cursors.read(self.cursor)


M = TypeVar("M", bound=BaseModel)


def fitting(items: Iterable[M]) -> list[M]:
    """The first items, as many as fit into an answer, one at least."""
    found: list[M] = []
    size = 0
    for item in items:
        size += len(item.model_dump_json(exclude_unset=True).encode())
        if found and size > ANSWER_BYTES_MAX:
            break
        found.append(item)
    return found


def parsed(name: str, parse: Callable[[str], Any], text: str) -> Any:
    """What `parse` makes of a parameter. Raises ValueError that names it."""
    try:
        return parse(text)
    except ValueError as error:
        raise ValueError(f"{name}: {error}.") from None


def _base64(text: str) -> bytes:
    """Base64, also as URLs have it; a plus sign that arrives as a blank is one."""
    normal = text.replace(" ", "+").replace("-", "+").replace("_", "/").rstrip("=")
    try:
        return base64.b64decode(normal + "=" * (-len(normal) % 4), validate=True)
    except (Base64Error, ValueError):
        raise ValueError("not base64; text goes into key") from None


def _origin(text: str) -> tuple[str, int, int]:
    match = re.fullmatch(r"([^/]+)/([0-9]{1,10})/([0-9]{1,15})", text, re.ASCII)
    if match is None or int(match[2]) > cursors.PARTITION_MAX or int(match[3]) > OFFSET_MAX:
        raise ValueError("write it as TOPIC/PARTITION/OFFSET, such as delay/0/42")
    return match[1], int(match[2]), int(match[3])


def time(name: str, text: str | None) -> int | None:
    """Epoch milliseconds of a parameter; a plus sign before the zone that arrives as a blank is one."""
    return None if text is None else int(parsed(name, parse_until, re.sub(r" ([0-9]{2}:[0-9]{2})$", r"+\1", text)))


class Edges(BaseModel):
    """The times between which messages are counted."""

    model_config = ConfigDict(extra="forbid")

    edge: list[Text] = Field(
        min_length=1, max_length=EDGES_MAX, description="In order; exact at whole ten seconds. As due_from."
    )

    def times(self) -> list[int]:
        """Epoch milliseconds. Raises ValueError that says what is wrong."""
        times = [int(parsed("edge", parse_until, each)) for each in self.edge]
        if times != sorted(times):
            raise ValueError("edge: give the times in order.")
        return times


class Timeline(BaseModel):
    """How many messages come up, by the time at which the bridge acts on them next (`at`)."""

    before: int = Field(description="Before the first edge.")
    counts: list[int] = Field(description="From each edge to the next.")
    after: int = Field(description="From the last edge on.")
    incomplete: list[str] = Field(default=[], description=INCOMPLETE)


class Blob(BaseModel):
    """Bytes: `text` if they are UTF-8, else `base64`; cut where `truncated`."""

    text: str | None = None
    base64: str | None = None
    truncated: bool = False

    @classmethod
    def of(cls, value: bytes, bytes_max: int | None = None) -> Self:
        """Of the first `bytes_max` bytes; a character that is cut in two is left out."""
        head = value[:bytes_max]
        blob = cls._of_head(head, cut=len(head) < len(value))
        if len(head) < len(value):
            blob.truncated = True
        return blob

    @classmethod
    def _of_head(cls, head: bytes, *, cut: bool) -> Self:
        try:
            return cls(text=head.decode())
        except UnicodeDecodeError as error:
            if cut and error.end == len(head) and error.reason == "unexpected end of data":
                return cls(text=head[: error.start].decode())
        return cls(base64=base64.b64encode(head).decode())


class HeaderValue(Blob):
    """A header; null, where it has neither `text` nor `base64`."""

    name: str


class Bulk(BaseModel):
    """What a message carries, as far as it is shown: where http.show_payloads is off, neither its value nor its own
    headers."""

    headers: list[HeaderValue] = Field(description="Without http.show_payloads only those of the bridge (delay-*).")
    headers_left_out: int = Field(description="How many headers are not shown.")
    value: Blob | None = Field(description="null as well where http.show_payloads is off.")
    value_bytes: int | None = Field(description="The size of the value; null: it has none.")


def bulk(headers: Sequence[tuple[str, bytes | None]], value: bytes | None, *, show_payloads: bool) -> dict[str, Any]:
    """The fields of `Bulk`, each cut where it is long."""
    shown = [(name, value) for name, value in headers if show_payloads or name.startswith(OWN_PREFIX)][:HEADERS_MAX]
    listed = fitting(map(_header, shown))
    return {
        "headers": listed,
        "headers_left_out": len(headers) - len(listed),
        "value": None if value is None or not show_payloads else Blob.of(value, PREVIEW_BYTES_MAX),
        "value_bytes": None if value is None else len(value),
    }


def _header(header: tuple[str, bytes | None]) -> HeaderValue:
    name, value = header
    blob = {} if value is None else Blob.of(value, PREVIEW_BYTES_MAX).model_dump(exclude_unset=True)
    return HeaderValue(name=name[:NAME_LENGTH_MAX], **blob)


class Message(BaseModel):
    """A pending message. `origin` is the record that was sent, (topic, partition, offset) the one that holds it now."""

    topic: str
    partition: int
    offset: int
    origin: str = Field(description="topic/partition/offset")
    due: int = Field(description="When it is to be delivered.")
    at: int = Field(description="When the bridge acts on it next; before `due` if it writes it again.")
    ts: int = Field(description="The timestamp of the record that holds it.")
    state: PendingState
    target: str = Field(description="Empty: the delay topic's default.")
    target_partition: int | None
    key: Blob | None
    id: str | None
    rolls: int
    attempts: int
    reason: str | None = Field(description="Why the last attempt failed.")

    @classmethod
    def of(cls, row: PendingRow) -> Self:
        return cls(**cls._fields(row))

    @staticmethod
    def _fields(row: PendingRow) -> dict[str, Any]:
        return {
            "topic": row.topic,
            "partition": row.partition,
            "offset": row.offset,
            "origin": f"{row.topic}/{row.partition}/{row.origin}",
            "due": row.due_ms,
            "at": row.at_ms,
            "ts": row.ts_ms,
            "state": row.state,
            "target": row.target,
            "target_partition": row.target_partition,
            "key": None if row.key is None else Blob.of(row.key, PREVIEW_BYTES_MAX),
            "id": row.id,
            "rolls": row.rolls,
            "attempts": row.attempt,
            "reason": row.reason,
        }


class MessageDetail(Message, Bulk):
    """One message with what it carries."""

    @classmethod
    def of_all(cls, row: PendingRow, *, show_payloads: bool) -> Self:
        return cls(**cls._fields(row), **bulk(row.headers, row.value, show_payloads=show_payloads))


class Messages(BaseModel):
    """A page, what comes up first at its beginning. It may have fewer messages than its limit, or none, and others
    behind it."""

    messages: list[Message]
    next: str | None = Field(description="The cursor of the next page; null: there are no more.")
    incomplete: list[str] = Field(default=[], description=INCOMPLETE)


class Counted(BaseModel):
    """How many messages fit; at least so many where it is not exact."""

    count: int
    exact: bool
    incomplete: list[str] = Field(default=[], description=INCOMPLETE)


class PauseState(BaseModel):
    """A pause of a target."""

    since: int
    until: int | None = Field(description="When it ends by itself; null: when the target is resumed.")
    reason: str = Field(description="As the operator gave it.")


class TargetState(BaseModel):
    """A target that the bridge has used, and what is wrong with it."""

    name: str
    partitions: int = Field(description="0: not known.")
    failing_partitions: int = Field(description="Those that take nothing now.")
    reason: str | None
    detail: str | None = Field(description="The last error.")
    open_breakers: int = Field(description="Partitions, or the whole topic, that are left alone for a while.")
    retry_in_s: float | None = Field(description="Until the first of them may be tried again.")
    paused: bool = Field(description="By an operator: its messages are put off.")
    pause: PauseState | None = Field(default=None, description="Absent where it is not paused.")
    pausable: bool = Field(description="false: it is a topic of the bridge itself, such as a delay topic.")


class TargetStates(BaseModel):
    """Targets, those in trouble first."""

    targets: list[TargetState]
    incomplete: list[str] = Field(default=[], description=INCOMPLETE)


class PartitionState(BaseModel):
    """A partition of a delay topic that this instance owns."""

    topic: str
    partition: int
    lag: int = Field(description="Records that are not read yet.")
    behind_s: float = Field(description="For how long the oldest of them waits.")


class FailingTarget(BaseModel):
    """A target, and why partitions of it take nothing now."""

    name: str
    reason: str
    partitions: int


class PausedTarget(BaseModel):
    """A target that an operator has paused."""

    name: str
    paused_s: float = Field(description="For how long.")


class TimeToGo(BaseModel):
    """How many messages come up within `until` (`more`: later), and not within the one before."""

    until: str
    pending: int


class Lateness(BaseModel):
    """Of the messages that were delivered in the last `over_s` seconds."""

    delivered: int
    p99_ms: float | None = Field(description="null: there are none.")
    over_s: float = Field(description="At most five minutes and a little.")

    @classmethod
    def of(cls, recent: RecentLateness) -> Self:
        p99_ms = None if recent.p99_ms is None else round(recent.p99_ms, 1)
        return cls(delivered=recent.delivered, p99_ms=p99_ms, over_s=round(recent.over_s, 1))


class Disk(BaseModel):
    """The volume of the index."""

    bytes: int | None
    free_bytes: int | None
    segments: int
    segment_bytes: int
    full: bool


class Summary(BaseModel):
    """What this instance knows at once."""

    writable: bool = Field(description="Whether there are actions (http.api: write).")
    now: int
    phase: str
    ready: bool
    reasons: list[str]
    reader: str | None = Field(description="Which one reads the delay topics: spark or plain.")
    pending: int
    schedules: int = Field(description="How many of the pending come again.")
    overdue: int = Field(description="Whose time was over when the clock's current ten seconds began.")
    oldest_overdue_s: float
    next_at: int | None = Field(description="When the next message comes up, to ten seconds.")
    lateness: Lateness | None
    by_target: dict[str, int] = Field(description='The largest; "" is the delay topic\'s default target.')
    by_time_to_go: list[TimeToGo]
    partitions: list[PartitionState]
    retention_headroom_s: dict[str, float]
    disk: Disk
    failing: list[FailingTarget]
    paused: list[PausedTarget] = Field(default=[], description="The longest first.")
    incomplete: list[str] = Field(default=[], description=INCOMPLETE)


class ProblemDocument(BaseModel):
    """An error (RFC 9457)."""

    type: str
    title: str
    status: int
    detail: str
