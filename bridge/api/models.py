"""Requests and answers, as the OpenAPI document shows them. Times are epoch milliseconds, or null."""

from __future__ import annotations

import base64
import re
from binascii import Error as Base64Error
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, Final, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from bridge.api import cursor as cursors
from bridge.stores.names import NamedPosition
from bridge.stores.search import PendingRow, Query
from bridge.telemetry.lateness import RecentLateness
from bridge.wire.headers import parse_until
from timerstore.operations.find import KEY_BYTES_MAX, PENDING, ROWS_MAX, PendingState
from timerstore.rows.position import OFFSET_MAX

PREVIEW_BYTES_MAX: Final = KEY_BYTES_MAX
"""Maximum number of shown bytes of a key, value or header."""
ANSWER_BYTES_MAX: Final = 1 << 20
"""Maximum number of bytes of a list in an answer: a page ends before."""
HEADERS_MAX: Final = 100
"""Maximum number of shown headers of a message."""
NAME_LENGTH_MAX: Final = 250
"""Maximum number of shown characters of a header name."""
LIMIT_DEFAULT: Final = 100
EDGES_MAX: Final = 101
TEXT_LENGTH_MAX: Final = 8_192
"""Maximum number of characters of a filter; a request has no room for more."""

OWN_PREFIX: Final = "delay-"
"""The prefix of the headers that the bridge reads and writes."""

INCOMPLETE: Final = "Instances that did not answer: their messages are missing here."

Text = Annotated[str, StringConstraints(max_length=TEXT_LENGTH_MAX)]


class Filters(BaseModel):
    """The wanted messages: those that match all filters."""

    model_config = ConfigDict(extra="forbid")

    id: Annotated[str, StringConstraints(min_length=1, max_length=TEXT_LENGTH_MAX)] | None = Field(
        default=None, description="The value of delay-id."
    )
    origin: Text | None = Field(
        default=None, description="TOPIC/PARTITION/OFFSET of the message's first record; finds its copies too."
    )
    key: Text | None = Field(default=None, description="The key as text.")
    key_base64: Text | None = Field(default=None, description="The key in base64, if it is not text.")
    target: Text | None = Field(default=None, description="The target topic; empty: the delay topic's default.")
    due_from: Text | None = Field(default=None, description="The earliest due time: RFC 3339 with a zone, or epoch ms.")
    due_until: Text | None = Field(default=None, description="The end of the due times, exclusive.")
    at_from: Text | None = Field(
        default=None, description="The earliest `at`, the time at which the bridge acts on the message next."
    )
    at_until: Text | None = Field(default=None, description="The end of the times `at`, exclusive.")
    state: list[PendingState] = Field(
        default=[],
        description="One of these states; by default all except cancelled.",
        max_length=len(PendingState),
    )

    def query(self) -> Query:
        """The same for the store. Raises ValueError with the name of the invalid parameter, and advice."""
        if self.key is not None and self.key_base64 is not None:
            raise ValueError("key and key_base64 are both given: give one of them.")
        key = None if self.key is None else self.key.encode()
        if self.key_base64 is not None:
            key = parsed_parameter("key_base64", _base64, self.key_base64)
        return Query(
            id=self.id,
            origin=None if self.origin is None else parsed_parameter("origin", _origin, self.origin),
            key=key,
            target=self.target,
            due_from_ms=parse_time("due_from", self.due_from),
            due_until_ms=parse_time("due_until", self.due_until),
            at_from_ms=parse_time("at_from", self.at_from),
            at_until_ms=parse_time("at_until", self.at_until),
            states=frozenset(self.state) or PENDING,
        )


class PageFilters(Filters):
    """The filters, and a page of the list."""

    cursor: Text | None = Field(default=None, description="The previous page's `next`.")
    limit: int = Field(default=LIMIT_DEFAULT, ge=1, le=ROWS_MAX, description="Maximum number of messages.")

    def after(self) -> NamedPosition | None:
        """The position before the page. Raises ValueError for an invalid cursor."""
        return None if self.cursor is None else cursors.read_position(self.cursor)


M = TypeVar("M", bound=BaseModel)


def fitting_answer(items: Iterable[M]) -> list[M]:
    """The first items: at least one, and no more than ANSWER_BYTES_MAX."""
    taken: list[M] = []
    size = 0
    for item in items:
        size += len(item.model_dump_json(exclude_unset=True).encode())
        if taken and size > ANSWER_BYTES_MAX:
            break
        taken.append(item)
    return taken


def parsed_parameter(name: str, parse: Callable[[str], Any], text: str) -> Any:
    """The parsed value of a parameter. Raises ValueError with its name."""
    try:
        return parse(text)
    except ValueError as error:
        raise ValueError(f"{name}: {error}.") from None


def _base64(text: str) -> bytes:
    """The bytes of base64 in either alphabet. A blank counts as a plus sign: forms decode it to one."""
    normal = text.replace(" ", "+").replace("-", "+").replace("_", "/").rstrip("=")
    try:
        return base64.b64decode(normal + "=" * (-len(normal) % 4), validate=True)
    except (Base64Error, ValueError):
        raise ValueError("not base64; give text as key") from None


def _origin(text: str) -> tuple[str, int, int]:
    match = re.fullmatch(r"([^/]+)/([0-9]{1,10})/([0-9]{1,15})", text, re.ASCII)
    if match is None or int(match[2]) > cursors.PARTITION_MAX or int(match[3]) > OFFSET_MAX:
        raise ValueError("write it as TOPIC/PARTITION/OFFSET, such as delay/0/42")
    return match[1], int(match[2]), int(match[3])


def parse_time(name: str, text: str | None) -> int | None:
    """Epoch milliseconds of a parameter. A blank before the zone counts as a plus sign: forms decode it to one."""
    if text is None:
        return None
    return int(parsed_parameter(name, parse_until, re.sub(r" ([0-9]{2}:[0-9]{2})$", r"+\1", text)))


class Edges(BaseModel):
    """The edges of a timeline."""

    model_config = ConfigDict(extra="forbid")

    edge: list[Text] = Field(
        min_length=1,
        max_length=EDGES_MAX,
        description="Times in ascending order, in the format of due_from. Exact at multiples of ten seconds.",
    )

    def times(self) -> list[int]:
        """Epoch milliseconds. Raises ValueError with the fault."""
        times = [int(parsed_parameter("edge", parse_until, text)) for text in self.edge]
        if times != sorted(times):
            raise ValueError("edge: give the times in order.")
        return times


class Timeline(BaseModel):
    """The number of messages by the time at which the bridge acts on them next (`at`)."""

    before: int = Field(description="The number before the first edge.")
    counts: list[int] = Field(description="The number from each edge to the next.")
    after: int = Field(description="The number from the last edge on.")
    incomplete: list[str] = Field(default=[], description=INCOMPLETE)


class Blob(BaseModel):
    """Bytes: `text` if they are UTF-8, else `base64`. With `truncated` they are only a prefix."""

    text: str | None = None
    base64: str | None = None
    truncated: bool = False

    @classmethod
    def of(cls, value: bytes, bytes_max: int | None = None) -> Self:
        """The first `bytes_max` bytes, without a character that they would cut in two."""
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
    """A header. Without `text` and `base64` its value is null."""

    name: str


class Bulk(BaseModel):
    """The headers and value of a message. Without http.show_payloads the value and the message's own headers are
    hidden."""

    headers: list[HeaderValue] = Field(description="Without http.show_payloads only the bridge's headers (delay-*).")
    headers_left_out: int = Field(description="The number of hidden headers.")
    value: Blob | None = Field(description="Without http.show_payloads always null.")
    value_bytes: int | None = Field(description="The size of the value; null: the value is null.")


def bulk(headers: Sequence[tuple[str, bytes | None]], value: bytes | None, *, show_payloads: bool) -> dict[str, Any]:
    """The fields of `Bulk`, long ones truncated."""
    shown = [(name, value) for name, value in headers if show_payloads or name.startswith(OWN_PREFIX)][:HEADERS_MAX]
    listed = fitting_answer(map(_header, shown))
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
    """A pending message. `origin` is its first record; topic, partition and offset are those of its present record."""

    topic: str
    partition: int
    offset: int
    origin: str = Field(description="topic/partition/offset")
    due: int = Field(description="Its due time.")
    at: int = Field(description="The time at which the bridge acts on it next; before `due` if it writes a copy.")
    ts: int = Field(description="The timestamp of its present record.")
    state: PendingState
    target: str = Field(description="Empty: the delay topic's default.")
    target_partition: int | None
    key: Blob | None
    id: str | None
    rolls: int
    attempts: int
    reason: str | None = Field(description="The reason why the last attempt failed.")

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
    """One message with its headers and value."""

    @classmethod
    def of_all(cls, row: PendingRow, *, show_payloads: bool) -> Self:
        return cls(**cls._fields(row), **bulk(row.headers, row.value, show_payloads=show_payloads))


class Messages(BaseModel):
    """A page of messages, ordered by `at`. Even a page below its limit, or an empty one, may have a successor."""

    messages: list[Message]
    next: str | None = Field(description="The cursor of the next page; null: this is the last page.")
    incomplete: list[str] = Field(default=[], description=INCOMPLETE)


class Counted(BaseModel):
    """The number of matching messages; a lower bound unless `exact`."""

    count: int
    exact: bool
    incomplete: list[str] = Field(default=[], description=INCOMPLETE)


class PauseState(BaseModel):
    """A pause of a target."""

    since: int
    until: int | None = Field(description="Its end; null: it lasts until the target is resumed.")
    reason: str = Field(description="The operator's reason.")


class TargetState(BaseModel):
    """A target that the bridge has used, and its failures."""

    name: str
    partitions: int = Field(description="0: unknown.")
    failing_partitions: int = Field(description="The number of partitions that take no records now.")
    reason: str | None
    detail: str | None = Field(description="The last error.")
    open_breakers: int = Field(description="Open breakers, of single partitions or of the whole topic.")
    retry_in_s: float | None = Field(description="The time until the next attempt at one of them.")
    paused: bool = Field(description="true: an operator has paused it, and its messages wait.")
    pause: PauseState | None = Field(default=None, description="Absent without a pause.")
    pausable: bool = Field(description="false: it is a topic of the bridge itself, such as a delay topic.")


class TargetStates(BaseModel):
    """Targets, failing ones first."""

    targets: list[TargetState]
    incomplete: list[str] = Field(default=[], description=INCOMPLETE)


class PartitionState(BaseModel):
    """A partition of a delay topic that this instance owns."""

    topic: str
    partition: int
    lag: int = Field(description="The number of unread records.")
    behind_s: float = Field(description="The waiting time of the oldest of them.")


class FailingTarget(BaseModel):
    """A target, and the reason why some of its partitions take no records now."""

    name: str
    reason: str
    partitions: int


class PausedTarget(BaseModel):
    """A target that an operator has paused."""

    name: str
    paused_s: float = Field(description="The time since the pause began.")


class TimeToGo(BaseModel):
    """The number of messages that come up within `until` (`more`: later), but not within the previous one."""

    until: str
    pending: int


class Lateness(BaseModel):
    """The lateness of the messages that were delivered in the last `over_s` seconds."""

    delivered: int
    p99_ms: float | None = Field(description="null: no message was delivered.")
    over_s: float = Field(description="Little more than five minutes at most.")

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
    """The state of this instance."""

    writable: bool = Field(description="Whether actions are allowed (http.api: write).")
    now: int
    phase: str
    ready: bool
    reasons: list[str]
    reader: str | None = Field(description="The present reader of the delay topics: spark or plain.")
    pending: int
    schedules: int = Field(description="The number of recurring messages among them.")
    overdue: int = Field(description="The number with a time `at` before the start of the clock's current ten seconds.")
    oldest_overdue_s: float
    next_at: int | None = Field(description="The time at which the next message comes up, to ten seconds.")
    lateness: Lateness | None
    by_target: dict[str, int] = Field(description='The largest targets; "" is the delay topic\'s default.')
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
